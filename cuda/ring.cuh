// A ring of stages in shared memory, filled and emptied by bulk copies; copies by plain loads; rows of a list by task.
//
// Bandwidth is bytes in flight over the time of a round trip. Bytes on their way by plain loads are in registers, so a
// CTA of 1,024 threads has 64 KiB of them; a ring has its stages, and needs one thread.
#pragma once
#include "ptx.cuh"

#ifndef ZK_STAGE
#define ZK_STAGE 32768  // bytes of a CTA's stage; less where a CTA may have less shared memory, as on sm_120
#endif

constexpr u32 STAGE_BYTES = ZK_STAGE;
constexpr u32 STAGES = 4;
constexpr u32 AHEAD = 2;   // loads on their way; as many stages as are left may still be read by stores
constexpr u32 FLIGHT = 8;  // plain loads of a thread that are on their way at once
constexpr u32 BARRIER = 8;

// A part of the list: `size` bytes from `from` to `to`; its tasks begin with number `first` of the launch.
// 24 bytes, so that 1,344 rows fit the 32,764 bytes of arguments that a kernel may have.
struct Row {
    u64 to, from;
    u32 size, first;
};

// The row that task `task` of a launch is of, which is row `low` or one of `ahead` later ones: each row has a task, so
// rows are no farther than tasks. The first look finds row `low`, of many tasks, and the second the last row that it
// can be, where each has one task.
template <class List>
ZK_DEVICE u32 row_of(const List &list, u32 task, u32 low, u32 ahead) {
    u32 left = list.rows - 1 - low, high = low + (ahead < left ? ahead : left);
    if (low < high && task < list.row[low + 1].first) return low;
    for (u32 look = high; low < high; look = (low + high + 1) / 2) {
        if (list.row[look].first <= task) {
            low = look;
        } else {
            high = look - 1;
        }
    }
    return low;
}

#if ZK_BULK
// One thread calls all functions of a ring. No thread reads or writes the stages, so bulk copies need no proxy fence.
struct Ring {
    u32 stages, barriers;  // addresses in shared memory
    u32 loads, stores;     // so far

    ZK_DEVICE Ring opened(u32 stages, u32 barriers) {
        for (u32 i = 0; i < STAGES; ++i) mbarrier_init(barriers + i * BARRIER, 1);
        fence_mbarrier_init();
        fence_proxy_async();
        return Ring{stages, barriers, 0, 0};
    }

    // At most AHEAD loads may be on their way.
    ZK_MEMBER void load(u64 from, u32 nbytes) {
        u32 stage = loads++ % STAGES;
        bulk_wait_group_read<STAGES - AHEAD>();  // the stores since then may still read other stages
        mbarrier_arrive_expect_tx(barriers + stage * BARRIER, nbytes);
        bulk_load(stages + stage * STAGE_BYTES, from, nbytes, barriers + stage * BARRIER);
    }

    // Stores the oldest load that has no store yet, once it has arrived.
    ZK_MEMBER void store(u64 to, u32 nbytes) {
        u32 stage = stores % STAGES;
        while (!mbarrier_try_wait_parity(barriers + stage * BARRIER, stores / STAGES & 1)) {
        }
        bulk_store(to, stages + stage * STAGE_BYTES, nbytes);
        bulk_commit_group();
        ++stores;
    }

    // A CTA must not end, nor its shared memory be used otherwise, before its stores have.
    ZK_MEMBER void close() const { bulk_wait_group<0>(); }
};
#endif

// Accesses of one width.
struct Bytes1 {
    static constexpr u32 NBYTES = 1;
    typedef u8 Word;
    ZK_DEVICE Word load(u64 at) { return ld_global_u8(at); }
    ZK_DEVICE void store(u64 at, Word x) { st_global_u8(at, x); }
};
struct Bytes2 {
    static constexpr u32 NBYTES = 2;
    typedef u16 Word;
    ZK_DEVICE Word load(u64 at) { return ld_global_u16(at); }
    ZK_DEVICE void store(u64 at, Word x) { st_global_u16(at, x); }
};
struct Bytes4 {
    static constexpr u32 NBYTES = 4;
    typedef u32 Word;
    ZK_DEVICE Word load(u64 at) { return ld_global_u32(at); }
    ZK_DEVICE void store(u64 at, Word x) { st_global_u32(at, x); }
};
struct Bytes8 {
    static constexpr u32 NBYTES = 8;
    typedef u64 Word;
    ZK_DEVICE Word load(u64 at) { return ld_global_u64(at); }
    ZK_DEVICE void store(u64 at, Word x) { st_global_u64(at, x); }
};
struct Bytes16 {
    static constexpr u32 NBYTES = 16;
    typedef Words4 Word;
    ZK_DEVICE Word load(u64 at) { return ld_global_v4(at); }
    ZK_DEVICE void store(u64 at, Word x) { st_global_v4(at, x); }
};

// The bytes of a span before the first that is aligned to `width` on both sides; all of them where there is none.
ZK_DEVICE u32 head_of(u64 to, u64 from, u32 nbytes, u32 width) {
    u32 head = ((to ^ from) & (width - 1)) ? nbytes : (u32)(-to & (width - 1));
    return head < nbytes ? head : nbytes;
}

// `threads` threads, of which this is number `thread`, copy `count` words with FLIGHT loads of each on their way.
template <class Width>
ZK_DEVICE void copy_words(u64 to, u64 from, u32 count, u32 thread, u32 threads) {
    for (u32 begin = thread; begin < count; begin += FLIGHT * threads) {
        typename Width::Word words[FLIGHT];
#pragma unroll
        for (u32 i = 0; i < FLIGHT; ++i) {
            u32 at = begin + i * threads;
            if (at < count) words[i] = Width::load(from + (u64)at * Width::NBYTES);
        }
#pragma unroll
        for (u32 i = 0; i < FLIGHT; ++i) {
            u32 at = begin + i * threads;
            if (at < count) Width::store(to + (u64)at * Width::NBYTES, words[i]);
        }
    }
}
