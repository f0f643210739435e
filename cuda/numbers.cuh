// The three formats of an element, and groups of elements that one thread moves at once.
#ifndef ZEROKERN_NUMBERS_CUH
#define ZEROKERN_NUMBERS_CUH

#include "ptx.cuh"

namespace zerokern {

// Numbers of the C ABI: DTYPES of zerokern/kernels/formats.py.
enum Dtype : long long { kFp32 = 1, kBf16 = 2, kFp16 = 3 };

struct Fp32 {
    static constexpr int kNbytes = 4;
    static __device__ __forceinline__ float widen(unsigned int bits) { return float_of(bits); }
    static __device__ __forceinline__ unsigned int narrow(float value) { return bits_of(value); }
};

struct Bf16 {
    static constexpr int kNbytes = 2;
    static __device__ __forceinline__ float widen(unsigned int bits) { return float_of(bits << 16); }
    static __device__ __forceinline__ unsigned int narrow(float value) { return bf16_of(value); }
};

struct Fp16 {
    static constexpr int kNbytes = 2;
    static __device__ __forceinline__ float widen(unsigned int bits) {
        return float_of_fp16(static_cast<unsigned short>(bits));
    }
    static __device__ __forceinline__ unsigned int narrow(float value) { return fp16_of(value); }
};

template <class Number>
__device__ __forceinline__ unsigned int load_one(Address at) {
    if constexpr (Number::kNbytes == 4) {
        return load4(at);
    } else {
        return load2(at);
    }
}

template <class Number>
__device__ __forceinline__ void store_one(Address at, unsigned int bits) {
    if constexpr (Number::kNbytes == 4) {
        store4(at, bits);
    } else {
        store2(at, static_cast<unsigned short>(bits));
    }
}

// The widest access that a group of N elements allows: 16 bytes, or all of them where they are 8.
template <class Number, int N>
__device__ constexpr int access_nbytes() {
    return N * Number::kNbytes < 16 ? N * Number::kNbytes : 16;
}

// The bits of N consecutive elements, in wide accesses where the address allows them.
template <class Number, int N>
__device__ __forceinline__ void load_group(Address at, unsigned int (&bits)[N]) {
    constexpr int kWords = N * Number::kNbytes / 4;
    constexpr int kPerWord = 4 / Number::kNbytes;
    if (at % access_nbytes<Number, N>() != 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) bits[i] = load_one<Number>(at + i * Number::kNbytes);
        return;
    }
    unsigned int words[kWords];
    if constexpr (kWords == 2) {
        load8(at, words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const Quad quad = load16(at + 4 * i);
#pragma unroll
            for (int k = 0; k < 4; ++k) words[i + k] = quad.words[k];
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        bits[i] = kPerWord == 1 ? words[i] : (words[i / 2] >> (i % 2 * 16)) & 0xFFFFu;
    }
}

template <class Number, int N>
__device__ __forceinline__ void store_group(Address at, const unsigned int (&bits)[N]) {
    constexpr int kWords = N * Number::kNbytes / 4;
    constexpr int kPerWord = 4 / Number::kNbytes;
    if (at % access_nbytes<Number, N>() != 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) store_one<Number>(at + i * Number::kNbytes, bits[i]);
        return;
    }
    unsigned int words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        words[i] = kPerWord == 1 ? bits[i] : bits[(2 * i) % N] | bits[(2 * i + 1) % N] << 16;
    }
    if constexpr (kWords == 2) {
        store8(at, words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            store16(at + 4 * i, Quad{{words[i], words[i + 1], words[i + 2], words[i + 3]}});
        }
    }
}

}  // namespace zerokern

#endif
