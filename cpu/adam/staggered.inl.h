// Adam on cores with a slow divider: Intel's take 22 cycles for the root and the quotient of 16 elements, about what
// all else takes, so neither may ever wait. The root of a pair of vectors is begun together with the quotient of the
// pair before and the parameters of the pair before that, all along the span, not only within a tile.
//
// A tile is asked beforehand whether its values are usual: gradients and averages finite, gradients not huge, averages
// not denormal. Then nothing below can become infinite or a NaN but the parameter, and every operation is that of
// AdamRule::apply. Other tiles go its way, once what is under way has been finished.
#pragma once

#include "adam/idle.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// What is loaded and stored, by pairs; `usual` for the gradient alone.
template <int G, int T, int O, Order ORDER>
struct PairStreams {
    const zk_segment &s;
    const Pairs<ORDER> pairs;
    const bool stream_out;

    ZK_INLINE Two grads(int64_t i) const {
        if constexpr (G == ZK_BF16) return pairs.widen(load_512(at<uint16_t>(s.grad, i)));
        return {load(at<float>(s.grad, i)), load(at<float>(s.grad, i + W))};
    }
    ZK_INLINE Two values(int64_t i) const {
        if constexpr (T == TO_SPLIT16) return pairs.load_split16(at<uint16_t>(s.param, i), at<int16_t>(s.remainder, i));
        if constexpr (T == TO_SPLIT8) return pairs.load_split8(at<uint16_t>(s.param, i), at<int8_t>(s.remainder, i));
        return {load(at<float>(s.master, i)), load(at<float>(s.master, i + W))};
    }
    // What a pair publishes. Streams lie in their order in memory, and what has a copy is in natural order.
    static constexpr int64_t PAIR = 2 * W;
    static constexpr bool PUBLISHES_FP32 = T == TO_FP32 && O == ZK_NONE;
    struct Published {
        I vectors[PUBLISHES_FP32 ? 2 : 1];
    };
    ZK_INLINE Published published_at(int64_t i) const {
        if constexpr (PUBLISHES_FP32) {
            return {{load_512(at<float>(s.master, i)), load_512(at<float>(s.master, i + W))}};
        } else if constexpr (T == TO_FP32) {
            return {{published(values(i))}};
        } else {
            return {{load_512(at<uint16_t>(s.param, i))}};
        }
    }
    static ZK_INLINE uint32_t different_bits(const Published &a, const Published &b) {
        if constexpr (PUBLISHES_FP32) {
            return _mm512_kunpackw(_mm512_cmpneq_epi32_mask(a.vectors[1], b.vectors[1]),
                                   _mm512_cmpneq_epi32_mask(a.vectors[0], b.vectors[0]));
        } else {
            return _mm512_cmpneq_epi16_mask(a.vectors[0], b.vectors[0]);
        }
    }
    // Marks what `store_all` changes of the elements from i on: what they published is put by meanwhile.
    template <int64_t NUMEL, class Stores>
    ZK_INLINE void marking(int64_t i, const Stores &store_all) const {
        const bool marked = __builtin_expect(s.changed != nullptr, 0);
        Published before[NUMEL / PAIR];
        for (int64_t n = 0; marked && n < NUMEL / PAIR; ++n) before[n] = published_at(i + n * PAIR);
        store_all();
        for (int64_t n = 0; marked && n < NUMEL / PAIR; ++n)
            mark(s, i + n * PAIR, different_bits(before[n], published_at(i + n * PAIR)));
    }
    // Of one pair, by a call with copies: blocks of int8 averages keep their registers only so.
    ZK_INLINE void store_and_mark(int64_t i, const Two &p) const {
        if (__builtin_expect(s.changed != nullptr, 0)) return store_marked_of(*this, i, p);
        store_values(i, p);
    }
    static __attribute__((noinline)) void store_marked_of(PairStreams of, int64_t i, Two p) {
        const Published before = of.published_at(i);
        of.store_values(i, p);
        mark(of.s, i, different_bits(before, of.published_at(i)));
    }
    ZK_INLINE I published(const Two &p) const { return pairs.bf16_of(pairs.canonical(p.a), pairs.canonical(p.b)); }
    ZK_INLINE void store_values(int64_t i, const Two &p) const {
        if constexpr (T == TO_FP32) {
            store(at<float>(s.master, i), p.a);
            store(at<float>(s.master, i + W), p.b);
            if constexpr (O == ZK_BF16) {
                const I out = published(p);
                I *const to = reinterpret_cast<I *>(at<uint16_t>(s.out, i));
                stream_out ? _mm512_stream_si512(to, out) : store_512(to, out);
            }
        } else if constexpr (T == TO_SPLIT16) {
            pairs.store_split16(at<uint16_t>(s.param, i), at<int16_t>(s.remainder, i), pairs.canonical(p.a),
                                pairs.canonical(p.b));
        } else {
            pairs.store_split8(at<uint16_t>(s.param, i), at<int8_t>(s.remainder, i), pairs.canonical(p.a),
                               pairs.canonical(p.b));
        }
    }

    // Without their signs the largest bits of a tile's gradients, times two: below 2^40.
    ZK_INLINE bool usual_grads(int64_t base) const {
        I most = _mm512_setzero_si512();
        for (int64_t i = base; i < base + TILE; i += G == ZK_BF16 ? 2 * W : W) {
            if constexpr (G == ZK_BF16) {
                most = _mm512_max_epu16(most, twice_words(load_512(at<uint16_t>(s.grad, i))));
            } else {
                most = _mm512_max_epu32(most, twice(load_512(at<float>(s.grad, i))));
            }
        }
        constexpr uint32_t MOST = (127 + 40) << 24;
        if constexpr (G == ZK_BF16)
            return _mm512_cmpgt_epu16_mask(most, _mm512_set1_epi16(static_cast<int16_t>(MOST >> 16))) == 0;
        return _mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(static_cast<int>(MOST))) == 0;
    }

    // Of a pair's gradients, and whether they are 0 or -0.
    ZK_INLINE I grad_bits(int64_t i) const {
        if constexpr (G == ZK_BF16) return load_512(at<uint16_t>(s.grad, i));
        return _mm512_or_si512(load_512(at<float>(s.grad, i)), load_512(at<float>(s.grad, i + W)));
    }
    static ZK_INLINE bool are_zero(I grads) {
        if constexpr (G == ZK_BF16) return _mm512_test_epi16_mask(grads, _mm512_set1_epi16(0x7FFF)) == 0;
        return _mm512_test_epi32_mask(grads, _mm512_set1_epi32(0x7FFFFFFF)) == 0;
    }

    // A shift would wait for port 0, where roots and quotients begin.
    static ZK_INLINE I twice(I x) {
        asm("" : "+v"(x));
        x = _mm512_add_epi32(x, x);
        asm("" : "+v"(x));
        return x;
    }
    static ZK_INLINE I twice_words(I x) {
        asm("" : "+v"(x));
        return _mm512_add_epi16(x, x);
    }
};

template <int G, int T, int S, int O>
struct Staggered<AdamRule, G, T, S, O> {
    static constexpr bool EXISTS = (G == ZK_F32 || G == ZK_BF16) && T >= TO_FP32 && T <= TO_SPLIT8 &&
                                   (S == ZK_F32 || S == ZK_BF16) && (O == ZK_NONE || (O == ZK_BF16 && T == TO_FP32));
    static constexpr Order ORDER = G == ZK_BF16 && T != TO_FP32 && S == ZK_BF16 ? Order::alternate : Order::natural;
    using Streams = PairStreams<G, T, O, ORDER>;
    using Plain = Update<AdamRule, G, T, S, O>;
    static constexpr int64_t PAIR = 2 * W;

    // Pairs on their way: the roots and averages of the last one, the quotients of the one before.
    struct Flow {
        Two root, m, quotient;
    };

    const zk_segment &s;
    const Scalars &k;
    const AdamRule &r;
    const Streams streams;

    Staggered(const zk_segment &segment, const Scalars &scalars, const AdamRule &rule)
        : s(segment), k(scalars), r(rule), streams{segment, {}, scalars.stream_out} {}

    // The quick look: exp_avg from 2^-126 to 2^60 in magnitude, exp_avg_sq from 2^-126 to 2^120. What is below becomes
    // huge by the subtraction.
    ZK_INLINE bool usual(int64_t base) const {
        constexpr uint32_t MOST_M = (126 + 60) << 24, MOST_V = (126 + 120) << 23;
        I m = _mm512_setzero_si512(), v = _mm512_setzero_si512();
        bool averages;
        if constexpr (S == ZK_BF16) {
            for (int64_t i = base; i < base + TILE; i += PAIR) {
                const I twice = Streams::twice_words(load_512(at<uint16_t>(s.exp_avg, i)));
                m = _mm512_max_epu16(m, _mm512_sub_epi16(twice, _mm512_set1_epi16(0x0100)));
                v = _mm512_max_epu16(
                    v, _mm512_sub_epi16(load_512(at<uint16_t>(s.exp_avg_sq, i)), _mm512_set1_epi16(0x0080)));
            }
            averages = (_mm512_cmpgt_epu16_mask(m, _mm512_set1_epi16(static_cast<int16_t>(MOST_M >> 16))) |
                        _mm512_cmpgt_epu16_mask(v, _mm512_set1_epi16(static_cast<int16_t>(MOST_V >> 16)))) == 0;
        } else {
            for (int64_t i = base; i < base + TILE; i += W) {
                const I twice = Streams::twice(load_512(at<float>(s.exp_avg, i)));
                m = _mm512_max_epu32(m, _mm512_sub_epi32(twice, _mm512_set1_epi32(0x01000000)));
                v = _mm512_max_epu32(
                    v, _mm512_sub_epi32(load_512(at<float>(s.exp_avg_sq, i)), _mm512_set1_epi32(0x00800000)));
            }
            averages = (_mm512_cmpgt_epu32_mask(m, _mm512_set1_epi32(static_cast<int>(MOST_M))) |
                        _mm512_cmpgt_epu32_mask(v, _mm512_set1_epi32(static_cast<int>(MOST_V)))) == 0;
        }
        return averages & streams.usual_grads(base);
    }

    // Zeros are usual too, as in rows of an embedding that were never used, but are told from denormals by a second
    // look.
    // Below a square that is huge and negative the gap to it is infinite, which AdamRule::apply mends.
    static constexpr int STRANGE = 0xB9, NEGATIVE = 0x40;  // to vfpclassps: NaNs, infinities, denormals
    __attribute__((noinline)) bool usual_with_zeros(int64_t base) const {
        M strange = 0;
        for (int64_t i = base; i < base + TILE; i += PAIR) {
            const Two m = states(s.exp_avg, i), v = states(s.exp_avg_sq, i);
            strange =
                either(strange, either(_mm512_fpclass_ps_mask(m.a, STRANGE), _mm512_fpclass_ps_mask(m.b, STRANGE)));
            strange = either(strange, either(_mm512_fpclass_ps_mask(v.a, STRANGE | NEGATIVE),
                                             _mm512_fpclass_ps_mask(v.b, STRANGE | NEGATIVE)));
        }
        return strange == 0 && streams.usual_grads(base);
    }

    ZK_INLINE Two states(const void *x, int64_t i) const {
        if constexpr (S == ZK_BF16) return streams.pairs.widen(load_512(at<uint16_t>(x, i)));
        return {load(at<float>(x, i)), load(at<float>(x, i + W))};
    }
    ZK_INLINE void store_states(void *x, int64_t i, const Two &v) const {
        if constexpr (S == ZK_BF16) {
            store_512(at<uint16_t>(x, i), streams.pairs.bf16_of(ints(v.a), ints(v.b)));
        } else {
            store(at<float>(x, i), v.a);
            store(at<float>(x, i + W), v.b);
        }
    }

    ZK_INLINE void averages(F g, F &m, F &v) const {
        g = mul(g, r.scale);
        v = fma(r.w2, fms(g, g, v), v);
        m = fma(r.weight1, sub(g, m), m);
    }
    static ZK_INLINE F root_of(F v) {
        ZK_PACED(v);
        F root = sqrt(v);
        ZK_PACED(root);
        return root;
    }
    ZK_INLINE F quotient_of(F m, F root) const {
        F quotient = div(m, fma(root, r.root_slope, r.root_floor));
        ZK_PACED(quotient);
        return quotient;
    }
    ZK_INLINE void finish(int64_t i, const Two &quotient) const {
        Two p = streams.values(i);
        p.a = sub(p.a, fma(r.lr_wd, p.a, quotient.a));
        p.b = sub(p.b, fma(r.lr_wd, p.b, quotient.b));
        streams.store_values(i, p);
    }

    // Averages and roots of the pair at i, quotients of the one before, parameters of the one before that; `before`
    // says how many there are.
    template <int BEFORE>
    ZK_INLINE void pair(int64_t i, Flow &flow) const {
        const Two g = streams.grads(i);
        Two m = states(s.exp_avg, i), v = states(s.exp_avg_sq, i), root, quotient;
        averages(g.a, m.a, v.a);
        root.a = root_of(v.a);
        if constexpr (BEFORE >= 1) quotient.a = quotient_of(flow.m.a, flow.root.a);
        averages(g.b, m.b, v.b);
        store_states(s.exp_avg, i, m);
        store_states(s.exp_avg_sq, i, v);
        root.b = root_of(v.b);
        if constexpr (BEFORE >= 2) finish(i - 2 * PAIR, flow.quotient);
        if constexpr (BEFORE >= 1) quotient.b = quotient_of(flow.m.b, flow.root.b);
        flow.root = root;
        flow.m = m;
        if constexpr (BEFORE >= 1) flow.quotient = quotient;
    }
    ZK_INLINE void drain(int64_t end, Flow &flow) const {
        finish(end - 2 * PAIR, flow.quotient);
        flow.quotient.a = quotient_of(flow.m.a, flow.root.a);
        flow.quotient.b = quotient_of(flow.m.b, flow.root.b);
        finish(end - PAIR, flow.quotient);
    }

    // Usual tiles from i on, at least one; returns where they end.
    ZK_INLINE int64_t usual_tiles(int64_t i, int64_t end) const {
        Flow flow;
        Plain::prefetch_tile(s, k, i);
        pair<0>(i, flow);
        pair<1>(i + PAIR, flow);
        streams.template marking<2 * PAIR>(i, [&]() __attribute__((always_inline)) {
            pair<2>(i + 2 * PAIR, flow);
            pair<2>(i + 3 * PAIR, flow);
        });
        for (i += TILE; i + TILE <= end && (usual(i) || usual_with_zeros(i)); i += TILE) {
            Plain::prefetch_tile(s, k, i);
            streams.template marking<TILE>(i - 2 * PAIR, [&]() __attribute__((always_inline)) {
                pair<2>(i, flow);
                pair<2>(i + PAIR, flow);
                pair<2>(i + 2 * PAIR, flow);
                pair<2>(i + 3 * PAIR, flow);
            });
        }
        streams.template marking<2 * PAIR>(i - 2 * PAIR, [&]() __attribute__((always_inline)) { drain(i, flow); });
        return i;
    }

    static int64_t tiles(const zk_segment &s, const Scalars &k, const AdamRule &rule, int64_t i, int64_t end) {
        static_assert(TILE == 4 * PAIR);
        const Staggered all(s, k, rule);
        const IdleTiles<Staggered, S> idle{all, IdleRule(rule, k)};
        int since = 0;  // what is rare comes in runs: of its tiles one in eight is looked at for zeros
        while (i + TILE <= end) {
            if (all.usual(i)) {
                i = all.usual_tiles(i, end);
            } else if (const int64_t next = idle.tiles(i, end); next > i) {
                i = next;
            } else if (since % 8 == 0 && all.usual_with_zeros(i)) {
                i = all.usual_tiles(i, end);
            } else {
                Plain::prefetch_tile(s, k, i);
                Plain::plain_tile(s, k, rule, i);
                i += TILE;
                ++since;
            }
        }
        return i;
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk

#include "adam/staggered_int8.inl.h"
