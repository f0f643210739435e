// The entry points: check everything, cut the work, hand it to the pool. Nothing is written before all checks have
// passed.

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "pool.h"
#include "stochastic.h"
#include "table.h"

namespace {

constexpr int64_t GRAIN =
    1 << 16;  // elements a thread takes at a time: long runs for the prefetchers, fair shares at the end
constexpr int64_t INLINE = 1 << 15;     // elements below which waking threads costs more than it brings
constexpr int64_t STREAMED = 16 << 20;  // bytes of written-only output from which it goes past the caches

int workers_for(int64_t numel) { return numel < INLINE ? 1 : zk::pool_threads(); }

bool finite(double x) { return std::isfinite(x); }
bool fraction(double x) { return x >= 0.0 && x < 1.0; }

int target_of(const zk_group &g) {
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

bool is_float(uint32_t dtype) { return dtype == ZK_F32 || dtype == ZK_BF16 || dtype == ZK_F16; }

int check_group(const zk_group &g) {
    if (!is_float(g.grad) || target_of(g) < 0 || !zk::active().update(g, target_of(g))) return ZK_E_FORMAT;
    if (g.out != ZK_NONE && g.out != ZK_BF16 && g.out != ZK_F16) return ZK_E_FORMAT;
    if ((g.flags & ZK_STOCHASTIC) && g.master != ZK_MASTER_NONE) return ZK_E_FORMAT;
    if ((g.flags & ~31u) || g.reserved) return ZK_E_FORMAT;
    const bool averages = g.algorithm == ZK_ADAM || g.algorithm == ZK_LION;
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
    k.w1d = 1.0 - g.beta1;
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
                const int64_t some = left < GRAIN - taken || left <= ZK_BLOCK
                                         ? left
                                         : (GRAIN - taken + ZK_BLOCK - 1) / ZK_BLOCK * ZK_BLOCK;
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

struct SumsqWork {
    const void *const *sources;
    const int64_t *numels;
    int64_t n, width, grain;  // elements that a thread takes at a time: whole chunks
    uint32_t dtype;
    double *partials;
    std::mutex lock;
    int64_t source = 0, offset = 0, chunk = 0;
};

int64_t chunks_of(int64_t numel) { return numel / ZK_SUMSQ_CHUNK + (numel % ZK_SUMSQ_CHUNK != 0); }

void sumsq_task(void *context) {
    constexpr int BATCH = 64;
    SumsqWork &w = *static_cast<SumsqWork *>(context);
    struct Piece {
        const char *from;
        int64_t numel, chunk;
    } pieces[BATCH];
    for (;;) {
        int count = 0;
        {
            std::lock_guard<std::mutex> guard(w.lock);
            for (int64_t taken = 0; taken < w.grain && count < BATCH && w.source < w.n;) {
                const int64_t left = w.numels[w.source] - w.offset;
                if (left <= 0) {
                    ++w.source;
                    w.offset = 0;
                    continue;
                }
                const int64_t numel = left < w.grain ? left : w.grain;
                pieces[count++] = {static_cast<const char *>(w.sources[w.source]) + w.offset * w.width, numel, w.chunk};
                w.chunk += chunks_of(numel);
                w.offset += numel;
                taken += numel;
            }
        }
        if (count == 0) return;
        for (int i = 0; i < count; ++i)
            zk::active().sumsq(pieces[i].from, w.dtype, pieces[i].numel, w.partials + pieces[i].chunk);
    }
}

// A span cut into GRAIN-sized pieces, whatever is done to each.
struct SpanWork {
    void (*piece)(const SpanWork &, int64_t begin, int64_t end);
    int64_t total, grain;
    const void *arguments;
    std::atomic<int64_t> next{0};
};

void span_task(void *context) {
    SpanWork &w = *static_cast<SpanWork *>(context);
    for (;;) {
        const int64_t begin = w.next.fetch_add(w.grain, std::memory_order_relaxed);
        if (begin >= w.total) return;
        w.piece(w, begin, begin + w.grain < w.total ? begin + w.grain : w.total);
    }
}

struct AccumulateArguments {
    void *dst;
    uint32_t dst_dtype, source_dtype;
    const void *const *sources;
    int64_t nsources;
    bool add, stream;
    float scale;
};

struct ConvertArguments {
    uint32_t codec;
    float *x;
    void *codes, *aux;
};

struct StreamArguments {
    const void *const *reads;
    void *const *updates;
    void *const *writes;
    int nread, nupdate, nwrite;
};

bool any_null(const void *const *pointers, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (!pointers[i]) return true;
    return false;
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
        if (groups[segments[i].group].out != ZK_NONE) written += 2 * segments[i].numel;
    }
    at_fault = INT64_MAX;
    constexpr int64_t FEW = 16;  // plans for a handful of groups need no memory
    GroupPlan few[FEW];
    GroupPlan *plans =
        ngroups <= FEW ? few : static_cast<GroupPlan *>(std::malloc(sizeof(GroupPlan) * static_cast<size_t>(ngroups)));
    if (!plans) return ZK_E_MEMORY;
    for (int64_t i = 0; i < ngroups; ++i)
        plans[i] = {scalars_of(groups[i], scale ? *scale : 1.0f), zk::active().update(groups[i], target_of(groups[i]))};
    UpdateWork work{segments, nseg, plans, written >= STREAMED, {}};
    zk::pool_run(update_task, &work, workers_for(total));
    if (plans != few) std::free(plans);
    return ZK_OK;
}

int64_t zk_sumsq_partials(const int64_t *numels, int64_t n) {
    if (n > 0 && !numels) return ZK_E_NULL;
    int64_t chunks = 0;
    for (int64_t i = 0; i < n; ++i) chunks += numels[i] > 0 ? chunks_of(numels[i]) : 0;
    return chunks;
}

int zk_sumsq(const void *const *sources, const int64_t *numels, int64_t n, uint32_t dtype, double *partials,
             double *sums) {
    if (n < 0) return ZK_E_COUNT;
    if (!is_float(dtype)) return ZK_E_FORMAT;
    if (n == 0) return ZK_OK;
    if (!sources || !numels || !sums) return ZK_E_NULL;
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (numels[i] < 0) return ZK_E_COUNT;
        if (numels[i] > 0 && (!sources[i] || !partials)) return ZK_E_NULL;
        total += numels[i];
    }
    const zk::IeeeArithmetic ieee;
    const int workers = workers_for(total);
    // Four chunks side by side are faster, and four for each of many turns are shared as fairly as one.
    const int64_t grain = total >= int64_t{16} * workers * ZK_SUMSQ_CHUNK ? 4 * ZK_SUMSQ_CHUNK : ZK_SUMSQ_CHUNK;
    SumsqWork work{sources, numels, n, dtype == ZK_F32 ? 4 : 2, grain, dtype, partials, {}};
    zk::pool_run(sumsq_task, &work, workers);
    const double *partial = partials;
    for (int64_t i = 0; i < n; ++i) {
        sums[i] = 0.0;
        for (int64_t c = chunks_of(numels[i]); c > 0; --c) sums[i] += *partial++;
    }
    return ZK_OK;
}

int zk_accumulate(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources, uint32_t source_dtype,
                  int64_t numel, int add, float scale) {
    if (!is_float(dst_dtype) || !is_float(source_dtype)) return ZK_E_FORMAT;
    if (numel < 0 || nsources < 1) return ZK_E_COUNT;
    if (numel == 0) return ZK_OK;
    if (!dst || !sources || any_null(sources, nsources)) return ZK_E_NULL;
    const int64_t width = dst_dtype == ZK_F32 ? 4 : 2;
    bool in_place = false;  // a source that is dst keeps its line: streaming past the cache would evict it
    for (int64_t i = 0; i < nsources; ++i) in_place = in_place || sources[i] == dst;
    const bool stream = !add && !in_place && numel * width >= STREAMED && reinterpret_cast<uintptr_t>(dst) % 64 == 0;
    const AccumulateArguments arguments{dst, dst_dtype, source_dtype, sources, nsources, add != 0, stream, scale};
    SpanWork work{[](const SpanWork &w, int64_t begin, int64_t end) {
                      const AccumulateArguments &a = *static_cast<const AccumulateArguments *>(w.arguments);
                      zk::active().accumulate(a.dst, a.dst_dtype, a.sources, a.nsources, a.source_dtype, begin, end,
                                              a.add, a.scale, a.stream);
                  },
                  numel, GRAIN, &arguments};
    zk::pool_run(span_task, &work, workers_for(numel));
    return ZK_OK;
}

int zk_convert(uint32_t codec, float *x, void *codes, void *aux, int64_t numel) {
    if (codec < ZK_ENCODE_EXP_AVG || codec > ZK_JOIN8) return ZK_E_FORMAT;
    if (numel < 0) return ZK_E_COUNT;
    if (numel == 0) return ZK_OK;
    if (!x || !codes || !aux) return ZK_E_NULL;
    const ConvertArguments arguments{codec, x, codes, aux};
    SpanWork work{[](const SpanWork &w, int64_t begin, int64_t end) {
                      const ConvertArguments &a = *static_cast<const ConvertArguments *>(w.arguments);
                      zk::active().convert(a.codec, a.x, a.codes, a.aux, begin, end);
                  },
                  numel, GRAIN, &arguments};
    zk::pool_run(span_task, &work, workers_for(numel));
    return ZK_OK;
}

int zk_stream(const void *const *reads, int nread, void *const *updates, int nupdate, void *const *writes, int nwrite,
              int64_t nbytes) {
    constexpr int MOST = 8;
    if (nread < 0 || nupdate < 0 || nwrite < 0 || nread > MOST || nupdate > MOST || nwrite > MOST || nbytes < 0 ||
        nbytes % 64)
        return ZK_E_COUNT;
    if ((nread && (!reads || any_null(reads, nread))) || (nupdate && (!updates || any_null(updates, nupdate))) ||
        (nwrite && (!writes || any_null(writes, nwrite))))
        return ZK_E_NULL;
    for (int i = 0; i < nwrite; ++i)
        if (reinterpret_cast<uintptr_t>(writes[i]) % 64) return ZK_E_COUNT;
    const StreamArguments arguments{reads, updates, writes, nread, nupdate, nwrite};
    SpanWork work{[](const SpanWork &w, int64_t begin, int64_t end) {
                      const StreamArguments &a = *static_cast<const StreamArguments *>(w.arguments);
                      zk::active().stream(a.reads, a.nread, a.updates, a.nupdate, a.writes, a.nwrite, begin, end);
                  },
                  nbytes, GRAIN * 4, &arguments};
    zk::pool_run(span_task, &work, workers_for(nbytes / 4));
    return ZK_OK;
}

}  // extern "C"
