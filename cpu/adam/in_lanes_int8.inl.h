// Adam with int8 averages on AVX2, whose shuffles stay within lanes of 128 bits: of 16 elements one vector has 0 to 3
// and 8 to 11, the other one the rest. So unpacking takes words apart and packing joins them without a permute across
// lanes.
//
// A block's averages come first, its parameters and codes when its scales are known to be usual. Nothing of it has been
// written by then, so that a block that is not goes the way of all formats.
#pragma once

#include "adam/adam.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct LaneTables {
    alignas(32) uint8_t top_bytes[2][32];  // codes of a vector to the upper bytes of its dwords, of 16 in each lane
    alignas(32) uint8_t upper_bytes[32];   // and to those of words
    alignas(32) uint8_t in_order[32];      // 0 4 1 5 2 6 3 7 to 0 to 7
};
constexpr LaneTables make_lane_tables() {
    LaneTables t{};
    for (int i = 0; i < 32; ++i) {
        const int lane = i / 16, dword = i % 16 / 4;
        for (int v = 0; v < 2; ++v)
            t.top_bytes[v][i] = static_cast<uint8_t>(i % 4 == 3 ? 8 * lane + 4 * v + dword : 0x80);
        t.upper_bytes[i] = static_cast<uint8_t>(i % 2 == 1 ? 8 * lane + i % 16 / 2 : 0x80);
        t.in_order[i] = static_cast<uint8_t>(i % 16 / 8 * 8 + (i % 8 < 4 ? 2 * (i % 8) : 2 * (i % 8 - 4) + 1));
    }
    return t;
}
constexpr LaneTables LANE_TABLES = make_lane_tables();
inline I table_of(const uint8_t (&t)[32]) { return _mm256_load_si256(reinterpret_cast<const I *>(t)); }

template <int G, int T, int O>
struct Staggered<AdamRule, G, T, ZK_INT8, O> {
    static constexpr bool EXISTS = (G == ZK_F32 || G == ZK_BF16) && T >= TO_FP32 && T <= TO_SPLIT8 &&
                                   (O == ZK_NONE || (O == ZK_BF16 && T == TO_FP32));
    using Plain = Update<AdamRule, G, T, ZK_INT8, O>;
    struct Two {
        F a, b;
    };
    struct Work {
        Two averages[TILE / STEP], roots[TILE / STEP];
        float average_scale, root_scale;
        bool some_root_is_0;
    };
    static constexpr uint32_t LEAST = (127 - 100) << 23, MOST = (127 + 100) << 23;  // of scales

    const zk_segment &s;
    const Scalars &k;
    const AdamRule &r;

    static ZK_INLINE Two unpacked(I low, I high) {
        return {floats(_mm256_unpacklo_epi16(low, high)), floats(_mm256_unpackhi_epi16(low, high))};
    }
    static ZK_INLINE Two load_two(const float *p) {
        const auto half = [](const float *x) {
            return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x)), _mm_loadu_ps(x + 8), 1);
        };
        return {half(p), half(p + 4)};
    }
    ZK_INLINE Two grads(int64_t i) const {
        if constexpr (G == ZK_BF16) return unpacked(_mm256_setzero_si256(), load_256(at<uint16_t>(s.grad, i)));
        return load_two(at<float>(s.grad, i));
    }
    ZK_INLINE Two values(int64_t i) const {
        if constexpr (T == TO_FP32) return load_two(at<float>(s.master, i));
        const I low = T == TO_SPLIT16
                          ? load_256(at<int16_t>(s.remainder, i))
                          : _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(at<int8_t>(s.remainder, i))),
                                                table_of(LANE_TABLES.upper_bytes));
        // the sign of the low word borrows from the upper one
        return unpacked(low, _mm256_add_epi16(load_256(at<uint16_t>(s.param, i)), _mm256_srai_epi16(low, 15)));
    }
    ZK_INLINE void store_values(int64_t i, const Two &p) const {
        if (__builtin_expect(s.changed == nullptr, 1)) return store_values<false>(i, p);
        if constexpr (T != TO_FP32) return store_values<true>(i, p);
        const F in_order[Q] = {_mm256_permute2f128_ps(p.a, p.b, 0x20), _mm256_permute2f128_ps(p.a, p.b, 0x31)};
        Plain::store_params(s, k, i, in_order);
    }
    // With bits of what changed no NaN is left to be mended: a NaN that stays one has not changed.
    template <bool MARKED>
    ZK_INLINE void store_values(int64_t i, const Two &p) const {
        if constexpr (T == TO_FP32) {
            float *to = at<float>(s.master, i);
            for (int j = 0; j < 2; ++j, to += 4) {
                const F x = j ? p.b : p.a;
                _mm_storeu_ps(to, _mm256_castps256_ps128(x));
                _mm_storeu_ps(to + 8, _mm256_extractf128_ps(x, 1));
            }
            if constexpr (O == ZK_BF16) {
                const I out = _mm256_packus_epi32(rounded_word<false>(p.a), rounded_word<false>(p.b));
                I *const out_to = reinterpret_cast<I *>(at<uint16_t>(s.out, i));
                k.stream_out ? _mm256_stream_si256(out_to, out) : _mm256_storeu_si256(out_to, out);
            }
        } else {
            const I a = canonical_bits_of<MARKED>(p.a), b = canonical_bits_of<MARKED>(p.b),
                    word = _mm256_set1_epi32(0xFFFF),
                    low = _mm256_packus_epi32(_mm256_and_si256(a, word), _mm256_and_si256(b, word)),
                    high = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
            I rounded = low, unit = _mm256_setzero_si256();
            if constexpr (T == TO_SPLIT16) {
                store_256(at<int16_t>(s.remainder, i), low);
            } else {  // half a unit less one, and the lowest bit that stays
                unit = _mm256_add_epi16(_mm256_and_si256(_mm256_srli_epi16(low, 8), _mm256_set1_epi16(1)),
                                        _mm256_set1_epi16(0x7F));
                rounded = _mm256_adds_epu16(low, unit);
                _mm_storeu_si128(reinterpret_cast<__m128i *>(at<int8_t>(s.remainder, i)),
                                 pack_bytes(_mm256_srli_epi16(_mm256_add_epi16(low, unit), 8)));
            }
            const I words = _mm256_add_epi16(high, _mm256_srli_epi16(rounded, 15));
            if constexpr (MARKED) mark(s, i, different(at<uint16_t>(s.param, i), words));
            store_256(at<uint16_t>(s.param, i), words);
        }
    }

    struct Decays {
        F decay1, decay2, counted;
    };
    // (2^23 + code) decay2 - 2^23 decay2 is rounded once, as code decay2 is.
    ZK_INLINE void average(const Decays &c, F g, F &m, F &root) const {
        F fresh = mul(r.gain2, g);
        root = fma(root, c.decay2, c.counted);
        fresh = mul(fresh, fresh);
        root = sqrt(fma(root, root, fresh));
        m = fma(m, c.decay1, mul(r.gain1, g));
    }

    // False where the block is not usual.
    ZK_INLINE bool averages(int64_t base, Work &to) const {
        const typename AdamRule::Block old =
            r.block(s.exp_avg_scale[base / ZK_BLOCK], s.exp_avg_sq_scale[base / ZK_BLOCK]);
        const Decays c = {old.decay1, old.decay2, mul(old.decay2, set1(-0x1p23f))};
        I strange = _mm256_setzero_si256(), zeros = strange, most_average = strange, most_root = strange;
#pragma GCC unroll 4
        for (int64_t j = 0; j < TILE; j += 32) {
            strange = _mm256_or_si256(strange, _mm256_abs_epi8(load_256(at<int8_t>(s.exp_avg, base + j))));
            zeros = _mm256_or_si256(
                zeros, _mm256_cmpeq_epi8(load_256(at<uint8_t>(s.exp_avg_sq, base + j)), _mm256_setzero_si256()));
        }
#pragma GCC unroll 2
        for (int v = 0; v < TILE / STEP; ++v) {
            const int64_t i = base + v * STEP;
            const Two g = grads(i);
            const I codes = _mm256_broadcastsi128_si256(load_128(at<int8_t>(s.exp_avg, i)));
            const auto quotient = [&](const uint8_t (&top_bytes)[32]) {  // of c 2^24
                const F code = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes, table_of(top_bytes)));
                return code_quotient(code, sub(set1(254.0f * 0x1p24f), abs(code)));
            };
            Two m = {quotient(LANE_TABLES.top_bytes[0]), quotient(LANE_TABLES.top_bytes[1])};
            Two root =
                unpacked(_mm256_cvtepu8_epi16(load_128(at<uint8_t>(s.exp_avg_sq, i))), _mm256_set1_epi16(0x4B00));
            average(c, g.a, m.a, root.a);
            average(c, g.b, m.b, root.b);
            to.averages[v] = m;
            to.roots[v] = root;
            most_average = _mm256_max_epu32(most_average, ints(abs(m.a)));
            most_average = _mm256_max_epu32(most_average, ints(abs(m.b)));
            most_root = _mm256_max_epu32(most_root, ints(root.a));
            most_root = _mm256_max_epu32(most_root, ints(root.b));
        }
        I most = _mm256_max_epu32(_mm256_permute2x128_si256(most_average, most_root, 0x20),
                                  _mm256_permute2x128_si256(most_average, most_root, 0x31));
        most = _mm256_max_epu32(most, _mm256_shuffle_epi32(most, 0x4E));
        most = _mm256_max_epu32(most, _mm256_shuffle_epi32(most, 0xB1));
        const uint32_t average_bits = static_cast<uint32_t>(_mm256_cvtsi256_si32(most)),
                       root_bits = static_cast<uint32_t>(_mm_cvtsi128_si32(_mm256_extracti128_si256(most, 1)));
        to.average_scale = float_of(average_bits);
        to.root_scale = float_of(root_bits);
        to.some_root_is_0 =
            (_mm256_movemask_epi8(zeros) != 0) | !(_mm_cvtss_f32(_mm256_castps256_ps128(c.decay2)) >= 0x1p-70f);
        return (_mm256_movemask_epi8(strange) == 0) & (average_bits - LEAST <= MOST - LEAST) &
               (root_bits - LEAST <= MOST - LEAST);
    }

    ZK_INLINE F stepped(F p, F m, F root) const {
        const F floor = fma(root, r.root_slope, r.root_floor);
        return fnma(m, reciprocal(floor), fnma(r.lr_wd, p, p));
    }
    ZK_INLINE void parameters(int64_t base, const Work &of) const {
        F nans = _mm256_setzero_ps();
#pragma GCC unroll 2
        for (int v = 0; v < TILE / STEP; ++v) {
            const int64_t i = base + v * STEP;
            Two p = values(i);
            p.a = stepped(p.a, of.averages[v].a, of.roots[v].a);
            p.b = stepped(p.b, of.averages[v].b, of.roots[v].b);
            nans = _mm256_or_ps(nans, _mm256_cmp_ps(p.a, p.b, _CMP_UNORD_Q));
            store_values(i, p);
        }
        if (__builtin_expect(_mm256_movemask_ps(nans) != 0, 0)) mend_nans(base);
    }
    // A NaN that was stored is one still: what made it has no low bits.
    __attribute__((noinline)) void mend_nans(int64_t base) const {
        for (int64_t i = base; i < base + TILE; i += STEP) {
            F p[Q];
            Plain::load_params(s, k, i, p);
            Plain::store_params(s, k, i, p);
        }
    }

    // The low words of two vectors as words in the order 0 4 1 5 2 6 3 7, in each lane.
    static ZK_INLINE I low_words(F a, F b) { return _mm256_blend_epi16(ints(a), _mm256_slli_epi32(ints(b), 16), 0xAA); }
    static ZK_INLINE I bytes_in_order(I bytes) {
        return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, table_of(LANE_TABLES.in_order)), 0xD8);
    }
    static ZK_INLINE I average_words(const Two &m, F scale) {
        const F rint = set1(0x1.8p23f), steps = set1(254.0f);
        const F a = div(m.a, add(abs(m.a), scale)), b = div(m.b, add(abs(m.b), scale));
        return low_words(fma(a, steps, rint), fma(b, steps, rint));
    }
    static ZK_INLINE I root_words(const Two &root, F inverse) {
        const F rint = set1(0x1.8p23f);
        return low_words(fma(root.a, inverse, rint), fma(root.b, inverse, rint));
    }
    // 1 for each root that is positive.
    static __attribute__((noinline)) I positive_of(const Two &first, const Two &second) {
        const auto words = [](const Two &x) {
            return low_words(_mm256_cmp_ps(x.a, _mm256_setzero_ps(), _CMP_GT_OQ),
                             _mm256_cmp_ps(x.b, _mm256_setzero_ps(), _CMP_GT_OQ));
        };
        return _mm256_and_si256(_mm256_packs_epi16(words(first), words(second)), _mm256_set1_epi8(1));
    }
    ZK_INLINE void codes(int64_t base, const Work &of) const {
        const F scale = set1(of.average_scale), inverse = set1(255.0f / of.root_scale);
        s.exp_avg_scale[base / ZK_BLOCK] = of.average_scale;
        s.exp_avg_sq_scale[base / ZK_BLOCK] = of.root_scale;
#pragma GCC unroll 2
        for (int v = 0; v < TILE / STEP; v += 2) {
            const int64_t i = base + v * STEP;
            const Two *const m = of.averages + v, *const root = of.roots + v;
            const I averages = _mm256_packs_epi16(average_words(m[0], scale), average_words(m[1], scale));
            I roots = _mm256_packus_epi16(root_words(root[0], inverse), root_words(root[1], inverse));
            roots = _mm256_max_epu8(
                roots, __builtin_expect(of.some_root_is_0, 0) ? positive_of(root[0], root[1]) : _mm256_set1_epi8(1));
            store_256(at<int8_t>(s.exp_avg, i), bytes_in_order(averages));
            store_256(at<uint8_t>(s.exp_avg_sq, i), bytes_in_order(roots));
        }
    }

    static int64_t tiles(const zk_segment &s, const Scalars &k, const AdamRule &rule, int64_t i, int64_t end) {
        const Staggered all{s, k, rule};
        Work work;
        for (; i + TILE <= end; i += TILE) {
            Plain::prefetch_tile(s, k, i);
            if (__builtin_expect(all.averages(i, work), 1)) {
                all.parameters(i, work);
                all.codes(i, work);
            } else {
                Plain::tile(s, k, rule, i);
            }
        }
        return i;
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
