// The C functions of zerokern_io.h: arguments are checked here, and what a fork left behind is told from what lives.
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <mutex>

#include "engine.h"
#include "futex.h"

namespace {

using zk::io::Engine;

std::mutex engines_lock;
Engine *engines = nullptr;
std::once_flag watching;

void before_fork() { engines_lock.lock(); }
void after_fork_parent() { engines_lock.unlock(); }
void after_fork_child() {
    for (Engine *engine = engines; engine; engine = engine->next_engine) engine->orphan();
    engines = nullptr;
    engines_lock.unlock();
}

Engine *engine_of(zk_io *handle) { return reinterpret_cast<Engine *>(handle); }

bool power_of_two(uint32_t n) { return n && !(n & (n - 1)); }

int possible(zk_io *handle) {
    if (!handle) return ZK_E_NULL;
    return engine_of(handle)->orphaned() ? ZK_E_PROCESS : ZK_OK;
}

}  // namespace

int zk_io_open(const zk_io_options *options, zk_io **handle) {
    if (!options || !handle) return ZK_E_NULL;
    if (options->kind != ZK_IO_URING && options->kind != ZK_IO_THREADS) return ZK_E_FORMAT;
    if (options->depth < 1 || options->depth > 4096) return ZK_E_COUNT;
    if (options->bounces < 1 || options->bounces > 4096) return ZK_E_COUNT;
    if (options->kind == ZK_IO_THREADS && (options->threads < 1 || options->threads > 256)) return ZK_E_THREADS;
    if (!options->block || options->block % 4096 || options->block > zk::io::PIECE_NBYTES) return ZK_E_VALUE;
    std::call_once(watching, [] { pthread_atfork(before_fork, after_fork_parent, after_fork_child); });
    std::lock_guard<std::mutex> guard(engines_lock);  // a fork waits: the child must find what it inherits in the list
    Engine *engine = nullptr;
    const int error = Engine::open(*options, &engine);
    if (error) return error;
    engine->next_engine = engines;
    engines = engine;
    *handle = reinterpret_cast<zk_io *>(engine);
    return ZK_OK;
}

int zk_io_close(zk_io *handle) {
    const int error = possible(handle);
    if (error == ZK_E_PROCESS) return ZK_OK;  // its memory may be in any state: it is left to the end of the process
    if (error) return error;
    Engine *engine = engine_of(handle);
    engine->close();
    {
        std::lock_guard<std::mutex> guard(engines_lock);
        Engine **link = &engines;
        while (*link && *link != engine) link = &(*link)->next_engine;
        if (*link) *link = engine->next_engine;
    }
    delete engine;
    return ZK_OK;
}

int zk_io_file(zk_io *handle, int fd, uint32_t memory_align, uint32_t offset_align, int32_t *number) {
    const int error = possible(handle);
    if (error) return error;
    if (!number) return ZK_E_NULL;
    if (fd < 0 || !power_of_two(memory_align) || !power_of_two(offset_align)) return ZK_E_VALUE;
    if (memory_align > zk::io::MOST_ALIGN || offset_align > zk::io::MOST_ALIGN) return ZK_E_VALUE;
    return engine_of(handle)->add_file(fd, memory_align, offset_align, number);
}

int zk_io_forget_file(zk_io *handle, int32_t number) {
    const int error = possible(handle);
    return error ? error : engine_of(handle)->forget_file(number);
}

int zk_io_memory(zk_io *handle, void *base, uint64_t nbytes) {
    const int error = possible(handle);
    if (error) return error;
    if (!base) return ZK_E_NULL;
    return nbytes ? engine_of(handle)->add_memory(base, nbytes) : ZK_E_COUNT;
}

int zk_io_forget_memory(zk_io *handle, void *base) {
    const int error = possible(handle);
    if (error) return error;
    return base ? engine_of(handle)->forget_memory(base) : ZK_E_NULL;
}

int zk_io_submit(zk_io *handle, zk_io_request *const *requests, int64_t n, int64_t *bad) {
    const int error = possible(handle);
    if (error) return error;
    if (!bad || (n > 0 && !requests)) return ZK_E_NULL;
    return engine_of(handle)->submit(requests, n, bad);
}

int zk_io_wait(zk_io_request *request, int64_t ns) {
    if (!request) return ZK_E_NULL;
    timespec deadline;
    if (ns >= 0) {
        const uint64_t end = zk::io::now_ns() + static_cast<uint64_t>(ns);
        deadline.tv_sec = static_cast<time_t>(end / 1000000000u);
        deadline.tv_nsec = static_cast<long>(end % 1000000000u);
    }
    for (;;) {
        int32_t state = __atomic_load_n(&request->state, __ATOMIC_ACQUIRE);
        if (state == ZK_IO_DONE) return ZK_OK;
        if (state == ZK_IO_IDLE) return ZK_E_VALUE;
        if (!ns) return ETIMEDOUT;
        if (state == ZK_IO_PENDING && !__atomic_compare_exchange_n(&request->state, &state, ZK_IO_WAITED, false,
                                                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            continue;
        if (zk::io::futex_wait(&request->state, ZK_IO_WAITED, ns < 0 ? nullptr : &deadline) == ETIMEDOUT)
            return __atomic_load_n(&request->state, __ATOMIC_ACQUIRE) == ZK_IO_DONE ? ZK_OK : ETIMEDOUT;
    }
}

int zk_io_stats_of(zk_io *handle, zk_io_stats *stats) {
    const int error = possible(handle);
    if (error) return error;
    if (!stats) return ZK_E_NULL;
    engine_of(handle)->stats(stats);
    return ZK_OK;
}

int zk_memory_lock(void *base, uint64_t nbytes) {
    if (!base) return ZK_E_NULL;
    if (madvise(base, nbytes, MADV_DONTFORK) != 0) return errno;
    return mlock(base, nbytes) == 0 ? ZK_OK : errno;
}

int zk_memory_bind(void *base, uint64_t nbytes, const int *nodes, int count) {
    constexpr int PREFERRED = 1, INTERLEAVE = 3;  // of linux/mempolicy.h, which not every system has
    constexpr int MOST_NODES = 1024, BITS = 8 * sizeof(unsigned long);
    if (!base || !nodes) return ZK_E_NULL;
    if (count < 1) return ZK_E_COUNT;
    unsigned long mask[MOST_NODES / BITS] = {};
    for (int i = 0; i < count; ++i) {
        if (nodes[i] < 0 || nodes[i] >= MOST_NODES) return ZK_E_VALUE;
        mask[nodes[i] / BITS] |= 1ul << nodes[i] % BITS;
    }
    // The kernel takes one bit less than it is told of.
    const long refused = syscall(SYS_mbind, base, nbytes, count > 1 ? INTERLEAVE : PREFERRED, mask, MOST_NODES + 1, 0);
    return refused == 0 ? ZK_OK : errno;
}

int zk_memory_unlock(void *base, uint64_t nbytes) {
    if (!base) return ZK_E_NULL;
    return munlock(base, nbytes) == 0 ? ZK_OK : errno;
}
