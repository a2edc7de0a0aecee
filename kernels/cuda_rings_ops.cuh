/* SPDX-License-Identifier: Apache-2.0
 *
 * The accesses by which the kernels of the rings meet other ranks and other warps. Who may use which stands in the
 * protocol (rings.h); nothing else in the kernels touches a segment.
 */
#ifndef LK_CUDA_RINGS_OPS_CUH
#define LK_CUDA_RINGS_OPS_CUH

#include "kernels/device_internal.cuh"

#define ALL_LANES 0xffffffffU

/* ---- words of a segment: one writer each, at system scope ---- */

static __device__ __forceinline__ uint64_t load_word(uint64_t address)
{
    uint64_t value;

    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/* After fence_system() of the same thread: together they are a release. A credit needs none (publishing_warp). */
static __device__ __forceinline__ void store_word(uint64_t address, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/* Everything that this thread has done or has seen done by threads it synchronised with comes before what it stores
 * next. */
static __device__ __forceinline__ void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* To be asked by who waits, and ends if it is so: that it has been cut short is then said, as rings.h wants it. */
static __device__ __forceinline__ uint32_t load_abort(uint32_t *address)
{
    uint32_t value;

    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    if (value)
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(2) : "memory");
    return value;
}

/* ---- payload ---- */

/* Not through a cache that could hold what the slot held before. Not ordered with other loads by the compiler's
 * "memory": several are to be under way; the pipeline's barriers stand around them. */
static __device__ __forceinline__ uint4 load_slot(uint64_t address)
{
    uint4 v;

    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

/* Towards L2, of what is read soon. */
static __device__ __forceinline__ void prefetch_global(uint64_t address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* How payload is stored into slots. */
enum slot_store {
    STORE_KEPT, /* L2 is told to keep it: it is read soon, and what streams past it from and to the tensors is not */
    STORE_PLAIN,
    STORE_STREAMING,
    STORE_STRONG,
};

#define LK_STORE_PACK(kind, address, v)                                                         \
    asm volatile(kind ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"((v).x), "r"((v).y), \
                 "r"((v).z), "r"((v).w)                                                         \
                 : "memory")

template <slot_store How>
static __device__ __forceinline__ void store_slot(uint64_t address, uint4 v)
{
#if __CUDA_ARCH__ >= 800
    constexpr bool kept = How == STORE_KEPT;
#else
    constexpr bool kept = false;
#endif

    if constexpr (kept) {
        /* as createpolicy.fractional.L2::evict_last makes it */
        const uint64_t keep = 0x14F0000000000000;

        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
                     "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(keep)
                     : "memory");
    } else if constexpr (How == STORE_STREAMING) {
        LK_STORE_PACK("st.global.cs", address, v);
    } else if constexpr (How == STORE_STRONG) {
        LK_STORE_PACK("st.relaxed.sys.global", address, v);
    } else {
        LK_STORE_PACK("st.global", address, v);
    }
}

/* ---- bulk copies, of one thread, in groups that end in order. Multiples of 16 bytes. From compute capability 9.0 on. ---- */

/* What the warp's lanes have stored to shared memory is there for bulk copies behind the next barrier of the warp. */
static __device__ __forceinline__ void fence_bulk()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* One group. */
static __device__ __forceinline__ void bulk_store(uint64_t to, const void *from, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes)
                 : "memory");
#endif
}

/* All groups but the last N have read their shared memory. */
template <uint32_t N> static __device__ __forceinline__ void bulk_wait_read()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}

/* What all groups wrote is there for this thread. */
static __device__ __forceinline__ void bulk_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

/* Two lines of a one-shot call. Each is whole, the two may come apart. */
static __device__ __forceinline__ void store_lines(uint64_t address, uint64_t first,
                                                   uint64_t second)
{
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first),
                 "l"(second)
                 : "memory");
}

static __device__ __forceinline__ void load_lines(uint64_t address, uint64_t *first,
                                                  uint64_t *second)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(*first), "=l"(*second)
                 : "l"(address)
                 : "memory");
}

/* ---- between the warps of a CTA: a phase ends when `count` threads have arrived. An arrival releases, a test that
 * finds the phase ended acquires. ---- */

struct lk_barrier {
    uint64_t word;
};

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

static __device__ __forceinline__ void barrier_init(lk_barrier *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(lk_barrier *b)
{
    asm volatile("{\n\t.reg .b64 state;\n\t"
                 "mbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(b))
                 : "memory");
}

/* An arrival, and the phase ends when so many bytes have come, too. */
static __device__ __forceinline__ void bulk_load(void *to, uint64_t from, uint32_t bytes,
                                                 lk_barrier *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .b64 state;\n\t"
        "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(shared_address(b)),
        "r"(bytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b))
        : "memory");
#endif
}

/* True if the phase of this parity, counted from 0, has ended. */
static __device__ __forceinline__ bool barrier_ended(lk_barrier *b, uint32_t parity)
{
    uint32_t ended;

    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(ended)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
    return ended != 0;
}

/* For phases that other warps of this CTA end without waiting for anybody, or until the producer's stop comes. */
static __device__ __forceinline__ void barrier_wait(lk_barrier *b, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900 /* sleeps in hardware for a while */
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t"
                 "@!p bra again;\n\t}" ::"r"(shared_address(b)),
                 "r"(parity)
                 : "memory");
#else
    while (!barrier_ended(b, parity))
        __nanosleep(40);
#endif
}

/* How many came before, of those that count at this word of shared memory: what they did comes before what whoever counts
 * last does next. */
static __device__ __forceinline__ uint32_t arrive_and_count(uint32_t *arrived)
{
    uint32_t before;

    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(shared_address(arrived))
                 : "memory");
    return before;
}

/* There is nothing to do, and others have the issue slots. */
static __device__ __forceinline__ void rest()
{
    __nanosleep(50);
}

/* A try at something that another rank has to do failed. */
static __device__ __forceinline__ void back_off(uint32_t tries)
{
    if (tries > 64)
        __nanosleep(100);
}

#endif
