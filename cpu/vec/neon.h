// The verbs on 4 lanes (NEON, which every aarch64 has; little-endian, as Linux runs it).
// The verbs of adam/lifted.inl.h are left out: whether these processors are slow with denormals was not measured.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "vec/bits.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int W = 4;  // lanes of a vector
constexpr int Q = 4;  // vectors handled together, so that 8-bit types fill whole registers
using F = float32x4_t;
using I = uint32x4_t;
struct D {
    float64x2_t low, high;
};

inline F set1(float x) { return vdupq_n_f32(x); }
inline F load(const float *p) { return vld1q_f32(p); }
inline void store(float *p, F x) { vst1q_f32(p, x); }
inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F sub(F a, F b) { return vsubq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F div(F a, F b) { return vdivq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
// The addend is negated, not the sum: a difference of equals is +0.
inline F fms(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }
// -infinity becomes the lowest finite number; a NaN stays, as it would not with vmaxnmq.
inline F at_least_lowest(F a) { return vmaxq_f32(vdupq_n_f32(-FLT_MAX), a); }
inline I is_infinite(F a) { return vceqq_f32(a, vdupq_n_f32(INFINITY)); }
inline bool any_infinite(const F (&a)[Q]) {
    const I either =
        vorrq_u32(vorrq_u32(is_infinite(a[0]), is_infinite(a[1])), vorrq_u32(is_infinite(a[2]), is_infinite(a[3])));
    return vmaxvq_u32(either) != 0;
}
inline F where_infinite(F test, F yes, F no) { return vbslq_f32(is_infinite(test), yes, no); }
inline F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
inline F reciprocal(F a) { return vdivq_f32(vdupq_n_f32(1.0f), a); }
inline F sqrt(F a) { return vsqrtq_f32(a); }
inline I ints(F a) { return vreinterpretq_u32_f32(a); }
inline F floats(I a) { return vreinterpretq_f32_u32(a); }
inline F abs(F a) { return vabsq_f32(a); }
inline F sign_of(F a) {
    const F one = vbslq_f32(vdupq_n_u32(0x80000000u), a, vdupq_n_f32(1.0f));
    const F signs = floats(vbicq_u32(ints(one), vceqzq_f32(a)));
    return vbslq_f32(vceqq_f32(a, a), signs, a);
}

inline D dset1(double x) { return {vdupq_n_f64(x), vdupq_n_f64(x)}; }
inline D widen(F a) { return {vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)}; }
inline F narrow(D a) { return vcvt_high_f32_f64(vcvt_f32_f64(a.low), a.high); }
inline D dadd(D a, D b) { return {vaddq_f64(a.low, b.low), vaddq_f64(a.high, b.high)}; }
inline D dsub(D a, D b) { return {vsubq_f64(a.low, b.low), vsubq_f64(a.high, b.high)}; }
inline D dmul(D a, D b) { return {vmulq_f64(a.low, b.low), vmulq_f64(a.high, b.high)}; }
// The square of a widened fp32 is exact, so the fused form has the bits of multiply and add.
inline D add_square(D sum, D x) { return {vfmaq_f64(sum.low, x.low, x.low), vfmaq_f64(sum.high, x.high, x.high)}; }
inline void dstore(double *p, D x) {
    vst1q_f64(p, x.low);
    vst1q_f64(p + 2, x.high);
}

// The larger by bits, which for magnitudes is the larger; a NaN is larger than everything and stays.
inline F max_bits(F a, F b) { return floats(vmaxq_u32(ints(a), ints(b))); }
inline float reduce_max(F x) { return float_of(vmaxvq_u32(ints(x))); }

// A NaN of this processor is positive, one of x86 negative: what is narrowed by its bits is NAN_BITS on both.
template <bool NANS>
inline I canonical_bits_of(F x) {
    return NANS ? vbslq_u32(vceqq_f32(x, x), ints(x), vdupq_n_u32(NAN_BITS)) : ints(x);
}

// 8 words above 8 words of zeros.
inline void widen_words(uint16x8_t x, F &a, F &b) {
    const uint16x8_t zero = vdupq_n_u16(0);
    a = vreinterpretq_f32_u16(vzip1q_u16(zero, x));
    b = vreinterpretq_f32_u16(vzip2q_u16(zero, x));
}
inline void load_bf16(const uint16_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) widen_words(vld1q_u16(p + 4 * j), x[j], x[j + 1]);
}
inline void load_f16(const uint16_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(p + 4 * j));
        x[j] = vcvt_f32_f16(vget_low_f16(half));
        x[j + 1] = vcvt_high_f32_f16(half);
    }
}
// Added to what is narrowed to its upper half, it rounds to nearest even.
inline I to_even(I bits) { return vaddq_u32(vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)), vdupq_n_u32(0x7FFF)); }
template <bool NANS = true>
inline void store_bf16(uint16_t *p, const F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        const I a = canonical_bits_of<NANS>(x[j]), b = canonical_bits_of<NANS>(x[j + 1]);
        vst1q_u16(p + 4 * j, vaddhn_high_u32(vaddhn_u32(a, to_even(a)), b, to_even(b)));
    }
}
// The pool's FPCR of zeros makes it round to nearest even, and to IEEE's half format.
inline void store_f16(uint16_t *p, const F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2)
        vst1q_u16(p + 4 * j, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x[j]), x[j + 1])));
}
// Plain stores: there is no intrinsic for a store past the cache, STNP is but a hint and not ordered by it, and these
// processors stop allocating lines by themselves where long runs of whole lines are written.
template <bool NANS = true>
inline void stream_bf16(uint16_t *p, const F (&x)[Q]) {
    store_bf16<NANS>(p, x);
}
inline void stream_f16(uint16_t *p, const F (&x)[Q]) { store_f16(p, x); }
inline void stream(float *p, F x) { store(p, x); }
inline void stream_fence() {}
inline void prefetch(const void *p) { asm volatile("prfm pldl1keep, %a0" : : "p"(p)); }  // see vec/avx512.h

// hi << 16 plus the signed low half.
inline void join_words(uint16x8_t hi, int16x8_t lo, F &a, F &b) {
    F upper_a, upper_b;
    widen_words(hi, upper_a, upper_b);
    a = vreinterpretq_f32_s32(vaddw_s16(vreinterpretq_s32_f32(upper_a), vget_low_s16(lo)));
    b = vreinterpretq_f32_s32(vaddw_high_s16(vreinterpretq_s32_f32(upper_b), lo));
}
inline void load_split16(const uint16_t *hi, const int16_t *lo, F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) join_words(vld1q_u16(hi + 4 * j), vld1q_s16(lo + 4 * j), x[j], x[j + 1]);
}
// The words below the upper halves of two vectors.
inline uint16x8_t low_words(I a, I b) { return vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)); }
// (bits + 0x8000) >> 16
inline uint16x8_t upper_halves(I a, I b) { return vrshrn_high_n_u32(vrshrn_n_u32(a, 16), b, 16); }
template <bool NANS = true>
inline void store_split16(uint16_t *hi, int16_t *lo, const F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        const I a = canonical_bits_of<NANS>(x[j]), b = canonical_bits_of<NANS>(x[j + 1]);
        vst1q_u16(hi + 4 * j, upper_halves(a, b));
        vst1q_s16(lo + 4 * j, vreinterpretq_s16_u16(low_words(a, b)));
    }
}
inline void load_split8(const uint16_t *hi, const int8_t *lo, F (&x)[Q]) {
    const int8x16_t zero = vdupq_n_s8(0), low = vld1q_s8(lo);
    join_words(vld1q_u16(hi), vreinterpretq_s16_s8(vzip1q_s8(zero, low)), x[0], x[1]);
    join_words(vld1q_u16(hi + 8), vreinterpretq_s16_s8(vzip2q_s8(zero, low)), x[2], x[3]);
}
template <bool NANS>
inline I rounded_24(F x) {
    const I b = canonical_bits_of<NANS>(x);
    return vaddq_u32(b, vaddq_u32(vandq_u32(vshrq_n_u32(b, 8), vdupq_n_u32(1)), vdupq_n_u32(0x7F)));
}
template <bool NANS = true>
inline void store_split8(uint16_t *hi, int8_t *lo, const F (&x)[Q]) {
    I r[Q];
    for (int j = 0; j < Q; ++j) r[j] = rounded_24<NANS>(x[j]);
    vst1q_u16(hi, upper_halves(r[0], r[1]));
    vst1q_u16(hi + 8, upper_halves(r[2], r[3]));
    const uint8x16_t front = vreinterpretq_u8_u16(low_words(r[0], r[1])),
                     back = vreinterpretq_u8_u16(low_words(r[2], r[3]));
    vst1q_s8(lo, vreinterpretq_s8_u8(vuzp2q_u8(front, back)));
}

inline void to_floats(int16x8_t x, F &a, F &b) {
    a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
    b = vcvtq_f32_s32(vmovl_high_s16(x));
}
// code -> c / (254 - |c|); -128, which no encoder writes for finite values, decodes as 0.
inline void decode_signed(const int8_t *p, F (&x)[Q]) {
    const int8x16_t codes = vld1q_s8(p);
    const int8x16_t c = vbicq_s8(codes, vreinterpretq_s8_u8(vceqq_s8(codes, vdupq_n_s8(-128))));
    to_floats(vmovl_s8(vget_low_s8(c)), x[0], x[1]);
    to_floats(vmovl_high_s8(c), x[2], x[3]);
    for (int j = 0; j < Q; ++j) x[j] = div(x[j], sub(set1(254.0f), abs(x[j])));
}
inline void decode_unsigned(const uint8_t *p, F (&x)[Q]) {
    const uint8x16_t codes = vld1q_u8(p);
    to_floats(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes))), x[0], x[1]);
    to_floats(vreinterpretq_s16_u16(vmovl_high_u8(codes)), x[2], x[3]);
}
// The lowest bytes of 16 lanes, in order.
inline uint8x16_t low_bytes(const I (&x)[Q]) {
    return vuzp1q_u8(vreinterpretq_u8_u16(low_words(x[0], x[1])), vreinterpretq_u8_u16(low_words(x[2], x[3])));
}
// Adding 1.5 * 2^23 in the same rounding leaves rint(a * b) in the lowest bits.
inline uint8x16_t rint_bytes(const F (&a)[Q], F b) {
    I sums[Q];
    for (int j = 0; j < Q; ++j) sums[j] = ints(fma(a[j], b, set1(0x1.8p23f)));
    return low_bytes(sums);
}
inline void encode_signed(int8_t *p, const F (&q)[Q], F steps) {
    vst1q_s8(p, vreinterpretq_s8_u8(rint_bytes(q, steps)));
}
inline void encode_unsigned(uint8_t *p, const F (&roots)[Q], F inverse) {
    I positive[Q];
    for (int j = 0; j < Q; ++j) positive[j] = vcgtzq_f32(roots[j]);
    const uint8x16_t least = vandq_u8(low_bytes(positive), vdupq_n_u8(1));
    vst1q_u8(p, vmaxq_u8(rint_bytes(roots, inverse), least));
}

// Squares of 64 bf16, lanes in order.
inline void add_bf16_squares(const uint16_t *p, D (&sums)[16]) {
    for (int c = 0; c < 16; c += 2) {
        F a, b;
        widen_words(vld1q_u16(p + 4 * c), a, b);
        sums[c] = add_square(sums[c], widen(a));
        sums[c + 1] = add_square(sums[c + 1], widen(b));
    }
}
inline void store_bf16_lanes(double *lanes, const D (&sums)[16]) {
    for (int c = 0; c < 16; ++c) dstore(lanes + 4 * c, sums[c]);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
