// The entries without buffers: instruction sets, threads, error texts, counts of partials.
#include <sched.h>

#include <algorithm>
#include <limits>

#include "fuzz.h"

namespace fuzz {

Counts fuzz_control(Random &random, uint64_t executions) {
    const int threads = zk_threads();
    const int own = sched_getcpu();
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        const int number = static_cast<int>(random.next() >> 33 >> random.below(31)) * (random.one_in(2) ? 1 : -1);
        const bool known = number >= 0 && number < zk_isa_count();
        if ((zk_isa_name(number) != nullptr) != known || (zk_isa_needs(number) != nullptr) != known)
            fail("zk_isa_name", i, "wrong for index", number);
        if (!known && zk_isa_usable(number)) fail("zk_isa_usable", i, "unknown index called usable", number);
        const char *text = zk_error_text(number);
        if (!text || !*text) fail("zk_error_text", i, "no text for", number);

        const bool valid = number >= 1 && number <= 1024;
        const int before = zk_threads();
        if ((zk_threads_set(number) == ZK_OK) != valid) fail("zk_threads_set", i, "wrong answer to", number);
        if (zk_threads() != (valid ? number : before)) fail("zk_threads", i, "not what was set", number);

        int here[1024];
        const int given = zk_pool_cpus(here, 1024);
        std::vector<int> cpus(1 + random.below(3), zk_threads() % 2 ? number : own);
        cpus.back() = random.one_in(2) ? own : number;
        const bool beyond = std::any_of(cpus.begin(), cpus.end(), [](int cpu) { return cpu < 0 || cpu >= 1024; });
        const int answer = random.one_in(8) ? zk_pool_cpus_set(nullptr, 0)
                                            : zk_pool_cpus_set(cpus.data(), static_cast<int>(cpus.size()));
        int now[1024];
        const int count = zk_pool_cpus(now, 1024);
        if (answer != ZK_OK && answer != ZK_E_CPU) fail("zk_pool_cpus_set", i, "another error", answer);
        if (answer == ZK_OK && count && beyond) fail("zk_pool_cpus_set", i, "took a number that is none", number);
        if (answer != ZK_OK && (count != given || std::memcmp(now, here, sizeof(int) * static_cast<size_t>(count))))
            fail("zk_pool_cpus_set", i, "a refusal changed the CPUs", count);
        if (zk_pool_cpus_set(nullptr, 1) != ZK_E_NULL || zk_pool_cpus_set(cpus.data(), -1) != ZK_E_COUNT)
            fail("zk_pool_cpus_set", i, "took no list", 0);

        std::vector<char> name(1 + random.below(12));
        for (char &letter : name) letter = static_cast<char>(random.next() >> 24);
        name.back() = '\0';
        bool listed = false;
        for (int isa = 0; isa < zk_isa_count(); ++isa)
            listed = listed || std::strcmp(name.data(), zk_isa_name(isa)) == 0;
        const char *active = zk_isa_active();
        if (!listed && (zk_isa_force(name.data()) != ZK_E_ISA || zk_isa_active() != active))
            fail("zk_isa_force", i, "took an unknown name of length", static_cast<int64_t>(name.size()));

        const int64_t extremes[] = {
            0, 1, 65536, 65537, -1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
        const int64_t numels[] = {random.pick(extremes), random.pick(extremes)};
        if (zk_sumsq_partials(numels, 1 + static_cast<int64_t>(random.below(2))) < 0)
            fail("zk_sumsq_partials", i, "negative count for", numels[0]);
        if (zk_sumsq_partials(nullptr, 1) != ZK_E_NULL || zk_sumsq_partials(nullptr, 0) != 0)
            fail("zk_sumsq_partials", i, "read from null", 0);
        ++(valid ? counts.accepted : counts.refused);
    }
    zk_threads_set(threads);
    zk_pool_cpus_set(nullptr, 0);
    return counts;
}

}  // namespace fuzz
