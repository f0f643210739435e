// The roof: as many read, update and write streams as an op has, and next to no arithmetic. What an op takes above this
// is its own.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// Elements are fp32 by width only: sums are of bits that may be NaN, so nothing but traffic is meant. [begin, end) are
// byte offsets.
void stream(const void *const *reads, int nread, void *const *updates, int nupdate, void *const *writes, int nwrite,
            int64_t begin, int64_t end) {
    constexpr int64_t WIDTH = W * 4;
    constexpr int64_t LINE = WIDTH < 64 ? 64 : WIDTH;
    F most = set1(1.0f);
    int64_t i = begin;
    for (; i + LINE <= end; i += LINE) {
        F sum = most;
        for (int64_t b = 0; b < LINE; b += WIDTH) {
            for (int r = 0; r < nread; ++r)
                sum = max_bits(sum, load(reinterpret_cast<const float *>(at<char>(reads[r], i + b))));
            for (int u = 0; u < nupdate; ++u) {
                float *p = reinterpret_cast<float *>(at<char>(updates[u], i + b));
                store(p, max_bits(sum, load(p)));
            }
            for (int w = 0; w < nwrite; ++w)
                zk::ZK_NS::stream(reinterpret_cast<float *>(at<char>(writes[w], i + b)), sum);
        }
        most = sum;
        for (int r = 0; r < nread; ++r) prefetch(at<char>(reads[r], i + 1024));
        for (int u = 0; u < nupdate; ++u) prefetch(at<char>(updates[u], i + 1024));
    }
    stream_fence();
    volatile float sink = reduce_max(most);  // or the reads would be dead code
    static_cast<void>(sink);
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
