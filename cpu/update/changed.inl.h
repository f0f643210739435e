// Which published values a step changes. Words from before a store are compared with those after it, and the bits go
// into the row's mask: one OR for all elements that are taken together.
#pragma once

#include "update/formats.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// Bit e: element e of STEP differs. Of fp32 values the bits are compared.
#if defined(ZK_LIFT)
using Bits = uint64_t;
ZK_INLINE Bits different(const uint16_t *a, const uint16_t *b) {
    const __mmask32 first = _mm512_cmpneq_epi16_mask(load_512(a), load_512(b)),
                    second = _mm512_cmpneq_epi16_mask(load_512(a + 32), load_512(b + 32));
    return _mm512_kunpackd(second, first);
}
ZK_INLINE Bits different(const float *a, const F (&b)[Q]) {
    Bits bits = 0;
    for (int j = 0; j < Q; ++j)
        bits |= static_cast<Bits>(_mm512_cmpneq_epi32_mask(load_512(a + j * W), ints(b[j]))) << (j * W);
    return bits;
}
#elif defined(ZK_IN_LANES)
using Bits = uint16_t;
ZK_INLINE Bits different(const uint16_t *a, I b) {
    const I same = _mm256_cmpeq_epi16(load_256(a), b);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1));
    return static_cast<Bits>(~_mm_movemask_epi8(bytes));
}
ZK_INLINE Bits different(const uint16_t *a, const uint16_t *b) { return different(a, load_256(b)); }
ZK_INLINE Bits different(const float *a, const F (&b)[Q]) {
    const auto same = [&](int j) {
        return _mm256_movemask_ps(floats(_mm256_cmpeq_epi32(ints(load(a + j * W)), ints(b[j]))));
    };
    return static_cast<Bits>(~(same(0) | same(1) << W));
}
#else
using Bits = uint16_t;
template <class Word>
ZK_INLINE Bits different_words(const Word *a, const Word *b) {  // a loop that compilers write with vectors
    Bits bits = 0;
    for (int e = 0; e < STEP; ++e) bits = static_cast<Bits>(bits | (a[e] != b[e] ? 1 << e : 0));
    return bits;
}
ZK_INLINE Bits different(const uint16_t *a, const uint16_t *b) { return different_words(a, b); }
ZK_INLINE Bits different(const float *a, const F (&b)[Q]) {
    uint32_t x[STEP], y[STEP];
    std::memcpy(x, a, sizeof x);
    std::memcpy(y, b, sizeof y);
    return different_words(x, y);
}
#endif

// Of elements from i on: as many as the bits have, or the one that the scalar set takes. Not as bytes and not by
// memcpy: what is written to bytes may be the segment itself, whose pointers would then be loaded again.
template <class BITS>
ZK_INLINE void mark(const zk_segment &s, int64_t i, BITS bits) {
    uint8_t *const to = s.changed + (i >> 3);
    if constexpr (STEP == 1) {
        *to = static_cast<uint8_t>(*to | bits << i % 8);
    } else {
        using Unaligned __attribute__((aligned(1))) = BITS;
        Unaligned &all = *reinterpret_cast<Unaligned *>(to);
        all = static_cast<BITS>(all | bits);
    }
}

// The parameter that a value becomes, by the verbs of the store: their arithmetic is done once for both.
template <int T, bool NANS>
ZK_INLINE void param_of(const Scalars &k, const F (&p)[Q], uint16_t (&words)[STEP]) {
    const int target = T == ANY ? static_cast<int>(k.target) : T;
    alignas(64) int16_t low[STEP];
    alignas(64) int8_t byte[STEP];
    if (target == TO_SPLIT16)
        store_split16<NANS>(words, low, p);
    else if (target == TO_SPLIT8)
        store_split8<NANS>(words, byte, p);
    else if (target == TO_BF16)
        store_bf16<NANS>(words, p);
    else
        store_f16(words, p);
}

// What a step publishes is the parameter, in its 16 bits; or the fp32 master; or the value rounded to a copy, which is
// never read: what it was follows from the value before, which was a NaN only where this one is.
template <int T, int O, bool NANS>
ZK_INLINE void store_marked(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q]) {
    const int target = T == ANY ? static_cast<int>(k.target) : T, out = O == ANY ? static_cast<int>(k.out) : O;
    alignas(64) uint16_t before[STEP], after[STEP];
    const bool drawn = k.stochastic && (out == ZK_NONE || out == dtype_of(target));
    if (target == TO_FP32 && out == ZK_NONE) {
        mark(s, i, different(at<float>(s.master, i), p));
    } else if (drawn) {  // by chance, once
        std::memcpy(before, at<uint16_t>(s.param, i), sizeof before);
    } else if (out == ZK_NONE || out == dtype_of(target)) {
        param_of<T, NANS>(k, p, after);
        mark(s, i, different(at<uint16_t>(s.param, i), after));
    } else {
        F old[Q];
        load_value<T>(s, k, i, old);
        const auto round = [out](uint16_t *to, const F(&x)[Q]) {
            out == ZK_BF16 ? store_bf16<NANS>(to, x) : store_f16(to, x);
        };
        round(before, old);
        round(after, p);
        mark(s, i, different(before, after));
    }
    store_value<T, NANS>(s, k, i, p);
    store_out<T, O, NANS>(s, k, i, p);
    if (drawn) mark(s, i, different(before, at<uint16_t>(s.param, i)));
}

// The one place where a step of all formats stores its values.
template <int T, int O, bool NANS>
ZK_INLINE void store_published(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q]) {
    if (__builtin_expect(s.changed != nullptr, 0)) return store_marked<T, O, NANS>(s, k, i, p);
    store_value<T, NANS>(s, k, i, p);
    store_out<T, O, NANS>(s, k, i, p);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
