// Conversions of one value at a time, shared by the scalar set and by the rare paths of the others. Everything has
// internal linkage: each instruction set compiles its own copy, so none can leak into another.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "stochastic.h"

namespace {

constexpr uint32_t NAN_BITS =
    0xFFC00000u;  // what every NaN becomes before it is narrowed, so that the upper half alone is a NaN

inline uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}

inline float float_of(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

inline uint32_t canonical_bits(float x) { return x == x ? bits_of(x) : NAN_BITS; }

inline uint16_t bf16_nearest_even(float x) {
    const uint32_t b = canonical_bits(x);
    return static_cast<uint16_t>((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}

inline uint16_t bf16_stochastic(float x, uint32_t random) {
    return static_cast<uint16_t>((canonical_bits(x) + (random >> 16)) >> 16);
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31u) return float_of(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent == 0u) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t half_nearest_even(float x) {
    const uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14 the step is 2^-24: adding 0.5 lets the fp32 adder round to it
        const uint32_t shifted = bits_of(float_of(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (shifted - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline uint16_t half_stochastic(float x, uint32_t random) {
    const uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude < 0x38800000u) {
        const float steps = float_of(magnitude) * 0x1p24f;  // exact, below 1024
        const uint32_t whole = static_cast<uint32_t>(steps);
        const float draw = static_cast<float>(random >> 8) * 0x1p-24f;
        return static_cast<uint16_t>(sign | (whole + (draw < steps - static_cast<float>(whole) ? 1u : 0u)));
    }
    const uint32_t rounded = magnitude + (random >> 19);
    if (rounded >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline void split16(float x, uint16_t &hi, int16_t &lo) {
    const uint32_t b = canonical_bits(x);
    hi = static_cast<uint16_t>((b + 0x8000u) >> 16);
    lo = static_cast<int16_t>(b & 0xFFFFu);
}

inline float join16(uint16_t hi, int16_t lo) {
    return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

inline void split8(float x, uint16_t &hi, int8_t &lo) {
    const uint32_t b = canonical_bits(x);
    const uint32_t r = b + 0x7Fu + ((b >> 8) & 1u);
    hi = static_cast<uint16_t>((r + 0x8000u) >> 16);
    lo = static_cast<int8_t>((r >> 8) & 0xFFu);
}

inline float join8(uint16_t hi, int8_t lo) { return join16(hi, static_cast<int16_t>(lo * 256)); }

}  // namespace
