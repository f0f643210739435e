// Adam with int8 averages on cores with a slow divider. Three blocks are under way: averages and roots of one;
// parameters and quotients of the block before it, whose scales are known; codes of the block before that. What waits
// lies in memory that stays in the first cache, and nothing of a block is written before its scales are known to be
// usual.
#pragma once

#include "adam/staggered.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// Of 64 codes, vectors 0 and 1 hold the first 32 elements and 2 and 3 the others, each pair in its order.
constexpr int code_of(Order order, int vector, int lane) {
    return 32 * (vector / 2) + element_of(order, vector % 2, lane);
}

template <Order O>
struct CodeTables {
    alignas(64) uint8_t spread[64];     // codes to where unpacking leaves each in its lane
    alignas(64) uint8_t lowest[4][64];  // the codes of a vector to the lowest bytes of its dwords
    alignas(64) uint8_t pack[4][64];    // and back
    Planes planes;
    alignas(64) uint32_t counted[16], rint[16], steps[16], magnitude[16], signs[16], ones[16];
    uint64_t lowest_bytes, packed[4];
};
template <Order O>
constexpr CodeTables<O> make_code_tables() {
    CodeTables<O> t{};
    t.planes = make_planes();
    for (int lane = 0; lane < 16; ++lane) {
        for (int vector = 0; vector < 4; ++vector) {
            const int code = code_of(O, vector, lane);
            t.spread[16 * (lane / 4) + 4 * vector + lane % 4] = static_cast<uint8_t>(code);
            t.lowest[vector][4 * lane] = static_cast<uint8_t>(code);
            t.pack[vector][code] = static_cast<uint8_t>(4 * lane);
            t.packed[vector] |= 1ull << code;
        }
        t.counted[lane] = 0x4B000000u;  // 2^23, and the code in its lowest byte
        t.rint[lane] = 0x4B400000u;     // 1.5 * 2^23
        t.steps[lane] = 0x437E0000u;    // 254
        t.magnitude[lane] = 0x7FFFFFFFu;
        t.signs[lane] = 0x80808080u;
        t.ones[lane] = 0x01010101u;
    }
    t.lowest_bytes = 0x1111111111111111ull;
    return t;
}
template <Order O>
constexpr CodeTables<O> CODE_TABLES = make_code_tables<O>();

template <int G, int T, int O>
struct Staggered<AdamRule, G, T, ZK_INT8, O> {
    static constexpr bool EXISTS = (G == ZK_F32 || G == ZK_BF16) && T >= TO_FP32 && T <= TO_SPLIT8 &&
                                   (O == ZK_NONE || (O == ZK_BF16 && T == TO_FP32));
    static constexpr Order ORDER = G == ZK_BF16 && T != TO_FP32 ? Order::alternate : Order::natural;
    using Streams = PairStreams<G, T, O, ORDER>;
    using Plain = Update<AdamRule, G, T, ZK_INT8, O>;
    static constexpr int64_t HALF = TILE / 2;

    // What waits of a block: averages, then quotients in their place; roots; the scales that they have.
    struct Work {
        F averages[VECTORS], roots[VECTORS];
        float average_scale, root_scale, inverse;
        bool some_root_is_0;
    };
    // The largest magnitudes; of squares by bits, so that a NaN stays. An average is one only where its square is none
    // that is finite.
    struct Extremes {
        I average = _mm512_setzero_si512(), square = _mm512_setzero_si512();
        __mmask64 zeros = 0;  // where a code of a root is 0, or all are: the root may be
    };
    // (2^23 + code) decay2 - 2^23 decay2 is rounded once, as code decay2 is. Found for 16 blocks at a time.
    struct Decays {
        alignas(64) float decay1[16], decay2[16], counted[16];
        uint32_t usual, no_roots;  // a bit for each block

        ZK_INLINE void find(const AdamRule &r, const float *averages, const float *roots, int64_t count) {
            const __mmask16 some = static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xFFFFu);
            const F average = _mm512_maskz_loadu_ps(some, averages), root = _mm512_maskz_loadu_ps(some, roots);
            const F second = mul(div(root, set1(255.0f)), set1(r.root_beta2));
            store(decay1, mul(set1(r.beta1), average));
            store(decay2, second);
            store(counted, mul(second, set1(-0x1p23f)));
            no_roots = _mm512_cmp_ps_mask(second, _mm512_setzero_ps(), _CMP_EQ_OQ);
            usual = some & usual_scales(average, LEAST_AVERAGE) & usual_scales(root, LEAST_ROOT);
        }
        // 0, or so large that no product with it is denormal, and not huge.
        static __mmask16 usual_scales(F scale, float least) {
            return static_cast<__mmask16>(_mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_EQ_OQ) |
                                          (_mm512_cmp_ps_mask(scale, set1(least), _CMP_GE_OQ) &
                                           _mm512_cmp_ps_mask(scale, set1(0x1p100f), _CMP_LE_OQ)));
        }
    };
    static constexpr float LEAST_AVERAGE = 0x1p-90f, LEAST_ROOT = 0x1p-50f;

    const zk_segment &s;
    const Scalars &k;
    const AdamRule &r;
    const Streams streams;
    const CodeTables<ORDER> *t = &CODE_TABLES<ORDER>;
    __mmask64 lowest_bytes, packed[4];

    Staggered(const zk_segment &segment, const Scalars &scalars, const AdamRule &rule)
        : s(segment), k(scalars), r(rule), streams{segment, {}, scalars.stream_out} {
        asm("" : "+r"(t));
        lowest_bytes = t->lowest_bytes;
        for (int vector = 0; vector < 4; ++vector) packed[vector] = t->packed[vector];
    }

    // 64 codes of exp_avg to what is multiplied by the scale: decode_signed of vec/vbmi.h in the order of the pairs.
    ZK_INLINE void decode(int64_t i, F (&x)[4]) const {
        const I codes = _mm512_permutexvar_epi8(order_of(t->spread), load_512(at<int8_t>(s.exp_avg, i))),
                magnitude = _mm512_abs_epi8(codes);
        const __mmask64 above_63 = _mm512_movepi8_mask(_mm512_add_epi8(magnitude, magnitude));
        const auto look = [&](const uint8_t (&plane)[128]) {
            return _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(magnitude, _mm512_load_si512(plane)), above_63,
                                                magnitude, _mm512_load_si512(plane + 64));
        };
        const I b0 = look(t->planes.plane[0]), b1 = look(t->planes.plane[1]), b2 = look(t->planes.plane[2]),
                signs = _mm512_andnot_si512(magnitude, codes),
                b3 = _mm512_ternarylogic_epi32(look(t->planes.plane[3]), signs, fixed(t->signs), 0xF8);
        const I low_a = _mm512_unpacklo_epi8(b0, b1), low_b = _mm512_unpackhi_epi8(b0, b1),
                high_a = _mm512_unpacklo_epi8(b2, b3), high_b = _mm512_unpackhi_epi8(b2, b3);
        x[0] = floats(_mm512_unpacklo_epi16(low_a, high_a));
        x[1] = floats(_mm512_unpackhi_epi16(low_a, high_a));
        x[2] = floats(_mm512_unpacklo_epi16(low_b, high_b));
        x[3] = floats(_mm512_unpackhi_epi16(low_b, high_b));
    }

    template <int VECTOR>
    ZK_INLINE void average(const Decays &c, int64_t n, F g, F x, I root_codes, Work &to, int v, Extremes &e) const {
        const I counted =
            _mm512_mask_permutexvar_epi8(fixed(t->counted), lowest_bytes, order_of(t->lowest[VECTOR]), root_codes);
        const F root = fma(floats(counted), set1(c.decay2[n]), set1(c.counted[n]));
        F fresh = mul(r.gain2, g);
        fresh = mul(fresh, fresh);
        F square = fma(root, root, fresh);
        const F m = fma(x, set1(c.decay1[n]), mul(r.gain1, g));
        to.averages[v] = m;
        e.average = ints(_mm512_range_ps(floats(e.average), m, 0xB));  // the larger magnitude
        e.square = _mm512_max_epu32(e.square, ints(square));
        ZK_PACED(square);
        F after = sqrt(square);
        ZK_PACED(after);
        to.roots[v] = after;
    }

    ZK_INLINE F stepped(F p, F m, F root) const {
        const F floor = fma(root, r.root_slope, r.root_floor);
        return fnma(m, reciprocal(floor), fnma(r.lr_wd, p, p));
    }
    ZK_INLINE void parameters(int64_t i, const Work &of, int v) const {
        Two p = streams.values(i);
        p.a = stepped(p.a, of.averages[v], of.roots[v]);
        p.b = stepped(p.b, of.averages[v + 1], of.roots[v + 1]);
        streams.store_and_mark(i, p);
    }
    ZK_INLINE void quotient(Work &of, int v) const {
        const F m = of.averages[v], magnitude = floats(_mm512_and_si512(ints(m), fixed(t->magnitude)));
        F quotient = div(m, add(magnitude, set1(of.average_scale)));
        ZK_PACED(quotient);
        of.averages[v] = quotient;
    }

    struct Codes {
        I averages, roots;
    };
    template <int VECTOR>
    ZK_INLINE void encode(const Work &of, int v, Codes &codes) const {
        const F rint = floats(fixed(t->rint));
        const I average = ints(fma(of.averages[v], floats(fixed(t->steps)), rint)),
                root = ints(fma(of.roots[v], set1(of.inverse), rint)), from = order_of(t->pack[VECTOR]);
        if constexpr (VECTOR == 0) {
            codes = {_mm512_permutexvar_epi8(from, average), _mm512_permutexvar_epi8(from, root)};
        } else {
            codes = {_mm512_mask_permutexvar_epi8(codes.averages, packed[VECTOR], from, average),
                     _mm512_mask_permutexvar_epi8(codes.roots, packed[VECTOR], from, root)};
        }
    }
    // Codes of positive roots are at least 1.
    ZK_INLINE I at_least_1(I codes, const F *roots) const {
        I positive = _mm512_setzero_si512();
        for (int vector = 0; vector < 4; ++vector) {
            const I one =
                _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(roots[vector], _mm512_setzero_ps(), _CMP_GT_OQ), 1);
            positive = _mm512_mask_permutexvar_epi8(positive, packed[vector], order_of(t->pack[vector]), one);
        }
        return _mm512_max_epu8(codes, positive);
    }
    ZK_INLINE void store_codes(int64_t i, const Work &of, int v, const Codes &codes) const {
        store_512(at<int8_t>(s.exp_avg, i), codes.averages);
        store_512(at<uint8_t>(s.exp_avg_sq, i), __builtin_expect(of.some_root_is_0, 0)
                                                    ? at_least_1(codes.roots, of.roots + v)
                                                    : _mm512_max_epu8(codes.roots, fixed(t->ones)));
    }

    // The scales of a block whose averages are known: both maxima in one reduction, the root taken last. False where
    // they are not usual, 0 included; then nothing of the block has been written.
    static ZK_INLINE bool find_scales(Work &of, const Extremes &e) {
        of.some_root_is_0 = e.zeros != 0;
        const auto folded = [](I x) {
            return _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti32x8_epi32(x, 1));
        };
        I both = _mm512_inserti32x8(_mm512_castsi256_si512(folded(e.average)), folded(e.square), 1);
        both = _mm512_max_epu32(both, _mm512_shuffle_i32x4(both, both, 0xB1));
        both = _mm512_max_epu32(both, _mm512_shuffle_epi32(both, _MM_PERM_BADC));
        both = _mm512_max_epu32(both, _mm512_shuffle_epi32(both, _MM_PERM_CDAB));
        const __m128 most = _mm512_castps512_ps128(floats(both)),
                     root = _mm_sqrt_ss(_mm512_extractf32x4_ps(floats(both), 2));
        of.average_scale = _mm_cvtss_f32(most);
        of.root_scale = _mm_cvtss_f32(root);
        of.inverse = 255.0f / of.root_scale;
        const auto usual = [](float x, float least) {
            return bits_of(x) - bits_of(least) <= bits_of(0x1p100f) - bits_of(least);
        };
        return usual(of.average_scale, LEAST_AVERAGE) & usual(of.root_scale, LEAST_ROOT);
    }

    // Averages and roots of the block at i, the n-th that decays are known of.
    ZK_INLINE void averages(int64_t i, const Decays &c, int64_t n, Work &to, Extremes &e) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v += 4, i += HALF) {
            const I roots = load_512(at<uint8_t>(s.exp_avg_sq, i));
            e.zeros |= c.no_roots >> n & 1;
            e.zeros |= _mm512_testn_epi8_mask(roots, roots);
            const Two first = streams.grads(i), second = streams.grads(i + 2 * W);
            F x[4];
            decode(i, x);
            average<0>(c, n, first.a, x[0], roots, to, v, e);
            average<1>(c, n, first.b, x[1], roots, to, v + 1, e);
            average<2>(c, n, second.a, x[2], roots, to, v + 2, e);
            average<3>(c, n, second.b, x[3], roots, to, v + 3, e);
        }
    }
    ZK_INLINE void parameters_and_quotients(int64_t i, Work &of) const {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v += 2, i += 2 * W) {
            parameters(i, of, v);
            quotient(of, v);
            quotient(of, v + 1);
        }
    }
    ZK_INLINE void codes(int64_t i, const Work &of) const {
        s.exp_avg_scale[i / ZK_BLOCK] = of.average_scale;
        s.exp_avg_sq_scale[i / ZK_BLOCK] = of.root_scale;
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v += 4, i += HALF) {
            Codes codes;
            encode<0>(of, v, codes);
            encode<1>(of, v + 1, codes);
            encode<2>(of, v + 2, codes);
            encode<3>(of, v + 3, codes);
            store_codes(i, of, v, codes);
        }
    }

    // Usual blocks from i on; returns where they end, which is i where the first one is not usual.
    int64_t usual_blocks(int64_t i, int64_t end) const {
        Work work[3];
        Work *fresh = &work[0], *known = &work[1], *coded = &work[2];
        Decays c;
        int64_t begun = 0;
        for (; i + TILE <= end; i += TILE, ++begun) {
            const int64_t block = i / ZK_BLOCK, n = begun % 16;
            if (n == 0) c.find(r, s.exp_avg_scale + block, s.exp_avg_sq_scale + block, (end - i) / ZK_BLOCK);
            if (!(c.usual >> n & 1)) break;
            Plain::prefetch_tile(s, k, i);
            Extremes e;
            averages(i, c, n, *fresh, e);
            if (begun >= 1) parameters_and_quotients(i - TILE, *known);
            if (begun >= 2) codes(i - 2 * TILE, *coded);
            // Where they are not usual nothing of this block has been written, and it goes the other way.
            const bool usual = find_scales(*fresh, e);
            Work *const free = coded;
            coded = known;
            known = fresh;
            fresh = free;
            if (!usual) {
                if (begun >= 1) codes(i - TILE, *coded);
                return i;
            }
        }
        if (begun >= 1) parameters_and_quotients(i - TILE, *known);
        if (begun >= 2) codes(i - 2 * TILE, *coded);
        if (begun >= 1) codes(i - TILE, *known);
        return i;
    }

    static int64_t tiles(const zk_segment &s, const Scalars &k, const AdamRule &rule, int64_t i, int64_t end) {
        const Staggered all(s, k, rule);
        while (i + TILE <= end) {
            i = all.usual_blocks(i, end);
            if (i + TILE > end) break;
            Plain::prefetch_tile(s, k, i);  // an unusual block, which ended the others
            Plain::tile(s, k, rule, i);
            i += TILE;
        }
        return i;
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
