// io_race [rounds] [seed]: threads that submit, wait for their own and for each other's requests, add and forget files
// and memory, count and fork, on one engine, which then closes while requests are in flight. Built with
// ThreadSanitizer; every byte must also be the right one.
#include <errno.h>
#include <sys/wait.h>

#include <atomic>
#include <memory>
#include <thread>

#include "io.h"

namespace {

using fuzz::FILE_NBYTES;
using fuzz::GUARD;
using fuzz::Random;
using fuzz::ScratchFile;

constexpr int CALLERS = 4;
constexpr uint64_t SPAN_NBYTES = FILE_NBYTES / CALLERS;
constexpr uint64_t BLOCK = 16384;

[[noreturn]] void wrong(const char *what, int64_t detail) { fuzz::fail("zk_io", 0, what, detail); }

void expect(bool right, const char *what, int64_t detail = 0) {
    if (!right) wrong(what, detail);
}

char *page_aligned(uint64_t nbytes) {
    void *base = nullptr;
    if (posix_memalign(&base, 4096, nbytes) != 0) std::abort();
    return static_cast<char *>(base);
}

// A write of one value over a caller's span, and the read that comes after it.
struct Pair {
    zk_io_request write{}, read{};
    char *memory = page_aligned(2 * SPAN_NBYTES);
    ~Pair() { std::free(memory); }

    void set(int32_t file, uint64_t span, uint64_t nbytes, int value, zk_io_request *before) {
        write = read = zk_io_request{};
        write.op = ZK_IO_WRITE;
        read.op = ZK_IO_READ;
        write.file = read.file = file;
        write.offset = read.offset = span * SPAN_NBYTES;
        write.nbytes = read.nbytes = nbytes;
        write.address = memory;
        read.address = memory + SPAN_NBYTES;
        write.after = before;
        read.after = &write;
        std::memset(memory, value, nbytes);
        std::memset(memory + SPAN_NBYTES, GUARD, SPAN_NBYTES);
    }
    void check(int value) const {
        expect(write.error == 0 && read.error == 0, "an error", write.error ? write.error : read.error);
        const char *got = memory + SPAN_NBYTES;
        for (uint64_t i = 0; i < SPAN_NBYTES; ++i)
            expect(got[i] == static_cast<char>(i < read.nbytes ? value : GUARD), "wrong data", static_cast<int64_t>(i));
    }
};

struct Shared {
    zk_io *engine = nullptr;
    int32_t file = -1;
    std::atomic<uint64_t> transfers{0}, forks{0}, changes{0};
    std::atomic<zk_io_request *> everyones{nullptr};  // a request that all callers wait for
    std::atomic<int> callers{CALLERS};
};

void call(Shared &shared, int caller, uint64_t rounds, uint64_t seed) {
    Random random(seed);
    std::unique_ptr<Pair[]> pairs(new Pair[3]);
    for (uint64_t round = 0; round < rounds; ++round) {
        zk_io_request *list[6], *before = nullptr;
        for (int i = 0; i < 3; ++i) {
            const uint64_t nbytes = random.one_in(2) ? SPAN_NBYTES : 1 + random.below(SPAN_NBYTES);
            pairs[i].set(shared.file, static_cast<uint64_t>(caller), nbytes, static_cast<int>(round + i) & 0x7F,
                         before);
            list[2 * i] = &pairs[i].write;
            list[2 * i + 1] = before = &pairs[i].read;
        }
        const int64_t first = static_cast<int64_t>(random.below(7));
        int64_t bad = 0;
        expect(zk_io_submit(shared.engine, list, first, &bad) == ZK_OK, "refused", bad);
        if (first < 6) expect(zk_io_submit(shared.engine, list + first, 6 - first, &bad) == ZK_OK, "refused", bad);
        if (zk_io_request *one = shared.everyones.load()) {
            const int code = zk_io_wait(one, random.one_in(2) ? 50000 : -1);
            expect(code == ZK_OK || code == ETIMEDOUT, "a wait for another's", code);
        }
        for (int i : {2, 0, 1}) {
            while (zk_io_wait(list[2 * i + 1], static_cast<int64_t>(random.below(100000))) == ETIMEDOUT) {
            }
            expect(__atomic_load_n(&pairs[i].write.state, __ATOMIC_ACQUIRE) == ZK_IO_DONE, "overtook `after`");
            pairs[i].check(static_cast<int>(round + i) & 0x7F);
        }
        shared.transfers += 6;
    }
    --shared.callers;
}

// Files, memory and counters change meanwhile.
void meddle(Shared &shared, ScratchFile &other) {
    char *memory = page_aligned(1 << 20), *small = page_aligned(4096);
    while (shared.callers) {
        int32_t number = -1;
        expect(zk_io_file(shared.engine, other.fd, other.memory_align, other.offset_align, &number) == ZK_OK,
               "no file");
        zk_io_memory(shared.engine, memory, 1 << 20);
        zk_io_request request{};
        request.op = ZK_IO_READ;
        request.file = number;
        request.address = small;
        request.nbytes = 4096;
        zk_io_request *list = &request;
        int64_t bad = 0;
        expect(zk_io_submit(shared.engine, &list, 1, &bad) == ZK_OK, "refused", bad);
        expect(zk_io_forget_file(shared.engine, number) == ZK_OK, "no forgetting");
        expect(__atomic_load_n(&request.state, __ATOMIC_ACQUIRE) == ZK_IO_DONE, "forgot a file too early");
        zk_io_forget_memory(shared.engine, memory);
        zk_io_stats stats;
        expect(zk_io_stats_of(shared.engine, &stats) == ZK_OK, "no stats");
        expect(stats.pending <= 6 * CALLERS + 1, "pending", static_cast<int64_t>(stats.pending));
        ++shared.changes;
    }
    std::free(memory);
    std::free(small);
}

// A child can do nothing to the engine, and says so; it does not hang, and it ends.
void fork_now(Shared &shared) {
    const pid_t pid = fork();
    if (!pid) {
        zk_io_request request{}, *list = &request;
        int64_t bad = 0;
        int32_t number = 0;
        zk_io_stats stats;
        const bool refused = zk_io_submit(shared.engine, &list, 1, &bad) == ZK_E_PROCESS &&
                             zk_io_file(shared.engine, 0, 1, 1, &number) == ZK_E_PROCESS &&
                             zk_io_forget_file(shared.engine, shared.file) == ZK_E_PROCESS &&
                             zk_io_stats_of(shared.engine, &stats) == ZK_E_PROCESS;
        _exit(refused && zk_io_close(shared.engine) == ZK_OK ? 0 : 1);
    }
    int status = 0;
    expect(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "a child that did otherwise", status);
    ++shared.forks;
}

// What is in flight when the engine closes ends first, and well.
void close_in_flight(Shared &shared, uint64_t seed) {
    Random random(seed);
    std::unique_ptr<Pair[]> pairs(new Pair[8]);
    zk_io_request *list[16], *before = nullptr;
    for (int i = 0; i < 8; ++i) {
        pairs[i].set(shared.file, random.below(1), SPAN_NBYTES - random.below(2), i, before);
        list[2 * i] = &pairs[i].write;
        list[2 * i + 1] = before = &pairs[i].read;
    }
    int64_t bad = 0;
    expect(zk_io_submit(shared.engine, list, 16, &bad) == ZK_OK, "refused", bad);
    std::thread waiter([&] { expect(zk_io_wait(list[15], -1) == ZK_OK, "a wait across the close"); });
    expect(zk_io_close(shared.engine) == ZK_OK, "no close");
    for (int i = 0; i < 8; ++i) {
        expect(list[2 * i + 1]->state == ZK_IO_DONE, "closed too early", i);
        pairs[i].check(i);
    }
    waiter.join();
}

void race(uint32_t kind, const char *name, uint64_t rounds, uint64_t seed) {
    for (int life = 0; life < 4; ++life) {
        zk_io_faults faults{};
        faults.seed = seed + static_cast<uint64_t>(life);
        faults.delay = faults.shorten = faults.interrupt = faults.again = faults.full = 6000;
        faults.delay_us = 300;
        zk_io_options options{};
        options.kind = kind;
        options.depth = life % 2 ? 3 : 32;
        options.block = BLOCK;
        options.threads = 3;
        options.bounces = 2;
        options.faults = life < 2 ? nullptr : &faults;
        Shared shared;
        ScratchFile file(true, 1), other(life % 2, 1);
        const int refused = zk_io_open(&options, &shared.engine);
        if (refused > 0 && kind == ZK_IO_URING) {
            std::printf("%-14s is refused on this machine (%s)\n", name, std::strerror(refused));
            return;
        }
        expect(refused == ZK_OK, "no engine", refused);
        expect(zk_io_file(shared.engine, file.fd, file.memory_align, file.offset_align, &shared.file) == ZK_OK,
               "no file");

        Pair common;
        common.set(shared.file, 0, 512, 1, nullptr);
        common.read.after = nullptr;
        zk_io_request *one = &common.read;
        int64_t bad = 0;
        expect(zk_io_submit(shared.engine, &one, 1, &bad) == ZK_OK, "refused", bad);
        shared.everyones = one;
        std::vector<std::thread> threads;
        for (int caller = 0; caller < CALLERS; ++caller)
            threads.emplace_back(
                [&, caller] { call(shared, caller, rounds, seed + static_cast<uint64_t>(17 * caller)); });
        threads.emplace_back([&] { meddle(shared, other); });
        while (shared.callers) {
            fork_now(shared);
            usleep(20000);
        }
        for (std::thread &thread : threads) thread.join();
        close_in_flight(shared, seed);
        std::printf("%-14s %9llu transfers from %d threads, %llu forks, %llu changes of files and memory meanwhile\n",
                    name, static_cast<unsigned long long>(shared.transfers.load()), CALLERS,
                    static_cast<unsigned long long>(shared.forks.load()),
                    static_cast<unsigned long long>(shared.changes.load()));
    }
}

}  // namespace

int main(int argc, char **argv) {
    const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 50;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    race(ZK_IO_THREADS, "threads", rounds, seed);
    race(ZK_IO_URING, "io_uring", rounds, seed);
    return 0;
}
