// Sum of squares of one chunk in float64: 64 lanes, lane j takes the elements that are j modulo 64, then a fixed tree.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

template <int G>
double sum_of_squares(const void *source, int64_t numel) {
    constexpr int LANES = 64, COUNT = LANES / W;
    D sums[COUNT];
    for (int c = 0; c < COUNT; ++c) sums[c] = dset1(0.0);
    const auto add_step = [&](const void *p) {
        if constexpr (G == ZK_BF16) {
            add_bf16_squares(static_cast<const uint16_t *>(p), sums);
            return;
        }
        for (int c = 0; c < COUNT; c += Q) {
            F x[Q];
            if constexpr (G == ZK_F16) {
                load_f16(at<uint16_t>(p, c * W), x);
            } else {
                for (int j = 0; j < Q; ++j) x[j] = load(at<float>(p, (c + j) * W));
            }
            for (int j = 0; j < Q; ++j) sums[c + j] = add_square(sums[c + j], widen(x[j]));
        }
    };
    constexpr int64_t WIDTH = G == ZK_F32 ? 4 : 2;
    int64_t i = 0;
    for (; i + LANES <= numel; i += LANES) {
        prefetch(at<char>(source, i * WIDTH + 2048));
        if (WIDTH == 4) {
            prefetch(at<char>(source, i * WIDTH + 2112));
            prefetch(at<char>(source, i * WIDTH + 2176));
            prefetch(at<char>(source, i * WIDTH + 2240));
        } else {
            prefetch(at<char>(source, i * WIDTH + 2112));
        }
        add_step(at<char>(source, i * WIDTH));
    }
    if (i < numel) {  // zeros add nothing: a sum of squares is never -0
        alignas(64) char room[LANES * 4] = {};
        std::memcpy(room, at<char>(source, i * WIDTH), static_cast<size_t>((numel - i) * WIDTH));
        add_step(room);
    }
    alignas(64) double lanes[LANES];
    if constexpr (G == ZK_BF16) {
        store_bf16_lanes(lanes, sums);
    } else {
        for (int c = 0; c < COUNT; ++c) dstore(lanes + c * W, sums[c]);
    }
    for (int half = LANES / 2; half >= 1; half /= 2)
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

double sumsq(const void *source, uint32_t dtype, int64_t numel) {
    switch (dtype) {
        case ZK_BF16:
            return sum_of_squares<ZK_BF16>(source, numel);
        case ZK_F16:
            return sum_of_squares<ZK_F16>(source, numel);
        default:
            return sum_of_squares<ZK_F32>(source, numel);
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
