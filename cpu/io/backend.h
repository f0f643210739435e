// What moves blocks: io_uring, or threads in pread and pwrite; and a layer over either that makes things go wrong.
#pragma once

#include <cstdint>

#include "../zerokern_io.h"

namespace zk {
namespace io {

// One block on its way. The backend moves [done, limit) of it and says how far it came.
struct Op {
    zk_io_request *request;
    char *address;    // the device's: in the caller's span, or a bounce buffer
    uint64_t offset;  // in the file
    uint64_t nbytes;  // of the device, padding included
    uint64_t needed;  // of these, what the caller asked for: beyond it the file may end
    uint64_t done;    // moved so far
    uint64_t limit;   // how far the next attempt goes: nbytes, or less where a test shortens it
    char *user;       // where a bounced block belongs
    int64_t result;   // of the last attempt: bytes, or -errno
    int32_t file, fd;
    int32_t memory;  // number of the registered piece of memory that holds the block, or -1
    int32_t bounce;  // number of the bounce buffer, or -1
    uint32_t tries;  // attempts in a row that moved nothing
    uint32_t align;
    bool write;
    uint64_t due;  // not to be told before this time (tests)
    Op *next;
};

struct OpList {
    Op *head = nullptr, **tail = &head;
    void push(Op *op) {
        op->next = nullptr;
        *tail = op;
        tail = &op->next;
    }
    Op *pop() {
        Op *op = head;
        if (op && !(head = op->next)) tail = &head;
        return op;
    }
    bool empty() const { return !head; }
    OpList() = default;
    OpList(const OpList &) = delete;
    OpList &operator=(const OpList &) = delete;
};

// All but kick() is called by the engine's own thread.
class Backend {
  public:
    virtual ~Backend() {}
    // Takes a block; false where there is no room before something has ended.
    virtual bool start(Op *op) = 0;
    // Hands everything that was started to the system, sleeps until `least` blocks have ended or kick() was called, and
    // appends what has ended. least = 0 never sleeps.
    virtual void finish(unsigned least, OpList *ended) = 0;
    // Ends a sleep in finish(), or the next one. From any thread.
    virtual void kick() = 0;
    // Numbers are below MOST_FILES and MOST_PIECES. Returns 0 or the errno of a refusal, which costs speed alone.
    virtual int add_file(int32_t, int) { return 0; }
    virtual void drop_file(int32_t) {}
    virtual int add_memory(int32_t, void *, uint64_t) { return 0; }
    virtual void drop_memory(int32_t) {}
    // From any thread.
    virtual void count(zk_io_stats *stats) = 0;
    // The last call: the kernel lets go of files and memory now, not some time after the ring is closed.
    virtual void retire() {}
    // In a forked child: closes descriptors, and nothing else.
    virtual void let_go() = 0;
};

constexpr uint32_t MOST_ALIGN = 1u << 16;
constexpr int32_t MOST_FILES = 1024, MOST_PIECES = 1024;
constexpr uint64_t PIECE_NBYTES = 1ull << 30;  // the kernel's limit for one registered buffer

// Null where the system refused, *error = why.
Backend *make_uring(uint32_t depth, int *error);
Backend *make_threads(uint32_t threads, int *error);
Backend *make_faulty(Backend *inner, const zk_io_faults &faults);

uint64_t now_ns();

}  // namespace io
}  // namespace zk
