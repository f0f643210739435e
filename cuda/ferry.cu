// A list of spans between device memory and pinned host memory, either way, by 2 to 8 CTAs that stay.
//
// From sm_90 on one thread of a CTA moves what is large and aligned alike on both sides through a ring of bulk copies.
// All else is moved by warps, a stage's worth of a span each, in 16-byte words with 8 on their way for each thread:
// many small spans are on their way at once. Before sm_90 warps move everything.
//
// promises: registers 128, stack 0, spills 0; bulk from sm_90 on
#include "ring.cuh"

constexpr u32 FERRY_THREADS = 256;

template <u32 ROWS>
struct FerryRows {
    u32 rows, tasks;      // a task is STAGE_BYTES of a row
    u32 largest, unused;  // bytes of the largest row
    Row row[ROWS];
};

// The most bytes, 16 or fewer, to which both sides are aligned together.
ZK_DEVICE u32 common_width(Row row) {
    u32 apart = (u32)(row.to ^ row.from) | 16;
    return apart & -apart;
}

// Bytes `begin` to `end` of a row, but no more than a task.
template <class Width>
ZK_DEVICE void ferry_words(Row row, u32 begin, u32 end) {
    u32 nbytes = end - begin < STAGE_BYTES ? end - begin : STAGE_BYTES;
    copy_words<Width>(row.to + begin, row.from + begin, nbytes / Width::NBYTES, thread_number() % 32, 32);
}

// Those before byte `head` and from byte `end` on.
ZK_DEVICE void ferry_ends(Row row, u32 head, u32 end) {
    u32 lane = thread_number() % 32;
    copy_words<Bytes1>(row.to, row.from, head, lane, 32);
    copy_words<Bytes1>(row.to + end, row.from + end, row.size - end, lane, 32);
}

// The tasks of a worker in order: every `step`-th of the launch.
template <u32 ROWS>
struct FerryTasks {
    const FerryRows<ROWS> &list;
    u32 task, step, number;  // the first task is less than `step`; row `number` is that of the task before

    ZK_MEMBER bool some() {
        if (task >= list.tasks) return false;
        number = row_of(list, task, number, step);
        return true;
    }
    ZK_MEMBER void next() { task += step; }
    ZK_MEMBER const Row &row() const { return list.row[number]; }
    ZK_MEMBER u32 within() const { return task - row().first; }
};

#if ZK_BULK
constexpr u32 LEAST_BULK = STAGE_BYTES / 4;  // a ring has few stages, and a small span would take a whole one

// The next part of this CTA for the ring; false where there is none.
template <u32 ROWS>
ZK_DEVICE bool next_bulk(FerryTasks<ROWS> &tasks, u64 &to, u64 &from, u32 &nbytes) {
    for (; tasks.some(); tasks.next()) {
        Row row = tasks.row();
        u32 head = head_of(row.to, row.from, row.size, 16);
        u32 end = head + ((row.size - head) & ~15u);
        u32 begin = head + tasks.within() * STAGE_BYTES;
        if (end - head < LEAST_BULK || begin >= end) continue;
        nbytes = end - begin < STAGE_BYTES ? end - begin : STAGE_BYTES;
        to = row.to + begin;
        from = row.from + begin;
        tasks.next();
        return true;
    }
    return false;
}

template <u32 ROWS>
ZK_DEVICE void ferry_bulk(const FerryRows<ROWS> &list) {
    Ring ring = Ring::opened(shared_memory(), shared_memory() + STAGES * STAGE_BYTES);
    FerryTasks<ROWS> loads{list, cta_number(), cta_count(), 0}, stores = loads;
    u64 to = 0, from = 0;
    u32 nbytes = 0;
    bool more = true;
    for (;;) {
        while (more && ring.loads < ring.stores + AHEAD) {
            more = next_bulk(loads, to, from, nbytes);
            if (more) ring.load(from, nbytes);
        }
        if (ring.loads == ring.stores) break;
        next_bulk(stores, to, from, nbytes);
        ring.store(to, nbytes);
    }
    ring.close();
}
constexpr u32 DRIVERS = 1;  // the warp of the thread that drives the ring
#else
constexpr u32 LEAST_BULK = ~0u;
constexpr u32 DRIVERS = 0;
#endif

template <u32 ROWS>
ZK_DEVICE void ferry(const FerryRows<ROWS> &list) {
    u32 warp = thread_number() / 32, warps = FERRY_THREADS / 32 - DRIVERS;
#if ZK_BULK
    if (thread_number() == 0 && list.largest >= LEAST_BULK) ferry_bulk(list);
    if (warp < DRIVERS) return;
#endif
    FerryTasks<ROWS> tasks{list, cta_number() * warps + warp - DRIVERS, cta_count() * warps, 0};
    for (; tasks.some(); tasks.next()) {
        Row row = tasks.row();
        u32 width = common_width(row);
        u32 head = head_of(row.to, row.from, row.size, width);
        u32 end = head + ((row.size - head) & -width);
        u32 begin = head + tasks.within() * STAGE_BYTES;
        if (begin < end && (width < 16 || end - head < LEAST_BULK)) {
            if (width == 1) ferry_words<Bytes1>(row, begin, end);
            if (width == 2) ferry_words<Bytes2>(row, begin, end);
            if (width == 4) ferry_words<Bytes4>(row, begin, end);
            if (width == 8) ferry_words<Bytes8>(row, begin, end);
            if (width == 16) ferry_words<Bytes16>(row, begin, end);
        }
        if (tasks.within() == 0) ferry_ends(row, head, end);
    }
}

ZK_KERNEL ferry_few(ZK_PARAMETERS(FerryRows<32>) list) { ferry(list); }
ZK_KERNEL ferry_many(ZK_PARAMETERS(FerryRows<1344>) list) { ferry(list); }
