// One function for each PTX instruction that the kernels are made of. Kernels touch memory through these alone.
//
// Compiled with ZK_MACHINE the same names come from tests/cuda/machine.h, where barriers and bulk copies complete late
// and in random order, and each access is checked. No header of CUDA is needed: NVRTC compiles this text as it is.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Words4 {
    u32 x, y, z, w;
};

#ifdef ZK_MACHINE
#include "machine.h"
#else

#define ZK_DEVICE static __device__ __forceinline__
#define ZK_MEMBER __device__ __forceinline__
#define ZK_KERNEL extern "C" __global__ void
#define ZK_PARAMETERS(type) const __grid_constant__ type  // stay in constant memory, with rows looked up by number

// bulk copies (TMA): sm_90 and later
#define ZK_BULK (__CUDA_ARCH__ >= 900)

// where a thread stands
ZK_DEVICE u32 thread_number() { return threadIdx.x; }
ZK_DEVICE u32 thread_count() { return blockDim.x; }
ZK_DEVICE u32 cta_number() { return blockIdx.x; }
ZK_DEVICE u32 cta_count() { return gridDim.x; }

// The address of dynamic shared memory, as the instructions below take it.
ZK_DEVICE u32 shared_memory() {
    extern __shared__ __align__(128) unsigned char zk_shared[];
    return (u32)__cvta_generic_to_shared(zk_shared);
}

// global memory, device or pinned host; nothing is read twice, so nothing stays in the L1 cache
#define ZK_LOAD(name, type, ptx, constraint)                                                                  \
    ZK_DEVICE type name(u64 at) {                                                                             \
        type x;                                                                                               \
        asm volatile("ld.global.L1::no_allocate." ptx " %0, [%1];" : "=" constraint(x) : "l"(at) : "memory"); \
        return x;                                                                                             \
    }
#define ZK_STORE(name, type, ptx, constraint)                                            \
    ZK_DEVICE void name(u64 at, type x) {                                                \
        asm volatile("st.global." ptx " [%0], %1;" ::"l"(at), constraint(x) : "memory"); \
    }
ZK_LOAD(ld_global_u16, u16, "u16", "h")
ZK_LOAD(ld_global_u32, u32, "u32", "r")
ZK_LOAD(ld_global_u64, u64, "u64", "l")
ZK_STORE(st_global_u16, u16, "u16", "h")
ZK_STORE(st_global_u32, u32, "u32", "r")
ZK_STORE(st_global_u64, u64, "u64", "l")
ZK_STORE(st_global_f64, double, "f64", "d")
ZK_DEVICE u8 ld_global_u8(u64 at) {
    u32 x;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return (u8)x;
}
ZK_DEVICE void st_global_u8(u64 at, u8 x) { asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)x) : "memory"); }
ZK_DEVICE Words4 ld_global_v4(u64 at) {
    Words4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
ZK_DEVICE void st_global_v4(u64 at, Words4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// past the L1 cache, which knows nothing of what other CTAs wrote
ZK_DEVICE double ld_global_cg_f64(u64 at) {
    double x;
    asm volatile("ld.global.cg.f64 %0, [%1];" : "=d"(x) : "l"(at) : "memory");
    return x;
}
ZK_DEVICE u32 atom_add_acq_rel(u64 at, u32 x) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(x) : "memory");
    return before;
}

// shared memory
ZK_DEVICE u32 ld_shared_u32(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
ZK_DEVICE double ld_shared_f64(u32 at) {
    double x;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at) : "memory");
    return x;
}
ZK_DEVICE void st_shared_u32(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
ZK_DEVICE void st_shared_f64(u32 at, double x) { asm volatile("st.shared.f64 [%0], %1;" ::"r"(at), "d"(x) : "memory"); }

// threads of a warp and of a CTA; all of them must come
ZK_DEVICE void bar_sync() { asm volatile("bar.sync 0;" ::: "memory"); }
ZK_DEVICE double shfl_bfly_f64(double x, u32 mask) {
    u32 low, high;
    asm volatile("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "d"(x));
    asm volatile("shfl.sync.bfly.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(low) : "r"(mask));
    asm volatile("shfl.sync.bfly.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(high) : "r"(mask));
    asm volatile("mov.b64 %0, {%1, %2};" : "=d"(x) : "r"(low), "r"(high));
    return x;
}

#if ZK_BULK
// barriers in shared memory that count the bytes of bulk copies
ZK_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// makes the initialisation visible to the engine that copies
ZK_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
ZK_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}
// Whether the phase of this parity has completed; may suspend the thread for a while before it says no.
ZK_DEVICE bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}
// What threads did to shared memory comes before what bulk copies do to it.
ZK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Addresses and sizes must be multiples of 16.
ZK_DEVICE void bulk_load(u32 to, u64 from, u32 nbytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(nbytes), "r"(barrier)
                 : "memory");
}
ZK_DEVICE void bulk_store(u64 to, u32 from, u32 nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(nbytes)
                 : "memory");
}
ZK_DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread have not read all of their shared memory.
template <u32 PENDING>
ZK_DEVICE void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until at most PENDING groups of this thread have not been written.
template <u32 PENDING>
ZK_DEVICE void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

// arithmetic, each rounded once
ZK_DEVICE float mul_rn_f32(float x, float y) { return __fmul_rn(x, y); }
ZK_DEVICE double add_rn_f64(double x, double y) { return __dadd_rn(x, y); }
ZK_DEVICE double fma_rn_f64(double x, double y, double z) { return __fma_rn(x, y, z); }
ZK_DEVICE u32 bits_of_f32(float x) { return __float_as_uint(x); }
ZK_DEVICE float f32_of_bits(u32 x) { return __uint_as_float(x); }
ZK_DEVICE u16 cvt_rn_bf16_f32(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
ZK_DEVICE u16 cvt_rn_f16_f32(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
ZK_DEVICE float cvt_f32_f16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#endif
