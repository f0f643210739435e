// Adam and AdamW.
//   m' = m + (1 - beta1) (g - m)      v' = v + (1 - beta2) (g g - v)
//   p' = p - (lr wd p + m' / (sqrt(v') slope + floor)),
//   slope = (1 - beta1^t) / (lr sqrt(1 - beta2^t)), floor = eps (1 - beta1^t) / lr
// Multiply-adds are fused by name, on every set. exp_avg then has the bits of torch's vectorised kernel; a rounded
// product would put it further from the truth where g and m nearly cancel, and float64, which would help as well, costs
// as many cycles again as the whole step. exp_avg_sq and p are closer to the truth than torch's: the first moves by a
// small fraction of an exact gap, and the decay and the step of p meet before p is touched, so p is rounded once.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// Loops run over the vectors of a step one operation at a time: dependent operations stand apart, so that their latency
// is hidden.
struct AdamRule {
    static constexpr int STATES = 2;
    F root_slope, root_floor, lr_wd, wd, scale;
    // exp_avg moves by weight1 from the nearer of its two ends, as torch.lerp does: from the gradient where beta1 <
    // 0.5.
    F weight1, w2, beta2;
    bool from_grad, square_rules, coupled, liftable, usual;
    F gain1, gain2;  // int8: see below
    float beta1, root_beta2;

    explicit AdamRule(const Scalars &k)
        : root_slope(set1(k.root_slope)),
          root_floor(set1(k.root_floor)),
          lr_wd(set1(k.lr_wd)),
          wd(set1(k.wd)),
          scale(set1(k.scale)),
          weight1(set1(k.w1 < 0.5f ? k.w1 : -k.beta1)),
          w2(set1(k.w2)),
          beta2(set1(k.beta2)),
          from_grad(k.w1 >= 0.5f),
          square_rules(k.w2 >= 0.5f),
          coupled(k.coupled),
          liftable(!from_grad && !square_rules && !coupled && k.root_floor > 0x1p-100f),
          usual(!from_grad && !square_rules && !coupled && k.scale < 0x1p20f && k.scale > -0x1p20f),
          gain1(set1(k.coupled ? k.w1 : k.w1 * k.scale)),
          gain2(set1(k.coupled ? k.root_w2 : k.root_w2 * k.scale)),
          beta1(k.beta1),
          root_beta2(k.root_beta2) {}

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const {
        F gap[Q], root[Q];
        if (coupled) {
            for (int j = 0; j < Q; ++j) g[j] = fma(wd, p[j], g[j]);
        }
        if (square_rules) {
            for (int j = 0; j < Q; ++j) v[j] = fma(mul(w2, g[j]), g[j], mul(beta2, v[j]));
        } else {
            for (int j = 0; j < Q; ++j) gap[j] = fms(g[j], g[j], v[j]);
            for (int j = 0; j < Q; ++j) gap[j] = at_least_lowest(gap[j]);  // an infinite v stays infinite
            for (int j = 0; j < Q; ++j) root[j] = v[j];
            for (int j = 0; j < Q; ++j) v[j] = fma(w2, gap[j], v[j]);
            if (any_infinite(gap)) {  // g g alone is too large, (1 - beta2) g g may not be
                for (int j = 0; j < Q; ++j)
                    v[j] = where_infinite(gap[j], fma(mul(w2, g[j]), g[j], mul(beta2, root[j])), v[j]);
            }
        }
        for (int j = 0; j < Q; ++j) root[j] = sqrt(v[j]);
        move(g, m);
        step(p, m, root);
    }

    ZK_INLINE void move(const F (&g)[Q], F (&m)[Q]) const {
        F gap[Q];
        for (int j = 0; j < Q; ++j) gap[j] = sub(g[j], m[j]);
        if (from_grad) {
            for (int j = 0; j < Q; ++j) m[j] = g[j];
        }
        for (int j = 0; j < Q; ++j) m[j] = fma(weight1, gap[j], m[j]);
    }

    ZK_INLINE void step(F (&p)[Q], const F (&m)[Q], F (&root)[Q]) const {
        for (int j = 0; j < Q; ++j) root[j] = fma(root[j], root_slope, root_floor);
        for (int j = 0; j < Q; ++j) root[j] = div(m[j], root[j]);
        for (int j = 0; j < Q; ++j) p[j] = sub(p[j], fma(lr_wd, p[j], root[j]));
    }

#if defined(ZK_LIFT)  // adam/lifted.inl.h
    bool apply_usual(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const;
    bool apply_rare(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const;
    bool apply_lifted(const F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const;
    static constexpr bool LIFTS_BLOCKS = true;
    void lifted_averages(const LiftedScales &c, F (&m)[Q], F (&root)[Q]) const;
    bool lifted_step(F (&p)[Q], const F (&root)[Q]) const;
#endif

    // int8 is bound by instructions, not by memory. The block scales and the loss scale are folded into factors,
    // products and sums are fused, and exp_avg_sq exists only as root^2. Still one fixed sequence, but for the
    // reciprocal, which only the parameter sees.
    struct Block {
        F decay1, decay2;
    };
    // A scale is infinite where a gradient's square was: then every code above 0 stands for infinity, and 0 for 0.
    Block block(float exp_avg_scale, float root_scale) const {
        const float decay2 = root_scale / 255.0f * root_beta2;
        return {set1(beta1 * exp_avg_scale), set1(decay2 > FLT_MAX ? FLT_MAX : decay2)};
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

#if defined(ZK_LIFT)
#include "adam/lifted.inl.h"
#endif
#if defined(ZK_STAGGERED)
#include "adam/staggered.inl.h"
#endif
#if defined(ZK_IN_LANES)
#include "adam/in_lanes_int8.inl.h"
#endif
