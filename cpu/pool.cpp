#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>

#include "zerokern_cpu.h"

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
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // yield does nothing on most of these; this takes about as long as x86's pause
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
    pthread_t workers[MOST_THREADS];
    Task task = nullptr;
    void *context = nullptr;
};

// Never destroyed: workers may still be parked on it while the process exits.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool *pool = nullptr;
std::once_flag once;
std::atomic<int> thread_count{0};
cpu_set_t cpu_set;  // guarded by calls, as is cpu_count; both outlive a fork
int cpu_count = 0;  // 0: workers run where the thread that starts them may

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

// Signals are for the threads that expect them: a thread that is started meanwhile gets none.
class NoSignals {
    sigset_t before_;

  public:
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
};

bool start_worker(pthread_t *thread, const cpu_set_t *cpus, Start *start) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (cpus) pthread_attr_setaffinity_np(&attributes, sizeof *cpus, cpus);
    const bool started = pthread_create(thread, &attributes, work, start) == 0;
    pthread_attr_destroy(&attributes);
    if (started) pthread_setname_np(*thread, "zerokern");
    return started;
}

// Called with calls held. A refusal by the system leaves the workers that there are; CPUs that were taken away since
// they were set hold no worker back.
void start_workers(Pool &p, int count) {
    NoSignals meanwhile;
    for (; p.started < count; ++p.started) {
        Start *start = static_cast<Start *>(std::malloc(sizeof(Start)));
        if (!start) return;
        *start = {&p, p.started};
        pthread_t *thread = &p.workers[p.started];
        if (!(cpu_count && start_worker(thread, &cpu_set, start)) && !start_worker(thread, nullptr, start)) {
            std::free(start);
            return;
        }
    }
}

struct Trial {
    cpu_set_t cpus;
    bool usable;
};

void *stay_on(void *argument) {
    Trial &trial = *static_cast<Trial *>(argument);
    cpu_set_t found;
    trial.usable = sched_setaffinity(0, sizeof trial.cpus, &trial.cpus) == 0 &&
                   sched_getaffinity(0, sizeof found, &found) == 0 && CPU_EQUAL(&found, &trial.cpus);
    return nullptr;
}

// Only the system knows what a control group and the machine grant: a thread that ends at once asks it.
int usable(const cpu_set_t &cpus) {
    Trial trial{cpus, false};
    pthread_t thread;
    {
        NoSignals meanwhile;
        if (pthread_create(&thread, nullptr, stay_on, &trial) != 0) return ZK_E_MEMORY;
    }
    pthread_join(thread, nullptr);
    return trial.usable ? ZK_OK : ZK_E_CPU;
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

int pool_set_cpus(const int *cpus, int count) {
    if (count < 0) return ZK_E_COUNT;
    if (count > 0 && !cpus) return ZK_E_NULL;
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (int i = 0; i < count; ++i) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return ZK_E_CPU;
        CPU_SET(cpus[i], &wanted);
    }
    if (count == 0) {
        if (sched_getaffinity(getpid(), sizeof wanted, &wanted) != 0) return ZK_E_CPU;
    } else if (const int refused = usable(wanted)) {
        return refused;
    }
    Pool &p = instance();
    std::lock_guard<std::mutex> call(p.calls);
    cpu_set = wanted;
    cpu_count = count ? CPU_COUNT(&wanted) : 0;
    for (int i = 0; i < p.started; ++i) pthread_setaffinity_np(p.workers[i], sizeof wanted, &wanted);
    return ZK_OK;
}

int pool_cpus(int *cpus, int room) {
    Pool &p = instance();
    std::lock_guard<std::mutex> call(p.calls);
    int written = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && written < room && written < cpu_count; ++cpu)
        if (CPU_ISSET(cpu, &cpu_set)) cpus[written++] = cpu;
    return cpu_count;
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
