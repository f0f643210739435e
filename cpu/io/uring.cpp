// io_uring by raw system calls. One thread submits and reaps; completions are taken when it asks (DEFER_TASKRUN), so
// that no interrupt of ours disturbs a thread that computes.
#include <errno.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>

#include "backend.h"
#include "uring_abi.h"

namespace zk {
namespace io {
namespace {

using namespace uring;

// The device starts on these blocks while more are being prepared: 4 KiB writes go 15 % faster than in batches of 20,
// and one call for each costs a third more CPU.
constexpr unsigned HAND_OVER = 4;

int enter(int ring, unsigned submit, unsigned least, unsigned flags = ENTER_GETEVENTS) {
    const long n = syscall(SYS_ENTER, ring, submit, least, flags, nullptr, 0);
    return n < 0 ? -errno : static_cast<int>(n);
}

int tell(int ring, uint32_t what, void *argument, uint32_t nbytes) {
    return syscall(SYS_REGISTER, ring, what, argument, nbytes) < 0 ? errno : 0;
}

class Uring final : public Backend {
  public:
    ~Uring() override {
        if (sqes_) munmap(sqes_, sqes_nbytes_);
        if (rings_) munmap(rings_, rings_nbytes_);
        let_go();
        delete[] pieces_;
    }

    int begin(uint32_t depth) {
        pieces_ = new (std::nothrow) Piece[MOST_PIECES];
        if (!pieces_) return ENOMEM;
        kick_fd_ = eventfd(0, EFD_CLOEXEC);
        if (kick_fd_ < 0) return errno;
        // Kernels before 6.1 lack the later flags; what they cost is time.
        const uint32_t choices[] = {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0};
        int error = 0;
        for (uint32_t flags : choices) {
            error = create(depth + 2, flags | SETUP_CLAMP);
            if (error != EINVAL) break;
        }
        if (error) return error;
        Register table = {};
        table.flags = REGISTER_SPARSE;
        table.count = MOST_FILES;
        fixed_files_ = tell(ring_, REGISTER_FILES2, &table, sizeof table) == 0;
        table.count = MOST_PIECES;
        fixed_memory_ = tell(ring_, REGISTER_BUFFERS2, &table, sizeof table) == 0;
        arm_kick();
        publish();
        const int n = enter(ring_, 1, 0);  // a filter may allow the setup and forbid this
        return n < 0 ? -n : 0;
    }

    bool start(Op *op) override {
        Sqe *sqe = next_sqe();
        if (!sqe) return false;
        const uint64_t address = reinterpret_cast<uint64_t>(op->address);
        op->memory = piece_of(address, op->nbytes);
        const bool fixed = op->memory >= 0;
        sqe->opcode = op->write ? (fixed ? OP_WRITE_FIXED : OP_WRITE) : (fixed ? OP_READ_FIXED : OP_READ);
        sqe->address = address + op->done;
        sqe->offset = op->offset + op->done;
        sqe->nbytes = static_cast<uint32_t>(op->limit - op->done);
        sqe->buffer = static_cast<uint16_t>(fixed ? op->memory : 0);
        if (files_[op->file]) {
            sqe->fd = op->file;
            sqe->flags = SQE_FIXED_FILE;
        } else {
            sqe->fd = op->fd;
        }
        sqe->user_data = reinterpret_cast<uint64_t>(op);
        if (++unsent_ == HAND_OVER) {
            publish();
            count_call();
            enter(ring_, unsent(), 0, 0);  // what is not taken now is offered again in finish()
            unsent_ = 0;
        }
        return true;
    }

    void finish(unsigned least, OpList *ended) override {
        unsigned got = reap(ended);
        unsent_ = 0;
        for (;;) {
            publish();
            const unsigned waiting = unsent();
            const unsigned sleep_for = got < least && !kicked_ ? least - got : 0;
            if (!waiting && !sleep_for) break;
            count_call();
            const int n = enter(ring_, waiting, sleep_for);
            got += reap(ended);
            // EAGAIN, EBUSY: the kernel is short of memory, or of room for completions, which have just been taken.
            if (n == -EAGAIN || n == -EBUSY) sched_yield();
        }
        if (kicked_) {
            kicked_ = false;
            arm_kick();
        }
    }

    void kick() override {
        const uint64_t one = 1;
        while (write(kick_fd_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    int add_file(int32_t number, int fd) override {
        if (!fixed_files_) return ENOTSUP;
        const int error = update(REGISTER_FILES_UPDATE2, number, &fd);
        files_[number] = error == 0;
        if (!error) ++nfiles_;
        return error;
    }

    void drop_file(int32_t number) override {
        if (!files_[number]) return;
        int none = -1;
        update(REGISTER_FILES_UPDATE2, number, &none);
        files_[number] = false;
        --nfiles_;
    }

    int add_memory(int32_t number, void *base, uint64_t nbytes) override {
        if (!fixed_memory_) return ENOTSUP;
        iovec piece = {base, static_cast<size_t>(nbytes)};
        const int error = update(REGISTER_BUFFERS_UPDATE, number, &piece);
        if (error) return error;
        pieces_[number] = {reinterpret_cast<uint64_t>(base), nbytes};
        if (number >= pieces_end_) pieces_end_ = number + 1;
        ++npieces_;
        return 0;
    }

    void drop_memory(int32_t number) override {
        if (!pieces_[number].nbytes) return;
        iovec none = {nullptr, 0};
        update(REGISTER_BUFFERS_UPDATE, number, &none);
        pieces_[number] = {0, 0};
        --npieces_;
        while (pieces_end_ && !pieces_[pieces_end_ - 1].nbytes) --pieces_end_;
    }

    void count(zk_io_stats *stats) override {
        stats->calls = calls_.load(std::memory_order_relaxed);
        stats->fixed_buffers = npieces_;
        stats->fixed_files = nfiles_;
        stats->ring_features = features_;
        stats->ring_flags = flags_;
    }

    void retire() override {
        if (fixed_files_) tell(ring_, UNREGISTER_FILES, nullptr, 0);
        if (fixed_memory_) tell(ring_, UNREGISTER_BUFFERS, nullptr, 0);
    }

    void let_go() override {
        if (ring_ >= 0) close(ring_);
        if (kick_fd_ >= 0) close(kick_fd_);
        ring_ = kick_fd_ = -1;
    }

  private:
    struct Piece {
        uint64_t base = 0, nbytes = 0;
    };

    int create(uint32_t entries, uint32_t flags) {
        Params params = {};
        params.flags = flags;
        const long fd = syscall(SYS_SETUP, entries, &params);  // O_CLOEXEC by itself
        if (fd < 0) return errno;
        ring_ = static_cast<int>(fd);
        features_ = params.features;
        flags_ = params.flags;
        if (!(features_ & FEATURE_SINGLE_MMAP) || !(features_ & FEATURE_NODROP)) return ENOSYS;  // before 5.5
        const size_t sq_end = params.sq.array + params.sq_entries * sizeof(uint32_t);
        const size_t cq_end = params.cq.cqes + params.cq_entries * sizeof(Cqe);
        rings_nbytes_ = sq_end > cq_end ? sq_end : cq_end;
        sqes_nbytes_ = params.sq_entries * sizeof(Sqe);
        char *rings = map(rings_nbytes_, OFFSET_RINGS);
        if (!rings) return errno;
        rings_ = rings;
        char *sqes = map(sqes_nbytes_, OFFSET_SQES);
        if (!sqes) return errno;
        sqes_ = reinterpret_cast<Sqe *>(sqes);
        sq_head_ = at(params.sq.head);
        sq_tail_ = at(params.sq.tail);
        cq_head_ = at(params.cq.head);
        cq_tail_ = at(params.cq.tail);
        cqes_ = reinterpret_cast<Cqe *>(rings + params.cq.cqes);
        cq_mask_ = *at(params.cq.ring_mask);
        entries_ = params.sq_entries;
        uint32_t *array = at(params.sq.array);
        for (uint32_t i = 0; i < entries_; ++i) array[i] = i;
        return 0;
    }

    // The child of a fork has no business in a ring whose kernel side belongs to its parent.
    char *map(size_t nbytes, long offset) {
        void *base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, offset);
        if (base == MAP_FAILED) return nullptr;
        madvise(base, nbytes, MADV_DONTFORK);
        return static_cast<char *>(base);
    }

    uint32_t *at(uint32_t offset) { return reinterpret_cast<uint32_t *>(static_cast<char *>(rings_) + offset); }

    int update(uint32_t what, int32_t number, void *data) {
        Update one = {};
        one.offset = static_cast<uint32_t>(number);
        one.data = reinterpret_cast<uint64_t>(data);
        one.count = 1;
        const long n = syscall(SYS_REGISTER, ring_, what, &one, sizeof one);
        return n == 1 ? 0 : n < 0 ? errno : ENOSPC;
    }

    unsigned unsent() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

    void count_call() { calls_.store(calls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

    Sqe *next_sqe() {
        if (unsent() == entries_) return nullptr;
        Sqe *sqe = &sqes_[tail_++ & (entries_ - 1)];
        std::memset(sqe, 0, sizeof *sqe);
        return sqe;
    }

    // The kernel reads entries below the tail: they are written before it.
    void publish() { __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE); }

    unsigned reap(OpList *ended) {
        unsigned count = 0;
        uint32_t head = *cq_head_;
        const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
        for (; head != tail; ++head) {
            const Cqe &cqe = cqes_[head & cq_mask_];
            if (!cqe.user_data) {
                kicked_ = true;
                continue;
            }
            Op *op = reinterpret_cast<Op *>(cqe.user_data);
            op->result = cqe.result;
            ended->push(op);
            ++count;
        }
        __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);  // the kernel may fill these places again
        return count;
    }

    // A read of the event counter is always in flight, with no op to it: it ends when somebody kicks. Room for it was
    // asked for beside `depth`.
    void arm_kick() {
        Sqe *sqe = next_sqe();
        if (!sqe) return;
        sqe->opcode = OP_READ;
        sqe->fd = kick_fd_;
        sqe->address = reinterpret_cast<uint64_t>(&kicks_);
        sqe->nbytes = sizeof kicks_;
    }

    int32_t piece_of(uint64_t address, uint64_t nbytes) const {
        for (int32_t i = 0; i < pieces_end_; ++i)
            if (address - pieces_[i].base < pieces_[i].nbytes &&
                nbytes <= pieces_[i].nbytes - (address - pieces_[i].base))
                return i;
        return -1;
    }

    int ring_ = -1, kick_fd_ = -1;
    void *rings_ = nullptr;
    Sqe *sqes_ = nullptr;
    Cqe *cqes_ = nullptr;
    size_t rings_nbytes_ = 0, sqes_nbytes_ = 0;
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t tail_ = 0, entries_ = 0, cq_mask_ = 0, features_ = 0, flags_ = 0;
    std::atomic<uint32_t> npieces_{0}, nfiles_{0};
    bool fixed_files_ = false, fixed_memory_ = false, kicked_ = false;
    bool files_[MOST_FILES] = {};
    Piece *pieces_ = nullptr;
    int32_t pieces_end_ = 0;
    unsigned unsent_ = 0;
    uint64_t kicks_ = 0;
    std::atomic<uint64_t> calls_{0};
};

}  // namespace

Backend *make_uring(uint32_t depth, int *error) {
    Uring *made = new (std::nothrow) Uring;
    *error = made ? made->begin(depth) : ENOMEM;
    if (!*error) return made;
    delete made;
    return nullptr;
}

}  // namespace io
}  // namespace zk
