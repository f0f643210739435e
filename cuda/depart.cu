// Spans that leave device memory for pinned host memory, with the sum of their squares in one pass over device memory.
//
// A chunk of 65,536 elements is the work of one warp: lane j of 64 adds the squares of its elements j, j + 64, ... in
// order, two lanes a thread. It reads them from the warp's stages, an eighth of a CTA's, out of which they are stored.
// What is ragged, or not aligned alike on both sides, passes through registers.
//
// promises: registers 128, stack 0, spills 0; bulk from sm_90 on
#include "ring.cuh"
#include "sums.cuh"

#ifndef ZK_CHUNK
#define ZK_CHUNK 65536
#endif
constexpr u32 DEPART_THREADS = 256;
constexpr u32 WARPS = DEPART_THREADS / 32;
constexpr u32 PART_BYTES = STAGE_BYTES / WARPS;  // of a stage: a warp's
constexpr u32 CHUNK = ZK_CHUNK;
constexpr u32 LANES = 64;
constexpr u32 SOME_ROWS = 4;  // of 64 elements whose loads are on their way at once

template <u32 ROWS>
struct DepartRows {
    Sums sums;
    u64 finite;        // a byte
    u32 rows, chunks;  // of this launch
    Row row[ROWS];     // `size` in elements
};

struct Lanes {
    double low, high;  // lanes t and t + 32 of the warp's thread t
};

// Elements `begin` to `end` of a chunk, numbered from its start: those of this thread, through registers.
template <class Type>
ZK_DEVICE void depart_plain(Lanes &lanes, u64 to, u64 from, u32 begin, u32 end) {
    u32 lane = thread_number() % 32;
    for (u32 row = begin & ~(LANES - 1); row < end; row += SOME_ROWS * LANES) {
        u32 bits[2 * SOME_ROWS];
#pragma unroll
        for (u32 i = 0; i < 2 * SOME_ROWS; ++i) {
            u32 at = row + i * 32 + lane;
            if (at >= begin && at < end) bits[i] = Type::load(from + at * Type::NBYTES);
        }
#pragma unroll
        for (u32 i = 0; i < 2 * SOME_ROWS; ++i) {
            u32 at = row + i * 32 + lane;
            if (at < begin || at >= end) continue;
            Type::store(to + at * Type::NBYTES, bits[i]);
            double &sum = i % 2 ? lanes.high : lanes.low;
            sum = plus_square(sum, Type::value(bits[i]));
        }
    }
}

// The same elements where they lie in shared memory from `stage` on.
template <class Type>
ZK_DEVICE void sum_stage(Lanes &lanes, u32 stage, u32 begin, u32 end) {
    u32 lane = thread_number() % 32;
    for (u32 row = begin & ~(LANES - 1); row < end; row += SOME_ROWS * LANES) {
        u32 bits[2 * SOME_ROWS];
#pragma unroll
        for (u32 i = 0; i < 2 * SOME_ROWS; ++i) {
            u32 at = row + i * 32 + lane;
            if (at >= begin && at < end) bits[i] = Type::load_shared(stage + (at - begin) * Type::NBYTES);
        }
#pragma unroll
        for (u32 i = 0; i < 2 * SOME_ROWS; ++i) {
            u32 at = row + i * 32 + lane;
            if (at < begin || at >= end) continue;
            double &sum = i % 2 ? lanes.high : lanes.low;
            sum = plus_square(sum, Type::value(bits[i]));
        }
    }
}

#if ZK_BULK
typedef Ring<PART_BYTES> WarpRing;
constexpr u32 WARP_SHARED = STAGES * PART_BYTES;

template <class Type>
ZK_DEVICE void depart_aligned(Lanes &lanes, WarpRing &ring, u64 to, u64 from, u32 begin, u32 end) {
    constexpr u32 PART = PART_BYTES / Type::NBYTES;
    u32 ahead = begin;
    for (u32 at = begin; at < end; at += PART) {
        for (; ahead < end && ring.loads < ring.stores + AHEAD; ahead += PART) {
            u32 count = end - ahead < PART ? end - ahead : PART;
            ring.load(from + ahead * Type::NBYTES, count * Type::NBYTES);
        }
        u32 count = end - at < PART ? end - at : PART;
        u32 stage = ring.loaded();
        ring.store(to + at * Type::NBYTES, count * Type::NBYTES);
        sum_stage<Type>(lanes, stage, at, at + count);
        fence_proxy_async();  // what was read here, before a later load writes over it
        bar_warp_sync();
    }
}
#else
struct WarpRing {
    u32 stages;
};
constexpr u32 WARP_SHARED = PART_BYTES;

// 16 bytes at a time, all loads of a part on their way at once, and through shared memory into the order of the lanes.
template <class Type>
ZK_DEVICE void depart_aligned(Lanes &lanes, WarpRing &ring, u64 to, u64 from, u32 begin, u32 end) {
    constexpr u32 PART = PART_BYTES / Type::NBYTES;
    u32 lane = thread_number() % 32;
    for (u32 at = begin; at < end; at += PART) {
        u32 count = end - at < PART ? end - at : PART;
        u32 words = count * Type::NBYTES / 16;
        for (u32 first = lane; first < words; first += FLIGHT * 32) {
            Words4 some[FLIGHT];
#pragma unroll
            for (u32 i = 0; i < FLIGHT; ++i)
                if (first + i * 32 < words) some[i] = ld_global_v4(from + at * Type::NBYTES + (first + i * 32) * 16);
#pragma unroll
            for (u32 i = 0; i < FLIGHT; ++i) {
                if (first + i * 32 >= words) continue;
                st_global_v4(to + at * Type::NBYTES + (first + i * 32) * 16, some[i]);
                st_shared_v4(ring.stages + (first + i * 32) * 16, some[i]);
            }
        }
        bar_warp_sync();
        sum_stage<Type>(lanes, ring.stages, at, at + count);
        bar_warp_sync();
    }
}
#endif

template <class Type, u32 ROWS>
ZK_DEVICE void depart(const DepartRows<ROWS> &list) {
    u32 warp = thread_number() / 32, lane = thread_number() % 32, number = 0;
    u32 shared = shared_memory() + warp * WARP_SHARED;
#if ZK_BULK
    u32 barriers = shared_memory() + WARPS * WARP_SHARED + warp * STAGES * BARRIER;
    u32 after = shared_memory() + WARPS * (WARP_SHARED + STAGES * BARRIER);
    WarpRing ring = WarpRing::opened(shared, barriers, lane == 0);
    bar_warp_sync();
#else
    u32 after = shared_memory() + WARPS * WARP_SHARED;
    WarpRing ring{shared};
#endif
    for (u32 chunk = cta_number() * WARPS + warp; chunk < list.chunks; chunk += cta_count() * WARPS) {
        while (number + 1 < list.rows && list.row[number + 1].first <= chunk) ++number;
        const Row &row = list.row[number];
        u32 first = (chunk - row.first) * CHUNK;
        u32 count = row.size - first < CHUNK ? row.size - first : CHUNK;
        u64 to = row.to + (u64)first * Type::NBYTES, from = row.from + (u64)first * Type::NBYTES;
        u32 begin = head_of(to, from, count * Type::NBYTES, 16) / Type::NBYTES;
        u32 end = begin + ((count - begin) & ~(16 / Type::NBYTES - 1));
        Lanes lanes{0.0, 0.0};
        depart_plain<Type>(lanes, to, from, 0, begin);
        depart_aligned<Type>(lanes, ring, to, from, begin, end);
        depart_plain<Type>(lanes, to, from, end, count);
        double sum = add_rn_f64(lanes.low, lanes.high);
#pragma unroll
        for (u32 half = 16; half > 0; half /= 2) sum = add_rn_f64(sum, shfl_bfly_f64(sum, half));
        if (lane == 0) st_global_f64(list.sums.partials + 8ull * (list.sums.first + chunk), sum);
    }
#if ZK_BULK
    ring.close();
#endif
    if (is_last(list.sums, after)) {
        double total = columns(list.sums, after);
        if (thread_number() == 0) st_global_u8(list.finite, is_finite(total));
    }
}

#define ZK_DEPART(type)                                                                       \
    ZK_KERNEL depart_##type##_few(ZK_PARAMETERS(DepartRows<32>) list) { depart<type>(list); } \
    ZK_KERNEL depart_##type##_many(ZK_PARAMETERS(DepartRows<1344>) list) { depart<type>(list); }
ZK_DEPART(f32)
ZK_DEPART(bf16)
ZK_DEPART(f16)
