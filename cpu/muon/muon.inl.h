// Muon's element-wise half over spans, in every format and on every set: muon/rule.inl.h says what is computed.
#pragma once

#include "muon/rule.inl.h"
#if defined(ZK_LIFT)
#include "muon/fused.inl.h"
#endif

namespace zk {
namespace ZK_NS {
namespace {

template <int S, int O>
struct Muon {
    using Lanes = SquareLanes<O>;
#if defined(ZK_LIFT)
    using Squares = FusedSquares<O>;
#endif
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

    // `put(i, u)` writes directions. False where they have been written, to `copy` too if they are streamed.
    template <class Put>
    ZK_INLINE static bool update_block(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base,
                                       [[maybe_unused]] char *copy, Coded &to, const Put &put_direction) {
        const float before = s.exp_avg_scale[base / ZK_BLOCK];
        to.in_units = false;
#if defined(ZK_LIFT)
        if (__builtin_expect(bits_of(before) - 1 < bits_of(0x1p-110f), 0) && rule.lifts) {
            small_block(s, k, rule, base, before, copy, to);
            return false;
        }
#endif
        F most = set1(0.0f);
        for (int v = 0; v < VECTORS; v += Q) {
            F g[Q], m[Q], u[Q];
            load_coded(s, k, rule, base + v * W, set1(before), g, m);
            rule.usual(g, m, u);
            put_direction(base + v * W, u);
            for (int j = 0; j < Q; ++j) to.averages[v + j] = m[j];
            for (int j = 0; j < Q; ++j) most = max_bits(most, abs(m[j]));
        }
        to.scale = reduce_max(most);
        return true;
    }
    ZK_INLINE static void update_block(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t base,
                                       char *copy, Coded &to) {
        update_block(s, k, rule, base, copy, to, [&](int64_t i, const F(&u)[Q]) {
            store_direction<true>(s, k, i, copy + (i - base) * OUT_BYTES, u);
        });
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

    // Of 64 elements that are usual; `copy` has room for their direction. Where they are not, another function does it
    // all from memory: averages or directions that are denormal or 0, and NaNs.
    template <int G>
    ZK_INLINE static void fused_step(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t i, char *copy,
                                     const Fixed &f, Squares &squares) {
        constexpr Order ORDER = S == ZK_BF16 && O == ZK_BF16 && G == ZK_BF16 ? Order::alternate : Order::natural;
        F g[Q], m[Q], u[Q];
        load_pairs<ORDER, G>(f, s.grad, i, g);
        load_pairs<ORDER, S>(f, s.exp_avg, i, m);
        for (int j = 0; j < Q; ++j) g[j] = mul(g[j], rule.scale);
        bool usual = !rule.lifts || all_normal<S>(f, at<char>(s.exp_avg, i * STATE_BYTES), m);
        rule.usual(g, m, u);
        if constexpr (O == ZK_F32) usual &= !any_nan(u);  // where m' is one, u is
        I average[Q];
        rounded<S>(f, m, average);
        if constexpr (O == ZK_BF16) {
            I direction[Q];
            rounded<O>(f, u, direction);
            const I first = upper_words_of<ORDER>(f, direction[0], direction[1]),
                    second = upper_words_of<ORDER>(f, direction[2], direction[3]);
            if (__builtin_expect(!(usual && all_usual_words(f, first, second)), 0))
                return rare(s, k, rule, i, copy, squares);
            store_words(s, k, f, i, first, second, squares);
        } else {
            if (__builtin_expect(!usual, 0)) return rare(s, k, rule, i, copy, squares);
            store_values(s, k, i, u, squares);
        }
        if constexpr (S == ZK_BF16) {
            store_512(at<uint16_t>(s.exp_avg, i), upper_words_of<ORDER>(f, average[0], average[1]));
            store_512(at<uint16_t>(s.exp_avg, i + 2 * W), upper_words_of<ORDER>(f, average[2], average[3]));
        } else {
            for (int j = 0; j < Q; ++j) store_512(at<float>(s.exp_avg, i + j * W), average[j]);
        }
    }
    ZK_INLINE static void rare(const zk_segment &s, const Scalars &k, const MuonRule &rule, int64_t i, char *copy,
                               Squares &squares) {
        rare_step(s, k, rule, i, copy);
        add_written(s, k, i, copy, squares);
    }
    // Squares of 64 directions that have been written, whatever they are.
    ZK_INLINE static void add_written(const zk_segment &s, const Scalars &k, int64_t i, const char *copy,
                                      Squares &squares) {
        __m512d sums[8];
        for (int c = 0; c < 8; ++c) sums[c] = squares.sums[c];  // or they would be in memory all the time
        Squares::add_any(k.stream_out ? copy : at<char>(s.out, i * OUT_BYTES), sums);
        for (int c = 0; c < 8; ++c) squares.sums[c] = sums[c];
    }
    ZK_INLINE static void store_words(const zk_segment &s, const Scalars &k, const Fixed &f, int64_t i, I first,
                                      I second, Squares &squares) {
        stream_or_store(at<uint16_t>(s.out, i), first, k.stream_out);
        stream_or_store(at<uint16_t>(s.out, i + 2 * W), second, k.stream_out);
        squares.add(f, first, 0);
        squares.add(f, second, 1);
    }
    ZK_INLINE static void store_values(const zk_segment &s, const Scalars &k, int64_t i, const F (&u)[Q],
                                       Squares &squares) {
        for (int j = 0; j < Q; ++j) stream_or_store(at<float>(s.out, i + j * W), ints(u[j]), k.stream_out);
        squares.add(u);
    }
    ZK_INLINE static void fused_direction(const zk_segment &s, const Scalars &k, const Fixed &f, int64_t i, char *copy,
                                          const F (&u)[Q], Squares &squares) {
        if constexpr (O == ZK_BF16) {
            I words[Q];
            rounded<O>(f, u, words);
            const I first = upper_words_of<Order::natural>(f, words[0], words[1]),
                    second = upper_words_of<Order::natural>(f, words[2], words[3]);
            if (__builtin_expect(all_usual_words(f, first, second), 1))
                return store_words(s, k, f, i, first, second, squares);
        } else {
            if (__builtin_expect(!any_nan(u), 1)) return store_values(s, k, i, u, squares);
        }
        store_direction<true>(s, k, i, copy, u);
        add_written(s, k, i, copy, squares);
    }

    template <int G>
    static __attribute__((noinline)) int64_t fused_tiles(const zk_segment &s, const Scalars &k, const MuonRule &rule,
                                                         int64_t begin, int64_t end, Lanes &lanes) {
        alignas(64) char copy[TILE * 4];
        const Fixed f;
        Squares squares = {};
        int64_t i = begin;
        if constexpr (CODED) {  // a block's codes are written while the next one is computed
            Coded coded[2];
            bool odd = false;
            for (; i + TILE <= end; i += TILE, odd = !odd) {
                for (int64_t j = 0; j < TILE; j += STEP) prefetch_step<G>(s, i + j);
                const bool usual = update_block(s, k, rule, i, copy, coded[odd], [&](int64_t at, const F(&u)[Q]) {
                    fused_direction(s, k, f, at, copy, u, squares);
                });
                if (__builtin_expect(!usual, 0)) {
                    for (int64_t j = 0; j < TILE; j += STEP) add_written(s, k, i + j, copy + j * OUT_BYTES, squares);
                }
                if (i > begin) encode_block(s, i - TILE, coded[!odd]);
            }
            if (i > begin) encode_block(s, i - TILE, coded[!odd]);
        } else {
            for (; i + TILE <= end; i += TILE) {
                for (int64_t j = 0; j < TILE; j += STEP) {
                    prefetch_step<G>(s, i + j);
                    fused_step<G>(s, k, rule, i + j, copy, f, squares);
                }
            }
        }
        const Squares all = squares;  // or they would be in memory all the time
        all.give(lanes);
        return i;
    }
    template <int G>
    ZK_INLINE static void prefetch_step(const zk_segment &s, int64_t i) {
        constexpr int64_t GRAD_BYTES = G == ZK_F32 ? 4 : 2;
        prefetch_twice(at<char>(s.grad, i * GRAD_BYTES), STEP * GRAD_BYTES);
        prefetch_twice(at<char>(s.exp_avg, i * STATE_BYTES), STEP * STATE_BYTES);
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
#if defined(ZK_LIFT)
        if (k.grad == ZK_BF16) return fused_tiles<ZK_BF16>(s, k, rule, begin, end, lanes);
        if (k.grad == ZK_F32) return fused_tiles<ZK_F32>(s, k, rule, begin, end, lanes);
#endif
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
                lanes.template add<true>(k.stream_out ? copy : at<char>(s.out, part * OUT_BYTES), i - part);
            }
            if (i > begin) encode_block(s, i - TILE, coded[!odd]);
        } else {
            while (i + TILE <= end) {
                const int64_t part = i;
                for (; i + TILE <= end && i < part + PART; i += TILE) {
                    prefetch_tile(s, k, i);
                    plain_tile(s, k, rule, i, copy + (i - part) * OUT_BYTES);
                }
                lanes.template add<true>(k.stream_out ? copy : at<char>(s.out, part * OUT_BYTES), i - part);
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
        lanes.template add<true>(out, whole);
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
