// Denormal numbers as whole units of 2^-149, where the set has the verbs for it. Averages whose gradient is 0 decay to
// a few units and stay there for ever, and an Intel core takes some 150 cycles for every product that is denormal, or
// has a denormal factor. As units they are normal numbers, and rounding to whole units is what the hardware would have
// done.
#pragma once

#include "table.h"

namespace zk {
namespace ZK_NS {
namespace {

#if defined(ZK_LIFT)
constexpr uint32_t SIGN_BIT = 0x80000000u, UNIT_23 = 0x4B000000u;  // 2^23

ZK_INLINE F with_sign_of(F magnitude, F of) { return bits_join(magnitude, bits_and(of, SIGN_BIT)); }

// Of what is denormal.
ZK_INLINE F units_of(F x) {
    const F lifted = bits_or(x, UNIT_23);
    return sub(lifted, bits_and(lifted, 0xFF800000u));
}
// Of fewer than 2^23 units.
ZK_INLINE F denormal_of(F units) { return with_sign_of(bits_less(add(abs(units), set1(0x1p23f)), UNIT_23), units); }
// The product of units and a factor from 0 to 1 in magnitude, rounded once: to whole units below 2^23, as usual above.
ZK_INLINE F unit_product(F factor, F units) {
    const F product = mul(factor, units), magnitude = abs(product);
    const F whole = sub(fma(abs(factor), abs(units), set1(0x1p23f)), set1(0x1p23f));
    return choose(below(magnitude, set1(0x1p23f)), with_sign_of(whole, product), product);
}

// The same of fewer than 2^23 units.
ZK_INLINE F small_product(F factor, F units) {
    return with_sign_of(sub(fma(factor, abs(units), set1(0x1p23f)), set1(0x1p23f)), units);
}

// The scale of an int8 block in units, up to 2^-90, and back: denormal or not, by bits alone.
inline float scale_units(float scale) {
    const uint32_t bits = bits_of(scale);
    return bits < 0x00800000u ? static_cast<float>(bits) : float_of(bits + (149u << 23));
}
inline float scale_of_units(float units) {
    return units < 0x1p23f ? float_of(static_cast<uint32_t>(units)) : float_of(bits_of(units) - (149u << 23));
}
#endif

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
