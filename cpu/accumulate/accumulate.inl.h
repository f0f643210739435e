// dst = cast((dst) + scale * s0 + scale * s1 + ...): casts, gradient accumulation and the sum behind a reduce-scatter
// are one loop. The squares of what is written are added up on the way, where somebody wants them.
#pragma once

#include "sumsq/sumsq.inl.h"
#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

template <int K>
inline void load_as(const void *p, int64_t i, F (&x)[Q]) {
    if constexpr (K == ZK_BF16) {
        load_bf16(at<uint16_t>(p, i), x);
    } else if constexpr (K == ZK_F16) {
        load_f16(at<uint16_t>(p, i), x);
    } else {
        for (int j = 0; j < Q; ++j) x[j] = load(at<float>(p, i + j * W));
    }
}

template <int K>
inline void store_as(void *p, int64_t i, const F (&x)[Q], bool streamed) {
    if constexpr (K == ZK_BF16) {
        streamed ? stream_bf16(at<uint16_t>(p, i), x) : store_bf16(at<uint16_t>(p, i), x);
    } else if constexpr (K == ZK_F16) {
        streamed ? stream_f16(at<uint16_t>(p, i), x) : store_f16(at<uint16_t>(p, i), x);
    } else {
        for (int j = 0; j < Q; ++j)
            streamed ? stream(at<float>(p, i + j * W), x[j]) : store(at<float>(p, i + j * W), x[j]);
    }
}

template <int T, int K>
struct Accumulate {
    static constexpr int64_t TO_BYTES = T == ZK_F32 ? 4 : 2, FROM_BYTES = K == ZK_F32 ? 4 : 2;

    ZK_INLINE static void sum_of(const void *dst, const void *const *sources, int64_t n, int64_t i, bool add_to,
                                 F scale, F (&sum)[Q]) {
        F x[Q];
        if (add_to) load_as<T>(dst, i, sum);
        for (int64_t s = 0; s < n; ++s) {
            prefetch(at<char>(sources[s], i * FROM_BYTES + 1024));
            load_as<K>(sources[s], i, x);
            for (int j = 0; j < Q; ++j) x[j] = mul(x[j], scale);
            for (int j = 0; j < Q; ++j) sum[j] = s == 0 && !add_to ? x[j] : add(sum[j], x[j]);
        }
    }

    static void run(void *dst, const void *const *sources, int64_t n, int64_t begin, int64_t end, bool add_to,
                    float scale, bool streamed) {
        const F factor = set1(scale);
        int64_t i = begin;
        for (; i + STEP <= end; i += STEP) {
            F sum[Q] = {};
            sum_of(dst, sources, n, i, add_to, factor, sum);
            store_as<T>(dst, i, sum, streamed);
        }
        for (; i < end; ++i) one(dst, sources, n, i, add_to, scale);
        if (streamed) stream_fence();
    }

    // `begin` is where a chunk of a span begins. A small copy of what is written stays in the first cache for the
    // squares, wherever the result goes.
    static void run_squares(void *dst, const void *const *sources, int64_t n, int64_t begin, int64_t end, bool add_to,
                            float scale, bool streamed, double *sums) {
        using Lanes = SquareLanes<T>;
        constexpr int64_t PART = 1024 / TO_BYTES;
        alignas(64) char copy[1024];
        const F factor = set1(scale);
        for (int64_t i = begin; i < end; ++sums) {
            const int64_t stop = end - i < ZK_SUMSQ_CHUNK ? end : i + ZK_SUMSQ_CHUNK;
            Lanes lanes;
            for (; i + PART <= stop; i += PART) {
                for (int64_t j = 0; j < PART; j += STEP) {
                    F sum[Q] = {};
                    sum_of(dst, sources, n, i + j, add_to, factor, sum);
                    store_as<T>(dst, i + j, sum, streamed);
                    store_as<T>(copy, j, sum, false);
                }
                lanes.template add<true>(copy, PART);
            }
            const int64_t whole = (stop - i) / Lanes::LANES * Lanes::LANES;
            run(dst, sources, n, i, stop, add_to, scale, false);
            lanes.template add<true>(at<char>(dst, i * TO_BYTES), whole);
            *sums = lanes.total(at<char>(dst, (i + whole) * TO_BYTES), stop - i - whole);
            i = stop;
        }
        if (streamed) stream_fence();
    }

    // A tail element in the same order of operations, through a padded vector.
    static void one(void *dst, const void *const *sources, int64_t n, int64_t i, bool add_to, float scale) {
        alignas(64) char to[STEP * 4] = {}, from[STEP * 4] = {};
        if (add_to) std::memcpy(to, at<char>(dst, i * TO_BYTES), TO_BYTES);
        F sum[Q] = {}, x[Q];
        if (add_to) load_as<T>(to, 0, sum);
        for (int64_t s = 0; s < n; ++s) {
            std::memcpy(from, at<char>(sources[s], i * FROM_BYTES), FROM_BYTES);
            load_as<K>(from, 0, x);
            for (int j = 0; j < Q; ++j) x[j] = mul(x[j], set1(scale));
            for (int j = 0; j < Q; ++j) sum[j] = s == 0 && !add_to ? x[j] : add(sum[j], x[j]);
        }
        store_as<T>(to, 0, sum, false);
        std::memcpy(at<char>(dst, i * TO_BYTES), to, TO_BYTES);
    }
};

template <int T, int K>
void accumulate_as(void *dst, const void *const *sources, int64_t n, int64_t begin, int64_t end, bool add_to,
                   float scale, bool streamed, double *sums) {
    if (sums) {
        Accumulate<T, K>::run_squares(dst, sources, n, begin, end, add_to, scale, streamed, sums);
    } else {
        Accumulate<T, K>::run(dst, sources, n, begin, end, add_to, scale, streamed);
    }
}

using AccumulateFn = void (*)(void *, const void *const *, int64_t, int64_t, int64_t, bool, float, bool, double *);

template <int T>
AccumulateFn accumulate_from(uint32_t dtype) {
    return dtype == ZK_BF16  ? accumulate_as<T, ZK_BF16>
           : dtype == ZK_F16 ? accumulate_as<T, ZK_F16>
                             : accumulate_as<T, ZK_F32>;
}

void accumulate(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t n, uint32_t source_dtype,
                int64_t begin, int64_t end, bool add_to, float scale, bool streamed, double *sums) {
    const AccumulateFn fn = dst_dtype == ZK_BF16  ? accumulate_from<ZK_BF16>(source_dtype)
                            : dst_dtype == ZK_F16 ? accumulate_from<ZK_F16>(source_dtype)
                                                  : accumulate_from<ZK_F32>(source_dtype);
    fn(dst, sources, n, begin, end, add_to, scale, streamed, sums);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
