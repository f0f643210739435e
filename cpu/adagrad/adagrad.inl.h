// Adagrad.
//   sum' = sum + g g      p' = p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(sum') + eps)
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct AdagradRule {
    static constexpr int STATES = 1;
    F eps, step_size, wd;
    D wdd;
    bool coupled;

    explicit AdagradRule(const Scalars &k)
        : eps(set1(k.eps)), step_size(set1(k.step_size)), wd(set1(k.wd)), wdd(dset1(k.wdd)), coupled(k.coupled) {}

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&sum)[Q], F (&)[Q]) const {
#if defined(ZK_LIFT)
        if (__builtin_expect(any_below_normal(sum), 0) && !coupled) return apply_hidden<S>(g, p, sum);
#endif
        for (int j = 0; j < Q; ++j) one<S>(g[j], p[j], sum[j]);
    }

#if defined(ZK_LIFT)
    // A gradient of 0 changes neither sum nor p, whatever the sum is: 1 stands for a denormal one, which is slow.
    template <int S>
    ZK_INLINE void apply_hidden(F (&g)[Q], F (&p)[Q], F (&sum)[Q]) const {
        for (int j = 0; j < Q; ++j) {
            const M hidden = both(is_positive_denormal(sum[j]), equal(g[j], set1(0.0f)));
            F shown = choose(hidden, set1(1.0f), sum[j]);
            one<S>(g[j], p[j], shown);
            sum[j] = choose(hidden, sum[j], shown);
        }
    }
#endif

    template <int S>
    ZK_INLINE void one(F g, F &p, F &sum) const {
        if constexpr (S == ZK_F32) {
            D gd = widen(g);
            if (coupled) gd = dadd(gd, dmul(wdd, widen(p)));
            sum = narrow(dadd(widen(sum), dmul(gd, gd)));
            g = narrow(gd);
        } else {
            if (coupled) g = add(g, mul(wd, p));
            sum = add(sum, mul(g, g));
        }
        p = sub(p, mul(step_size, div(g, add(sqrt(sum), eps))));
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
