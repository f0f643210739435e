// The slow twin of io_uring, and what runs where it is forbidden: threads that sleep in pread and pwrite.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <new>

#include "backend.h"

namespace zk {
namespace io {
namespace {

class Threads final : public Backend {
  public:
    ~Threads() override {
        {
            std::lock_guard<std::mutex> guard(lock_);
            closing_ = true;
        }
        work_.notify_all();
        for (unsigned i = 0; i < count_; ++i) pthread_join(threads_[i], nullptr);
        delete[] threads_;
    }

    // As many as the system grants, at least one.
    int begin(unsigned threads) {
        threads_ = new (std::nothrow) pthread_t[threads];
        if (!threads_) return ENOMEM;
        sigset_t all, before;  // signals are for the threads that expect them
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int error = 0;
        while (count_ < threads && !error) {
            error = pthread_create(&threads_[count_], nullptr, serve, this);
            if (!error) ++count_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return count_ ? 0 : error;
    }

    bool start(Op *op) override {
        fresh_.push(op);
        ++nfresh_;
        return true;
    }

    void finish(unsigned least, OpList *ended) override {
        std::unique_lock<std::mutex> guard(lock_);
        for (unsigned i = 0; i < nfresh_; ++i) queue_.push(fresh_.pop());
        if (nfresh_ == 1)
            work_.notify_one();
        else if (nfresh_)
            work_.notify_all();
        nfresh_ = 0;
        least_ = least;
        ended_one_.wait(guard, [&] { return kicked_ || nended_ >= least; });
        kicked_ = false;
        while (Op *op = ended_.pop()) ended->push(op);
        nended_ = 0;
    }

    void kick() override {
        {
            std::lock_guard<std::mutex> guard(lock_);
            kicked_ = true;
        }
        ended_one_.notify_one();
    }

    void count(zk_io_stats *stats) override {
        std::lock_guard<std::mutex> guard(lock_);
        stats->calls = calls_;
    }

    void let_go() override {}

  private:
    static void *serve(void *self) {
        static_cast<Threads *>(self)->work();
        return nullptr;
    }

    void work() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            work_.wait(guard, [&] { return closing_ || !queue_.empty(); });
            Op *op = queue_.pop();
            if (!op) return;
            ++calls_;
            guard.unlock();
            char *address = op->address + op->done;
            const size_t nbytes = static_cast<size_t>(op->limit - op->done);
            const off_t at = static_cast<off_t>(op->offset + op->done);
            const ssize_t moved = op->write ? pwrite(op->fd, address, nbytes, at) : pread(op->fd, address, nbytes, at);
            op->result = moved < 0 ? -errno : moved;
            guard.lock();
            ended_.push(op);
            if (++nended_ == least_) ended_one_.notify_one();
        }
    }

    std::mutex lock_;  // guards what follows, but for fresh_
    std::condition_variable work_, ended_one_;
    OpList queue_, ended_;
    unsigned nended_ = 0, least_ = 0;
    uint64_t calls_ = 0;
    bool kicked_ = false, closing_ = false;
    OpList fresh_;  // the engine thread's
    unsigned nfresh_ = 0;
    pthread_t *threads_ = nullptr;
    unsigned count_ = 0;
};

}  // namespace

Backend *make_threads(uint32_t threads, int *error) {
    Threads *made = new (std::nothrow) Threads;
    *error = made ? made->begin(threads) : ENOMEM;
    if (!*error) return made;
    delete made;
    return nullptr;
}

}  // namespace io
}  // namespace zk
