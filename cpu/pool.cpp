#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zk {
namespace {

constexpr int MOST_THREADS = 1024;
constexpr int SPINS =
    2000;  // about 20 us: a step's native calls (norm, then update) follow each other closer than that

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct Pool {
    std::mutex calls;  // one call at a time
    std::mutex lock;   // guards what follows
    std::condition_variable wake, finished;
    std::atomic<uint64_t> generation{0};
    std::atomic<int> running{0};  // workers inside the task
    int wanted = 0;               // workers that may take part in this generation: index < wanted
    bool open = false;            // and only until the caller has seen the end of the work
    int started = 0;
    Task task = nullptr;
    void *context = nullptr;
};

// Never destroyed: workers may still be parked on it while the process exits.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool *pool = nullptr;
std::once_flag once;
std::atomic<int> thread_count{0};

struct Start {
    Pool *pool;
    int index;
};

void *work(void *argument) {
    Start *start = static_cast<Start *>(argument);
    Pool &p = *start->pool;
    const int index = start->index;
    std::free(start);
    uint64_t seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && p.generation.load(std::memory_order_acquire) == seen; ++i) pause();
        Task task = nullptr;
        void *context = nullptr;
        {
            std::unique_lock<std::mutex> guard(p.lock);
            p.wake.wait(guard, [&] { return p.generation.load(std::memory_order_relaxed) != seen; });
            seen = p.generation.load(std::memory_order_relaxed);
            if (index >= p.wanted || !p.open) continue;
            task = p.task;
            context = p.context;
            p.running.fetch_add(1, std::memory_order_relaxed);
        }
        {
            IeeeArithmetic ieee;
            task(context);
        }
        if (p.running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            std::lock_guard<std::mutex> guard(p.lock);
            p.finished.notify_one();
        }
    }
    return nullptr;
}

void before_fork() {
    pool->calls.lock();
    pool->lock.lock();
}
void after_fork_parent() {
    pool->lock.unlock();
    pool->calls.unlock();
}
// The child has no workers and locks held by threads that do not exist: a fresh pool, whose workers start at its first
// call.
void after_fork_child() { pool = new (storage) Pool; }

void create() {
    pool = new (storage) Pool;
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

Pool &instance() {
    std::call_once(once, create);
    return *pool;
}

// Called with calls held. A refusal by the system leaves the workers that there are.
void start_workers(Pool &p, int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;  // signals are for the threads that expect them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p.started < count) {
        Start *start = static_cast<Start *>(std::malloc(sizeof(Start)));
        if (!start) break;
        *start = {&p, p.started};
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, start) != 0) {
            std::free(start);
            break;
        }
        ++p.started;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
}

int usable_cpus() {
    cpu_set_t set;
    const int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count < 1 ? 1 : count;
}

}  // namespace

int pool_threads() {
    int count = thread_count.load(std::memory_order_relaxed);
    if (count == 0) {
        count = usable_cpus();
        thread_count.store(count, std::memory_order_relaxed);
    }
    return count;
}

bool pool_set_threads(int count) {
    if (count < 1 || count > MOST_THREADS) return false;
    thread_count.store(count, std::memory_order_relaxed);
    return true;
}

void pool_run(Task task, void *context, int workers) {
    if (workers <= 1) {
        IeeeArithmetic ieee;
        task(context);
        return;
    }
    Pool &p = instance();
    std::lock_guard<std::mutex> call(p.calls);
    start_workers(p, workers - 1);
    const int helpers = workers - 1 < p.started ? workers - 1 : p.started;
    {
        std::lock_guard<std::mutex> guard(p.lock);
        p.wanted = helpers;
        p.open = true;
        p.task = task;
        p.context = context;
        p.generation.fetch_add(1, std::memory_order_release);
    }
    p.wake.notify_all();
    {
        IeeeArithmetic ieee;
        task(context);
    }
    // The caller's own return means that no work is left to take: a worker that the system has not scheduled yet is not
    // waited for, it finds the call closed.
    for (int i = 0; i < SPINS && p.running.load(std::memory_order_acquire) != 0; ++i) pause();
    std::unique_lock<std::mutex> guard(p.lock);
    p.open = false;
    p.finished.wait(guard, [&] { return p.running.load(std::memory_order_acquire) == 0; });
}

}  // namespace zk
