// Loading and storing what a step touches, in every format: gradients, values, the published copy, averages.
//
// Formats are template parameters where they are worth a kernel of their own and ANY where they are not; both run this
// code.
#pragma once

#include <cstring>

#include "codec/codec.inl.h"
#include "table.h"

namespace zk {
namespace ZK_NS {
namespace {

constexpr int ANY = -1;
constexpr int64_t STEP = W * Q;  // elements taken together

template <class T>
T *at(void *p, int64_t i) {
    return static_cast<T *>(p) + i;
}
template <class T>
const T *at(const void *p, int64_t i) {
    return static_cast<const T *>(p) + i;
}

template <int G>
ZK_INLINE void load_grad(const zk_segment &s, const Scalars &k, int64_t i, F (&g)[Q]) {
    const int kind = G == ANY ? static_cast<int>(k.grad) : G;
    if (kind == ZK_BF16) {
        load_bf16(at<uint16_t>(s.grad, i), g);
    } else if (kind == ZK_F16) {
        load_f16(at<uint16_t>(s.grad, i), g);
    } else {
        for (int j = 0; j < Q; ++j) g[j] = load(at<float>(s.grad, i + j * W));
    }
}

template <int T>
ZK_INLINE void load_value(const zk_segment &s, const Scalars &k, int64_t i, F (&p)[Q]) {
    const int kind = T == ANY ? static_cast<int>(k.target) : T;
    switch (kind) {
        case TO_FP32:
            for (int j = 0; j < Q; ++j) p[j] = load(at<float>(s.master, i + j * W));
            break;
        case TO_SPLIT16:
            load_split16(at<uint16_t>(s.param, i), at<int16_t>(s.remainder, i), p);
            break;
        case TO_SPLIT8:
            load_split8(at<uint16_t>(s.param, i), at<int8_t>(s.remainder, i), p);
            break;
        case TO_BF16:
            load_bf16(at<uint16_t>(s.param, i), p);
            break;
        default:
            load_f16(at<uint16_t>(s.param, i), p);
            break;
    }
}

// Rounds stochastically a value at a time: the draws cost more than the conversion, and nobody waits for them.
inline void store_stochastic(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q], bool half) {
    alignas(64) float x[W * Q];
    for (int j = 0; j < Q; ++j) store(x + j * W, p[j]);
    const uint64_t mixed = stochastic_key(k.seed_mix, s.key, k.step);
    uint16_t *to = at<uint16_t>(s.param, i);
    for (int e = 0; e < W * Q; ++e) {
        const uint32_t random = stochastic_bits(mixed, static_cast<uint64_t>(s.first + i + e));
        to[e] = half ? half_stochastic(x[e], random) : bf16_stochastic(x[e], random);
    }
}

// NANS: where there may be one. Its upper half alone must be a NaN too, which costs an instruction for each vector.
template <int T, bool NANS>
ZK_INLINE void store_value(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q]) {
    const int kind = T == ANY ? static_cast<int>(k.target) : T;
    switch (kind) {
        case TO_FP32:
            for (int j = 0; j < Q; ++j) store(at<float>(s.master, i + j * W), p[j]);
            break;
        case TO_SPLIT16:
            store_split16<NANS>(at<uint16_t>(s.param, i), at<int16_t>(s.remainder, i), p);
            break;
        case TO_SPLIT8:
            store_split8<NANS>(at<uint16_t>(s.param, i), at<int8_t>(s.remainder, i), p);
            break;
        default:
            if (k.stochastic) {
                store_stochastic(s, k, i, p, kind == TO_F16);
            } else if (kind == TO_BF16) {
                store_bf16<NANS>(at<uint16_t>(s.param, i), p);
            } else {
                store_f16(at<uint16_t>(s.param, i), p);
            }
    }
}

ZK_INLINE int dtype_of(int target) { return target == TO_F16 ? ZK_F16 : target == TO_FP32 ? ZK_NONE : ZK_BF16; }

// The published copy: the parameter itself where it has that dtype, so that both agree, else the value rounded to it.
template <int T, int O, bool NANS>
ZK_INLINE void store_out(const zk_segment &s, const Scalars &k, int64_t i, const F (&p)[Q]) {
    const int kind = O == ANY ? static_cast<int>(k.out) : O;
    if (kind == ZK_NONE) return;
    const int target = T == ANY ? static_cast<int>(k.target) : T;
    uint16_t *to = at<uint16_t>(s.out, i);
    if (kind == dtype_of(target)) {
        std::memcpy(to, at<uint16_t>(s.param, i), sizeof(uint16_t) * STEP);
    } else if (kind == ZK_BF16) {
        k.stream_out ? stream_bf16<NANS>(to, p) : store_bf16<NANS>(to, p);
    } else {
        k.stream_out ? stream_f16(to, p) : store_f16(to, p);
    }
}

template <int S>
ZK_INLINE void load_state(const void *state, int64_t i, F (&x)[Q]) {
    if constexpr (S == ZK_BF16) {
        load_bf16(at<uint16_t>(state, i), x);
    } else if constexpr (S == ZK_F32) {
        for (int j = 0; j < Q; ++j) x[j] = load(at<float>(state, i + j * W));
    }
}

template <int S, bool NANS>
ZK_INLINE void store_state(void *state, int64_t i, const F (&x)[Q]) {
    if constexpr (S == ZK_BF16) {
        store_bf16<NANS>(at<uint16_t>(state, i), x);
    } else if constexpr (S == ZK_F32) {
        for (int j = 0; j < Q; ++j) store(at<float>(state, i + j * W), x[j]);
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
