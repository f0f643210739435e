// The verbs on 16 lanes. Narrow types are taken 32 or 64 at a time and spread by whole-register permutes, in natural
// order.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "table.h"
#include "vec/bits.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int W = 16;  // lanes of a vector
constexpr int Q = 4;   // vectors handled together, so that narrow types fill whole registers
using F = __m512;
using I = __m512i;
struct D {
    __m512d low, high;
};

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
inline I ints(F a) { return _mm512_castps_si512(a); }
inline F floats(I a) { return _mm512_castsi512_ps(a); }
inline F abs(F a) { return floats(_mm512_and_si512(ints(a), _mm512_set1_epi32(0x7FFFFFFF))); }
inline F sign_of(F a) {
    const F one =
        floats(_mm512_or_si512(_mm512_and_si512(ints(a), _mm512_set1_epi32(INT32_MIN)), ints(_mm512_set1_ps(1.0f))));
    const F signs = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), one);
    return _mm512_mask_mov_ps(signs, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}

inline D dset1(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
inline D widen(F a) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(a)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))};
}
inline F narrow(D a) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.low)), _mm512_cvtpd_ps(a.high), 1);
}
inline D dadd(D a, D b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
inline D dsub(D a, D b) { return {_mm512_sub_pd(a.low, b.low), _mm512_sub_pd(a.high, b.high)}; }
inline D dmul(D a, D b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }

// The larger by bits, which for magnitudes is the larger; a NaN is larger than everything and stays.
inline F max_bits(F a, F b) { return floats(_mm512_max_epu32(ints(a), ints(b))); }
inline float reduce_max(F x) { return float_of(_mm512_reduce_max_epu32(ints(x))); }

inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
// -infinity becomes the lowest finite number; a NaN, the second operand, stays.
inline F at_least_lowest(F a) { return _mm512_max_ps(_mm512_set1_ps(-FLT_MAX), a); }
inline __mmask16 is_infinite(F a) { return _mm512_cmp_ps_mask(a, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ); }
inline bool any_infinite(const F (&a)[Q]) {
    return (is_infinite(a[0]) | is_infinite(a[1]) | is_infinite(a[2]) | is_infinite(a[3])) != 0;
}
inline F where_infinite(F test, F yes, F no) { return _mm512_mask_mov_ps(no, is_infinite(test), yes); }
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
// Within 2^-14 of 1 / a, relative. Only for what is lossy anyway.
inline F reciprocal(F a) { return _mm512_rcp14_ps(a); }

// The verbs of adam/lifted.inl.h.
#define ZK_LIFT 1
using M = __mmask16;  // lanes
inline bool any(M a) { return a != 0; }
inline M both(M a, M b) { return a & b; }
inline M either(M a, M b) { return a | b; }
inline F choose(M lanes, F yes, F no) { return _mm512_mask_mov_ps(no, lanes, yes); }
inline M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline M equal_or_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_UQ); }
inline M at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline M below(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline F bits_join(F a, F b) { return floats(_mm512_or_si512(ints(a), ints(b))); }
inline F max_signed_bits(F a, uint32_t b) {
    return floats(_mm512_max_epi32(ints(a), _mm512_set1_epi32(static_cast<int>(b))));
}
inline M is_positive_denormal(F a) {
    const I less = _mm512_sub_epi32(ints(a), _mm512_set1_epi32(1));  // 0 becomes the largest
    return _mm512_cmp_epu32_mask(less, _mm512_set1_epi32(0x007FFFFF), _MM_CMPINT_LT);
}
inline M is_denormal(F a) { return _mm512_fpclass_ps_mask(a, 0x20); }
inline F bits_and(F a, uint32_t b) { return floats(_mm512_and_si512(ints(a), _mm512_set1_epi32(static_cast<int>(b)))); }
inline F bits_or(F a, uint32_t b) { return floats(_mm512_or_si512(ints(a), _mm512_set1_epi32(static_cast<int>(b)))); }
inline F bits_less(F a, uint32_t b) {
    return floats(_mm512_sub_epi32(ints(a), _mm512_set1_epi32(static_cast<int>(b))));
}
// Whether any of the two operands' lanes is a NaN.
inline bool any_nan(const F (&a)[Q]) {
    return (_mm512_cmp_ps_mask(a[0], a[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(a[2], a[3], _CMP_UNORD_Q)) != 0;
}
// Of what is not negative. Zeros are told too.
inline bool any_below_normal(const F (&a)[Q]) {
    const I least =
        _mm512_min_epu32(_mm512_min_epu32(ints(a[0]), ints(a[1])), _mm512_min_epu32(ints(a[2]), ints(a[3])));
    return _mm512_cmp_epu32_mask(least, _mm512_set1_epi32(0x00800000), _MM_CMPINT_LT) != 0;
}
// Whether all averages are denormal or 0, and no gradient has any of these bits.
inline bool all_idle(const F (&average)[Q], const F (&gradient)[Q], uint32_t bits) {
    I averages = ints(average[0]), gradients = ints(gradient[0]);
    for (int j = 1; j < Q; ++j) averages = _mm512_or_si512(averages, ints(average[j]));
    for (int j = 1; j < Q; ++j) gradients = _mm512_or_si512(gradients, ints(gradient[j]));
    return (_mm512_test_epi32_mask(averages, _mm512_set1_epi32(0x7F800000)) |
            _mm512_test_epi32_mask(gradients, _mm512_set1_epi32(static_cast<int>(bits)))) == 0;
}
inline bool any_below_normal_magnitude(const F (&a)[Q]) {
    const F magnitudes[Q] = {abs(a[0]), abs(a[1]), abs(a[2]), abs(a[3])};
    return any_below_normal(magnitudes);
}
// Of any a, and b that is not negative.
inline bool any_below_normal(const F (&a)[Q], const F (&b)[Q]) {
    I least = ints(abs(a[0]));
    for (int j = 1; j < Q; ++j) least = _mm512_min_epu32(least, ints(abs(a[j])));
    for (int j = 0; j < Q; ++j) least = _mm512_min_epu32(least, ints(b[j]));
    return _mm512_cmp_epu32_mask(least, _mm512_set1_epi32(0x00800000), _MM_CMPINT_LT) != 0;
}
inline bool any_above(const F (&a)[Q], float limit) {
    const F most = _mm512_max_ps(_mm512_max_ps(a[0], a[1]), _mm512_max_ps(a[2], a[3]));
    return _mm512_cmp_ps_mask(most, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}

// A NaN becomes NAN_BITS: tokens 0 and 1 of the table are quiet and signalling NaN, 3 is the default NaN, 1 the operand
// itself.
template <bool NANS>
inline I canonical_bits_of(F x) {
    return ints(NANS ? _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x11111133), 0) : x);
}

inline I load_512(const void *p) { return _mm512_loadu_si512(p); }
inline void store_512(void *p, I x) { _mm512_storeu_si512(p, x); }

// How 32 elements lie in two vectors. In natural order they are the first and the second 16. Where no stream of the
// step is wider than 16 bits, the even and the odd ones need no permutes: a shift and a mask take words apart.
enum class Order { natural, alternate };

// Word indices that interleave (low halves from the first operand, upper halves from the second) or take apart.
struct Words {
    alignas(64) uint16_t join_low[32], join_high[32], even[32], odd[32], widen_low[32], widen_high[32];
};
constexpr Words make_words() {
    Words w{};
    for (int i = 0; i < 32; ++i) {
        const uint16_t element = static_cast<uint16_t>(i / 2), from_second = i % 2 ? 32 : 0;
        w.join_low[i] = static_cast<uint16_t>(element + from_second);
        w.join_high[i] = static_cast<uint16_t>(element + 16 + from_second);
        w.even[i] = static_cast<uint16_t>(2 * i);
        w.odd[i] = static_cast<uint16_t>(2 * i + 1);
        w.widen_low[i] = element;
        w.widen_high[i] = static_cast<uint16_t>(element + 16);
    }
    return w;
}
constexpr Words WORDS = make_words();
inline I words(const uint16_t (&index)[32]) { return _mm512_load_si512(index); }

// 32 words to the upper halves of two vectors, and the even words followed by the odd ones. A permute of bytes takes
// one slot of Intel's cores where one of words takes two.
#if defined(ZK_VBMI)
struct WordBytes {
    alignas(64) uint8_t widen[2][64], apart[64];
};
constexpr WordBytes make_word_bytes() {
    WordBytes t{};
    for (int i = 0; i < 64; ++i) {
        for (int half = 0; half < 2; ++half) t.widen[half][i] = static_cast<uint8_t>(32 * half + i / 4 * 2 + i % 2);
        const int word = i / 2;
        t.apart[i] = static_cast<uint8_t>(2 * (word < 16 ? 2 * word : 2 * (word - 16) + 1) + i % 2);
    }
    return t;
}
constexpr WordBytes WORD_BYTES = make_word_bytes();
inline void widen_words(I x, F &a, F &b) {
    a = floats(_mm512_maskz_permutexvar_epi8(0xCCCCCCCCCCCCCCCCull, _mm512_load_si512(WORD_BYTES.widen[0]), x));
    b = floats(_mm512_maskz_permutexvar_epi8(0xCCCCCCCCCCCCCCCCull, _mm512_load_si512(WORD_BYTES.widen[1]), x));
}
inline I apart_words(I x) { return _mm512_permutexvar_epi8(_mm512_load_si512(WORD_BYTES.apart), x); }
#else
inline I apart_words(I x) {
    return _mm512_permutexvar_epi16(_mm512_mask_blend_epi32(0xFF00, words(WORDS.even), words(WORDS.odd)), x);
}
inline void widen_words(I x, F &a, F &b) {
    a = floats(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, words(WORDS.widen_low), x));
    b = floats(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, words(WORDS.widen_high), x));
}
#endif
inline I low_words(I a, I b) { return _mm512_permutex2var_epi16(a, words(WORDS.even), b); }
inline I high_words(I a, I b) { return _mm512_permutex2var_epi16(a, words(WORDS.odd), b); }

inline void load_bf16(const uint16_t *p, F (&x)[Q]) {
    widen_words(load_512(p), x[0], x[1]);
    widen_words(load_512(p + 32), x[2], x[3]);
}
inline void load_f16(const uint16_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j)
        x[j] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16 * j)));
}

// Nearest even in the word domain: up when low > 0x8000, or when low == 0x8000 and the upper word is odd.
template <bool NANS>
inline I round_words(F a, F b) {
    const I x = canonical_bits_of<NANS>(a), y = canonical_bits_of<NANS>(b);
    const I low = low_words(x, y), high = high_words(x, y);
    const I nudged = _mm512_adds_epu16(low, _mm512_and_si512(high, _mm512_set1_epi16(1)));
    return _mm512_mask_add_epi16(high, _mm512_cmpgt_epu16_mask(nudged, _mm512_set1_epi16(INT16_MIN)), high,
                                 _mm512_set1_epi16(1));
}
template <bool NANS = true>
inline void store_bf16(uint16_t *p, const F (&x)[Q]) {
    store_512(p, round_words<NANS>(x[0], x[1]));
    store_512(p + 32, round_words<NANS>(x[2], x[3]));
}
template <bool NANS = true>
inline void stream_bf16(uint16_t *p, const F (&x)[Q]) {
    _mm512_stream_si512(reinterpret_cast<I *>(p), round_words<NANS>(x[0], x[1]));
    _mm512_stream_si512(reinterpret_cast<I *>(p + 32), round_words<NANS>(x[2], x[3]));
}
inline I half_words(F a, F b) {
    const __m256i x = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                  y = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
}
inline void store_f16(uint16_t *p, const F (&x)[Q]) {
    store_512(p, half_words(x[0], x[1]));
    store_512(p + 32, half_words(x[2], x[3]));
}
inline void stream_f16(uint16_t *p, const F (&x)[Q]) {
    _mm512_stream_si512(reinterpret_cast<I *>(p), half_words(x[0], x[1]));
    _mm512_stream_si512(reinterpret_cast<I *>(p + 32), half_words(x[2], x[3]));
}
inline void stream(float *p, F x) { _mm512_stream_ps(p, x); }
inline void stream_fence() { _mm_sfence(); }
// Into the first cache, and into the second one. In assembly, as on all sets: GCC takes a function that does nothing
// but prefetch for one without effects, and deletes the calls.
inline void prefetch(const void *p) { asm volatile("prefetcht0 %a0" : : "p"(p)); }
inline void prefetch_far(const void *p) { asm volatile("prefetcht1 %a0" : : "p"(p)); }

// hi << 16 plus the signed low half: the sign of lo borrows from hi in the word domain, 32 elements an instruction.
inline void join_words(I hi, I lo, F &a, F &b) {
    const I upper = _mm512_add_epi16(hi, _mm512_srai_epi16(lo, 15));
    a = floats(_mm512_permutex2var_epi16(lo, words(WORDS.join_low), upper));
    b = floats(_mm512_permutex2var_epi16(lo, words(WORDS.join_high), upper));
}
inline void load_split16(const uint16_t *hi, const int16_t *lo, F (&x)[Q]) {
    join_words(load_512(hi), load_512(lo), x[0], x[1]);
    join_words(load_512(hi + 32), load_512(lo + 32), x[2], x[3]);
}
template <bool NANS = true>
inline void store_split16(uint16_t *hi, int16_t *lo, const F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        const I a = canonical_bits_of<NANS>(x[j]), b = canonical_bits_of<NANS>(x[j + 1]);
        const I low = low_words(a, b);
        store_512(hi + 16 * j, _mm512_add_epi16(high_words(a, b), _mm512_srli_epi16(low, 15)));
        store_512(lo + 16 * j, low);
    }
}
// The low word rounded to its upper byte, to nearest even: half a step more, and on a tie (nothing left below) the
// lowest kept bit is cleared. From 0x7F80 on (0x7F is odd, so its tie goes up) the rounded byte is negative and hi
// takes one more.
template <bool NANS>
inline I split8_words(F x, F y, I &low) {
    const I a = canonical_bits_of<NANS>(x), b = canonical_bits_of<NANS>(y);
    const I word = low_words(a, b), high = high_words(a, b);
    const I nudged = _mm512_add_epi16(word, _mm512_set1_epi16(0x80));
    low = _mm512_mask_mov_epi16(nudged, _mm512_testn_epi16_mask(nudged, _mm512_set1_epi16(0xFF)),
                                _mm512_and_si512(nudged, _mm512_set1_epi16(static_cast<int16_t>(0xFEFF))));
    return _mm512_mask_add_epi16(high, _mm512_cmpge_epu16_mask(word, _mm512_set1_epi16(0x7F80)), high,
                                 _mm512_set1_epi16(1));
}

inline void load_codes(const int8_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j)
        x[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16 * j))));
}
inline void decode_unsigned(const uint8_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j)
        x[j] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16 * j))));
}
// Dword L of lane t and dword t of lane L change places (its own inverse): what packs and unpacks in 128-bit lanes
// need.
inline I transpose_dwords() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

// Adding 1.5 * 2^23 in the same rounding leaves rint(a * b) in the lowest bits.
inline I rint_product(F a, F b) { return ints(fma(a, b, _mm512_set1_ps(0x1.8p23f))); }

// The square of a widened fp32 is exact, so the fused form has the bits of multiply and add.
inline D add_square(D sum, D x) {
    return {_mm512_fmadd_pd(x.low, x.low, sum.low), _mm512_fmadd_pd(x.high, x.high, sum.high)};
}
// Squares of 64 bf16: even and odd elements of 16 are a shift and a mask away from being fp32, without a permute. Until
// they are stored, the two halves of sums[c] hold the even and the odd lanes of elements 16 c to 16 c + 15.
inline void add_bf16_squares(const uint16_t *p, D (&sums)[4]) {
    for (int c = 0; c < 4; ++c) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16 * c));
        const __m256i odd = _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
        const D values = {_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))),
                          _mm512_cvtps_pd(_mm256_castsi256_ps(odd))};
        sums[c] = add_square(sums[c], values);
    }
}
inline void dstore(double *p, D x) {
    _mm512_storeu_pd(p, x.low);
    _mm512_storeu_pd(p + 8, x.high);
}
inline void load_bf16_lanes(const double *lanes, D (&sums)[4]) {
    const I even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    for (int c = 0; c < 4; ++c) {
        const __m512d first = _mm512_loadu_pd(lanes + 16 * c), second = _mm512_loadu_pd(lanes + 16 * c + 8);
        sums[c] = {_mm512_permutex2var_pd(first, even, second), _mm512_permutex2var_pd(first, odd, second)};
    }
}
inline void store_bf16_lanes(double *lanes, const D (&sums)[4]) {
    for (int c = 0; c < 4; ++c) {
        double even[8], odd[8];
        _mm512_storeu_pd(even, sums[c].low);
        _mm512_storeu_pd(odd, sums[c].high);
        for (int i = 0; i < 8; ++i) {
            lanes[16 * c + 2 * i] = even[i];
            lanes[16 * c + 2 * i + 1] = odd[i];
        }
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk

#if defined(ZK_VBMI)
#include "vec/vbmi.h"
#else
#include "vec/avx512_bytes.h"
#endif
#if defined(ZK_STAGGERED)
#include "vec/vnni.h"
#endif
