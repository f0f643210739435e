// Stands in for libcudart where there is no GPU: copies at once, and remembers what it was asked for.
//
// With ZEROKERN_HEADER the declarations of a CUDA toolkit are there too, and a signature that differs does not compile.
#include <cstddef>
#include <cstring>

#ifdef ZEROKERN_HEADER
#include <cuda_runtime_api.h>
#else
typedef int cudaError_t;
typedef void *cudaStream_t;
typedef int cudaMemcpyKind;
typedef int cudaDeviceAttr;
struct cudaMemLocation {
    int type, id;
};
struct cudaMemcpyAttributes {
    int srcAccessOrder;
    cudaMemLocation srcLocHint, dstLocHint;
    unsigned int flags;
};
#endif

namespace {
long long asked[8];  // calls of one, calls of many, copies of the last, its attributes: order, flags; stream; cleared
int refusal;

cudaError_t copy_many(void *const *dsts, const void *const *srcs, const std::size_t *sizes, std::size_t count,
                      cudaMemcpyAttributes *attributes, std::size_t *first, std::size_t nattributes, void *stream) {
    asked[1] += 1;
    asked[2] = static_cast<long long>(count);
    asked[3] = attributes->srcAccessOrder;
    asked[4] = attributes->flags;
    asked[5] = reinterpret_cast<long long>(stream);
    if (refusal || nattributes != 1 || first[0] != 0) return static_cast<cudaError_t>(refusal ? refusal : 1);
    if (attributes->srcLocHint.type || attributes->srcLocHint.id || attributes->dstLocHint.type ||
        attributes->dstLocHint.id) {
        return static_cast<cudaError_t>(1);
    }
    for (std::size_t i = 0; i < count; ++i) std::memcpy(dsts[i], srcs[i], sizes[i]);
    return static_cast<cudaError_t>(0);
}
}  // namespace

extern "C" {

long long stand_in_asked(int which) { return asked[which]; }

void stand_in_reset(int refuse) {
    std::memset(asked, 0, sizeof(asked));
    refusal = refuse;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, std::size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
    asked[0] += 1;
    asked[3] = kind;
    asked[5] = reinterpret_cast<long long>(stream);
    if (refusal) return static_cast<cudaError_t>(refusal);
    std::memcpy(dst, src, nbytes);
    return static_cast<cudaError_t>(0);
}

#ifdef ZEROKERN_FAULT_ARGUMENT  // CUDA 12.8 and 12.9
cudaError_t cudaMemcpyBatchAsync(void **dsts, void **srcs, std::size_t *sizes, std::size_t count,
                                 cudaMemcpyAttributes *attributes, std::size_t *first, std::size_t nattributes,
                                 std::size_t *fault, cudaStream_t stream) {
    *fault = 0;
    return copy_many(dsts, srcs, sizes, count, attributes, first, nattributes, stream);
}
#else
cudaError_t cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const std::size_t *sizes,
                                 std::size_t count, cudaMemcpyAttributes *attributes, std::size_t *first,
                                 std::size_t nattributes, cudaStream_t stream) {
    return copy_many(dsts, srcs, sizes, count, attributes, first, nattributes, stream);
}
#endif

const char *cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheStandIn"; }

cudaError_t cudaGetLastError() {
    asked[6] += 1;
    return static_cast<cudaError_t>(refusal);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == 91;  // cudaDevAttrCanUseHostPointerForRegisteredMem
    return static_cast<cudaError_t>(refusal);
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return static_cast<cudaError_t>(0);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return static_cast<cudaError_t>(0);
}

}  // extern "C"
