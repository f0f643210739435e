// Byte work with AVX512-VBMI: 64 codes at a time.
#pragma once

namespace zk {
namespace ZK_NS {
namespace {

// The four bytes of c / (254 - c) for c = 0..127, a plane each: one two-register permute looks up 64 codes in one
// plane.
struct Planes {
    alignas(64) uint8_t plane[4][128];
};
constexpr Planes make_planes() {
    Planes t{};
    for (int c = 0; c < 128; ++c) {
        const uint32_t b = __builtin_bit_cast(uint32_t, static_cast<float>(c) / static_cast<float>(254 - c));
        for (int k = 0; k < 4; ++k) t.plane[k][c] = static_cast<uint8_t>(b >> (8 * k));
    }
    return t;
}
constexpr Planes PLANES = make_planes();

inline I look_up(I magnitude, const uint8_t (&plane)[128]) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(plane), magnitude, _mm512_load_si512(plane + 64));
}

// The permute reads the low seven bits of |code|, so -128, which no encoder writes, looks up entry 0; |-128| has the
// sign bit, which takes the sign away.
inline void decode_signed(const int8_t *p, F (&x)[Q]) {
    const I codes = _mm512_permutexvar_epi32(transpose_dwords(), load_512(p));
    const I magnitude = _mm512_abs_epi8(codes);
    const I b0 = look_up(magnitude, PLANES.plane[0]), b1 = look_up(magnitude, PLANES.plane[1]),
            b2 = look_up(magnitude, PLANES.plane[2]);
    const I signs = _mm512_andnot_si512(magnitude, codes);
    const I sign_and_b3 = _mm512_ternarylogic_epi32(look_up(magnitude, PLANES.plane[3]), signs,
                                                    _mm512_set1_epi8(INT8_MIN), 0xF8);  // a | (b & c)
    const I low_a = _mm512_unpacklo_epi8(b0, b1), low_b = _mm512_unpackhi_epi8(b0, b1);
    const I high_a = _mm512_unpacklo_epi8(b2, sign_and_b3), high_b = _mm512_unpackhi_epi8(b2, sign_and_b3);
    x[0] = floats(_mm512_unpacklo_epi16(low_a, high_a));
    x[1] = floats(_mm512_unpackhi_epi16(low_a, high_a));
    x[2] = floats(_mm512_unpacklo_epi16(low_b, high_b));
    x[3] = floats(_mm512_unpackhi_epi16(low_b, high_b));
}

// Byte indices: the odd bytes of two registers, their lowest bytes of each dword, and (0, lo, hi, hi) from hi words and
// lo bytes.
struct Bytes {
    alignas(64) uint8_t odd[64], lowest[64], join[4][64];
};
constexpr Bytes make_bytes() {
    Bytes t{};
    for (int i = 0; i < 64; ++i) {
        t.odd[i] = static_cast<uint8_t>(2 * i + 1);
        t.lowest[i] = static_cast<uint8_t>(4 * i);  // the upper half repeats: only 32 of the results are used
        for (int j = 0; j < 4; ++j) {
            const int element = i / 4, byte = i % 4;
            const int from_hi = 2 * (16 * (j % 2) + element) + byte - 2, from_lo = 64 + 16 * j + element;
            t.join[j][i] = static_cast<uint8_t>(byte >= 2 ? from_hi : from_lo);
        }
    }
    return t;
}
constexpr Bytes BYTES = make_bytes();
inline I bytes(const uint8_t (&index)[64]) { return _mm512_load_si512(index); }

// With its sign bit flipped lo is 128 too large and never borrows: one subtraction mends both.
inline void load_split8(const uint16_t *hi, const int8_t *lo, F (&x)[Q]) {
    const I low = _mm512_xor_si512(load_512(lo), _mm512_set1_epi8(INT8_MIN)), bias = _mm512_set1_epi32(0x8000);
    for (int j = 0; j < Q; ++j) {
        const I joined = _mm512_maskz_permutex2var_epi8(0xEEEEEEEEEEEEEEEEull, load_512(hi + 32 * (j / 2)),
                                                        bytes(BYTES.join[j]), low);
        x[j] = floats(_mm512_sub_epi32(joined, bias));
    }
}
template <bool NANS = true>
inline void store_split8(uint16_t *hi, int8_t *lo, const F (&x)[Q]) {
    I low_a, low_b;
    store_512(hi, split8_words<NANS>(x[0], x[1], low_a));
    store_512(hi + 32, split8_words<NANS>(x[2], x[3], low_b));
    store_512(lo, _mm512_permutex2var_epi8(low_a, bytes(BYTES.odd), low_b));
}

inline I lowest_bytes(I a, I b, I c, I d) {
    const I ab = _mm512_permutex2var_epi8(a, bytes(BYTES.lowest), b),
            cd = _mm512_permutex2var_epi8(c, bytes(BYTES.lowest), d);
    return _mm512_inserti64x4(ab, _mm512_castsi512_si256(cd), 1);
}
inline void encode_signed(int8_t *p, const F (&q)[Q], F steps) {
    store_512(p, lowest_bytes(rint_product(q[0], steps), rint_product(q[1], steps), rint_product(q[2], steps),
                              rint_product(q[3], steps)));
}
inline __mmask64 positive_lanes(const F (&x)[Q]) {
    __mmask64 lanes = 0;
    for (int j = 0; j < Q; ++j)
        lanes |= static_cast<__mmask64>(_mm512_cmp_ps_mask(x[j], _mm512_setzero_ps(), _CMP_GT_OQ)) << (16 * j);
    return lanes;
}
inline void encode_unsigned(uint8_t *p, const F (&roots)[Q], F inverse) {
    I codes = lowest_bytes(rint_product(roots[0], inverse), rint_product(roots[1], inverse),
                           rint_product(roots[2], inverse), rint_product(roots[3], inverse));
    const __mmask64 zeros = _mm512_testn_epi8_mask(codes, codes);
    if (__builtin_expect(zeros != 0, 0))
        codes = _mm512_mask_mov_epi8(codes, zeros & positive_lanes(roots), _mm512_set1_epi8(1));
    store_512(p, codes);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
