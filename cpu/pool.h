// Threads that share one call. They start at first use, spin briefly, then park; a child of fork() starts its own.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zk {

// Arithmetic is IEEE whatever the calling thread has set (torch.set_flush_denormal, a rounding mode).
class IeeeArithmetic {
#if defined(__x86_64__)
    unsigned saved_ = _mm_getcsr();

  public:
    IeeeArithmetic() { _mm_setcsr(0x1F80); }
    ~IeeeArithmetic() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    uint64_t saved_;
    static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); }

  public:
    IeeeArithmetic() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_) : : "memory");
        set(0);
    }
    ~IeeeArithmetic() { set(saved_); }
#else
  public:
    IeeeArithmetic() {}
#endif
};

using Task = void (*)(void *context);

// Runs task(context) on up to `workers` threads at once, the caller among them, and returns when all have returned.
// Tasks take their work from a shared cursor, so fewer threads than asked for (none could be started, say) only means
// that it takes longer.
void pool_run(Task task, void *context, int workers);

int pool_threads();
bool pool_set_threads(int count);

// The CPUs that the pool's threads run on, those there are and those to come; the caller of a task stays where it is.
// None at all gives them back what the process's first thread may use. Returns a zk_error.
int pool_set_cpus(const int *cpus, int count);
// Writes the CPUs in force, in order, as far as `room` reaches; returns how many there are, 0 where none were set.
int pool_cpus(int *cpus, int room);

}  // namespace zk
