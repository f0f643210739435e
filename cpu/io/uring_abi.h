// The part of Linux's io_uring interface that is used here. Spelled out, so that the library builds on a system whose
// headers are older than the kernel it will run on.
#pragma once

#include <cstdint>

namespace zk {
namespace io {
namespace uring {

constexpr long SYS_SETUP = 425, SYS_ENTER = 426, SYS_REGISTER = 427;  // the same on every architecture

constexpr uint8_t OP_READ_FIXED = 4, OP_WRITE_FIXED = 5, OP_READ = 22, OP_WRITE = 23;
constexpr uint8_t SQE_FIXED_FILE = 1;

constexpr uint32_t SETUP_CQSIZE = 1u << 3, SETUP_CLAMP = 1u << 4, SETUP_COOP_TASKRUN = 1u << 8,
                   SETUP_SINGLE_ISSUER = 1u << 12, SETUP_DEFER_TASKRUN = 1u << 13;
constexpr uint32_t FEATURE_SINGLE_MMAP = 1u << 0, FEATURE_NODROP = 1u << 1;
constexpr uint32_t ENTER_GETEVENTS = 1u << 0;
constexpr uint32_t UNREGISTER_BUFFERS = 1, UNREGISTER_FILES = 3;
constexpr uint32_t REGISTER_FILES2 = 13, REGISTER_FILES_UPDATE2 = 14, REGISTER_BUFFERS2 = 15,
                   REGISTER_BUFFERS_UPDATE = 16;
constexpr uint32_t REGISTER_SPARSE = 1u << 0;
constexpr long OFFSET_RINGS = 0, OFFSET_SQES = 0x10000000;

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t address;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t address;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};

struct Sqe {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t nbytes, rw_flags;
    uint64_t user_data;
    uint16_t buffer, personality;
    int32_t splice_fd;
    uint64_t reserved[2];
};

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

struct Register {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};

struct Update {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};

static_assert(sizeof(Params) == 120 && sizeof(Sqe) == 64 && sizeof(Cqe) == 16, "the kernel's layout");
static_assert(sizeof(Register) == 32 && sizeof(Update) == 32, "the kernel's layout");

}  // namespace uring
}  // namespace io
}  // namespace zk
