// A list of spans between device memory and pinned host memory, either way, by 2 to 8 CTAs that stay.
//
// From sm_90 on one thread of a CTA moves all 16-byte aligned parts through a ring (bulk copies); the others move what
// is ragged. Before, all threads move 16 bytes at a time, 8 loads of each on their way: 32 KiB of a CTA.
//
// promises: registers 160, stack 0, spills 0; bulk from sm_90 on
#include "ring.cuh"

constexpr u32 FERRY_THREADS = 256;

template <u32 ROWS>
struct FerryRows {
    u32 rows, tasks;  // a task is STAGE_BYTES of a row
    Row row[ROWS];
};

// `size` bytes of a row from `begin` on, those that are whole aligned words; task 0 moves what is left before and
// after.
template <class Width>
ZK_DEVICE void ferry_plain(Row row, u32 task, u32 thread, u32 threads) {
    u32 head = head_of(row.to, row.from, row.size, Width::NBYTES);
    u32 whole = (row.size - head) & ~(Width::NBYTES - 1);
    u32 begin = task * STAGE_BYTES;
    if (begin < whole) {
        u32 nbytes = whole - begin < STAGE_BYTES ? whole - begin : STAGE_BYTES;
        copy_words<Width>(row.to + head + begin, row.from + head + begin, nbytes / Width::NBYTES, thread, threads);
    }
    if (task == 0) {
        copy_words<Bytes1>(row.to, row.from, head, thread, threads);
        u32 end = head + whole;
        copy_words<Bytes1>(row.to + end, row.from + end, row.size - end, thread, threads);
    }
}

// In the widest words in which both sides are aligned alike.
ZK_DEVICE void ferry_ragged(Row row, u32 task, u32 thread, u32 threads) {
    u32 apart = (u32)(row.to ^ row.from);
    if (apart & 1) {
        ferry_plain<Bytes1>(row, task, thread, threads);
    } else if (apart & 2) {
        ferry_plain<Bytes2>(row, task, thread, threads);
    } else if (apart & 4) {
        ferry_plain<Bytes4>(row, task, thread, threads);
    } else {
        ferry_plain<Bytes8>(row, task, thread, threads);
    }
}

// The tasks of this CTA in order: every cta_count()-th of the launch.
template <u32 ROWS>
struct FerryTasks {
    const FerryRows<ROWS> &list;
    u32 task, number;

    ZK_MEMBER bool some() {
        if (task >= list.tasks) return false;
        while (number + 1 < list.rows && list.row[number + 1].first <= task) ++number;
        return true;
    }
    ZK_MEMBER void next() { task += cta_count(); }
    ZK_MEMBER const Row &row() const { return list.row[number]; }
    ZK_MEMBER u32 within() const { return task - row().first; }
};

#if ZK_BULK
// The next part of this CTA that a bulk copy can move; false where there is none.
template <u32 ROWS>
ZK_DEVICE bool next_bulk(FerryTasks<ROWS> &tasks, u64 &to, u64 &from, u32 &nbytes) {
    for (; tasks.some(); tasks.next()) {
        Row row = tasks.row();
        u32 head = head_of(row.to, row.from, row.size, 16);
        u32 whole = (row.size - head) & ~15u;
        u32 begin = tasks.within() * STAGE_BYTES;
        if (begin >= whole) continue;
        nbytes = whole - begin < STAGE_BYTES ? whole - begin : STAGE_BYTES;
        to = row.to + head + begin;
        from = row.from + head + begin;
        tasks.next();
        return true;
    }
    return false;
}

template <u32 ROWS>
ZK_DEVICE void ferry_bulk(const FerryRows<ROWS> &list) {
    typedef Ring<STAGE_BYTES> Stages;
    Stages ring = Stages::opened(shared_memory(), shared_memory() + STAGES * STAGE_BYTES, true);
    FerryTasks<ROWS> loads{list, cta_number(), 0}, stores{list, cta_number(), 0};
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
        ring.loaded();
        ring.store(to, nbytes);
    }
    ring.close();
}
#endif

template <u32 ROWS>
ZK_DEVICE void ferry(const FerryRows<ROWS> &list) {
    u32 thread = thread_number(), threads = FERRY_THREADS;
#if ZK_BULK
    if (thread == 0) ferry_bulk(list);
    if (thread < 32) return;  // the warp of the thread that copies
    thread -= 32;
    threads -= 32;
#endif
    for (FerryTasks<ROWS> tasks{list, cta_number(), 0}; tasks.some(); tasks.next()) {
        Row row = tasks.row();
        if ((row.to ^ row.from) & 15) {
            ferry_ragged(row, tasks.within(), thread, threads);
        } else {
#if ZK_BULK
            if (tasks.within()) continue;
            u32 head = head_of(row.to, row.from, row.size, 16);
            u32 end = head + ((row.size - head) & ~15u);
            copy_words<Bytes1>(row.to, row.from, head, thread, threads);
            copy_words<Bytes1>(row.to + end, row.from + end, row.size - end, thread, threads);
#else
            ferry_plain<Bytes16>(row, tasks.within(), thread, threads);
#endif
        }
    }
}

ZK_KERNEL ferry_few(ZK_PARAMETERS(FerryRows<32>) list) { ferry(list); }
ZK_KERNEL ferry_many(ZK_PARAMETERS(FerryRows<1344>) list) { ferry(list); }
