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
        for (int j = 0; j < Q; ++j) one<S>(g[j], p[j], sum[j]);
    }

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
