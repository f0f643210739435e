// The verbs on 8 lanes (AVX2, FMA for exact squares, F16C).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vec/bits.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int W = 8;  // lanes of a vector
constexpr int Q = 2;  // vectors handled together, so that 16-bit types fill whole registers
using F = __m256;
using I = __m256i;
struct D {
    __m256d low, high;
};

inline I load_256(const void *p) { return _mm256_loadu_si256(static_cast<const I *>(p)); }
inline __m128i load_128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
// -infinity becomes the lowest finite number; a NaN, the second operand, stays.
inline F at_least_lowest(F a) { return _mm256_max_ps(_mm256_set1_ps(-FLT_MAX), a); }
inline F is_infinite(F a) { return _mm256_cmp_ps(a, _mm256_set1_ps(INFINITY), _CMP_EQ_OQ); }
inline bool any_infinite(const F (&a)[Q]) {
    return _mm256_movemask_ps(_mm256_or_ps(is_infinite(a[0]), is_infinite(a[1]))) != 0;
}
inline F where_infinite(F test, F yes, F no) { return _mm256_blendv_ps(no, yes, is_infinite(test)); }
inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F reciprocal(F a) { return _mm256_div_ps(_mm256_set1_ps(1.0f), a); }
inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
inline I ints(F a) { return _mm256_castps_si256(a); }
inline F floats(I a) { return _mm256_castsi256_ps(a); }
inline F abs(F a) { return floats(_mm256_and_si256(ints(a), _mm256_set1_epi32(0x7FFFFFFF))); }
inline F sign_of(F a) {
    const F one =
        floats(_mm256_or_si256(_mm256_and_si256(ints(a), _mm256_set1_epi32(INT32_MIN)), ints(_mm256_set1_ps(1.0f))));
    const F signs = _mm256_and_ps(one, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ));
    return _mm256_blendv_ps(signs, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

inline D dset1(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline D widen(F a) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
}
inline F narrow(D a) { return _mm256_set_m128(_mm256_cvtpd_ps(a.high), _mm256_cvtpd_ps(a.low)); }
inline D dadd(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
inline D dsub(D a, D b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
inline D dmul(D a, D b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
// The square of a widened fp32 is exact, so the fused form has the bits of multiply and add.
inline D add_square(D sum, D x) {
    return {_mm256_fmadd_pd(x.low, x.low, sum.low), _mm256_fmadd_pd(x.high, x.high, sum.high)};
}
// Squares of 64 bf16: even and odd elements of 8 are a shift and a mask away from being fp32. Until they are stored,
// the two halves of sums[c] hold the even and the odd lanes of elements 8 c to 8 c + 7.
inline void add_bf16_squares(const uint16_t *p, D (&sums)[8]) {
    for (int c = 0; c < 8; ++c) {
        const __m128i x = load_128(p + 8 * c);
        const __m128i odd = _mm_and_si128(x, _mm_set1_epi32(static_cast<int>(0xFFFF0000u)));
        const D values = {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(x, 16))),
                          _mm256_cvtps_pd(_mm_castsi128_ps(odd))};
        sums[c] = add_square(sums[c], values);
    }
}
inline void dstore(double *p, D x) {
    _mm256_storeu_pd(p, x.low);
    _mm256_storeu_pd(p + 4, x.high);
}
inline void store_bf16_lanes(double *lanes, const D (&sums)[8]) {
    for (int c = 0; c < 8; ++c) {
        double even[4], odd[4];
        _mm256_storeu_pd(even, sums[c].low);
        _mm256_storeu_pd(odd, sums[c].high);
        for (int i = 0; i < 4; ++i) {
            lanes[8 * c + 2 * i] = even[i];
            lanes[8 * c + 2 * i + 1] = odd[i];
        }
    }
}

// The larger by bits, which for magnitudes is the larger; a NaN is larger than everything and stays.
inline F max_bits(F a, F b) { return floats(_mm256_max_epu32(ints(a), ints(b))); }
inline float reduce_max(F x) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(ints(x)), _mm256_extracti128_si256(ints(x), 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
    return float_of(static_cast<uint32_t>(_mm_cvtsi128_si32(most)));
}

template <bool NANS>
inline I canonical_bits_of(F x) {
    if (!NANS) return ints(x);
    return ints(
        _mm256_blendv_ps(x, floats(_mm256_set1_epi32(static_cast<int>(NAN_BITS))), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_256(void *p, I x) { _mm256_storeu_si256(static_cast<I *>(p), x); }

inline void load_bf16(const uint16_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j) x[j] = floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p + 8 * j)), 16));
}
inline void load_f16(const uint16_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j) x[j] = _mm256_cvtph_ps(load_128(p + 8 * j));
}
// 16 dwords below 65536 to words; the pack works in 128-bit lanes, the permute restores the order.
inline I pack_words(I a, I b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8); }
template <bool NANS>
inline I rounded_word(F x) {
    const I b = canonical_bits_of<NANS>(x);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
}
template <bool NANS = true>
inline void store_bf16(uint16_t *p, const F (&x)[Q]) {
    store_256(p, pack_words(rounded_word<NANS>(x[0]), rounded_word<NANS>(x[1])));
}
template <bool NANS = true>
inline void stream_bf16(uint16_t *p, const F (&x)[Q]) {
    _mm256_stream_si256(reinterpret_cast<I *>(p), pack_words(rounded_word<NANS>(x[0]), rounded_word<NANS>(x[1])));
}
inline I half_words(const F (&x)[Q]) { return _mm256_set_m128i(_mm256_cvtps_ph(x[1], 0), _mm256_cvtps_ph(x[0], 0)); }
inline void store_f16(uint16_t *p, const F (&x)[Q]) { store_256(p, half_words(x)); }
inline void stream_f16(uint16_t *p, const F (&x)[Q]) { _mm256_stream_si256(reinterpret_cast<I *>(p), half_words(x)); }
inline void stream(float *p, F x) { _mm256_stream_ps(p, x); }
inline void stream_fence() { _mm_sfence(); }
inline void prefetch(const void *p) { asm volatile("prefetcht0 %a0" : : "p"(p)); }  // see vec/avx512.h

inline F join(I hi, I lo) { return floats(_mm256_add_epi32(_mm256_slli_epi32(hi, 16), lo)); }
inline void load_split16(const uint16_t *hi, const int16_t *lo, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j)
        x[j] = join(_mm256_cvtepu16_epi32(load_128(hi + 8 * j)), _mm256_cvtepi16_epi32(load_128(lo + 8 * j)));
}
inline I upper_half(I bits) { return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16); }
template <bool NANS = true>
inline void store_split16(uint16_t *hi, int16_t *lo, const F (&x)[Q]) {
    const I a = canonical_bits_of<NANS>(x[0]), b = canonical_bits_of<NANS>(x[1]), word = _mm256_set1_epi32(0xFFFF);
    store_256(hi, pack_words(upper_half(a), upper_half(b)));
    store_256(lo, pack_words(_mm256_and_si256(a, word), _mm256_and_si256(b, word)));
}
inline void load_split8(const uint16_t *hi, const int8_t *lo, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j) {
        const I low =
            _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(lo + 8 * j))), 8);
        x[j] = join(_mm256_cvtepu16_epi32(load_128(hi + 8 * j)), low);
    }
}
template <bool NANS>
inline I rounded_24(F x) {
    const I b = canonical_bits_of<NANS>(x);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(b, 8), _mm256_set1_epi32(1));
    return _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7F)));
}
inline __m128i pack_bytes(I words_in_order) {
    return _mm_packus_epi16(_mm256_castsi256_si128(words_in_order), _mm256_extracti128_si256(words_in_order, 1));
}
template <bool NANS = true>
inline void store_split8(uint16_t *hi, int8_t *lo, const F (&x)[Q]) {
    const I a = rounded_24<NANS>(x[0]), b = rounded_24<NANS>(x[1]), byte = _mm256_set1_epi32(0xFF);
    store_256(hi, pack_words(upper_half(a), upper_half(b)));
    const I bytes =
        pack_words(_mm256_and_si256(_mm256_srli_epi32(a, 8), byte), _mm256_and_si256(_mm256_srli_epi32(b, 8), byte));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(lo), pack_bytes(bytes));
}

// c / (254 - |c|) of a code and its divisor, both times any power of 2. The divider has enough to do with roots and
// steps, so this quotient is made of an estimate, of which 16 bits remain: its products with code and divisor are
// exact, and the two terms of its error leave the cube, less than 2^-33.6 of the quotient. A quotient is at least 2^-9
// of a unit away from half way between two numbers, which is more, whatever the estimate's bits are: they differ
// between processors.
inline F code_quotient(F code, F divisor) {
    const F estimate = floats(_mm256_and_si256(ints(_mm256_rcp_ps(divisor)), _mm256_set1_epi32(-256))),
            error = fnma(divisor, estimate, set1(1.0f)), coarse = mul(code, estimate);
    return fma(coarse, fma(error, error, error), coarse);
}
// code -> c / (254 - |c|); -128, which no encoder writes for finite values, decodes as 0.
inline void decode_signed(const int8_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j) {
        const F code =
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8 * j))));
        const F c = _mm256_and_ps(code, _mm256_cmp_ps(code, _mm256_set1_ps(-128.0f), _CMP_NEQ_OQ));
        x[j] = code_quotient(c, sub(set1(254.0f), abs(c)));
    }
}
inline void decode_unsigned(const uint8_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j)
        x[j] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8 * j))));
}
// Adding 1.5 * 2^23 in the same rounding leaves rint(a * b) in the lowest bits; the lowest bytes of 16 of them in
// order.
inline I rint_byte(F a, F b) {
    return _mm256_and_si256(ints(fma(a, b, _mm256_set1_ps(0x1.8p23f))), _mm256_set1_epi32(0xFF));
}
inline void encode_signed(int8_t *p, const F (&q)[Q], F steps) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     pack_bytes(pack_words(rint_byte(q[0], steps), rint_byte(q[1], steps))));
}
inline void encode_unsigned(uint8_t *p, const F (&roots)[Q], F inverse) {
    I codes[Q];
    for (int j = 0; j < Q; ++j) {
        const I positive = ints(_mm256_cmp_ps(roots[j], _mm256_setzero_ps(), _CMP_GT_OQ));
        codes[j] = _mm256_max_epi32(rint_byte(roots[j], inverse), _mm256_and_si256(positive, _mm256_set1_epi32(1)));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), pack_bytes(pack_words(codes[0], codes[1])));
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
