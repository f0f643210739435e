// Entry points over spans of elements: sums of squares, accumulation, codecs, the stream. All are checked, cut and
// handed to the pool; nothing is written before all checks have passed.

#include <atomic>
#include <mutex>

#include "work.h"

namespace {

using zk::GRAIN;
using zk::is_float;
using zk::STREAMED;
using zk::workers_for;

bool any_null(const void *const *pointers, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (!pointers[i]) return true;
    return false;
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

int64_t width_of(uint32_t dtype) { return dtype == ZK_F32 ? 4 : 2; }

int64_t chunks_of(int64_t numel) { return numel / ZK_SUMSQ_CHUNK + (numel % ZK_SUMSQ_CHUNK != 0); }

double sum_of_chunks(int64_t numel, const double *&partial) {
    double sum = 0.0;
    for (int64_t c = chunks_of(numel); c > 0; --c) sum += *partial++;
    return sum;
}

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
    int64_t nsources, numel;
    bool add, stream;
    float scale;
};

bool streams(const void *dst, uint32_t dtype, const void *const *sources, int64_t nsources, int64_t numel, int add) {
    // a source that is dst keeps its line: streaming past the cache would evict it
    for (int64_t i = 0; i < nsources; ++i)
        if (sources[i] == dst) return false;
    return !add && numel * width_of(dtype) >= STREAMED && reinterpret_cast<uintptr_t>(dst) % 64 == 0;
}

int check_accumulate(const void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources,
                     uint32_t source_dtype, int64_t numel) {
    if (!is_float(dst_dtype) || !is_float(source_dtype)) return ZK_E_FORMAT;
    if (numel < 0 || nsources < 1) return ZK_E_COUNT;
    return numel > 0 && (!dst || !sources || any_null(sources, nsources)) ? ZK_E_NULL : ZK_OK;
}

struct CollectWork {
    char *dst;
    uint32_t dst_dtype, source_dtype;
    const void *const *sources;
    const int64_t *begins, *numels;
    int64_t n;
    bool add;
    std::mutex lock;
    int64_t source = 0, offset = 0;
};

// A thread takes many small sources, or a part of a large one, at a time.
void collect_task(void *context) {
    CollectWork &w = *static_cast<CollectWork *>(context);
    for (;;) {
        int64_t source, begin, stop, end;
        {
            std::lock_guard<std::mutex> guard(w.lock);
            source = w.source, begin = w.offset;
            for (int64_t taken = 0; taken < GRAIN && w.source < w.n;) {
                const int64_t left = w.numels[w.source] - w.offset;
                const int64_t some = left < GRAIN - taken ? left : GRAIN - taken;
                taken += some;
                w.offset += some;
                if (some == left) ++w.source, w.offset = 0;
            }
            stop = w.source, end = w.offset;
        }
        if (source == stop && begin == end) return;
        for (;; ++source, begin = 0) {
            const int64_t last = source == stop ? end : w.numels[source];
            if (begin < last)
                zk::active().accumulate(w.dst + w.begins[source] * width_of(w.dst_dtype), w.dst_dtype,
                                        w.sources + source, 1, w.source_dtype, begin, last, w.add, 1.0f, false,
                                        nullptr);
            if (source == stop) break;
        }
    }
}

// Spans and what lies between them, in order; of a span whole chunks at a time.
struct SquaredWork {
    const AccumulateArguments &of;
    const int64_t *begins, *numels;
    int64_t nspans;
    double *partials;
    std::mutex lock;
    int64_t at = 0, span = 0, chunk = 0;
};

void squared_task(void *context) {
    constexpr int BATCH = 64;
    SquaredWork &w = *static_cast<SquaredWork *>(context);
    struct Piece {
        int64_t begin, end;
        double *sums;
    } pieces[BATCH];
    for (;;) {
        int count = 0;
        {
            std::lock_guard<std::mutex> guard(w.lock);
            for (int64_t taken = 0; taken < GRAIN && count < BATCH && w.at < w.of.numel;) {
                while (w.span < w.nspans && w.at == w.begins[w.span] + w.numels[w.span]) ++w.span;
                const bool between = w.span == w.nspans || w.at < w.begins[w.span];
                const int64_t last = w.span == w.nspans ? w.of.numel
                                     : between          ? w.begins[w.span]
                                                        : w.begins[w.span] + w.numels[w.span];
                const int64_t end = last - w.at < ZK_SUMSQ_CHUNK ? last : w.at + ZK_SUMSQ_CHUNK;
                pieces[count++] = {w.at, end, between ? nullptr : w.partials + w.chunk};
                w.chunk += !between;
                taken += end - w.at;
                w.at = end;
            }
        }
        if (count == 0) return;
        const AccumulateArguments &a = w.of;
        for (int i = 0; i < count; ++i) {
            const auto [begin, end, sums] = pieces[i];
            const bool stream = a.stream && begin * width_of(a.dst_dtype) % 64 == 0;
            zk::active().accumulate(a.dst, a.dst_dtype, a.sources, a.nsources, a.source_dtype, begin, end, a.add,
                                    a.scale, stream, sums);
        }
    }
}

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

}  // namespace

extern "C" {

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
    SumsqWork work{sources, numels, n, width_of(dtype), grain, dtype, partials, {}};
    zk::pool_run(sumsq_task, &work, workers);
    const double *partial = partials;
    for (int64_t i = 0; i < n; ++i) sums[i] = sum_of_chunks(numels[i], partial);
    return ZK_OK;
}

int zk_accumulate(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources, uint32_t source_dtype,
                  int64_t numel, int add, float scale) {
    const int refusal = check_accumulate(dst, dst_dtype, sources, nsources, source_dtype, numel);
    if (refusal || numel == 0) return refusal;
    const zk::IeeeArithmetic ieee;
    const bool stream = streams(dst, dst_dtype, sources, nsources, numel, add);
    const AccumulateArguments arguments{dst,   dst_dtype, source_dtype, sources, nsources,
                                        numel, add != 0,  stream,       scale};
    SpanWork work{[](const SpanWork &w, int64_t begin, int64_t end) {
                      const AccumulateArguments &a = *static_cast<const AccumulateArguments *>(w.arguments);
                      zk::active().accumulate(a.dst, a.dst_dtype, a.sources, a.nsources, a.source_dtype, begin, end,
                                              a.add, a.scale, a.stream, nullptr);
                  },
                  numel, GRAIN, &arguments};
    zk::pool_run(span_task, &work, workers_for(numel));
    return ZK_OK;
}

int zk_collect(void *dst, uint32_t dst_dtype, const void *const *sources, const int64_t *begins, const int64_t *numels,
               int64_t nsources, uint32_t source_dtype, int add) {
    if (!is_float(dst_dtype) || !is_float(source_dtype)) return ZK_E_FORMAT;
    if (nsources < 0) return ZK_E_COUNT;
    if (nsources == 0) return ZK_OK;
    if (!dst || !sources || !begins || !numels) return ZK_E_NULL;
    int64_t total = 0;
    for (int64_t i = 0; i < nsources; ++i) {
        if (begins[i] < 0 || numels[i] < 0) return ZK_E_COUNT;
        if (numels[i] > 0 && !sources[i]) return ZK_E_NULL;
        total += numels[i];
    }
    const zk::IeeeArithmetic ieee;
    CollectWork work{
        static_cast<char *>(dst), dst_dtype, source_dtype, sources, begins, numels, nsources, add != 0, {}};
    zk::pool_run(collect_task, &work, workers_for(total));
    return ZK_OK;
}

int zk_accumulate_sumsq(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources,
                        uint32_t source_dtype, int64_t numel, int add, float scale, const int64_t *begins,
                        const int64_t *numels, int64_t nspans, double *partials, double *sums) {
    const int refusal = check_accumulate(dst, dst_dtype, sources, nsources, source_dtype, numel);
    if (refusal) return refusal;
    if (nspans < 0) return ZK_E_COUNT;
    if (nspans > 0 && (!begins || !numels || !sums)) return ZK_E_NULL;
    int64_t end = 0;
    for (int64_t i = 0; i < nspans; ++i) {
        if (begins[i] < end || numels[i] < 0 || begins[i] > numel || numels[i] > numel - begins[i]) return ZK_E_COUNT;
        if (numels[i] > 0 && !partials) return ZK_E_NULL;
        end = begins[i] + numels[i];
    }
    const zk::IeeeArithmetic ieee;
    const bool stream = streams(dst, dst_dtype, sources, nsources, numel, add);
    const AccumulateArguments arguments{dst,   dst_dtype, source_dtype, sources, nsources,
                                        numel, add != 0,  stream,       scale};
    SquaredWork work{arguments, begins, numels, nspans, partials, {}};
    zk::pool_run(squared_task, &work, workers_for(numel));
    const double *partial = partials;
    for (int64_t i = 0; i < nspans; ++i) sums[i] = sum_of_chunks(numels[i], partial);
    return ZK_OK;
}

int zk_convert(uint32_t codec, float *x, void *codes, void *aux, int64_t numel) {
    if (codec < ZK_ENCODE_EXP_AVG || codec > ZK_JOIN8) return ZK_E_FORMAT;
    if (numel < 0) return ZK_E_COUNT;
    if (numel == 0) return ZK_OK;
    if (!x || !codes || !aux) return ZK_E_NULL;
    const zk::IeeeArithmetic ieee;
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
