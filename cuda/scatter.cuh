// The way back: a bucket of pinned host memory into a list of tensors of any dtypes, scaled and cast, in one pass.
#ifndef ZEROKERN_SCATTER_CUH
#define ZEROKERN_SCATTER_CUH

#include "walk.cuh"

namespace zerokern {

template <class Bucket>
struct Scatter {
    static constexpr int kNumel = 16 / Bucket::kNbytes;

    // The elements of the bucket become what a tensor gets.
    template <class Tensor, int N>
    static __device__ __forceinline__ double convert(unsigned int (&bits)[N], float scale, double sum) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            bits[i] = Tensor::narrow(product(Bucket::widen(bits[i]), scale));
            sum = with_square(sum, Tensor::widen(bits[i]));
        }
        return sum;
    }

    template <class Tensor>
    static __device__ __forceinline__ double tile(Address bucket, Address tensor, float scale) {
        unsigned int bits[kGroups][kNumel];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {  // host memory is a microsecond away: all of it is asked for at once
            load_group<Bucket>(bucket + (g * kThreads + threadIdx.x) * 16, bits[g]);
        }
        double sum = 0.0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const unsigned int group = g * kThreads + threadIdx.x;
            sum = convert<Tensor>(bits[g], scale, sum);
            store_group<Tensor>(tensor + group * (kNumel * Tensor::kNbytes), bits[g]);
        }
        return sum;
    }

    template <class Tensor>
    static __device__ __forceinline__ double group(Address bucket, Address tensor, float scale, double sum) {
        unsigned int bits[kNumel];
        load_group<Bucket>(bucket, bits);
        sum = convert<Tensor>(bits, scale, sum);
        store_group<Tensor>(tensor, bits);
        return sum;
    }

    // Reads the whole group where the bucket has all of it: one access over the link, not one for each element.
    struct Ragged {
        Address bucket;
        bool is_loaded;
        unsigned int loaded[kNumel];

        __device__ __forceinline__ Ragged(Address at, bool readable) : bucket(at), is_loaded(readable), loaded{} {
            if (readable) load_group<Bucket>(at, loaded);
        }

        template <class Tensor>
        __device__ __forceinline__ double one(int i, Address tensor, float scale, double sum) {
            unsigned int bits[1] = {loaded[i]};
            if (!is_loaded) bits[0] = load_one<Bucket>(bucket + i * Bucket::kNbytes);
            sum = convert<Tensor>(bits, scale, sum);
            store_one<Tensor>(tensor, bits[0]);
            return sum;
        }
    };
};

}  // namespace zerokern

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) scatter_fp32(const zerokern::Job job) {
    zerokern::walk<zerokern::Scatter<zerokern::Fp32>>(job);
}

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) scatter_bf16(const zerokern::Job job) {
    zerokern::walk<zerokern::Scatter<zerokern::Bf16>>(job);
}

extern "C" __global__ void __launch_bounds__(zerokern::kThreads, 2) scatter_fp16(const zerokern::Job job) {
    zerokern::walk<zerokern::Scatter<zerokern::Fp16>>(job);
}

#endif
