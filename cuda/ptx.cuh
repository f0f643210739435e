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
#endif
