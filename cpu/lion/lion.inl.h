// Lion.
//   p' = p - (lr wd p + lr sign(m + (1 - beta1) (g - m)))      m' = m + (1 - beta2) (g - m)
// fp32 states: in float64, rounded once. The sign is taken of the unrounded value.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct LionRule {
    static constexpr int STATES = 1;
    F w1, w2, lr, lr_wd, scale;
    D w1d, w2d, lift;

    // 2^126 keeps what is nonzero in float64 nonzero in fp32, and overflow keeps its sign.
    explicit LionRule(const Scalars &k)
        : w1(set1(k.w1)),
          w2(set1(k.w2)),
          lr(set1(k.lr)),
          lr_wd(set1(k.lr_wd)),
          scale(set1(k.scale)),
          w1d(dset1(k.w1d)),
          w2d(dset1(k.w2d)),
          lift(dset1(0x1p126)) {}

    static constexpr bool coupled = false;

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&)[Q]) const {
        F sign[Q];
#if defined(ZK_LIFT)
        if constexpr (S == ZK_BF16) {
            if (__builtin_expect(any_below_normal_magnitude(m), 0)) {
                if (all_idle(m, g, ~SIGN_BIT)) {
                    for (int j = 0; j < Q; ++j) sign[j] = advance_idle(m[j]);
                } else {
                    for (int j = 0; j < Q; ++j) sign[j] = advance_lifted(g[j], m[j]);
                }
                return step(p, sign);
            }
        }
#endif
        for (int j = 0; j < Q; ++j) sign[j] = advance<S>(g[j], m[j]);
        step(p, sign);
    }

#if defined(ZK_LIFT)
    // The same of averages in units, whose gradient is 0.
    ZK_INLINE F advance_units(F &units) const {
        const F old = units;
        units = sub(old, unit_product(w2, old));
        return sign_of(sub(old, unit_product(w1, old)));
    }
    // Where all lanes are like that: -0 becomes 0, as it does in `advance`.
    ZK_INLINE F advance_idle(F &m) const {
        const F old = units_of(m);
        m = denormal_of(sub(old, small_product(w2, old)));
        return sign_of(sub(old, small_product(w1, old)));
    }
    // Denormal lanes whose gradient is 0 go by units, and 0 stands for them among the others.
    ZK_INLINE F advance_lifted(F g, F &m) const {
        const M low = both(is_denormal(m), equal(g, set1(0.0f)));
        F shown = choose(low, set1(0.0f), m), units = units_of(m);
        const F sign = advance<ZK_BF16>(g, shown), low_sign = advance_units(units);
        m = choose(low, denormal_of(units), shown);
        return choose(low, low_sign, sign);
    }
    // A block of int8 averages in units.
    static constexpr bool LIFTS_BLOCKS = true;
    ZK_INLINE void lifted_averages(const LiftedScales &c, F (&m)[Q], F (&sign)[Q]) const {
        for (int j = 0; j < Q; ++j) m[j] = unit_product(m[j], c.average_units);
        for (int j = 0; j < Q; ++j) sign[j] = advance_units(m[j]);
    }
    ZK_INLINE bool lifted_step(F (&p)[Q], const F (&sign)[Q]) const {
        step(p, sign);
        return true;
    }
#endif

    // m becomes m'; returns the sign of the direction.
    template <int S>
    ZK_INLINE F advance(F g, F &m) const {
        if constexpr (S == ZK_F32) {
            const D md = widen(m), difference = dsub(widen(g), md);
            m = narrow(dadd(md, dmul(w2d, difference)));
            return sign_of(narrow(dmul(lift, dadd(md, dmul(w1d, difference)))));
        } else {
            const F old = m, difference = sub(g, m);
            m = add(old, mul(w2, difference));
            return sign_of(add(old, mul(w1, difference)));
        }
    }

    ZK_INLINE void step(F (&p)[Q], const F (&sign)[Q]) const {
        for (int j = 0; j < Q; ++j) p[j] = sub(p[j], add(mul(lr_wd, p[j]), mul(lr, sign[j])));
    }

    struct Block {
        F exp_avg_scale;
    };
    Block block(float exp_avg_scale, float) const { return {set1(exp_avg_scale)}; }

    ZK_INLINE void couple(F (&)[Q], const F (&)[Q]) const {}

    ZK_INLINE void coded_averages(const Block &c, F (&g)[Q], F (&m)[Q], F (&sign)[Q]) const {
        for (int j = 0; j < Q; ++j) m[j] = mul(m[j], c.exp_avg_scale);
        for (int j = 0; j < Q; ++j) sign[j] = advance<ZK_INT8>(mul(g[j], scale), m[j]);
    }

    ZK_INLINE void coded_step(F (&p)[Q], const F (&)[Q], const F (&sign)[Q]) const { step(p, sign); }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
