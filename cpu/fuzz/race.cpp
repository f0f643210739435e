// race [rounds] [seed]: callers on several threads share the pool while others change its size and the instruction set.
// Built with ThreadSanitizer; every result must also be the one that a single thread gives.
#include <sched.h>

#include <atomic>
#include <thread>

#include "fuzz.h"

namespace {

constexpr int CALLERS = 4;
constexpr int64_t NUMEL = 150001;  // above what one thread takes alone, and no multiple of anything

struct Step {
    std::vector<float> master, grad, exp_avg, exp_avg_sq;
    std::vector<uint16_t> out;

    explicit Step(uint64_t seed) : master(NUMEL), grad(NUMEL), exp_avg(NUMEL), exp_avg_sq(NUMEL), out(NUMEL) {
        fuzz::Random random(seed);
        for (int64_t i = 0; i < NUMEL; ++i) {
            master[i] = static_cast<float>(random.unit() - 0.5);
            grad[i] = static_cast<float>(random.unit() - 0.5);
            exp_avg_sq[i] = static_cast<float>(random.unit());
        }
    }

    int run() {
        zk_group group{};
        group.algorithm = ZK_ADAM;
        group.grad = group.state = ZK_F32;
        group.master = ZK_MASTER_FP32;
        group.out = ZK_BF16;
        group.lr = 0.01;
        group.beta1 = 0.9;
        group.beta2 = 0.999;
        group.step = 3;
        zk_segment segments[2] = {};
        for (int half = 0; half < 2; ++half) {
            const int64_t begin = half * 70000;
            segments[half].master = master.data() + begin;
            segments[half].grad = grad.data() + begin;
            segments[half].exp_avg = exp_avg.data() + begin;
            segments[half].exp_avg_sq = exp_avg_sq.data() + begin;
            segments[half].out = out.data() + begin;
            segments[half].numel = half ? NUMEL - begin : 70000;
        }
        int64_t bad = 0;
        return zk_update(segments, 2, &group, 1, nullptr, &bad);
    }

    bool operator==(const Step &other) const {
        return master == other.master && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq && out == other.out;
    }
};

// Muon's pass, whose sums of squares are added up by whichever thread takes a chunk.
struct Direction {
    std::vector<float> grad, exp_avg, out;
    std::vector<double> sums;

    explicit Direction(const std::vector<float> &gradient)
        : grad(gradient), exp_avg(gradient), out(NUMEL), sums(NUMEL / ZK_SUMSQ_CHUNK + 1) {}

    int run() {
        zk_group group{};
        group.algorithm = ZK_MUON;
        group.grad = group.state = group.out = ZK_F32;
        group.master = ZK_MASTER_NONE;
        group.param = ZK_BF16;
        group.flags = ZK_NESTEROV;
        group.momentum = 0.9;
        group.step = 1;
        zk_segment segment{};
        segment.grad = grad.data();
        segment.exp_avg = exp_avg.data();
        segment.exp_avg_sq = sums.data();
        segment.out = out.data();
        segment.numel = NUMEL;
        const float scale = -0.5f;
        int64_t bad = 0;
        return zk_update(&segment, 1, &group, 1, &scale, &bad);
    }

    bool operator==(const Direction &other) const {
        return exp_avg == other.exp_avg && out == other.out && sums == other.sums;
    }
};

double sum_of(const std::vector<float> &values) {
    const void *source = values.data();
    const int64_t numel = static_cast<int64_t>(values.size());
    std::vector<double> partials(static_cast<size_t>(zk_sumsq_partials(&numel, 1)));
    double sum = -1.0;
    zk_sumsq(&source, &numel, 1, ZK_F32, partials.data(), &sum);
    return sum;
}

void call(uint64_t rounds, uint64_t seed, const Step &expected, const Direction &expected_direction,
          double expected_sum, std::atomic<uint64_t> &done) {
    for (uint64_t i = 0; i < rounds; ++i) {
        Step step(seed);
        if (step.run() != ZK_OK || !(step == expected))
            fuzz::fail("zk_update", i, "another result than a single thread's", 0);
        Direction direction(step.grad);
        if (direction.run() != ZK_OK || !(direction == expected_direction))
            fuzz::fail("zk_update of Muon", i, "another result than a single thread's", 0);
        if (sum_of(step.grad) != expected_sum) fuzz::fail("zk_sumsq", i, "another result than a single thread's", 0);
        std::vector<float> copy(NUMEL);
        const void *source = step.grad.data();
        zk_accumulate(copy.data(), ZK_F32, &source, 1, ZK_F32, NUMEL, 0, 1.0f);
        if (copy != step.grad) fuzz::fail("zk_accumulate", i, "another result than a single thread's", 0);
        int64_t begin = 0, whole = NUMEL;
        double partials[NUMEL / ZK_SUMSQ_CHUNK + 1], sum = -1.0;
        zk_accumulate_sumsq(copy.data(), ZK_F32, &source, 1, ZK_F32, NUMEL, 0, 1.0f, &begin, &whole, 1, partials, &sum);
        if (sum != expected_sum || copy != step.grad)
            fuzz::fail("zk_accumulate_sumsq", i, "another result than a single thread's", 0);
        ++done;
    }
}

}  // namespace

int main(int argc, char **argv) {
    const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    zk_threads_set(1);
    Step expected(seed);
    expected.run();
    Direction expected_direction(expected.grad);
    expected_direction.run();
    const double expected_sum = sum_of(expected.grad);

    std::atomic<uint64_t> done{0}, changes{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < CALLERS; ++i)
        threads.emplace_back([&] { call(rounds, seed, expected, expected_direction, expected_sum, done); });
    std::thread meddler([&] {
        const std::vector<const char *> sets = fuzz::usable_sets();
        fuzz::Random random(seed);
        cpu_set_t usable;
        sched_getaffinity(0, sizeof usable, &usable);
        for (; done < CALLERS * rounds; ++changes) {
            zk_threads_set(1 + static_cast<int>(random.below(8)));
            const int cpu = static_cast<int>(random.below(64));
            const bool there = CPU_ISSET(cpu, &usable);
            if ((zk_pool_cpus_set(&cpu, there) != ZK_OK)) fuzz::fail("zk_pool_cpus_set", changes, "refused", cpu);
            zk_isa_force(sets[random.below(sets.size())]);
            std::this_thread::yield();
        }
    });
    for (std::thread &thread : threads) thread.join();
    meddler.join();
    std::printf("pool           %9llu calls from %d threads, %llu changes of threads and instruction set meanwhile\n",
                static_cast<unsigned long long>(4 * done), CALLERS, static_cast<unsigned long long>(changes));
    return 0;
}
