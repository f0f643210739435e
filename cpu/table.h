// What each instruction set offers to the dispatcher: one table of functions over spans. Internal.
#pragma once

#include "zerokern_cpu.h"

// In the loops that decide, a call costs more than its code.
#define ZK_INLINE inline __attribute__((always_inline))

namespace zk {

// Hyperparameters of a group, rounded once from double the way kernels/reference.py does it.
struct Scalars {
    float scale;  // negative to ascend
    float step_size, lr_wd, eps, wd, w1, w2, beta1, beta2, root_beta2, root_w2, root_slope, root_floor, lr, momentum,
        undamped;
    double w1d, w2d, wdd, lrd, momentumd, undampedd;
    uint64_t seed_mix;
    int64_t step;
    uint32_t grad, target, out;
    bool coupled, first, nesterov, stochastic, stream_out;
};

// Where the updated value goes: zk_master and the parameter's dtype in one number.
enum Target : int { TO_FP32 = 0, TO_SPLIT16, TO_SPLIT8, TO_BF16, TO_F16 };

// Elements [begin, end) of a segment; begin is a multiple of ZK_BLOCK, end too unless it is numel.
using UpdateFn = void (*)(const zk_segment &, const Scalars &, int64_t begin, int64_t end);

struct IsaTable {
    const char *name;
    UpdateFn (*update)(const zk_group &, int target);
    // One sum for each started chunk of ZK_SUMSQ_CHUNK elements.
    void (*sumsq)(const void *source, uint32_t dtype, int64_t numel, double *sums);
    // With `sums`, which may be null, they are of [begin, end) of the result, as by `sumsq`.
    void (*accumulate)(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t n, uint32_t source_dtype,
                       int64_t begin, int64_t end, bool add, float scale, bool stream, double *sums);
    void (*convert)(uint32_t codec, float *x, void *codes, void *aux, int64_t begin, int64_t end);
    void (*stream)(const void *const *reads, int nread, void *const *updates, int nupdate, void *const *writes,
                   int nwrite, int64_t begin, int64_t end);
};

#define ZK_ISA(ns, name, needs, maker) \
    namespace ns {                     \
    extern const IsaTable table;       \
    }
#include "isa.def"
#undef ZK_ISA

// The table that calls go through now.
const IsaTable &active();

}  // namespace zk
