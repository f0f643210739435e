// SGD with momentum, dampening and Nesterov's form, as torch defines them.
//   b' = momentum b + (1 - dampening) g (the gradient itself at first)      p' = p - lr (nesterov ? g + momentum b' :
//   b')
// fp32 buffers, or none: in float64, rounded once.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct SgdRule {
    static constexpr int STATES = 1;
    F wd, lr, momentum, undamped;
    D wdd, lrd, momentumd, undampedd;
    bool coupled, first, nesterov;

    explicit SgdRule(const Scalars &k)
        : wd(set1(k.wd)),
          lr(set1(k.lr)),
          momentum(set1(k.momentum)),
          undamped(set1(k.undamped)),
          wdd(dset1(k.wdd)),
          lrd(dset1(k.lrd)),
          momentumd(dset1(k.momentumd)),
          undampedd(dset1(k.undampedd)),
          coupled(k.coupled),
          first(k.first),
          nesterov(k.nesterov) {}

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&buffer)[Q], F (&)[Q]) const {
        for (int j = 0; j < Q; ++j) one<S>(g[j], p[j], buffer[j]);
    }

    template <int S>
    ZK_INLINE void one(F g, F &p, F &buffer) const {
        if constexpr (S == ZK_BF16) {
            if (coupled) g = add(g, mul(wd, p));
            buffer = first ? g : add(mul(momentum, buffer), mul(undamped, g));
            const F direction = nesterov ? add(g, mul(momentum, buffer)) : buffer;
            p = sub(p, mul(lr, direction));
        } else {
            D gd = widen(g), direction = gd;
            if (coupled) gd = direction = dadd(gd, dmul(wdd, widen(p)));
            if constexpr (S == ZK_F32) {
                buffer = narrow(first ? gd : dadd(dmul(momentumd, widen(buffer)), dmul(undampedd, gd)));
                direction = nesterov ? dadd(gd, dmul(momentumd, widen(buffer))) : widen(buffer);
            }
            p = narrow(dsub(widen(p), dmul(lrd, direction)));
        }
    }
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
