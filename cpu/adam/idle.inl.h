// Adam where nobody uses a tile, as in rows of an embedding that do not occur: the gradient is 0 and exp_avg has
// decayed to a few units of 2^-149, where it stays for ever. Same bits as AdamRule::apply, without a root or a
// quotient.
//
// The quotient is below 2^-100, for its divisor is at least 2^-26, and the parameter feels no more of that than its
// sign and whether it is 0: lr_wd p is a multiple of more than 2^-100 where p is at least `least`, as are the points
// where it would round otherwise. So 2^-126 stands for it. It is 0 up to half a unit; with a divisor of at most 1, only
// where exp_avg is 0.
#pragma once

#include <cmath>

#include "adam/adam.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr uint32_t MOST_SQUARE = (127 + 118) << 23;

struct IdleRule {
    static constexpr uint32_t SIGN = 0x80000000u, NORMAL = 0x00800000u, LIFT = 0x4B000000u;
    bool exists;
    uint32_t small_square, least;  // bits
    F w1, w2, lr_wd, slope, floor;

    explicit IdleRule(const AdamRule &rule, const Scalars &k)
        : w1(rule.weight1), w2(rule.w2), lr_wd(rule.lr_wd), slope(rule.root_slope), floor(rule.root_floor) {
        const float root = 0.5f / k.root_slope, decay = std::fabs(k.lr_wd);
        small_square = bits_of(root < 0x1p59f ? root * root * 0.5f : 0x1p117f);  // keeps the divisor below 1
        least = bits_of(decay == 0.0f ? 0x1p-50f : std::fmax(0x1p-50f, 0x1p-52f / decay));
        exists = rule.usual && k.root_floor >= 0x1p-26f && k.root_floor <= 0.5f && small_square > 2 * NORMAL &&
                 k.root_slope <= k.root_floor * 0x1p40f && least < bits_of(0x1p100f);
    }

    // Lane by lane: x | LIFT is 2^23 and as many units, and rounds to whole units as a denormal does.
    ZK_INLINE F square(F v) const {
        const M low = _mm512_cmplt_epu32_mask(ints(v), _mm512_set1_epi32(NORMAL));
        const I lift = _mm512_set1_epi32(static_cast<int>(LIFT));
        const F lifted = floats(_mm512_mask_or_epi32(ints(v), low, ints(v), lift));
        const F units = sub(lifted, floats(_mm512_maskz_mov_epi32(low, lift)));
        const F next = fnma(w2, units, lifted);
        return floats(_mm512_mask_sub_epi32(ints(next), low, ints(next), lift));
    }
    ZK_INLINE F average(F m) const {  // -0 becomes 0
        const M some = _mm512_test_epi32_mask(ints(m), _mm512_set1_epi32(0x7FFFFFFF));
        const F lifted = bits_or(m, LIFT);
        const F next = fnma(w1, sub(lifted, bits_and(lifted, 0xFF800000u)), lifted);
        return floats(_mm512_maskz_sub_epi32(some, ints(next), _mm512_set1_epi32(static_cast<int>(LIFT))));
    }
    // The lanes whose quotient is not 0. A denormal v adds nothing to the divisor that shows in 2^-14 of it.
    template <bool SMALL>
    ZK_INLINE M divides(F m, F v, M &doubtful) const {
        if constexpr (SMALL) return _mm512_test_epi32_mask(ints(m), _mm512_set1_epi32(0x7FFFFFFF));
        const M normal = _mm512_cmpge_epu32_mask(ints(v), _mm512_set1_epi32(NORMAL));
        const F root = mul(v, _mm512_maskz_rsqrt14_ps(normal, v));
        const F divisor = fma(floats(_mm512_maskz_mov_epi32(normal, ints(root))), slope, floor);
        const F units = sub(bits_or(abs(m), LIFT), set1(0x1p23f)), excess = fms(units, set1(2.0f), divisor);
        doubtful |= _mm512_cmp_ps_mask(abs(excess), mul(divisor, set1(0x1p-12f)), _CMP_LE_OQ);
        return _mm512_cmp_ps_mask(excess, set1(0.0f), _CMP_GT_OQ);
    }
    // `doubtful`: p is too small for this, or not finite.
    template <bool SMALL>
    ZK_INLINE F value(F p, F m, F v, M &doubtful) const {
        const M some = divides<SMALL>(m, v, doubtful);
        const F quotient =
            floats(_mm512_maskz_or_epi32(some, ints(bits_and(m, SIGN)), _mm512_set1_epi32(static_cast<int>(NORMAL))));
        const I size = _mm512_sub_epi32(ints(bits_and(p, ~SIGN)), _mm512_set1_epi32(static_cast<int>(least)));
        const M outside = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(static_cast<int>(0x7F7FFFFFu - least)));
        doubtful |= _mm512_mask_test_epi32_mask(outside, _mm512_or_epi32(ints(p), ints(m)), _mm512_set1_epi32(-1));
        return sub(p, fma(lr_wd, p, quotient));
    }
};

// Over the streams of a staggered rule.
template <class Of, int S>
struct IdleTiles {
    const Of &of;
    const IdleRule rule;

    enum Kind { OTHER, SMALL, LARGE };  // by exp_avg_sq

    // All gradients are 0, exp_avg is denormal or 0, exp_avg_sq too or far enough above that to stay normal.
    ZK_INLINE Kind kind(int64_t base) const {
        constexpr uint32_t EXPONENTS = S == ZK_BF16 ? 0x7F807F80u : 0x7F800000u;
        const I exponents = _mm512_set1_epi32(static_cast<int>(EXPONENTS));
        // most others show it in their first elements
        if (!rule.exists || !of.streams.are_zero(of.streams.grad_bits(base)) ||
            _mm512_test_epi32_mask(load_512(at<char>(of.s.exp_avg, base * (S == ZK_BF16 ? 2 : 4))), exponents))
            return OTHER;
        I g = _mm512_setzero_si512(), m = g, v = g, above = _mm512_set1_epi32(-1);
        for (int64_t i = base; i < base + TILE; i += 2 * W) g = _mm512_or_si512(g, of.streams.grad_bits(i));
        if (!of.streams.are_zero(g)) return OTHER;
        if constexpr (S == ZK_BF16) {
            const I normal = _mm512_set1_epi16(0x0080);
            for (int64_t i = base; i < base + TILE; i += 2 * W) {
                const I square = load_512(at<uint16_t>(of.s.exp_avg_sq, i));
                m = _mm512_or_si512(m, load_512(at<uint16_t>(of.s.exp_avg, i)));
                v = _mm512_max_epu16(v, square);
                above = _mm512_min_epu16(above, _mm512_sub_epi16(square, normal));
            }
            const auto beyond = [v](uint32_t most) {
                return _mm512_cmpgt_epu16_mask(v, _mm512_set1_epi16(static_cast<int16_t>((most >> 16) - 1)));
            };
            if (_mm512_test_epi16_mask(m, exponents) | _mm512_cmplt_epu16_mask(above, normal) | beyond(MOST_SQUARE))
                return OTHER;
            return beyond(rule.small_square) ? LARGE : SMALL;
        }
        const I normal = _mm512_set1_epi32(0x00800000);
        for (int64_t i = base; i < base + TILE; i += W) {
            const I square = load_512(at<float>(of.s.exp_avg_sq, i));
            m = _mm512_or_si512(m, load_512(at<float>(of.s.exp_avg, i)));
            v = _mm512_max_epu32(v, square);
            above = _mm512_min_epu32(above, _mm512_sub_epi32(square, normal));
        }
        const auto beyond = [v](uint32_t most) {
            return _mm512_cmpgt_epu32_mask(v, _mm512_set1_epi32(static_cast<int>(most)));
        };
        if (_mm512_test_epi32_mask(m, exponents) | _mm512_cmplt_epu32_mask(above, normal) | beyond(MOST_SQUARE))
            return OTHER;
        return beyond(rule.small_square) ? LARGE : SMALL;
    }

    struct Three {
        Two m, v, p;
    };
    template <Kind KIND>
    ZK_INLINE Three pair(int64_t i, M &doubtful) const {
        Two m = of.states(of.s.exp_avg, i), v = of.states(of.s.exp_avg_sq, i), p = of.streams.values(i);
        m = {rule.average(m.a), rule.average(m.b)};
        v = {rule.square(v.a), rule.square(v.b)};
        p = {rule.template value<KIND == SMALL>(p.a, m.a, v.a, doubtful),
             rule.template value<KIND == SMALL>(p.b, m.b, v.b, doubtful)};
        return {m, v, p};
    }
    ZK_INLINE void store_pair(int64_t i, const Three &x) const {
        of.store_states(of.s.exp_avg, i, x.m);
        of.store_states(of.s.exp_avg_sq, i, x.v);
        of.streams.store_values(i, x.p);
    }

    template <Kind KIND>
    ZK_INLINE void tile(int64_t base) const {
        static_assert(STEP == 4 * W);
        Of::Plain::prefetch_tile(of.s, of.k, base);
        for (int64_t i = base; i < base + TILE; i += STEP) {
            M doubtful = 0;
            const Three first = pair<KIND>(i, doubtful), second = pair<KIND>(i + 2 * W, doubtful);
            if (__builtin_expect(doubtful != 0, 0)) {
                Of::Plain::rare_steps(of.s, of.k, of.r, i, i + STEP);
                continue;
            }
            of.streams.template marking<STEP>(i, [&]() __attribute__((always_inline)) {
                store_pair(i, first);
                store_pair(i + 2 * W, second);
            });
        }
    }

    // Idle tiles from i on; returns where they end.
    int64_t tiles(int64_t i, int64_t end) const {
        for (; i + TILE <= end; i += TILE) {
            const Kind found = kind(i);
            if (found == OTHER) break;
            found == SMALL ? tile<SMALL>(i) : tile<LARGE>(i);
        }
        return i;
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
