// Adam's rare values, where the set has the verbs for it. Same bits as `AdamRule::apply`, or false, and nothing of use.
//
// Where g is 0, as in a row of an embedding that is not used, averages decay until they are denormal and stick at a few
// units of 2^-149 for ever, and denormal operands cost some processors hundreds of cycles. Those lanes are lifted:
// x | LIFT is 2^23 and as many units, and rounds to whole units as a denormal does. The quotient is in units too. From
// 2^23 units on it is a normal number; below, a p that is not tiny feels no more than its sign and whether it is 0, so
// 2^-126 stands for it: either the decay of p is so small that neither moves p, or its last bit is above both.
#pragma once

#include "adam/adam.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// What is not rare: no NaN in p (where m or v is one, p is) and no infinite v.
ZK_INLINE bool AdamRule::apply_usual(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const {
    F gap[Q], root[Q];
    if (coupled) {
        for (int j = 0; j < Q; ++j) g[j] = fma(wd, p[j], g[j]);
    }
    if (square_rules) {
        for (int j = 0; j < Q; ++j) v[j] = fma(mul(w2, g[j]), g[j], mul(beta2, v[j]));
    } else {
        for (int j = 0; j < Q; ++j) gap[j] = fms(g[j], g[j], v[j]);
        for (int j = 0; j < Q; ++j) v[j] = fma(w2, gap[j], v[j]);
    }
    for (int j = 0; j < Q; ++j) root[j] = sqrt(v[j]);
    const bool infinite = any_above(v, FLT_MAX);
    move(g, m);
    step(p, m, root);
    return !(infinite | any_nan(p));
}

ZK_INLINE bool AdamRule::apply_lifted(const F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const {
    constexpr uint32_t LIFT = 0x4B000000u, SIGN_AND_EXPONENT = 0xFF800000u, SIGN = 0x80000000u, UNIT = 149u << 23;
    const F nothing = set1(0.0f), half = set1(0.5f);
    M low[Q], unsure = 0;
    F next[Q], root[Q], gap[Q];
    for (int j = 0; j < Q; ++j) low[j] = both(is_positive_denormal(v[j]), equal(g[j], nothing));
    for (int j = 0; j < Q; ++j) next[j] = choose(low[j], bits_or(v[j], LIFT), v[j]);
    for (int j = 0; j < Q; ++j) gap[j] = choose(low[j], sub(next[j], set1(0x1p23f)), v[j]);
    for (int j = 0; j < Q; ++j) gap[j] = fms(g[j], g[j], gap[j]);
    for (int j = 0; j < Q; ++j) next[j] = fma(w2, gap[j], next[j]);
    for (int j = 0; j < Q; ++j) v[j] = choose(low[j], bits_less(next[j], LIFT), next[j]);
    // The root of n units is sqrt(2 n) 2^-75.
    for (int j = 0; j < Q; ++j) root[j] = choose(low[j], fms(next[j], set1(2.0f), set1(0x1p24f)), next[j]);
    for (int j = 0; j < Q; ++j) root[j] = sqrt(root[j]);
    for (int j = 0; j < Q; ++j) root[j] = choose(low[j], mul(root[j], set1(0x1p-75f)), root[j]);
    for (int j = 0; j < Q; ++j) low[j] = both(is_denormal(m[j]), equal(g[j], nothing));
    for (int j = 0; j < Q; ++j) next[j] = choose(low[j], bits_or(m[j], LIFT), m[j]);
    for (int j = 0; j < Q; ++j) gap[j] = choose(low[j], bits_and(next[j], SIGN_AND_EXPONENT), g[j]);
    for (int j = 0; j < Q; ++j) gap[j] = sub(gap[j], next[j]);
    for (int j = 0; j < Q; ++j) next[j] = fma(weight1, gap[j], next[j]);
    for (int j = 0; j < Q; ++j) m[j] = choose(low[j], bits_less(next[j], LIFT), next[j]);
    for (int j = 0; j < Q; ++j) gap[j] = bits_and(next[j], SIGN_AND_EXPONENT);
    for (int j = 0; j < Q; ++j) next[j] = choose(low[j], sub(next[j], gap[j]), next[j]);
    for (int j = 0; j < Q; ++j) root[j] = fma(root[j], root_slope, root_floor);
    for (int j = 0; j < Q; ++j) root[j] = div(next[j], root[j]);
    for (int j = 0; j < Q; ++j) gap[j] = abs(root[j]);
    for (int j = 0; j < Q; ++j) next[j] = max_signed_bits(bits_less(gap[j], UNIT), 0x00800000u);
    for (int j = 0; j < Q; ++j) next[j] = bits_join(next[j], bits_and(root[j], SIGN));
    for (int j = 0; j < Q; ++j) next[j] = choose(at_least(half, gap[j]), nothing, next[j]);
    for (int j = 0; j < Q; ++j) {
        const M doubtful = either(equal_or_nan(half, gap[j]), below(abs(p[j]), set1(0x1p-50f)));
        unsure = either(unsure, both(low[j], doubtful));
    }
    for (int j = 0; j < Q; ++j) root[j] = choose(low[j], next[j], root[j]);
    for (int j = 0; j < Q; ++j) p[j] = sub(p[j], fma(lr_wd, p[j], root[j]));
    return !(any(unsure) | any_nan(p) | any_above(v, FLT_MAX));
}

// Where something is below 2^-126, if only a 0.
ZK_INLINE bool AdamRule::apply_rare(F (&g)[Q], F (&p)[Q], F (&m)[Q], F (&v)[Q]) const {
    M denormal = 0;
    for (int j = 0; j < Q; ++j) denormal = either(denormal, either(is_denormal(m[j]), is_denormal(v[j])));
    if (!any(denormal)) return apply_usual(g, p, m, v);
    return liftable && apply_lifted(g, p, m, v);
}

// A block of int8 averages in units (update/lifted_block.inl.h). Squares are in units too where the roots are small,
// and the root of n units is sqrt(2 n) 2^-75.
ZK_INLINE void AdamRule::lifted_averages(const LiftedScales &c, F (&m)[Q], F (&root)[Q]) const {
    const F decay1 = unit_product(set1(beta1), c.average_units), decay2 = mul(c.root_decay, set1(root_beta2));
    for (int j = 0; j < Q; ++j) m[j] = unit_product(m[j], decay1);
    for (int j = 0; j < Q; ++j) root[j] = mul(root[j], decay2);
    if (c.root_lift == 1.0f) {
        for (int j = 0; j < Q; ++j) root[j] = sqrt(mul(root[j], root[j]));
        return;
    }
    for (int j = 0; j < Q; ++j) {
        const F half = mul(root[j], set1(0.5f)), square = mul(half, root[j]);
        const F whole = sub(fma(half, root[j], set1(0x1p23f)), set1(0x1p23f));
        root[j] = choose(below(square, set1(0x1p23f)), whole, square);
    }
    for (int j = 0; j < Q; ++j) root[j] = mul(sqrt(mul(root[j], set1(2.0f))), set1(0x1p-75f));
}

// What is subtracted is below 2^-78 where the quotient's divisor is no smaller than 2^-40, and so moves no p that is
// not tiny.
ZK_INLINE bool AdamRule::lifted_step(F (&p)[Q], const F (&root)[Q]) const {
    M unsure = 0;
    for (int j = 0; j < Q; ++j) {
        const M divisible = at_least(fma(root[j], root_slope, root_floor), set1(0x1p-30f));
        unsure = either(unsure, static_cast<M>(~divisible));
        p[j] = fnma(lr_wd, p[j], p[j]);
        unsure = either(unsure, below(abs(p[j]), set1(0x1p-50f)));
        unsure = either(unsure, equal_or_nan(p[j], set1(INFINITY)));
    }
    return !any(unsure);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
