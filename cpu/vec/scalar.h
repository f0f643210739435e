// The verbs on one lane: the slow twin that the wide sets are held to.
#pragma once

#include <cmath>
#include <cstdint>

#include "vec/bits.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int W = 1;  // lanes of a vector
constexpr int Q = 1;  // vectors handled together, so that narrow types fill whole registers
using F = float;
using D = double;

inline F set1(float x) { return x; }
inline F load(const float *p) { return *p; }
inline void store(float *p, F x) { *p = x; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return std::fma(a, b, c); }
inline F fms(F a, F b, F c) { return std::fma(a, b, -c); }
// -infinity becomes the lowest finite number; a NaN stays.
inline F at_least_lowest(F a) { return a < -FLT_MAX ? -FLT_MAX : a; }
inline bool any_infinite(const F (&a)[Q]) { return a[0] == INFINITY; }
inline F where_infinite(F test, F yes, F no) { return test == INFINITY ? yes : no; }
inline F fnma(F a, F b, F c) { return std::fma(-a, b, c); }
inline F reciprocal(F a) { return 1.0f / a; }
inline F sqrt(F a) { return std::sqrt(a); }
inline F abs(F a) { return float_of(bits_of(a) & 0x7FFFFFFFu); }
inline F sign_of(F a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a == 0.0f ? 0.0f : a; }

inline D dset1(double x) { return x; }
inline D widen(F a) { return a; }
inline F narrow(D a) { return static_cast<float>(a); }
inline D dadd(D a, D b) { return a + b; }
inline D dsub(D a, D b) { return a - b; }
inline D dmul(D a, D b) { return a * b; }

// The larger by bits, which for magnitudes is the larger; a NaN is larger than everything and stays.
inline F max_bits(F a, F b) { return bits_of(a) > bits_of(b) ? a : b; }
inline float reduce_max(F x) { return x; }

inline void load_bf16(const uint16_t *p, F (&x)[Q]) { x[0] = float_of(static_cast<uint32_t>(*p) << 16); }
inline void load_f16(const uint16_t *p, F (&x)[Q]) { x[0] = half_to_float(*p); }
template <bool NANS = true>
inline void store_bf16(uint16_t *p, const F (&x)[Q]) {
    *p = bf16_nearest_even(x[0]);
}
inline void store_f16(uint16_t *p, const F (&x)[Q]) { *p = half_nearest_even(x[0]); }
template <bool NANS = true>
inline void stream_bf16(uint16_t *p, const F (&x)[Q]) {
    store_bf16<NANS>(p, x);
}
inline void stream_f16(uint16_t *p, const F (&x)[Q]) { store_f16(p, x); }
inline void stream(float *p, F x) { *p = x; }
inline void stream_fence() {}
inline void prefetch(const void *) {}

inline void load_split16(const uint16_t *hi, const int16_t *lo, F (&x)[Q]) { x[0] = join16(*hi, *lo); }
template <bool NANS = true>
inline void store_split16(uint16_t *hi, int16_t *lo, const F (&x)[Q]) {
    split16(x[0], *hi, *lo);
}
inline void load_split8(const uint16_t *hi, const int8_t *lo, F (&x)[Q]) { x[0] = join8(*hi, *lo); }
template <bool NANS = true>
inline void store_split8(uint16_t *hi, int8_t *lo, const F (&x)[Q]) {
    split8(x[0], *hi, *lo);
}

// code -> c / (254 - |c|); -128, which no encoder writes for finite values, decodes as 0.
inline void decode_signed(const int8_t *codes, F (&x)[Q]) {
    const float c = codes[0] == -128 ? 0.0f : static_cast<float>(codes[0]);
    x[0] = c / (254.0f - abs(c));
}
inline void decode_unsigned(const uint8_t *codes, F (&x)[Q]) { x[0] = static_cast<float>(codes[0]); }
// Adding 1.5 * 2^23 in the same rounding leaves rint(a * b) in the lowest bits.
inline uint32_t rint_byte(F a, F b) { return bits_of(fma(a, b, 0x1.8p23f)) & 0xFFu; }
inline void encode_signed(int8_t *codes, const F (&q)[Q], F steps) {
    codes[0] = static_cast<int8_t>(rint_byte(q[0], steps));
}
// At least 1 where the root is positive: a step must not divide by what rounding made zero.
inline void encode_unsigned(uint8_t *codes, const F (&roots)[Q], F inverse) {
    const uint32_t code = rint_byte(roots[0], inverse);
    codes[0] = static_cast<uint8_t>(code == 0u && roots[0] > 0.0f ? 1u : code);
}

inline D add_square(D sum, D x) { return sum + x * x; }
inline void dstore(double *p, D x) { *p = x; }
inline void add_bf16_squares(const uint16_t *p, D (&sums)[64]) {
    for (int i = 0; i < 64; ++i) sums[i] = add_square(sums[i], float_of(static_cast<uint32_t>(p[i]) << 16));
}
inline void store_bf16_lanes(double *lanes, const D (&sums)[64]) {
    for (int i = 0; i < 64; ++i) lanes[i] = sums[i];
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
