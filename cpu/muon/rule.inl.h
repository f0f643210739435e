// Muon's element-wise half: the average moves, the direction is written for the iteration that follows, and its squares
// are added up on the way. No parameter is touched.
//   m' = m + (1 - momentum) (g - m)      u = nesterov ? g + momentum (m' - g) : m'
// Both are torch.lerp's: one fused multiply-add from the nearer end. u is of m' before it is rounded to a lossy state.
#pragma once

#include "accumulate/accumulate.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

struct MuonRule {
    F scale, weight, rest;  // of the average, and of the direction, each from its nearer end
    bool from_grad, nesterov, near_grad, lifts;

    explicit MuonRule(const Scalars &k)
        : scale(set1(k.scale)),
          weight(set1(k.w1 < 0.5f ? k.w1 : -k.momentum)),
          rest(set1(k.momentum < 0.5f ? k.momentum : -(1.0f - k.momentum))),
          from_grad(k.w1 >= 0.5f),
          nesterov(k.nesterov),
          near_grad(k.momentum < 0.5f),
          lifts(!from_grad && !near_grad) {}

    // g is scaled; m becomes m'.
    ZK_INLINE void usual(const F (&g)[Q], F (&m)[Q], F (&u)[Q]) const {
        F gap[Q];
        for (int j = 0; j < Q; ++j) gap[j] = sub(g[j], m[j]);
        if (from_grad) {
            for (int j = 0; j < Q; ++j) m[j] = g[j];
        }
        for (int j = 0; j < Q; ++j) m[j] = fma(weight, gap[j], m[j]);
        for (int j = 0; j < Q; ++j) u[j] = m[j];
        if (!nesterov) return;
        for (int j = 0; j < Q; ++j) gap[j] = sub(m[j], g[j]);
        if (near_grad) {
            for (int j = 0; j < Q; ++j) u[j] = g[j];
        }
        for (int j = 0; j < Q; ++j) u[j] = fma(rest, gap[j], u[j]);
    }

#if defined(ZK_LIFT)
    // x - weight x in whole units, of fewer than 2^23: where it is rounded, the last bit is one unit.
    ZK_INLINE static F decayed(F minus_weight, F units) {
        const F magnitude = abs(units), lifted = add(magnitude, set1(0x1p23f));
        return with_sign_of(sub(fma(minus_weight, magnitude, lifted), set1(0x1p23f)), units);
    }
    ZK_INLINE void decay(F &m_units, F &u_units) const {
        m_units = decayed(sub(set1(0.0f), weight), m_units);
        u_units = nesterov ? decayed(rest, m_units) : m_units;
    }
    // Denormal lanes whose gradient is 0 go by units, and 0 stands for them among the others.
    ZK_INLINE void lifted(const F (&g)[Q], F (&m)[Q], F (&u)[Q]) const {
        M low[Q];
        F units[Q], direction[Q];
        for (int j = 0; j < Q; ++j) {
            low[j] = both(is_denormal(m[j]), equal(g[j], set1(0.0f)));
            units[j] = choose(low[j], units_of(m[j]), set1(0.0f));
            m[j] = choose(low[j], set1(0.0f), m[j]);
            decay(units[j], direction[j]);
        }
        usual(g, m, u);
        for (int j = 0; j < Q; ++j) {
            m[j] = choose(low[j], denormal_of(units[j]), m[j]);
            u[j] = choose(low[j], denormal_of(direction[j]), u[j]);
        }
    }
#endif
};

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
