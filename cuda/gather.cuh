// A list of tensors of any dtypes into one bucket of pinned host memory: scaled, cast, its squares summed, in one pass.
#ifndef ZEROKERN_GATHER_CUH
#define ZEROKERN_GATHER_CUH

#include "walk.cuh"

namespace zerokern {

template <class Bucket>
struct Gather {
    static constexpr int kNumel = 16 / Bucket::kNbytes;

    // The elements of a tensor become what the bucket gets.
    template <class Tensor, int N>
    static __device__ __forceinline__ double convert(unsigned int (&bits)[N], float scale, double sum) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            bits[i] = Bucket::narrow(product(Tensor::widen(bits[i]), scale));
            sum = with_square(sum, Bucket::widen(bits[i]));
        }
        return sum;
    }

    template <class Tensor>
    static __device__ __forceinline__ double tile(Address bucket, Address tensor, float scale) {
        unsigned int bits[kGroups][kNumel];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const unsigned int group = g * kThreads + threadIdx.x;
            load_group<Tensor>(tensor + group * (kNumel * Tensor::kNbytes), bits[g]);
        }
        double sum = 0.0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            sum = convert<Tensor>(bits[g], scale, sum);
            store_group<Bucket>(bucket + (g * kThreads + threadIdx.x) * 16, bits[g]);
        }
        return sum;
    }

    template <class Tensor>
    static __device__ __forceinline__ double group(Address bucket, Address tensor, float scale, double sum) {
        unsigned int bits[kNumel];
        load_group<Tensor>(tensor, bits);
        sum = convert<Tensor>(bits, scale, sum);
        store_group<Bucket>(bucket, bits);
        return sum;
    }

    struct Ragged {
        Address bucket;
        __device__ __forceinline__ Ragged(Address at, bool) : bucket(at) {}

        template <class Tensor>
        __device__ __forceinline__ double one(int i, Address tensor, float scale, double sum) {
            unsigned int bits[1] = {load_one<Tensor>(tensor)};
            sum = convert<Tensor>(bits, scale, sum);
            store_one<Bucket>(bucket + i * Bucket::kNbytes, bits[0]);
            return sum;
        }
    };
};

}  // namespace zerokern

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) gather_fp32(const zerokern::Job job) {
    zerokern::walk<zerokern::Gather<zerokern::Fp32>>(job);
}

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) gather_bf16(const zerokern::Job job) {
    zerokern::walk<zerokern::Gather<zerokern::Bf16>>(job);
}

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) gather_fp16(const zerokern::Job job) {
    zerokern::walk<zerokern::Gather<zerokern::Fp16>>(job);
}

#endif
