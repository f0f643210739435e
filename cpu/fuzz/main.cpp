// fuzz [executions per entry] [seed] [entries]: every entry of the C ABI or those named, one line each. A finding ends
// the program with a nonzero status. The digests of one seed are the same on every processor.
#include <chrono>

#include "fuzz.h"

int main(int argc, char **argv) {
    const uint64_t executions = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const struct {
        const char *name;
        fuzz::Entry run;
        uint64_t share;  // one execution in so many: a transfer costs more than a call of arithmetic
    } entries[] = {{"zk_update", fuzz::fuzz_update, 1},
                   {"zk_sumsq", fuzz::fuzz_sumsq, 1},
                   {"zk_accumulate", fuzz::fuzz_accumulate, 1},
                   {"zk_accumulate_sumsq", fuzz::fuzz_accumulate_sumsq, 1},
                   {"zk_collect", fuzz::fuzz_collect, 1},
                   {"zk_convert", fuzz::fuzz_convert, 1},
                   {"zk_stream", fuzz::fuzz_stream, 1},
                   {"zk_gradients", fuzz::fuzz_gradients, 1},
                   {"zk_spans", fuzz::fuzz_copies, 1},
                   {"control", fuzz::fuzz_control, 1},
                   {"zk_crc32c", fuzz::fuzz_crc32c, 1},
                   {"zk_changed", fuzz::fuzz_changed, 1},
                   {"zk_weighted_sum", fuzz::fuzz_weighted_sum, 1},
                   {"zk_io", fuzz::fuzz_io, 50}};
    std::printf("instruction sets:");
    for (const char *name : fuzz::usable_sets()) std::printf(" %s", name);
    std::printf("; seed %llu\n", static_cast<unsigned long long>(seed));
    for (const auto &entry : entries) {
        bool named = argc <= 3;
        for (int i = 3; i < argc; ++i) named = named || std::strcmp(argv[i], entry.name) == 0;
        if (!named) continue;
        fuzz::Random random(seed);
        const uint64_t own = (executions + entry.share - 1) / entry.share;
        const auto start = std::chrono::steady_clock::now();
        const fuzz::Counts counts = entry.run(random, own);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("%-19s %9llu executions: %9llu valid, %9llu refused, %6.1f s", entry.name,
                    static_cast<unsigned long long>(own), static_cast<unsigned long long>(counts.accepted),
                    static_cast<unsigned long long>(counts.refused), seconds);
        if (counts.digest.nbytes())
            std::printf(", digest %016llx of %llu bytes", static_cast<unsigned long long>(counts.digest.value()),
                        static_cast<unsigned long long>(counts.digest.nbytes()));
        std::printf("\n");
        std::fflush(stdout);
    }
    return 0;
}
