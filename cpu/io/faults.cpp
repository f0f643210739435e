// What a device does on a bad day, on demand: slow, out of order, short, interrupted, refusing, failing.
#include <errno.h>
#include <time.h>

#include <new>

#include "backend.h"

namespace zk {
namespace io {
namespace {

class Faulty final : public Backend {
  public:
    Faulty(Backend *inner, const zk_io_faults &faults) : inner_(inner), faults_(faults), state_(faults.seed * 2 + 1) {}
    ~Faulty() override { delete inner_; }

    bool start(Op *op) override {
        if (drawn(faults_.full)) return false;
        op->limit = op->nbytes;
        int error = 0;
        if (in_span(*op))
            error = faults_.fail_errno;
        else if (drawn(faults_.interrupt))
            error = EINTR;
        else if (drawn(faults_.again))
            error = EAGAIN;
        else if (drawn(faults_.fail))
            error = faults_.fail_errno;
        if (error) {
            op->result = -error;
            hold(op);
            return true;
        }
        const uint64_t units = (op->nbytes - op->done) / op->align;
        if (units > 1 && drawn(faults_.shorten)) op->limit = op->done + (1 + next() % (units - 1)) * op->align;
        if (!inner_->start(op)) return false;
        ++inside_;
        return true;
    }

    void finish(unsigned least, OpList *ended) override {
        const uint64_t now = now_ns();
        unsigned count = release(now, ended);
        if (count >= least && count) least = 0;
        // A held block ends by itself: the device may be waited for only where nothing is held.
        inner_->finish(held_ || least <= count ? 0 : 1, &arrived_);
        while (Op *op = arrived_.pop()) {
            --inside_;
            hold(op);
        }
        count += release(now_ns(), ended);
        if (!count && least && held_) nap();
    }

    void kick() override { inner_->kick(); }
    int add_file(int32_t number, int fd) override { return inner_->add_file(number, fd); }
    void drop_file(int32_t number) override { inner_->drop_file(number); }
    int add_memory(int32_t number, void *base, uint64_t nbytes) override {
        return inner_->add_memory(number, base, nbytes);
    }
    void drop_memory(int32_t number) override { inner_->drop_memory(number); }
    void count(zk_io_stats *stats) override { inner_->count(stats); }
    void retire() override { inner_->retire(); }
    void let_go() override { inner_->let_go(); }

  private:
    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ * 0x2545F4914F6CDD1Dull >> 16;
    }
    bool drawn(uint32_t chance) { return chance && next() % 65536 < chance; }

    bool in_span(const Op &op) {
        if (faults_.fail_end <= faults_.fail_begin || faults_.fail_count == 0) return false;
        if (faults_.fail_op && (faults_.fail_op == ZK_IO_WRITE) != op.write) return false;
        if (faults_.fail_file >= 0 && faults_.fail_file != op.file) return false;
        if (op.offset >= faults_.fail_end || op.offset + op.nbytes <= faults_.fail_begin) return false;
        if (faults_.fail_count > 0) --faults_.fail_count;
        return true;
    }

    void hold(Op *op) {
        op->due = drawn(faults_.delay) ? now_ns() + next() % (1000ull * faults_.delay_us + 1) : 0;
        holding_.push(op);
        ++held_;
    }

    // What is due, in the order of arrival; the rest is overtaken.
    unsigned release(uint64_t now, OpList *ended) {
        unsigned count = 0;
        for (uint64_t left = held_; left; --left) {
            Op *op = holding_.pop();
            if (op->due <= now) {
                ended->push(op);
                --held_;
                ++count;
            } else {
                holding_.push(op);
            }
        }
        return count;
    }

    static void nap() {
        const timespec some = {0, 50000};
        nanosleep(&some, nullptr);
    }

    Backend *inner_;
    zk_io_faults faults_;
    uint64_t state_;
    OpList holding_, arrived_;
    uint64_t held_ = 0, inside_ = 0;
};

}  // namespace

Backend *make_faulty(Backend *inner, const zk_io_faults &faults) { return new (std::nothrow) Faulty(inner, faults); }

}  // namespace io
}  // namespace zk
