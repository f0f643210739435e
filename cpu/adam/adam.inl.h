// Adam and AdamW.
//   m' = m + (1 - beta1) (g - m)      v' = beta2 v + (1 - beta2) g g
//   p' = p - (lr wd p + lr / (1 - beta1^t) * m' / (sqrt(v') / sqrt(1 - beta2^t) + eps))
// With fp32 states the two averages are formed in float64 and rounded once, so they are the nearest fp32 to the true
// value; the decay and the step meet before p is touched, so p is rounded once. Compact states are lossy anyway and
// stay in fp32 throughout.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// Loops run over the vectors of a step one operation at a time: dependent operations stand apart, so that their latency
// is hidden.
struct AdamRule {
    static constexpr int STATES = 2;
    F w1, w2, inv_bias2, eps, step_size, lr_wd, wd, scale;
    D w1d, w2d, beta2d, wdd;
    bool coupled;
    F gain1, gain2, root_slope, root_floor;  // int8: see below
    float beta1, root_beta2;

    explicit AdamRule(const Scalars &k)
        : w1(set1(k.w1)),
          w2(set1(k.w2)),
          inv_bias2(set1(k.inv_bias2)),
          eps(set1(k.eps)),
          step_size(set1(k.step_size)),
          lr_wd(set1(k.lr_wd)),
          wd(set1(k.wd)),
          scale(set1(k.scale)),
          w1d(dset1(k.w1d)),
          w2d(dset1(k.w2d)),
          beta2d(dset1(k.beta2d)),
          wdd(dset1(k.wdd)),
          coupled(k.coupled),
          gain1(set1(k.coupled ? k.w1 : k.w1 * k.scale)),
          gain2(set1(k.coupled ? k.root_w2 : k.root_w2 * k.scale)),
          root_slope(set1(k.root_slope)),
          root_floor(set1(k.root_floor)),
          beta1(k.beta1),
          root_beta2(k.root_beta2) {}

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const {
        if constexpr (S == ZK_F32) {
            D gd[Q], md[Q];
            for (int j = 0; j < Q; ++j) gd[j] = widen(g[j]);
            if (coupled) {
                for (int j = 0; j < Q; ++j) gd[j] = dadd(gd[j], dmul(wdd, widen(p[j])));
            }
            for (int j = 0; j < Q; ++j) v[j] = narrow(dadd(dmul(beta2d, widen(v[j])), dmul(w2d, dmul(gd[j], gd[j]))));
            for (int j = 0; j < Q; ++j) md[j] = widen(m[j]);
            for (int j = 0; j < Q; ++j) m[j] = narrow(dadd(md[j], dmul(w1d, dsub(gd[j], md[j]))));
        } else {
            if (coupled) {
                for (int j = 0; j < Q; ++j) g[j] = add(g[j], mul(wd, p[j]));
            }
            for (int j = 0; j < Q; ++j) v[j] = add(v[j], mul(w2, sub(mul(g[j], g[j]), v[j])));
            for (int j = 0; j < Q; ++j) m[j] = add(m[j], mul(w1, sub(g[j], m[j])));
        }
        F denominator[Q];
        for (int j = 0; j < Q; ++j) denominator[j] = add(mul(sqrt(v[j]), inv_bias2), eps);
        for (int j = 0; j < Q; ++j) p[j] = sub(p[j], add(mul(lr_wd, p[j]), mul(step_size, div(m[j], denominator[j]))));
    }

    // int8 is bound by instructions, not by memory. The block scales and the loss scale are folded into factors,
    // products and sums are fused, exp_avg_sq exists only as root^2, and the step size is divided into the denominator
    // beforehand. Still one fixed sequence, but for the reciprocal, which only the parameter sees.
    struct Block {
        F decay1, decay2;
    };
    Block block(float exp_avg_scale, float root_scale) const {
        return {set1(beta1 * exp_avg_scale), set1(root_scale / 255.0f * root_beta2)};
    }

    ZK_INLINE void couple(F (&g)[Q], const F (&p)[Q]) const {
        for (int j = 0; j < Q; ++j) g[j] = fma(wd, p[j], mul(g[j], scale));
    }

    ZK_INLINE void coded_averages(const Block &c, F (&g)[Q], F (&m)[Q], F (&root)[Q]) const {
        F fresh[Q];
        for (int j = 0; j < Q; ++j) fresh[j] = mul(gain2, g[j]);
        for (int j = 0; j < Q; ++j) root[j] = mul(root[j], c.decay2);
        for (int j = 0; j < Q; ++j) fresh[j] = mul(fresh[j], fresh[j]);
        for (int j = 0; j < Q; ++j) root[j] = fma(root[j], root[j], fresh[j]);
        for (int j = 0; j < Q; ++j) root[j] = sqrt(root[j]);
        for (int j = 0; j < Q; ++j) g[j] = mul(gain1, g[j]);
        for (int j = 0; j < Q; ++j) m[j] = fma(m[j], c.decay1, g[j]);
    }

    ZK_INLINE void coded_step(F (&p)[Q], const F (&m)[Q], const F (&root)[Q]) const {
        F r[Q];
        for (int j = 0; j < Q; ++j) r[j] = fma(root[j], root_slope, root_floor);
        for (int j = 0; j < Q; ++j) p[j] = fnma(lr_wd, p[j], p[j]);
        for (int j = 0; j < Q; ++j) r[j] = reciprocal(r[j]);
        for (int j = 0; j < Q; ++j) p[j] = fnma(m[j], r[j], p[j]);
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
