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
    bool coupled, first, nesterov, liftable, idles;

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
          nesterov(k.nesterov),
          liftable(!k.first && k.momentum >= 0.0f && k.momentum <= 1.0f && k.lr >= 0.0f && k.lr <= 1.0f &&
                   k.undamped - k.undamped == 0.0f),
          idles(k.undamped >= 0.0f) {}

    template <int S>
    ZK_INLINE void apply(F (&g)[Q], F (&p)[Q], F (&buffer)[Q], F (&)[Q]) const {
#if defined(ZK_LIFT)
        if constexpr (S == ZK_BF16) {
            if (__builtin_expect(any_below_normal_magnitude(buffer), 0) && liftable) {
                if (all_idle(buffer, g, ~0u) && stay(p)) {
                    for (int j = 0; j < Q; ++j)
                        buffer[j] = denormal_of(add(small_product(momentum, units_of(buffer[j])), set1(0.0f)));
                    return;
                }
                for (int j = 0; j < Q; ++j) one_lifted(g[j], p[j], buffer[j]);
                return;
            }
        }
#endif
        for (int j = 0; j < Q; ++j) one<S>(g[j], p[j], buffer[j]);
    }

#if defined(ZK_LIFT)
    // Whether no p is moved by so little.
    ZK_INLINE bool stay(const F (&p)[Q]) const {
        M moved = 0;
        for (int j = 0; j < Q; ++j) moved = either(moved, static_cast<M>(~at_least(abs(p[j]), set1(0x1p-50f))));
        return !coupled && idles && !any(moved);
    }
    // Denormal lanes whose gradient is 0 go by units, and 0 stands for them among the others. Such a step does not move
    // a p that is not tiny.
    ZK_INLINE void one_lifted(F g, F &p, F &buffer) const {
        if (coupled) g = add(g, mul(wd, p));
        const M low = both(both(is_denormal(buffer), equal(g, set1(0.0f))), at_least(abs(p), set1(0x1p-50f)));
        F shown = choose(low, set1(0.0f), buffer), moved = p;
        const F units = add(unit_product(momentum, units_of(buffer)), mul(undamped, g));
        one_uncoupled(g, moved, shown);
        buffer = choose(low, denormal_of(units), shown);
        p = choose(low, p, moved);
    }
#endif

    // bf16 buffers, weight decay in the gradient already.
    ZK_INLINE void one_uncoupled(F g, F &p, F &buffer) const {
        buffer = first ? g : add(mul(momentum, buffer), mul(undamped, g));
        const F direction = nesterov ? add(g, mul(momentum, buffer)) : buffer;
        p = sub(p, mul(lr, direction));
    }

    template <int S>
    ZK_INLINE void one(F g, F &p, F &buffer) const {
        if constexpr (S == ZK_BF16) {
            if (coupled) g = add(g, mul(wd, p));
            one_uncoupled(g, p, buffer);
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
