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
        for (int j = 0; j < Q; ++j) sign[j] = advance<S>(g[j], m[j]);
        step(p, sign);
    }

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
