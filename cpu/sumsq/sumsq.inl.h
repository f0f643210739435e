// Sums of squares of chunks in float64: 64 lanes, lane j takes the elements that are j modulo 64, then a fixed tree.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

template <int G>
struct SquareLanes {
    static constexpr int LANES = 64, COUNT = LANES / W;
    static constexpr int64_t WIDTH = G == ZK_F32 ? 4 : 2;
    static constexpr int64_t AHEAD_BYTES = 2048;
    D sums[COUNT];

    SquareLanes() {
        for (int c = 0; c < COUNT; ++c) sums[c] = dset1(0.0);
    }

    ZK_INLINE void add_step(const void *p) {
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
    }
    // A multiple of LANES elements, from memory, or as they have just been written. The sums are in registers
    // meanwhile, and in memory else.
    template <bool IN_CACHE = false>
    ZK_INLINE void add(const void *p, int64_t numel) {
        SquareLanes local = *this;
        for (int64_t i = 0; i < numel; i += LANES) {
            if constexpr (!IN_CACHE) prefetch_span(p, i * WIDTH, LANES * WIDTH, AHEAD_BYTES);
            local.add_step(at<char>(p, i * WIDTH));
        }
        *this = local;
    }
    double total(const void *rest, int64_t numel) {
        if (numel) {  // zeros add nothing: a sum of squares is never -0
            alignas(64) char room[LANES * 4] = {};
            std::memcpy(room, rest, static_cast<size_t>(numel * WIDTH));
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
};

// Whole chunks are taken side by side, a part of each in turn: a core that only reads waits for memory, and of one
// stream the hardware asks for fewer lines at once than of several.
template <int G>
void sums_of_squares(const void *source, int64_t numel, double *sums) {
    using Lanes = SquareLanes<G>;
    constexpr int64_t CHUNK = ZK_SUMSQ_CHUNK, PART = 1024 / Lanes::WIDTH;
    constexpr int SIDE = 4;
    for (; numel >= SIDE * CHUNK; numel -= SIDE * CHUNK, sums += SIDE) {
        Lanes lanes[SIDE];
        for (int64_t i = 0; i < CHUNK; i += PART)
            for (int s = 0; s < SIDE; ++s) lanes[s].add(at<char>(source, (s * CHUNK + i) * Lanes::WIDTH), PART);
        for (int s = 0; s < SIDE; ++s) sums[s] = lanes[s].total(nullptr, 0);
        source = at<char>(source, SIDE * CHUNK * Lanes::WIDTH);
    }
    for (; numel > 0; numel -= CHUNK, ++sums) {
        const int64_t some = numel < CHUNK ? numel : CHUNK, whole = some / Lanes::LANES * Lanes::LANES;
        Lanes lanes;
        lanes.add(source, whole);
        *sums = lanes.total(at<char>(source, whole * Lanes::WIDTH), some - whole);
        source = at<char>(source, some * Lanes::WIDTH);
    }
}

void sumsq(const void *source, uint32_t dtype, int64_t numel, double *sums) {
    switch (dtype) {
        case ZK_BF16:
            return sums_of_squares<ZK_BF16>(source, numel, sums);
        case ZK_F16:
            return sums_of_squares<ZK_F16>(source, numel, sums);
        default:
            return sums_of_squares<ZK_F32>(source, numel, sums);
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
