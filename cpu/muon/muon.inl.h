// Muon's element-wise half: the average moves, the direction is written for the iteration that follows, and its squares
// are added up on the way. No parameter is touched.
//   m' = m + (1 - momentum) (g - m)      u = nesterov ? g + momentum (m' - g) : m'
// Both are torch.lerp's: one fused multiply-add from the nearer end. u is of m' before it is rounded to a lossy state.
#pragma once

#include "accumulate/accumulate.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct MuonRule {
    F scale, weight, rest;  // of the average, and of the direction, each from its nearer end
    bool from_grad, nesterov, near_grad, lifts;

    explicit MuonRule(const Scalars &k)
        : scale(set1(k.scale)),
          weight(set1(k.w1 < 0.5f ? k.w1 : -k.momentum)),
          rest(set1(k.momentum < 0.5f ? k.momentum : -(1.0f - k.momentum))),
          from_grad(k.w1 >= 0.5f),
          nesterov(k.nesterov),
          near_grad(k.momentum < 0.5f),
          lifts(!from_grad && !near_grad) {}

    // g is scaled; m becomes m'.
    ZK_INLINE void usual(const F (&g)[Q], F (&m)[Q], F (&u)[Q]) const {
        F gap[Q];
        for (int j = 0; j < Q; ++j) gap[j] = sub(g[j], m[j]);
        if (from_grad) {
            for (int j = 0; j < Q; ++j) m[j] = g[j];
        }
        for (int j = 0; j < Q; ++j) m[j] = fma(weight, gap[j], m[j]);
        for (int j = 0; j < Q; ++j) u[j] = m[j];
        if (!nesterov) return;
        for (int j = 0; j < Q; ++j) gap[j] = sub(m[j], g[j]);
        if (near_grad) {
            for (int j = 0; j < Q; ++j) u[j] = g[j];
        }
        for (int j = 0; j < Q; ++j) u[j] = fma(rest, gap[j], u[j]);
    }

#if defined(ZK_LIFT)
    // x - weight x in whole units, of fewer than 2^23: where it is rounded, the last bit is one unit.
    ZK_INLINE static F decayed(F minus_weight, F units) {
        const F magnitude = abs(units), lifted = add(magnitude, set1(0x1p23f));
        return with_sign_of(sub(fma(minus_weight, magnitude, lifted), set1(0x1p23f)), units);
    }
    ZK_INLINE void decay(F &m_units, F &u_units) const {
        m_units = decayed(sub(set1(0.0f), weight), m_units);
        u_units = nesterov ? decayed(rest, m_units) : m_units;
    }
    // Denormal lanes whose gradient is 0 go by units, and 0 stands for them among the others.
    ZK_INLINE void lifted(const F (&g)[Q], F (&m)[Q], F (&u)[Q]) const {
        M low[Q];
        F units[Q], direction[Q];
        for (int j = 0; j < Q; ++j) {
            low[j] = both(is_denormal(m[j]), equal(g[j], set1(0.0f)));
            units[j] = choose(low[j], units_of(m[j]), set1(0.0f));
            m[j] = choose(low[j], set1(0.0f), m[j]);
            decay(units[j], direction[j]);
        }
        usual(g, m, u);
        for (int j = 0; j < Q; ++j) {
            m[j] = choose(low[j], denormal_of(units[j]), m[j]);
            u[j] = choose(low[j], denormal_of(direction[j]), u[j]);
        }
    }
#endif
};

template <int S, int O>
struct Muon {
    using Lanes = SquareLanes<O>;
    static constexpr bool CODED = S == ZK_INT8;
    static constexpr int STATE_BYTES = S == ZK_F32 ? 4 : S == ZK_BF16 ? 2 : 1, OUT_BYTES = O == ZK_F32 ? 4 : 2;
    static constexpr int64_t PART = 1024 / OUT_BYTES;  // elements whose squares are added at a time, of whole tiles

    // A block of averages until its codes are written: they need its scale.
    struct Coded {
        F averages[VECTORS];
        float scale;
        bool in_units;
    };

    ZK_INLINE static void load_scaled(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t i,
                                      F (&g)[Q]) {
        load_grad<ANY>(s, k, i, g);
        for (int j = 0; j < Q; ++j) g[j] = mul(g[j], rule.scale);
    }

    template <bool NANS>
    ZK_INLINE static void put(void *to, int64_t i, const F (&u)[Q], bool streamed) {
        if constexpr (O == ZK_BF16) {
            streamed ? stream_bf16<NANS>(at<uint16_t>(to, i), u) : store_bf16<NANS>(at<uint16_t>(to, i), u);
        } else {
            store_as<O>(to, i, u, streamed);
        }
    }
    // What goes past the caches leaves a copy in the first one, for the squares.
    template <bool NANS>
    ZK_INLINE static void store_direction(const zk_segment &s, const Scalars &k, int64_t i, void *copy,
                                          const F (&u)[Q]) {
        if (k.stream_out) put<NANS>(copy, 0, u, false);
        put<NANS>(s.out, i, u, k.stream_out);
    }

    ZK_INLINE static void load_step(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t i, F (&g)[Q],
                                    F (&m)[Q]) {
        load_scaled(s, k, rule, i, g);
        load_state<S>(s.exp_avg, i, m);
    }
    template <bool NANS>
    ZK_INLINE static void store_step(const zk_segment &s, const Scalars &k, int64_t i, void *copy, const F (&m)[Q],
                                     const F (&u)[Q]) {
        store_state<S, NANS>(s.exp_avg, i, m);
        store_direction<NANS>(s, k, i, copy, u);
    }

    ZK_INLINE static void plain_tile(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base,
                                     char *copy) {
        for (int64_t i = base; i < base + TILE; i += STEP, copy += STEP * OUT_BYTES) {
            F g[Q], m[Q], u[Q];
            load_step(s, k, rule, i, g, m);
#if defined(ZK_LIFT)
            if (__builtin_expect(any_below_normal_magnitude(m), 0) && rule.lifts) {
                rare_step(s, k, rule, i, copy);
                continue;
            }
            rule.usual(g, m, u);
            if (__builtin_expect(any_nan(u), 0)) {  // where m' is one, u is
                rare_step(s, k, rule, i, copy);
            } else {
                store_step<false>(s, k, i, copy, m, u);
            }
#else
            rule.usual(g, m, u);
            store_step<true>(s, k, i, copy, m, u);
#endif
        }
    }

    ZK_INLINE static void load_coded(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t i, F scale,
                                     F (&g)[Q], F (&m)[Q]) {
        load_scaled(s, k, rule, i, g);
        decode_signed(at<int8_t>(s.exp_avg, i), m);
        for (int j = 0; j < Q; ++j) m[j] = mul(m[j], scale);
    }

    ZK_INLINE static void update_block(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base,
                                       char *copy, Coded &to) {
        const float before = s.exp_avg_scale[base / ZK_BLOCK];
        to.in_units = false;
#if defined(ZK_LIFT)
        if (__builtin_expect(bits_of(before) - 1 < bits_of(0x1p-110f), 0) && rule.lifts)
            return small_block(s, k, rule, base, before, copy, to);
#endif
        F most = set1(0.0f);
        for (int v = 0; v < VECTORS; v += Q, copy += STEP * OUT_BYTES) {
            F g[Q], m[Q], u[Q];
            load_coded(s, k, rule, base + v * W, set1(before), g, m);
            rule.usual(g, m, u);
            store_direction<true>(s, k, base + v * W, copy, u);
            for (int j = 0; j < Q; ++j) to.averages[v + j] = m[j];
            for (int j = 0; j < Q; ++j) most = max_bits(most, abs(m[j]));
        }
        to.scale = reduce_max(most);
    }

#if defined(ZK_LIFT)
    // A step with denormal averages, or zeros, or with a NaN, from memory.
    static __attribute__((noinline)) void rare_step(const zk_segment &s, const Scalars &k, const MuonRule &rule,
                                                    int64_t i, char *copy) {
        F g[Q], m[Q], u[Q];
        load_step(s, k, rule, i, g, m);
        rule.lifts ? rule.lifted(g, m, u) : rule.usual(g, m, u);
        store_step<true>(s, k, i, copy, m, u);
    }

    // All streams are of words: even and odd elements are a shift and a mask away from being fp32, without permutes.
    static constexpr bool ALTERNATES = S == ZK_BF16 && O == ZK_BF16;
    ZK_INLINE static void widen_alternate(const uint16_t *p, F (&x)[Q]) {
        for (int j = 0; j < Q; j += 2) {
            const I pair = load_512(p + j * W);
            x[j] = floats(_mm512_slli_epi32(pair, 16));
            x[j + 1] = floats(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
        }
    }
    // To nearest even, no NaNs.
    ZK_INLINE static I nudged(F x) {
        const I bits = ints(x);
        return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)),
                                _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)));
    }
    ZK_INLINE static I joined_words(F even, F odd) {
        return _mm512_mask_mov_epi16(_mm512_srli_epi32(nudged(even), 16), 0xAAAAAAAAu, nudged(odd));
    }
    ZK_INLINE static void alternate_tile(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base,
                                         char *copy) {
        for (int64_t i = base; i < base + TILE; i += STEP, copy += STEP * OUT_BYTES) {
            F g[Q], m[Q], u[Q];
            widen_alternate(at<uint16_t>(s.grad, i), g);
            widen_alternate(at<uint16_t>(s.exp_avg, i), m);
            for (int j = 0; j < Q; ++j) g[j] = mul(g[j], rule.scale);
            const bool below = any_below_normal_magnitude(m) && rule.lifts;
            rule.usual(g, m, u);
            if (__builtin_expect(below || any_nan(u), 0)) {
                rare_step(s, k, rule, i, copy);
                continue;
            }
            for (int j = 0; j < Q; j += 2) {
                const I direction = joined_words(u[j], u[j + 1]);
                store_512(at<uint16_t>(s.exp_avg, i + j * W), joined_words(m[j], m[j + 1]));
                if (k.stream_out) {
                    store_512(copy + j * W * OUT_BYTES, direction);
                    _mm512_stream_si512(reinterpret_cast<I *>(at<uint16_t>(s.out, i + j * W)), direction);
                } else {
                    store_512(at<uint16_t>(s.out, i + j * W), direction);
                }
            }
        }
    }

    static bool is_idle(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base) {
        M moves = 0;
        for (int64_t i = base; i < base + TILE; i += STEP) {
            F g[Q];
            load_scaled(s, k, rule, i, g);
            for (int j = 0; j < Q; ++j) moves = either(moves, static_cast<M>(~equal(g[j], set1(0.0f))));
        }
        return !any(moves);
    }
    // A block whose averages may be denormal. Where its scale is, and all gradients are 0, all of it is fewer than 2^23
    // units; a -0 becomes 0.
    static __attribute__((noinline)) void small_block(const zk_segment &s, const Scalars &k, const MuonRule &rule,
                                                      int64_t base, float before, char *copy, Coded &to) {
        to.in_units = bits_of(before) < 0x00800000u && is_idle(s, k, rule, base);
        F most = set1(0.0f);
        for (int v = 0; v < VECTORS; v += Q, copy += STEP * OUT_BYTES) {
            F g[Q], m[Q], u[Q];
            if (to.in_units) {
                const F scale = set1(scale_units(before));
                decode_signed(at<int8_t>(s.exp_avg, base + v * W), m);
                for (int j = 0; j < Q; ++j) {
                    m[j] = add(with_sign_of(small_product(abs(m[j]), scale), m[j]), set1(0.0f));
                    rule.decay(m[j], u[j]);
                    u[j] = denormal_of(u[j]);
                }
            } else {
                load_coded(s, k, rule, base + v * W, set1(before), g, m);
                rule.lifted(g, m, u);
            }
            store_direction<true>(s, k, base + v * W, copy, u);
            for (int j = 0; j < Q; ++j) to.averages[v + j] = m[j];
            for (int j = 0; j < Q; ++j) most = max_bits(most, abs(m[j]));
        }
        to.scale = reduce_max(most);
    }
#endif

    ZK_INLINE static void encode_block(const zk_segment &s, int64_t base, const Coded &from) {
        const float scale = encode_averages(at<int8_t>(s.exp_avg, base), from.averages, from.scale);
        s.exp_avg_scale[base / ZK_BLOCK] = scale;
#if defined(ZK_LIFT)
        if (from.in_units) s.exp_avg_scale[base / ZK_BLOCK] = scale_of_units(scale);
#endif
    }

    static ZK_INLINE void prefetch_tile(const zk_segment &s, const Scalars &k, int64_t i) {
        const int width = k.grad == ZK_F32 ? 4 : 2;
        prefetch_span(s.grad, i * width, TILE * width, Lanes::AHEAD_BYTES);
        prefetch_span(s.exp_avg, i * STATE_BYTES, TILE * STATE_BYTES, Lanes::AHEAD_BYTES);
    }

    // Whole tiles, and the sums of their squares. A block's codes are written while the next one is computed.
    static int64_t whole_tiles(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t begin, int64_t end,
                               Lanes &lanes) {
        alignas(64) char copy[PART * OUT_BYTES];
        int64_t i = begin;
        if constexpr (CODED) {
            Coded coded[2];
            bool odd = false;
            while (i + TILE <= end) {
                const int64_t part = i;
                for (; i + TILE <= end && i < part + PART; i += TILE, odd = !odd) {
                    prefetch_tile(s, k, i);
                    update_block(s, k, rule, i, copy + (i - part) * OUT_BYTES, coded[odd]);
                    if (i > begin) encode_block(s, i - TILE, coded[!odd]);
                }
                lanes.add(k.stream_out ? copy : at<char>(s.out, part * OUT_BYTES), i - part);
            }
            if (i > begin) encode_block(s, i - TILE, coded[!odd]);
        } else {
            while (i + TILE <= end) {
                const int64_t part = i;
                for (; i + TILE <= end && i < part + PART; i += TILE) {
                    prefetch_tile(s, k, i);
#if defined(ZK_LIFT)
                    if (ALTERNATES && k.grad == ZK_BF16) {
                        alternate_tile(s, k, rule, i, copy + (i - part) * OUT_BYTES);
                        continue;
                    }
#endif
                    plain_tile(s, k, rule, i, copy + (i - part) * OUT_BYTES);
                }
                lanes.add(k.stream_out ? copy : at<char>(s.out, part * OUT_BYTES), i - part);
            }
        }
        return i;
    }

    // `begin` is where a chunk begins.
    static void run(const zk_segment &s, const Scalars &k, int64_t begin, int64_t end) {
        const MuonRule rule(k);
        double *sums = static_cast<double *>(s.exp_avg_sq) + begin / ZK_SUMSQ_CHUNK;
        for (int64_t i = begin; i < end; ++sums) {
            const int64_t stop = end - i < ZK_SUMSQ_CHUNK ? end : i + ZK_SUMSQ_CHUNK;
            Lanes lanes;
            i = whole_tiles(s, k, rule, i, stop, lanes);
            if (i < stop) {
                tail(s, k, rule, i, stop - i, lanes, sums);
            } else {
                *sums = lanes.total(nullptr, 0);
            }
            i = stop;
        }
        if (k.stream_out) stream_fence();
    }

    // The last, partial tile, on padded copies.
    static void tail(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base, int64_t n, Lanes &lanes,
                     double *sum) {
        alignas(64) char grad[TILE * 4] = {}, average[TILE * 4] = {}, out[TILE * 4];
        const int64_t width = k.grad == ZK_F32 ? 4 : 2;
        std::memcpy(grad, at<char>(s.grad, base * width), static_cast<size_t>(n * width));
        std::memcpy(average, at<char>(s.exp_avg, base * STATE_BYTES), static_cast<size_t>(n * STATE_BYTES));
        zk_segment padded = s;
        padded.grad = grad;
        padded.exp_avg = average;
        padded.out = out;
        Scalars kept = k;
        kept.stream_out = false;
        if constexpr (CODED) {
            padded.exp_avg_scale = s.exp_avg_scale + base / ZK_BLOCK;
            Coded coded;
            update_block(padded, kept, rule, 0, out, coded);
            encode_block(padded, 0, coded);
        } else {
            plain_tile(padded, kept, rule, 0, out);
        }
        std::memcpy(at<char>(s.exp_avg, base * STATE_BYTES), average, static_cast<size_t>(n * STATE_BYTES));
        std::memcpy(at<char>(s.out, base * OUT_BYTES), out, static_cast<size_t>(n * OUT_BYTES));
        const int64_t whole = n / Lanes::LANES * Lanes::LANES;
        lanes.add(out, whole);
        *sum = lanes.total(out + whole * OUT_BYTES, n - whole);
    }
};

template <int S>
UpdateFn muon_into(uint32_t out) {
    return out == ZK_F32 ? Muon<S, ZK_F32>::run : out == ZK_BF16 ? Muon<S, ZK_BF16>::run : nullptr;
}

UpdateFn muon(const zk_group &g) {
    return g.state == ZK_F32    ? muon_into<ZK_F32>(g.out)
           : g.state == ZK_BF16 ? muon_into<ZK_BF16>(g.out)
           : g.state == ZK_INT8 ? muon_into<ZK_INT8>(g.out)
                                : nullptr;
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
