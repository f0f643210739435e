// The walk over a bucket that both directions share: which tile is whole, which group is, and what is left of them.
//
// A Way says how elements move: tile() and group() for what lies inside one tensor, Ragged for a group where tensors
// begin or end. Each returns the sum that it was given plus the squares of what it wrote.
#ifndef ZEROKERN_WALK_CUH
#define ZEROKERN_WALK_CUH

#include "spans.cuh"

namespace zerokern {

// The address of a bucket's element in the tensor of its row.
__device__ __forceinline__ Address in_tensor(const Address *addresses, const Row *rows, int row, long long element) {
    const int nbytes = rows[row].dtype == kFp32 ? 4 : 2;
    return addresses[row] + static_cast<Address>(element - rows[row].begin) * nbytes;
}

template <class Way>
__device__ __forceinline__ double move_tile(long long dtype, Address bucket, Address tensor, float scale) {
    if (dtype == kFp32) return Way::template tile<Fp32>(bucket, tensor, scale);
    if (dtype == kBf16) return Way::template tile<Bf16>(bucket, tensor, scale);
    return Way::template tile<Fp16>(bucket, tensor, scale);
}

template <class Way>
__device__ __forceinline__ double move_group(long long dtype, Address bucket, Address tensor, float scale, double sum) {
    if (dtype == kFp32) return Way::template group<Fp32>(bucket, tensor, scale, sum);
    if (dtype == kBf16) return Way::template group<Bf16>(bucket, tensor, scale, sum);
    return Way::template group<Fp16>(bucket, tensor, scale, sum);
}

// A group of which some elements belong to this tensor, others to the next one, or to none.
template <class Way>
__device__ __forceinline__ double move_ragged(const Row *rows, const Address *addresses, int row, int high,
                                              long long element, Address bucket, bool readable, float scale,
                                              double sum) {
    typename Way::Ragged ragged(bucket, readable);
#pragma unroll
    for (int i = 0; i < Way::kNumel; ++i) {
        while (row < high && rows[row].end <= element + i) ++row;
        if (rows[row].begin > element + i || rows[row].end <= element + i) continue;
        const Address tensor = in_tensor(addresses, rows, row, element + i);
        if (rows[row].dtype == kFp32) {
            sum = ragged.template one<Fp32>(i, tensor, scale, sum);
        } else if (rows[row].dtype == kBf16) {
            sum = ragged.template one<Bf16>(i, tensor, scale, sum);
        } else {
            sum = ragged.template one<Fp16>(i, tensor, scale, sum);
        }
    }
    return sum;
}

template <class Way>
__device__ __forceinline__ void walk(const Job &job) {
    constexpr long long kTile = static_cast<long long>(kThreads) * kGroups * Way::kNumel;
    const Row *rows = table<Row>(job.rows);
    const Address *addresses = table<Address>(job.addresses);
    const float scale = scale_of(job);
    for_each_tile(job, [&](long long tile, int low, int high) {
        const long long begin = tile * kTile;
        const Address bucket = job.bucket + static_cast<Address>(tile) * (kThreads * kGroups * 16);
        if (rows[low].begin <= begin && begin + kTile <= rows[low].end) {
            return move_tile<Way>(rows[low].dtype, bucket, in_tensor(addresses, rows, low, begin), scale);
        }
        double sum = 0.0;
        for (int g = 0; g < kGroups; ++g) {
            const int group = g * kThreads + threadIdx.x;
            const long long element = begin + group * Way::kNumel;
            const Address at = bucket + static_cast<Address>(group) * 16;
            const int row = row_at(rows, low, high, element);
            if (rows[row].begin <= element && element + Way::kNumel <= rows[row].end) {
                const Address tensor = in_tensor(addresses, rows, row, element);
                sum = move_group<Way>(rows[row].dtype, at, tensor, scale, sum);
            } else if (rows[row].begin < element + Way::kNumel && rows[row].end > element) {
                const bool readable = element + Way::kNumel <= job.bucket_numel;
                sum = move_ragged<Way>(rows, addresses, row, high, element, at, readable, scale, sum);
            }
        }
        return sum;
    });
}

}  // namespace zerokern

#endif
