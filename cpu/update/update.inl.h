// One step over a span, whatever the rule and the formats: load, apply, store, a tile of ZK_BLOCK elements at a time,
// every byte once.
#pragma once

#include "update/changed.inl.h"
#include "update/units.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int64_t TILE = ZK_BLOCK;
constexpr int VECTORS = ZK_BLOCK / W;  // vectors of a tile
constexpr int64_t AHEAD = 1024;        // bytes that the prefetches run ahead in the streams of 32-bit elements

// One prefetch per 64 bytes of each stream; the hardware's own prefetchers stop at 4 KiB pages, these do not.
inline void prefetch_span(const void *base, int64_t byte, int64_t nbytes, int64_t ahead) {
    const char *p = static_cast<const char *>(base) + byte + ahead;
    for (int64_t b = 0; b < nbytes; b += 64) prefetch(p + b);
}

#if defined(ZK_LIFT)
template <class Update>
struct LiftedBlock;  // update/lifted_block.inl.h
struct LiftedScales {
    F average_units, root_decay;  // the root's decay times root_lift
    float root_lift;
};
#endif

#if defined(ZK_STAGGERED) || defined(ZK_IN_LANES)
#define ZK_OWN_ORDER 1
// A rule's own order of operations over many tiles, with the same bits: adam/staggered.inl.h, adam/in_lanes_int8.inl.h.
template <class Rule, int G, int T, int S, int O>
struct Staggered {
    static constexpr bool EXISTS = false;
};
#endif

template <class RULE, int G, int T, int S, int O>
struct Update {
    using Rule = RULE;
    static constexpr bool CODED = S == ZK_INT8;
    static constexpr int STATE_BYTES = S == ZK_F32 ? 4 : S == ZK_BF16 ? 2 : S == ZK_INT8 ? 1 : 0;

    static int grad_bytes(const Scalars &k) { return (G == ANY ? static_cast<int>(k.grad) : G) == ZK_F32 ? 4 : 2; }

    static ZK_INLINE void load_params(const zk_segment &s, const Scalars &k, int64_t i, F (&p)[Q]) {
        load_value<T>(s, k, i, p);
    }
    static ZK_INLINE void store_params(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q]) {
        store_published<T, O, true>(s, k, i, p);
    }

    static void prefetch_tile(const zk_segment &s, const Scalars &k, int64_t i) {
        const int target = T == ANY ? static_cast<int>(k.target) : T;
        const auto ahead = [&](const void *p, int width) {
            prefetch_span(p, i * width, TILE * width, AHEAD / 4 * width);
        };
        ahead(s.grad, grad_bytes(k));
        if (target == TO_FP32) {
            ahead(s.master, 4);
        } else {
            ahead(s.param, 2);
        }
        if (target == TO_SPLIT16) ahead(s.remainder, 2);
        if (target == TO_SPLIT8) ahead(s.remainder, 1);
        if constexpr (Rule::STATES >= 1 && S != ZK_NONE) ahead(s.exp_avg, STATE_BYTES);
        if constexpr (Rule::STATES >= 2 && S != ZK_NONE) ahead(s.exp_avg_sq, STATE_BYTES);
        if (__builtin_expect(s.changed != nullptr, 0)) prefetch(s.changed + (i >> 3) + 64);
    }

    static ZK_INLINE void load_plain(const zk_segment &s, const Scalars &k, int64_t i, F (&g)[Q], F (&p)[Q], F (&a)[Q],
                                     F (&b)[Q]) {
        const F scale = set1(k.scale);  // carries the sign of ZK_MAXIMIZE
        load_grad<G>(s, k, i, g);
        load_value<T>(s, k, i, p);
        if constexpr (Rule::STATES >= 1) load_state<S>(s.exp_avg, i, a);
        if constexpr (Rule::STATES >= 2) load_state<S>(s.exp_avg_sq, i, b);
        for (int j = 0; j < Q; ++j) g[j] = mul(g[j], scale);
    }

    template <bool NANS>
    static ZK_INLINE void store_plain(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q],
                                      const F (&a)[Q], const F (&b)[Q]) {
        if constexpr (Rule::STATES >= 1) store_state<S, NANS>(s.exp_avg, i, a);
        if constexpr (Rule::STATES >= 2) store_state<S, NANS>(s.exp_avg_sq, i, b);
        store_published<T, O, NANS>(s, k, i, p);
    }

#if defined(ZK_LIFT)
    // A step with a NaN or an infinity in it, or with denormals that could not be lifted, from memory.
    static __attribute__((noinline)) void rare_step(const zk_segment &s, const Scalars &k, const Rule &rule,
                                                    int64_t i) {
        F g[Q], p[Q], a[Q], b[Q];
        load_plain(s, k, i, g, p, a, b);
        rule.template apply<S>(g, p, a, b);
        store_plain<true>(s, k, i, p, a, b);
    }

    // What is left of a tile with denormals.
    static __attribute__((noinline)) void rare_steps(const zk_segment &s, const Scalars &k, const Rule &rule,
                                                     int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += STEP) {
            F g[Q], p[Q], a[Q], b[Q];
            load_plain(s, k, i, g, p, a, b);
            if (rule.apply_rare(g, p, a, b)) {
                store_plain<false>(s, k, i, p, a, b);
            } else {
                rare_step(s, k, rule, i);
            }
        }
    }

    static ZK_INLINE void lifting_tile(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base) {
        for (int64_t i = base; i < base + TILE; i += STEP) {
            F g[Q], p[Q], a[Q], b[Q];
            load_plain(s, k, i, g, p, a, b);
            if (__builtin_expect(any_below_normal(a, b), 0)) return rare_steps(s, k, rule, i, base + TILE);
            if (__builtin_expect(rule.apply_usual(g, p, a, b), 1)) {
                store_plain<false>(s, k, i, p, a, b);
            } else {
                rare_step(s, k, rule, i);
            }
        }
    }
#endif

    static ZK_INLINE void plain_tile(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base) {
#if defined(ZK_LIFT)
        if constexpr (Rule::STATES == 2) return lifting_tile(s, k, rule, base);
#endif
        for (int64_t i = base; i < base + TILE; i += STEP) {
            F g[Q], p[Q], a[Q] = {}, b[Q] = {};
            load_plain(s, k, i, g, p, a, b);
            rule.template apply<S>(g, p, a, b);
            store_plain<true>(s, k, i, p, a, b);
        }
    }

    // What an updated block waits in until its scales are known.
    struct Pending {
        F averages[VECTORS], roots[VECTORS];
        float average_scale, root_scale;
        bool in_units;  // the averages and their scale
    };

    // First the averages of the whole block, then its parameters: the square roots of one half are done when the other
    // half is loaded.
    static ZK_INLINE void update_block(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base,
                                       Pending &to) {
        constexpr int GROUPS = VECTORS / Q;
        const int64_t block = base / ZK_BLOCK;
#if defined(ZK_LIFT)
        if (LiftedBlock<Update>::fits(s, k, rule, base) && LiftedBlock<Update>::update(s, k, rule, base, to)) return;
#endif
        to.in_units = false;
        const typename Rule::Block constants =
            rule.block(s.exp_avg_scale[block], Rule::STATES >= 2 ? s.exp_avg_sq_scale[block] : 0.0f);
        F a[GROUPS][Q], root[GROUPS][Q], most_average = set1(0.0f), most_root = set1(0.0f);
#pragma GCC unroll 2
        for (int v = 0; v < GROUPS; ++v) {
            const int64_t i = base + v * STEP;
            F g[Q];
            load_grad<G>(s, k, i, g);
            if (rule.coupled) {
                F p[Q];
                load_value<T>(s, k, i, p);
                rule.couple(g, p);
            }
            decode_signed(at<int8_t>(s.exp_avg, i), a[v]);
            if constexpr (Rule::STATES >= 2) decode_unsigned(at<uint8_t>(s.exp_avg_sq, i), root[v]);
            rule.coded_averages(constants, g, a[v], root[v]);
        }
#pragma GCC unroll 2
        for (int v = 0; v < GROUPS; ++v) {
            const int64_t i = base + v * STEP;
            F p[Q];
            load_value<T>(s, k, i, p);
            rule.coded_step(p, a[v], root[v]);
            for (int j = 0; j < Q; ++j) {
                to.averages[v * Q + j] = a[v][j];
                most_average = max_bits(most_average, abs(a[v][j]));
                if constexpr (Rule::STATES >= 2) {
                    to.roots[v * Q + j] = root[v][j];
                    most_root = max_bits(most_root, root[v][j]);
                }
            }
            store_params(s, k, i, p);
        }
        to.average_scale = reduce_max(most_average);
        if constexpr (Rule::STATES >= 2) to.root_scale = reduce_max(most_root);
    }

    static ZK_INLINE void encode_block(const zk_segment &s, int64_t base, const Pending &from) {
        const int64_t block = base / ZK_BLOCK;
        const float scale = encode_averages(at<int8_t>(s.exp_avg, base), from.averages, from.average_scale);
        s.exp_avg_scale[block] = scale;
#if defined(ZK_LIFT)
        if (from.in_units) s.exp_avg_scale[block] = scale_of_units(scale);
#endif
        if constexpr (Rule::STATES >= 2)
            s.exp_avg_sq_scale[block] = encode_roots(at<uint8_t>(s.exp_avg_sq, base), from.roots, from.root_scale);
    }

    static void tile(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base) {
        if constexpr (CODED) {
            Pending pending;
            update_block(s, k, rule, base, pending);
            encode_block(s, base, pending);
        } else {
            plain_tile(s, k, rule, base);
        }
    }

    // Whole tiles from begin on; returns where they end. A block's codes are written while the next block is computed:
    // the reduction between the two has a long latency.
    static int64_t whole_tiles(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t begin, int64_t end) {
        int64_t i = begin;
#if defined(ZK_OWN_ORDER)
        if constexpr (Staggered<Rule, G, T, S, O>::EXISTS)
            if (rule.usual) return Staggered<Rule, G, T, S, O>::tiles(s, k, rule, begin, end);
#endif
        if constexpr (CODED) {
            Pending pending[2];
            bool odd = false;
            for (; i + TILE <= end; i += TILE, odd = !odd) {
                prefetch_tile(s, k, i);
                update_block(s, k, rule, i, pending[odd]);
                if (i > begin) encode_block(s, i - TILE, pending[!odd]);
            }
            if (i > begin) encode_block(s, i - TILE, pending[!odd]);
        } else {
            for (; i + TILE <= end; i += TILE) {
                prefetch_tile(s, k, i);
                plain_tile(s, k, rule, i);
            }
        }
        return i;
    }

    static void run(const zk_segment &s, const Scalars &k, int64_t begin, int64_t end) {
        const Rule rule(k);
        const int64_t i = whole_tiles(s, k, rule, begin, end);
        if (i < end) tail(s, k, rule, i, end - i);
        if (O != ZK_NONE && k.stream_out) stream_fence();
    }

    // The last, partial tile runs on padded copies, so that no kernel needs masks and none reads past a buffer.
    static void tail(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base, int64_t n) {
        alignas(64) unsigned char room[7][TILE * 4];
        uint8_t changed[TILE / 8] = {};
        std::memset(room, 0, sizeof room);
        const int target = T == ANY ? static_cast<int>(k.target) : T;
        const int out_bytes = (O == ANY ? static_cast<int>(k.out) : O) == ZK_NONE ? 0 : 2;
        const int64_t block = base / ZK_BLOCK;
        struct Role {
            void *real;
            int width;
            bool read;
        };
        const Role roles[7] = {{const_cast<void *>(s.grad), grad_bytes(k), true},
                               {s.param, target == TO_FP32 ? 0 : 2, true},
                               {s.remainder,
                                target == TO_SPLIT16  ? 2
                                : target == TO_SPLIT8 ? 1
                                                      : 0,
                                true},
                               {s.master, target == TO_FP32 ? 4 : 0, true},
                               {s.exp_avg, Rule::STATES >= 1 ? STATE_BYTES : 0, true},
                               {s.exp_avg_sq, Rule::STATES >= 2 ? STATE_BYTES : 0, true},
                               {s.out, out_bytes, false}};
        for (int r = 0; r < 7; ++r)
            if (roles[r].width && roles[r].read)
                std::memcpy(room[r], at<char>(roles[r].real, base * roles[r].width),
                            static_cast<size_t>(n * roles[r].width));
        zk_segment padded = s;
        padded.grad = room[0];
        padded.param = room[1];
        padded.remainder = room[2];
        padded.master = room[3];
        padded.exp_avg = room[4];
        padded.exp_avg_sq = room[5];
        padded.out = room[6];
        padded.changed = s.changed ? changed : nullptr;
        padded.first = s.first + base;
        if (CODED) padded.exp_avg_scale = s.exp_avg_scale + block;
        if (CODED && Rule::STATES >= 2) padded.exp_avg_sq_scale = s.exp_avg_sq_scale + block;
        tile(padded, k, rule, 0);
        for (int64_t e = 0; s.changed && e < n; e += 8)
            s.changed[(base + e) / 8] |= static_cast<uint8_t>(changed[e / 8] & (n - e < 8 ? (1 << (n - e)) - 1 : 255));
        for (int r = 1; r < 7; ++r)
            if (roles[r].width)
                std::memcpy(at<char>(roles[r].real, base * roles[r].width), room[r],
                            static_cast<size_t>(n * roles[r].width));
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
