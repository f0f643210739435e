// Which instruction set calls go through, and the few facts a loader asks for.
#include <atomic>
#include <chrono>
#include <cstring>

#include "pool.h"
#include "table.h"

namespace zk {
namespace {

struct Entry {
    const IsaTable *table;
    const char *name, *needs, *maker;
};

constexpr Entry ENTRIES[] = {
#define ZK_ISA(ns, name, needs, maker) {&ns::table, name, needs, maker},
#include "isa.def"
#undef ZK_ISA
};
constexpr int COUNT = sizeof ENTRIES / sizeof ENTRIES[0];

// The builtin wants literals; it asks the operating system too, so that saved registers can be relied on.
bool has_feature(const char *name) {
#if defined(__x86_64__)
    struct Feature {
        const char *name;
        bool present;
    };
    const Feature features[] = {{"avx2", __builtin_cpu_supports("avx2") != 0},
                                {"fma", __builtin_cpu_supports("fma") != 0},
                                {"f16c", __builtin_cpu_supports("f16c") != 0},
                                {"avx512f", __builtin_cpu_supports("avx512f") != 0},
                                {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
                                {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
                                {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
                                {"avx512vbmi", __builtin_cpu_supports("avx512vbmi") != 0},
                                {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0}};
    for (const Feature &feature : features)
        if (std::strcmp(feature.name, name) == 0) return feature.present;
#endif
    static_cast<void>(name);
    return false;
}

bool usable(int index) {
    char name[32];
    const char *needs = ENTRIES[index].needs;
    while (*needs) {
        const size_t length = std::strcspn(needs, " ");
        if (length >= sizeof name) return false;
        std::memcpy(name, needs, length);
        name[length] = '\0';
        if (!has_feature(name)) return false;
        needs += length;
        while (*needs == ' ') ++needs;
    }
    return true;
}

// A schedule of instructions can be better on one maker's cores and unmeasured on another's.
bool of_this_maker(int index) {
    const char *maker = ENTRIES[index].maker;
#if defined(__x86_64__)
    if (std::strcmp(maker, "intel") == 0) return __builtin_cpu_is("intel") != 0;
#endif
    return *maker == '\0';
}

int best() {
    int index = COUNT - 1;
    while (index > 0 && !(usable(index) && of_this_maker(index))) --index;
    return index;
}

std::atomic<int> chosen{-1};

int chosen_index() {
    int index = chosen.load(std::memory_order_relaxed);
    if (index < 0) {
        index = best();
        chosen.store(index, std::memory_order_relaxed);
    }
    return index;
}

}  // namespace

const IsaTable &active() { return *ENTRIES[chosen_index()].table; }

}  // namespace zk

extern "C" {

int zk_isa_count(void) { return zk::COUNT; }
const char *zk_isa_name(int index) { return index >= 0 && index < zk::COUNT ? zk::ENTRIES[index].name : nullptr; }
const char *zk_isa_needs(int index) { return index >= 0 && index < zk::COUNT ? zk::ENTRIES[index].needs : nullptr; }
int zk_isa_usable(int index) { return index >= 0 && index < zk::COUNT && zk::usable(index); }
const char *zk_isa_active(void) { return zk::active().name; }

int zk_isa_force(const char *name) {
    if (!name) {
        zk::chosen.store(zk::best(), std::memory_order_relaxed);
        return ZK_OK;
    }
    for (int index = 0; index < zk::COUNT; ++index) {
        if (std::strcmp(name, zk::ENTRIES[index].name) != 0) continue;
        if (!zk::usable(index)) return ZK_E_ISA;
        zk::chosen.store(index, std::memory_order_relaxed);
        return ZK_OK;
    }
    return ZK_E_ISA;
}

int zk_threads(void) { return zk::pool_threads(); }
int zk_threads_set(int count) { return zk::pool_set_threads(count) ? ZK_OK : ZK_E_THREADS; }

int zk_pool_cpus_set(const int *cpus, int count) { return zk::pool_set_cpus(cpus, count); }
int zk_pool_cpus(int *cpus, int room) { return cpus || room <= 0 ? zk::pool_cpus(cpus, room) : ZK_E_NULL; }

int zk_abi(void) { return ZK_ABI; }

const char *zk_error_text(int code) {
    switch (code) {
        case ZK_OK:
            return "no error";
        case ZK_E_NULL:
            return "a pointer that the formats need is null";
        case ZK_E_COUNT:
            return "a negative count, or a group index out of range";
        case ZK_E_FORMAT:
            return "an unknown dtype, format or algorithm, or a combination that has no kernel";
        case ZK_E_VALUE:
            return "a hyperparameter that is not finite or out of range";
        case ZK_E_ISA:
            return "an instruction set that this machine or this build lacks";
        case ZK_E_THREADS:
            return "a thread count below 1 or above 1024";
        case ZK_E_MEMORY:
            return "the system refused memory";
        case ZK_E_PROCESS:
            return "made by the process that this one was forked from; make another one here";
        case ZK_E_CPU:
            return "a CPU that this process may not use, or a number that is none";
        default:
            return "an unknown error code";
    }
}

double zk_core_ghz(void) {
    constexpr int64_t LINKS = 100000;
    double best = 0.0;  // of many short runs, so that a preempted one does not count
    uint64_t step = 3;
    __asm__ volatile("" : "+r"(step));  // in a register: additions of constants are folded by some processors
    for (int run = 0; run < 50; ++run) {
        uint64_t chain = 1;
        const auto start = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < LINKS; i += 4) {
            for (int link = 0; link < 4; ++link) {
                chain += step;
                __asm__ volatile("" : "+r"(chain));  // one addition a cycle, none folded into the next
            }
        }
        const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
        if (static_cast<double>(LINKS) / ns > best) best = static_cast<double>(LINKS) / ns;
    }
    return best;
}

}  // extern "C"
