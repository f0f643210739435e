// Muon with AVX-512: what is rounded, stored and squared never leaves the registers in between, so that a core has time
// left to ask for memory.
#pragma once

#include "muon/rule.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// What a step will read is asked for twice: far ahead into the second cache, which has room for three times as many
// requests as the first one, and then into the first one.
constexpr int64_t FAR_AHEAD = 4096, NEAR_AHEAD = 512;
ZK_INLINE void prefetch_twice(const char *p, int64_t nbytes) {
    for (int64_t b = 0; b < nbytes; b += 64) {
        prefetch_far(p + FAR_AHEAD + b);
        prefetch(p + NEAR_AHEAD + b);
    }
}

// In memory: the compiler would build them again and again from integer registers, through a port that shuffles need.
struct FusedConstants {
    alignas(64) uint32_t nudge[16], unit[16], upper_unit[16], upper[16], exponents[16],
        word_exponents[16], word_unit[16], word_tops[16];
    alignas(64) uint64_t magnitude[8], up[8];
    uint64_t odd_words;
};
constexpr FusedConstants make_fused_constants() {
    FusedConstants c{};
    for (int i = 0; i < 16; ++i) {
        c.nudge[i] = 0x7FFF;
        c.unit[i] = 1;
        c.upper_unit[i] = 0x10000;
        c.upper[i] = 0xFFFF0000u;
        c.exponents[i] = 0x7F800000;
        c.word_exponents[i] = 0x7F807F80;
        c.word_unit[i] = 0x00800080;
        c.word_tops[i] = 0x7F007F00;
    }
    for (int i = 0; i < 8; ++i) {
        c.magnitude[i] = 0x0FFFE00000000000;
        c.up[i] = 0x3000000000000000;
    }
    c.odd_words = 0xAAAAAAAA;
    return c;
}
constexpr FusedConstants FUSED_CONSTANTS = make_fused_constants();

struct Fixed {
    const FusedConstants *c = &FUSED_CONSTANTS;
    __mmask32 odd_words;
    ZK_INLINE Fixed() {
        asm("" : "+r"(c));  // what it points to is no longer known
        odd_words = static_cast<__mmask32>(c->odd_words);
    }
};
template <class T, int N>
ZK_INLINE I of_memory(const T (&x)[N]) {
    return _mm512_load_si512(x);
}

template <Order ORDER, int K>
ZK_INLINE void load_pairs(const Fixed &f, const void *p, int64_t i, F (&x)[Q]) {
    if constexpr (K == ZK_F32) {
        for (int j = 0; j < Q; ++j) x[j] = load(at<float>(p, i + j * W));
    } else if constexpr (ORDER == Order::natural) {
        load_bf16(at<uint16_t>(p, i), x);
    } else {
        for (int j = 0; j < Q; j += 2) {
            const I pair = load_512(at<uint16_t>(p, i + j * W));
            x[j] = floats(_mm512_slli_epi32(pair, 16));
            x[j + 1] = floats(_mm512_and_si512(pair, of_memory(f.c->upper)));
        }
    }
}

// Whether none is denormal or 0: of 64 words in memory, or of vectors of fp32.
template <int K>
ZK_INLINE bool all_normal(const Fixed &f, const void *words, const F (&x)[Q]) {
    if constexpr (K == ZK_BF16) {
        const I exponents = of_memory(f.c->word_exponents);
        const __mmask32 first = _mm512_test_epi16_mask(load_512(words), exponents);
        return _mm512_mask_test_epi16_mask(first, load_512(at<char>(words, 64)), exponents) == 0xFFFFFFFFu;
    }
    M normal = _mm512_test_epi32_mask(ints(x[0]), of_memory(f.c->exponents));
    for (int j = 1; j < Q; ++j) normal = _mm512_mask_test_epi32_mask(normal, ints(x[j]), of_memory(f.c->exponents));
    return normal == 0xFFFF;
}
// Whether no word is denormal, 0, infinite or a NaN: an exponent of 0 or 255, 1 or 0 when one is added.
ZK_INLINE bool all_usual_words(const Fixed &f, I a, I b) {
    const I unit = of_memory(f.c->word_unit), tops = of_memory(f.c->word_tops);
    const __mmask32 first = _mm512_test_epi16_mask(_mm512_add_epi16(a, unit), tops);
    return _mm512_mask_test_epi16_mask(first, _mm512_add_epi16(b, unit), tops) == 0xFFFFFFFFu;
}

// To bf16 in upper words, to nearest even, no NaNs: half a unit less one, and the lowest bit that stays.
template <int K>
ZK_INLINE void rounded(const Fixed &f, const F (&x)[Q], I (&to)[Q]) {
    for (int j = 0; j < Q; ++j) {
        to[j] = ints(x[j]);
        if constexpr (K != ZK_BF16) continue;
        const I nudged = _mm512_add_epi32(to[j], of_memory(f.c->nudge));
#if defined(ZK_STAGGERED)
        to[j] = _mm512_dpwssd_epi32(nudged, _mm512_and_si512(to[j], of_memory(f.c->upper_unit)),
                                    of_memory(f.c->upper_unit));
#else
        to[j] = _mm512_add_epi32(nudged, _mm512_and_si512(_mm512_srli_epi32(to[j], 16), of_memory(f.c->unit)));
#endif
    }
}
// The upper words of two vectors as they lie in memory.
template <Order ORDER>
ZK_INLINE I upper_words_of(const Fixed &f, I a, I b) {
    const I both = _mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), f.odd_words, b);
    if constexpr (ORDER == Order::alternate) return both;
    return apart_words(both);
}
ZK_INLINE void stream_or_store(void *p, I x, bool streamed) {
    streamed ? _mm512_stream_si512(static_cast<I *>(p), x) : store_512(p, x);
}

// Sums of squares of directions, in 64 lanes as `SquareLanes` has them, in another order until they are given to one.
template <int O>
struct FusedSquares;

// The bits of a normal bf16 number, 45 to the left and 768 added to the exponent, are those of the float64 number that
// is 2^-128 times as large. So the sums are 2^-256 times what they shall be, with the same bits otherwise, and no
// shuffle is needed.
template <>
struct FusedSquares<ZK_BF16> {
    __m512d sums[8];  // lane q of sums[4 h + w]: elements 32 h + 4 q + w of 64

    ZK_INLINE void add(const Fixed &f, I x, int half) {
        for (int w = 0; w < 4; ++w) {
            const I shifted =
                w == 3 ? _mm512_srli_epi64(x, 3) : _mm512_slli_epi64(x, static_cast<unsigned>(45 - 16 * w));
            const __m512d small = _mm512_castsi512_pd(
                _mm512_ternarylogic_epi64(shifted, of_memory(f.c->magnitude), of_memory(f.c->up), 0xEA));  // a & b | c
            sums[4 * half + w] = _mm512_fmadd_pd(small, small, sums[4 * half + w]);
        }
    }
    // Whatever the numbers are: 64 of them.
    static __attribute__((noinline)) void add_any(const void *p, __m512d (&sums)[8]) {
        for (int c = 0; c < 8; ++c) {
            const I x = load_512(at<uint16_t>(p, 32 * (c / 4)));
            const I word = _mm512_slli_epi64(_mm512_srli_epi64(x, static_cast<unsigned>(16 * (c % 4))), 48);
            const __m256 value = _mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_srli_epi64(word, 32)));
            const __m512d small = _mm512_mul_pd(_mm512_cvtps_pd(value), _mm512_set1_pd(0x1p-128));
            sums[c] = _mm512_fmadd_pd(small, small, sums[c]);
        }
    }
    // `lanes` has nothing yet.
    void give(SquareLanes<ZK_BF16> &lanes) const {
        alignas(64) double in_order[64];
        for (int c = 0; c < 8; ++c) {
            alignas(64) double some[8];
            _mm512_store_pd(some, sums[c]);
            for (int q = 0; q < 8; ++q) in_order[32 * (c / 4) + 4 * q + c % 4] = some[q] * 0x1p256;
        }
        load_bf16_lanes(in_order, lanes.sums);
    }
};
template <>
struct FusedSquares<ZK_F32> {
    __m512d sums[8];  // lane q of sums[c]: element 8 c + q of 64

    ZK_INLINE void add(const F (&x)[Q]) {
        for (int j = 0; j < Q; ++j) {
            const D wide = widen(x[j]);
            sums[2 * j] = _mm512_fmadd_pd(wide.low, wide.low, sums[2 * j]);
            sums[2 * j + 1] = _mm512_fmadd_pd(wide.high, wide.high, sums[2 * j + 1]);
        }
    }
    static __attribute__((noinline)) void add_any(const void *p, __m512d (&sums)[8]) {
        for (int c = 0; c < 8; ++c) {
            const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(at<float>(p, 8 * c)));
            sums[c] = _mm512_fmadd_pd(wide, wide, sums[c]);
        }
    }
    void give(SquareLanes<ZK_F32> &lanes) const {
        for (int c = 0; c < 4; ++c) lanes.sums[c] = {sums[2 * c], sums[2 * c + 1]};
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
