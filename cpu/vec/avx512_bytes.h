// Byte work for AVX-512 without byte permutes (before Ice Lake and Zen 4): by conversion and division, with the same
// results.
#pragma once

namespace zk {
namespace ZK_NS {
namespace {

inline void load_split8(const uint16_t *hi, const int8_t *lo, F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        const I low = _mm512_slli_epi16(
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(lo + 16 * j))), 8);
        join_words(load_512(hi + 16 * j), low, x[j], x[j + 1]);
    }
}
template <bool NANS = true>
inline void store_split8(uint16_t *hi, int8_t *lo, const F (&x)[Q]) {
    for (int j = 0; j < Q; j += 2) {
        I low;
        store_512(hi + 16 * j, split8_words<NANS>(x[j], x[j + 1], low));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lo + 16 * j), _mm512_cvtepi16_epi8(_mm512_srli_epi16(low, 8)));
    }
}

// code -> c / (254 - |c|), correctly rounded, so equal to a table; -128, which no encoder writes, decodes as 0.
inline void decode_signed(const int8_t *p, F (&x)[Q]) {
    for (int j = 0; j < Q; ++j) {
        const F code =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16 * j))));
        const F c = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(code, _mm512_set1_ps(-128.0f), _CMP_NEQ_OQ), code);
        x[j] = div(c, sub(set1(254.0f), abs(c)));
    }
}
inline void encode_signed(int8_t *p, const F (&q)[Q], F steps) {
    for (int j = 0; j < Q; ++j)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 16 * j), _mm512_cvtepi32_epi8(rint_product(q[j], steps)));
}
inline void encode_unsigned(uint8_t *p, const F (&roots)[Q], F inverse) {
    for (int j = 0; j < Q; ++j) {
        const __m128i codes = _mm512_cvtepi32_epi8(rint_product(roots[j], inverse));
        const __mmask16 positive = _mm512_cmp_ps_mask(roots[j], _mm512_setzero_ps(), _CMP_GT_OQ);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 16 * j),
                         _mm_mask_max_epu8(codes, positive, codes, _mm_set1_epi8(1)));
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
