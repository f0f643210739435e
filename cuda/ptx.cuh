// What the kernels say to the machine: one function, one instruction.
//
// Addresses are whole numbers, read from a table in memory: through a pointer made of one, the compiler would not know
// that they are global. The tests run the kernels on the host with functions of their own in place of this file.
#ifndef ZEROKERN_PTX_CUH
#define ZEROKERN_PTX_CUH

namespace zerokern {

using Address = unsigned long long;

struct Quad {
    unsigned int words[4];
};

// Volatile keeps the order of the program: all loads of a tile, then its stores.

__device__ __forceinline__ Quad load16(Address at) {
    Quad q;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.words[0]), "=r"(q.words[1]), "=r"(q.words[2]), "=r"(q.words[3])
                 : "l"(at));
    return q;
}

__device__ __forceinline__ void load8(Address at, unsigned int &low, unsigned int &high) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(at));
}

__device__ __forceinline__ unsigned int load4(Address at) {
    unsigned int word;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
    return word;
}

__device__ __forceinline__ unsigned short load2(Address at) {
    unsigned short half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(at));
    return half;
}

__device__ __forceinline__ void store16(Address at, const Quad &q) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(q.words[0]), "r"(q.words[1]),
                 "r"(q.words[2]), "r"(q.words[3])
                 : "memory");
}

__device__ __forceinline__ void store8(Address at, unsigned int low, unsigned int high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store4(Address at, unsigned int word) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void store2(Address at, unsigned short half) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(half) : "memory");
}

// Conversions round to nearest even and keep subnormal numbers. The headers that name these types are not needed for
// them: NVRTC then compiles without any CUDA toolkit installed.

__device__ __forceinline__ unsigned short bf16_of(float value) {
    unsigned short half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

__device__ __forceinline__ unsigned short fp16_of(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

__device__ __forceinline__ float float_of_fp16(unsigned short half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ float float_of(unsigned int bits) { return __uint_as_float(bits); }

__device__ __forceinline__ unsigned int bits_of(float value) { return __float_as_uint(value); }

// Rounded once: contraction is off for the whole file, but a multiply by name cannot be contracted by any option.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }

}  // namespace zerokern

#endif
