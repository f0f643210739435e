// Threads that a program switches between by itself: a stack of its own for each, and one way back.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

class Fibers {
  public:
    static constexpr size_t STACK = 64 << 10;
    typedef void (*Body)();

    // The fiber `number` will begin with `body`, which never returns.
    void prepare(size_t number, Body body) {
        while (stacks_.size() <= number) {
            void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) abort();
            stacks_.push_back(static_cast<char *>(memory));
            contexts_.emplace_back();
        }
#if defined(__x86_64__)
        uint64_t *top = reinterpret_cast<uint64_t *>(stacks_[number] + STACK) - 1;  // as a call leaves it
        *--top = reinterpret_cast<uint64_t>(body);
        top -= 6;  // rbx, rbp, r12 to r15: nobody reads what they begin with
        contexts_[number] = top;
#else
        getcontext(&contexts_[number]);
        contexts_[number].uc_stack.ss_sp = stacks_[number];
        contexts_[number].uc_stack.ss_size = STACK;
        contexts_[number].uc_link = nullptr;
        makecontext(&contexts_[number], body, 0);
#endif
    }

    void enter(size_t number) {
        current_ = number;
#if defined(__x86_64__)
        exchange(&outside_, contexts_[number]);
#else
        swapcontext(&outside_, &contexts_[number]);
#endif
    }

    // From within a fiber back to who entered it.
    void leave() {
#if defined(__x86_64__)
        exchange(&contexts_[current_], outside_);
#else
        swapcontext(&contexts_[current_], &outside_);
#endif
    }

  private:
#if defined(__x86_64__)
    typedef void *Context;
    static void exchange(void **, void *) __attribute__((noinline, naked)) {  // from, to
        asm volatile(
            "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15;"
            "movq %rsp, (%rdi); movq %rsi, %rsp;"
            "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
    }
#else
    typedef ucontext_t Context;
#endif
    std::vector<char *> stacks_;
    std::vector<Context> contexts_;
    Context outside_{};
    size_t current_ = 0;
};
