// Where a list of tensors lies in a bucket of host memory, who works on which part of it, and the sum of squares.
//
// The bucket decides: it is cut into tiles of 16 KiB, and a thread moves 16 bytes of it at a time, its neighbours the
// 16 bytes before and behind. So whatever the lengths of the tensors, the link carries whole lines of 128 bytes. Which
// tensor a group belongs to is looked up in the rows that meet the tile. The order of the sums follows from the bucket
// alone, not from the number of blocks: the same bits on every run and on every GPU.
#ifndef ZEROKERN_SPANS_CUH
#define ZEROKERN_SPANS_CUH

#include "numbers.cuh"

namespace zerokern {

constexpr int kThreads = 256;
constexpr int kGroups = 4;  // of a thread in a tile: loads under way before the first is used

struct Row {
    long long begin, end;  // elements of the bucket; rows are sorted, do not overlap and are not empty
    long long dtype;       // of the tensor
};

// One launch. zerokern/kernels/cuda.py has the same words in the same order.
struct Job {
    Address addresses;       // of a table: the address of each row's tensor, in device memory
    Address rows;            // of Row[nrows]
    Address first;           // of int[ntiles + 1]: the first row that ends behind the beginning of each tile
    Address bucket;          // in mapped host memory, a multiple of 128
    long long bucket_numel;  // a group beyond it is read element by element
    long long nrows, ntiles;
    Address scale_at;  // of a float in device memory; 0: the number below
    double scale;
    Address partials;  // of double[ntiles]
    Address counter;   // of blocks that are through; 0 before and after a launch
    Address stats;     // of double[2]: sum of squares, whether it is not finite; 0: not wanted
};
static_assert(sizeof(Job) == 12 * 8, "the launcher packs 12 words");

template <class T>
__device__ __forceinline__ const T *table(Address at) {
    return reinterpret_cast<const T *>(at);
}

__device__ __forceinline__ float scale_of(const Job &job) {
    return job.scale_at ? float_of(load4(job.scale_at)) : static_cast<float>(job.scale);
}

// The first row of [low, high] that ends behind an element; high where none does.
__device__ __forceinline__ int row_at(const Row *rows, int low, int high, long long element) {
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (rows[middle].end > element) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// In thread 0, the sum over all threads, as a tree: lane[j] + lane[j + 128], then 64, 32, ... 1. Nobody else reads it,
// so the next sum may begin at once.
__device__ __forceinline__ double sum_of_block(double mine) {
    __shared__ double lanes[kThreads];
    const int thread = threadIdx.x;
    lanes[thread] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (thread < half) lanes[thread] = lanes[thread] + lanes[thread + half];
        __syncthreads();
    }
    return thread == 0 ? lanes[0] : 0.0;
}

// The last block to arrive adds the sums of all tiles: thread j those of the tiles j, j + 256, ... in order, then a
// tree.
__device__ __forceinline__ void finish_stats(const Job &job) {
    __shared__ bool is_last;
    const int thread = threadIdx.x;
    if (thread == 0) {
        unsigned int *counter = reinterpret_cast<unsigned int *>(job.counter);
        __threadfence();  // this thread has written all partials of the block; they are seen before the count is
        is_last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const volatile double *partials = reinterpret_cast<const volatile double *>(job.partials);
    double sum = 0.0;
    for (long long tile = thread; tile < job.ntiles; tile += kThreads) sum = sum + partials[tile];
    const double total = sum_of_block(sum);
    if (thread == 0) {
        double *stats = reinterpret_cast<double *>(job.stats);
        stats[0] = total;
        stats[1] = total - total == 0.0 ? 0.0 : 1.0;  // squares of fp32 cannot overflow: an element is inf or nan
    }
}

// Runs move(tile, low, high) -> double for every tile; low and high are the rows that may meet it. What it returns is
// this thread's part of the sum of squares.
template <class Move>
__device__ __forceinline__ void for_each_tile(const Job &job, Move move) {
    const int *first = table<int>(job.first);
    const int last = static_cast<int>(job.nrows) - 1;
    for (long long tile = blockIdx.x; tile < job.ntiles; tile += gridDim.x) {
        const int low = first[tile] < last ? first[tile] : last;
        const int high = first[tile + 1] < last ? first[tile + 1] : last;
        const double squares = move(tile, low, high);
        if (job.stats) {
            const double sum = sum_of_block(squares);
            if (threadIdx.x == 0) reinterpret_cast<double *>(job.partials)[tile] = sum;
        }
    }
    if (job.stats) finish_stats(job);
}

__device__ __forceinline__ double with_square(double sum, float value) {
    const double wide = value;  // its square is exact in double: one rounding, fused or not
    return sum + wide * wide;
}

}  // namespace zerokern

#endif
