// Numbers of three types, and sums whose order is that of zerokern/kernels/reference_device.py: the same bits on every
// GPU and in every run, however many CTAs there are and whichever ends last.
#pragma once
#include "ptx.cuh"

constexpr u32 COLUMNS = 1024;
constexpr u32 SUMS_SHARED = COLUMNS * 8 + 16;  // bytes of shared memory that `columns` and `is_last` take

struct f32 {
    static constexpr u32 NBYTES = 4;
    ZK_DEVICE float value(u32 bits) { return f32_of_bits(bits); }
    ZK_DEVICE u32 rounded(float x) { return bits_of_f32(x); }
    ZK_DEVICE u32 load(u64 at) { return ld_global_u32(at); }
    ZK_DEVICE void store(u64 at, u32 bits) { st_global_u32(at, bits); }
};
struct bf16 {
    static constexpr u32 NBYTES = 2;
    ZK_DEVICE float value(u32 bits) { return f32_of_bits(bits << 16); }
    ZK_DEVICE u32 rounded(float x) { return cvt_rn_bf16_f32(x); }
    ZK_DEVICE u32 load(u64 at) { return ld_global_u16(at); }
    ZK_DEVICE void store(u64 at, u32 bits) { st_global_u16(at, (u16)bits); }
};
struct f16 {
    static constexpr u32 NBYTES = 2;
    ZK_DEVICE float value(u32 bits) { return cvt_f32_f16((u16)bits); }
    ZK_DEVICE u32 rounded(float x) { return cvt_rn_f16_f32(x); }
    ZK_DEVICE u32 load(u64 at) { return ld_global_u16(at); }
    ZK_DEVICE void store(u64 at, u32 bits) { st_global_u16(at, (u16)bits); }
};

// The square of an fp32 number is exact in float64, so the fused multiply-add rounds as an addition does.
ZK_DEVICE double plus_square(double sum, float x) {
    double wide = x;
    return fma_rn_f64(wide, wide, sum);
}

// Where the sums of the parts of a list go. A list that needs several launches hands in parts from all of them, and
// the last launch adds them up; a list of several dtypes is several lists, of which later ones `follow`.
struct Sums {
    u64 out, partials, counter;  // float64: the total and the parts; a word that is 0 between launches
    u32 first, count;            // the number of this launch's first part; parts of all launches
    u32 last, follows;
};

// Whether all other CTAs of the launch are past this line, their parts visible. Thread 0 of each has stored its part,
// and counts. All threads must come.
ZK_DEVICE bool is_last(const Sums &sums, u32 shared) {
    u32 flag = shared + COLUMNS * 8;
    if (thread_number() == 0) {
        bool last = atom_add_acq_rel(sums.counter, 1) == cta_count() - 1;
        if (last) st_global_u32(sums.counter, 0);
        st_shared_u32(flag, last && sums.last);
    }
    bar_sync();
    return ld_shared_u32(flag) != 0;
}

// Column j of 1024 adds the parts j, j + 1024, ... in order; then columns are added by halves. In thread 0: the sum.
ZK_DEVICE double columns(const Sums &sums, u32 shared) {
    for (u32 column = thread_number(); column < COLUMNS; column += thread_count()) {
        double total = 0.0;
        for (u32 i = column; i < sums.count; i += COLUMNS)
            total = add_rn_f64(total, ld_global_cg_f64(sums.partials + 8ull * i));
        st_shared_f64(shared + 8 * column, total);
    }
    for (u32 half = COLUMNS / 2; half > 0; half /= 2) {
        bar_sync();
        for (u32 column = thread_number(); column < half; column += thread_count()) {
            u32 at = shared + 8 * column;
            st_shared_f64(at, add_rn_f64(ld_shared_f64(at), ld_shared_f64(at + 8 * half)));
        }
    }
    if (thread_number() != 0) return 0.0;
    double total = ld_shared_f64(shared);
    if (sums.follows) total = add_rn_f64(ld_global_cg_f64(sums.out), total);
    st_global_f64(sums.out, total);
    return total;
}

ZK_DEVICE bool is_finite(double x) { return x - x == 0.0; }
