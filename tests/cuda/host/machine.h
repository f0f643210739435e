// A GPU of one multiprocessor made of the host: the kernels of cuda/ run on it as they are, a block at a time.
//
// The threads of a block are coroutines; between two barriers they run one after the other, in an order that depends on
// the seed. So what works only where threads happen to run in step does not pass. Every access is checked against the
// spans that the test has declared, and counted: this stands in for compute-sanitizer, and for a look at the link.
#ifndef ZEROKERN_PTX_CUH
#define ZEROKERN_PTX_CUH  // its functions are here, in C++

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
    unsigned int x;
};
inline Index threadIdx, blockIdx, gridDim;

namespace machine {

using Address = unsigned long long;

enum Fault { kNone = 0, kOutside = 1, kMisaligned = 2, kReadOnly = 3, kWrittenTwice = 4, kLeftAtBarrier = 5 };

struct Span {
    Address begin, end;
    bool is_link, is_writable;
    std::vector<bool> written;  // by byte: what is written twice is a race
};

inline std::vector<Span> spans;
inline long long counts[2][2][17];  // [is a store][goes over the link][bytes of the access]
inline int fault;

inline bool fail(Fault what) {
    if (fault == kNone) fault = what;
    return false;
}

// Whether an access may be made.
inline bool access(Address at, int nbytes, bool is_store) {
    if (at % static_cast<Address>(nbytes) != 0) return fail(kMisaligned);
    for (Span &span : spans) {
        if (at < span.begin || at + static_cast<Address>(nbytes) > span.end) continue;
        if (is_store && !span.is_writable) return fail(kReadOnly);
        ++counts[is_store][span.is_link][nbytes];
        for (Address byte = at - span.begin; is_store && byte < at - span.begin + static_cast<Address>(nbytes);
             ++byte) {
            if (span.written[byte]) fail(kWrittenTwice);
            span.written[byte] = true;
        }
        return true;
    }
    return fail(kOutside);
}

// ---- threads ----

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(32 << 10);
    bool is_through = false;
};
inline ucontext_t scheduler;
inline Thread *running;
inline void (*body)();

struct Shuffle {
    std::uint64_t state;
    void operator()(std::vector<unsigned int> &order) {
        for (std::size_t i = order.size(); i > 1; --i) {
            state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
            std::swap(order[i - 1], order[(state >> 33) % i]);
        }
    }
};

inline void run_body() {
    body();
    running->is_through = true;
    swapcontext(&running->context, &scheduler);
}

inline void run_block(std::vector<Thread> &threads, Shuffle &shuffle) {
    std::vector<unsigned int> order;
    for (Thread &thread : threads) {
        order.push_back(static_cast<unsigned int>(order.size()));
        thread.is_through = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_body, 0);
    }
    for (std::size_t through = 0; through < threads.size();) {
        shuffle(order);
        for (const unsigned int i : order) {
            threadIdx.x = i;
            running = &threads[i];
            swapcontext(&scheduler, &running->context);
            through += running->is_through;
        }
        if (through != 0 && through != threads.size()) {  // the others would wait for ever
            fail(kLeftAtBarrier);
            return;
        }
    }
}

}  // namespace machine

inline void __syncthreads() {
    const unsigned int mine = threadIdx.x;
    swapcontext(&machine::running->context, &machine::scheduler);
    threadIdx.x = mine;
}

inline void __threadfence() {}

inline unsigned int atomicAdd(unsigned int *at, unsigned int value) {
    const unsigned int before = *at;
    *at += value;
    return before;
}

namespace zerokern {

using Address = machine::Address;

struct Quad {
    unsigned int words[4];
};

template <class T>
T load(Address at) {
    T value{};
    if (machine::access(at, sizeof(T), false)) std::memcpy(&value, reinterpret_cast<const void *>(at), sizeof(T));
    return value;
}

template <class T>
void store(Address at, const T &value) {
    if (machine::access(at, sizeof(T), true)) std::memcpy(reinterpret_cast<void *>(at), &value, sizeof(T));
}

template <class To, class From>
To same_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "bits are kept");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline Quad load16(Address at) { return load<Quad>(at); }
inline void load8(Address at, unsigned int &low, unsigned int &high) {
    const Address both = load<Address>(at);
    low = static_cast<unsigned int>(both), high = static_cast<unsigned int>(both >> 32);
}
inline unsigned int load4(Address at) { return load<unsigned int>(at); }
inline unsigned short load2(Address at) { return load<unsigned short>(at); }
inline void store16(Address at, const Quad &q) { store(at, q); }
inline void store8(Address at, unsigned int low, unsigned int high) {
    store(at, low | static_cast<Address>(high) << 32);
}
inline void store4(Address at, unsigned int word) { store(at, word); }
inline void store2(Address at, unsigned short half) { store(at, half); }

inline unsigned int bits_of(float value) { return same_bits<unsigned int>(value); }
inline float float_of(unsigned int bits) { return same_bits<float>(bits); }
inline unsigned short bf16_of(float value) {
    const unsigned int bits = bits_of(value);
    return value != value ? 0x7FFF : static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline unsigned short fp16_of(float value) {
    const unsigned int sign = bits_of(value) >> 16 & 0x8000;
    const double size = std::fabs(static_cast<double>(value));
    if (value != value) return 0x7FFF;
    if (size >= 65520.0) return static_cast<unsigned short>(sign | 0x7C00);
    const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
    const double steps = std::nearbyint(std::ldexp(size, 10 - exponent));  // a carry goes into the exponent
    return static_cast<unsigned short>(sign | (static_cast<int>(steps) + ((exponent + 14) << 10)));
}
inline float float_of_fp16(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? float_of(0x7F800000u | static_cast<unsigned int>(mantissa) << 13)
                                      : std::ldexp(static_cast<float>(exponent ? 1024 + mantissa : mantissa),
                                                   (exponent ? exponent : 1) - 25);
    return bits & 0x8000 ? -size : size;
}
inline float product(float a, float b) { return a * b; }

}  // namespace zerokern

#endif
