// fuzz [executions per entry] [seed]: every entry of the C ABI, one line each. A finding ends the program with a
// nonzero status.
#include <chrono>

#include "fuzz.h"

int main(int argc, char **argv) {
    const uint64_t executions = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const struct {
        const char *name;
        fuzz::Entry run;
    } entries[] = {{"zk_update", fuzz::fuzz_update},         {"zk_sumsq", fuzz::fuzz_sumsq},
                   {"zk_accumulate", fuzz::fuzz_accumulate}, {"zk_convert", fuzz::fuzz_convert},
                   {"zk_stream", fuzz::fuzz_stream},         {"zk_gradients", fuzz::fuzz_gradients},
                   {"control", fuzz::fuzz_control}};
    std::printf("instruction sets:");
    for (const char *name : fuzz::usable_sets()) std::printf(" %s", name);
    std::printf("; seed %llu\n", static_cast<unsigned long long>(seed));
    for (const auto &entry : entries) {
        fuzz::Random random(seed);
        const auto start = std::chrono::steady_clock::now();
        const fuzz::Counts counts = entry.run(random, executions);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("%-14s %9llu executions: %9llu valid, %9llu refused, %6.1f s\n", entry.name,
                    static_cast<unsigned long long>(executions), static_cast<unsigned long long>(counts.accepted),
                    static_cast<unsigned long long>(counts.refused), seconds);
        std::fflush(stdout);
    }
    return 0;
}
