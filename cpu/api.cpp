// An update's entry point: check everything, round constants once, cut the work, hand it to the pool. Nothing is
// written before all checks have passed.

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "stochastic.h"
#include "work.h"

namespace {

using zk::GRAIN;
using zk::is_float;
using zk::STREAMED;
using zk::workers_for;

bool finite(double x) { return std::isfinite(x); }
bool fraction(double x) { return x >= 0.0 && x < 1.0; }

int target_of(const zk_group &g) {
    if (g.algorithm == ZK_MUON) return zk::TO_FP32;  // of no use: there is no parameter
    switch (g.master) {
        case ZK_MASTER_FP32:
            return zk::TO_FP32;
        case ZK_MASTER_SPLIT16:
            return zk::TO_SPLIT16;
        case ZK_MASTER_SPLIT8:
            return zk::TO_SPLIT8;
        case ZK_MASTER_NONE:
            return g.param == ZK_BF16 ? zk::TO_BF16 : g.param == ZK_F16 ? zk::TO_F16 : -1;
        default:
            return -1;
    }
}

int check_group(const zk_group &g) {
    if (!is_float(g.grad) || target_of(g) < 0 || !zk::active().update(g, target_of(g))) return ZK_E_FORMAT;
    if (g.out != ZK_NONE && g.out != ZK_BF16 && g.out != ZK_F16 && g.algorithm != ZK_MUON) return ZK_E_FORMAT;
    if ((g.flags & ZK_STOCHASTIC) && g.master != ZK_MASTER_NONE) return ZK_E_FORMAT;
    if ((g.flags & ~31u) || g.reserved) return ZK_E_FORMAT;
    const bool averages = g.algorithm == ZK_ADAM || g.algorithm == ZK_LION;
    if (g.algorithm == ZK_MUON) return fraction(g.momentum) ? ZK_OK : ZK_E_VALUE;
    if (!finite(g.lr) || !finite(g.weight_decay) || g.step < 1) return ZK_E_VALUE;
    if (averages && !(fraction(g.beta1) && fraction(g.beta2))) return ZK_E_VALUE;
    if ((g.algorithm == ZK_ADAM || g.algorithm == ZK_ADAGRAD) && !(finite(g.eps) && g.eps >= 0.0)) return ZK_E_VALUE;
    if (g.algorithm == ZK_ADAGRAD && !(finite(g.lr_decay) && g.lr_decay >= 0.0)) return ZK_E_VALUE;
    if (g.algorithm == ZK_SGD && !(finite(g.momentum) && finite(g.dampening))) return ZK_E_VALUE;
    return ZK_OK;
}

int check_segment(const zk_segment &s, const zk_group *groups, int64_t ngroups) {
    if (s.numel < 0 || s.group >= static_cast<uint64_t>(ngroups) || s.first < 0) return ZK_E_COUNT;
    if (s.numel > INT64_MAX - ZK_BLOCK || s.first > INT64_MAX - ZK_BLOCK - s.numel) return ZK_E_COUNT;
    if (s.numel == 0) return ZK_OK;
    const zk_group &g = groups[s.group];
    if (g.algorithm == ZK_MUON) {
        const bool whole = s.grad && s.exp_avg && s.exp_avg_sq && s.out && (g.state != ZK_INT8 || s.exp_avg_scale);
        return whole ? ZK_OK : ZK_E_NULL;
    }
    const bool split = g.master == ZK_MASTER_SPLIT16 || g.master == ZK_MASTER_SPLIT8;
    if (!s.grad || (g.master == ZK_MASTER_FP32 ? !s.master : !s.param) || (split && !s.remainder)) return ZK_E_NULL;
    if ((g.state != ZK_NONE && !s.exp_avg) || (g.algorithm == ZK_ADAM && !s.exp_avg_sq) || (g.out != ZK_NONE && !s.out))
        return ZK_E_NULL;
    if (g.state == ZK_INT8 && (!s.exp_avg_scale || (g.algorithm == ZK_ADAM && !s.exp_avg_sq_scale))) return ZK_E_NULL;
    return ZK_OK;
}

// By repeated squaring, as reference.py and the GPU have it: pow() may round otherwise in another libm.
double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

zk::Scalars scalars_of(const zk_group &g, float scale) {
    zk::Scalars k{};
    const double t = static_cast<double>(g.step);
    const bool adam = g.algorithm == ZK_ADAM, decoupled = (g.flags & ZK_DECOUPLED) != 0 || g.algorithm == ZK_LION;
    const double step_size = adam                        ? g.lr / (1.0 - power(g.beta1, g.step))
                             : g.algorithm == ZK_ADAGRAD ? g.lr / (1.0 + (t - 1.0) * g.lr_decay)
                                                         : g.lr;
    k.scale = (g.flags & ZK_MAXIMIZE) ? -scale : scale;
    k.step_size = static_cast<float>(step_size);
    k.lr = static_cast<float>(g.lr);
    k.lr_wd = decoupled ? static_cast<float>(g.lr * g.weight_decay) : 0.0f;
    k.eps = static_cast<float>(g.eps);
    k.wd = static_cast<float>(g.weight_decay);
    k.wdd = g.weight_decay;
    k.coupled = !decoupled && g.weight_decay != 0.0;
    k.w1d = 1.0 - (g.algorithm == ZK_MUON ? g.momentum : g.beta1);
    k.w2d = 1.0 - g.beta2;
    k.w1 = static_cast<float>(k.w1d);
    k.w2 = static_cast<float>(k.w2d);
    k.beta1 = static_cast<float>(g.beta1);
    k.beta2 = static_cast<float>(g.beta2);
    k.root_beta2 = static_cast<float>(std::sqrt(g.beta2));
    k.root_w2 = static_cast<float>(std::sqrt(k.w2d));
    // Without a step the floor is infinite, and what is divided by it 0. The slope stays finite and above 0: a root may
    // be 0, or infinite.
    const double per_step = k.step_size != 0.0f ? 1.0 / step_size : FLT_MAX;
    k.root_slope =
        adam ? static_cast<float>(std::fmin(per_step / std::sqrt(1.0 - power(g.beta2, g.step)), FLT_MAX)) : 0.0f;
    k.root_floor = k.step_size != 0.0f ? static_cast<float>(g.eps * per_step) : INFINITY;
    k.lrd = g.lr;
    k.momentumd = g.momentum;
    k.momentum = static_cast<float>(g.momentum);
    k.undampedd = 1.0 - g.dampening;
    k.undamped = static_cast<float>(k.undampedd);
    k.first = (g.flags & ZK_FIRST) != 0;
    k.nesterov = (g.flags & ZK_NESTEROV) != 0;
    k.stochastic = (g.flags & ZK_STOCHASTIC) != 0;
    k.seed_mix = zk::splitmix64(g.seed);
    k.step = g.step;
    k.grad = g.grad;
    k.target = static_cast<uint32_t>(target_of(g));
    k.out = g.out;
    return k;
}

struct GroupPlan {
    zk::Scalars scalars;
    zk::UpdateFn run;
    int64_t unit;  // elements of a row that one thread must take: blocks, or chunks where squares are added up
};

// Threads take the next GRAIN elements, of one segment or of many small ones, until none are left.
struct UpdateWork {
    const zk_segment *segments;
    int64_t nseg;
    const GroupPlan *plans;
    bool stream_out;
    std::mutex lock;
    int64_t segment = 0, offset = 0;
};

void update_task(void *context) {
    UpdateWork &w = *static_cast<UpdateWork *>(context);
    for (;;) {
        int64_t segment, offset, last, end;
        {
            std::lock_guard<std::mutex> guard(w.lock);
            segment = last = w.segment;
            offset = end = w.offset;
            for (int64_t taken = 0; taken < GRAIN && w.segment < w.nseg;) {
                const int64_t left = w.segments[w.segment].numel - w.offset;
                const int64_t unit = w.plans[w.segments[w.segment].group].unit;
                const int64_t some =
                    left < GRAIN - taken || left <= unit ? left : (GRAIN - taken + unit - 1) / unit * unit;
                last = w.segment;
                end = w.offset + (some < left ? some : left);
                taken += end - w.offset;
                w.offset = end;
                if (w.offset == w.segments[w.segment].numel) {
                    ++w.segment;
                    w.offset = 0;
                }
            }
        }
        if (segment >= w.nseg) return;
        for (int64_t s = segment; s <= last; ++s) {
            const zk_segment &row = w.segments[s];
            const int64_t to = s == last ? end : row.numel;
            if (offset < to) {
                const GroupPlan &plan = w.plans[row.group];
                if (w.stream_out && plan.scalars.out != ZK_NONE && reinterpret_cast<uintptr_t>(row.out) % 64 == 0) {
                    zk::Scalars streamed = plan.scalars;
                    streamed.stream_out = true;
                    plan.run(row, streamed, offset, to);
                } else {
                    plan.run(row, plan.scalars, offset, to);
                }
            }
            offset = 0;
        }
    }
}

}  // namespace

extern "C" {

int zk_update(const zk_segment *segments, int64_t nseg, const zk_group *groups, int64_t ngroups, const float *scale,
              int64_t *bad) {
    int64_t ignored;
    int64_t &at_fault = bad ? *bad : ignored;
    at_fault = INT64_MAX;
    if (nseg < 0 || ngroups < 0) return ZK_E_COUNT;
    if (nseg == 0) return ZK_OK;
    if (!segments || !groups) return ZK_E_NULL;
    const zk::IeeeArithmetic ieee;  // constants are rounded here
    int64_t total = 0, written = 0;
    for (int64_t i = 0; i < ngroups; ++i) {
        at_fault = -1 - i;
        if (const int code = check_group(groups[i])) return code;
    }
    for (int64_t i = 0; i < nseg; ++i) {
        at_fault = i;
        if (const int code = check_segment(segments[i], groups, ngroups)) return code;
        total += segments[i].numel;
        const uint32_t out = groups[segments[i].group].out;
        if (out != ZK_NONE) written += (out == ZK_F32 ? 4 : 2) * segments[i].numel;
    }
    at_fault = INT64_MAX;
    constexpr int64_t FEW = 16;  // plans for a handful of groups need no memory
    GroupPlan few[FEW];
    GroupPlan *plans =
        ngroups <= FEW ? few : static_cast<GroupPlan *>(std::malloc(sizeof(GroupPlan) * static_cast<size_t>(ngroups)));
    if (!plans) return ZK_E_MEMORY;
    for (int64_t i = 0; i < ngroups; ++i)
        plans[i] = {scalars_of(groups[i], scale ? *scale : 1.0f), zk::active().update(groups[i], target_of(groups[i])),
                    groups[i].algorithm == ZK_MUON ? ZK_SUMSQ_CHUNK : ZK_BLOCK};
    UpdateWork work{segments, nseg, plans, written >= STREAMED, {}};
    zk::pool_run(update_task, &work, workers_for(total));
    if (plans != few) std::free(plans);
    return ZK_OK;
}

}  // extern "C"
