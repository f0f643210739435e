// The int8 block codecs and the split masters. Their arithmetic is a fixed sequence of IEEE operations, so codes agree
// on every set.
#pragma once

#include <cstring>

#include "table.h"

namespace zk {
namespace ZK_NS {
namespace {

// scale = the largest magnitude; code = rint(254 (m / (|m| + scale))), one rounding for product and rint, which is 127
// * 2x / (1 + |x|) with x = m / scale.
ZK_INLINE float encode_averages(int8_t *codes, const F *values, float scale) {
    const bool huge = scale > 0x1p126f;  // |m| + scale would overflow: the codes of m * 2^-64 are the same
    const F largest = set1(huge ? scale * 0x1p-64f : scale), shrink = set1(0x1p-64f);
    if (scale == 0.0f) {
        std::memset(codes, 0, ZK_BLOCK);
        return 0.0f;
    }
    for (int v = 0; v < ZK_BLOCK / W; v += Q) {
        F q[Q];
        for (int j = 0; j < Q; ++j) {
            const F m = huge ? mul(values[v + j], shrink) : values[v + j];
            q[j] = div(m, add(abs(m), largest));
        }
        encode_signed(codes + v * W, q, set1(254.0f));
    }
    return scale;
}

// Linear codes of sqrt(exp_avg_sq): rint(255 s / scale), at least 1 where s is positive, else a step could divide by
// zero.
ZK_INLINE float encode_roots(uint8_t *codes, const F *roots, float scale) {
    if (scale == 0.0f) {
        std::memset(codes, 0, ZK_BLOCK);
        return 0.0f;
    }
    const F inverse = set1(255.0f / scale);
    for (int v = 0; v < ZK_BLOCK / W; v += Q) {
        F group[Q];
        for (int j = 0; j < Q; ++j) group[j] = roots[v + j];
        encode_unsigned(codes + v * W, group, inverse);
    }
    return scale;
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
