/* SPDX-License-Identifier: Apache-2.0
 *
 * Device code as host C++: what kernels/cuda_rings_*.cuh need of CUDA and of the device headers, over fibers. All threads of
 * all CTAs of all ranks take turns in one thread of the processor, in an order drawn from a seed; a turn ends where a
 * thread has to wait, and before each access to a word that other ranks use. So this finds wrong logic and wrong
 * addresses, but of wrong memory orders only that between the lanes which store a word.
 */
#ifndef LC_TESTS_EMULATION_H
#define LC_TESTS_EMULATION_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define LK_DEVICE_INTERNAL_CUH /* given here instead */
#define LK_CUDA_RINGS_OPS_CUH
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define ALL_LANES       0xffffffffU

#include "kernels/value_internal.h"

namespace emulation
{

struct index3 {
    uint32_t x, y, z;
};

constexpr uint32_t lanes = 32;

/* Rendezvous of the 32 lanes of a warp, in two buffers used in turn. */
struct warp {
    uint64_t values[2][lanes];
    int line; /* where the first of them came from */
    uint32_t arrived;
    uint32_t generation;
};

struct block {
    uint32_t threads;
    uint32_t arrived; /* at __syncthreads */
    uint32_t generation;
    warp *warps;
    bool any[2]; /* of __syncthreads_or, in turns */
};

extern index3 thread; /* of whoever runs */

/* Ends the turn. */
void yield();

/* Ends the turn until *word is no longer `value`. */
void sleep_while(const uint32_t *word, uint32_t value);

block *current_block();

/* Of whoever runs: memory is in order between the lanes of its warp, and a store to a word of another rank. Two lanes may
 * not store the same word without the former between them. */
void note_sync();
void note_store(uint64_t address);

/* Bulk copies of whoever runs. Each is made as late as it may be: memory is read when all but the last `but` have to have
 * read it, and written when all have to have ended. */
void bulk_begin(uint64_t to, const void *from, uint32_t bytes);
void bulk_read(uint32_t but);
void bulk_end();

/* Leaves a value and returns everybody's. All lanes have to come from one line of the source. */
const uint64_t *meet(uint64_t value, int line);

[[noreturn]] void fail(const char *what);

template <class T> inline uint64_t to_bits(T value)
{
    uint64_t bits = 0;

    memcpy(&bits, &value, sizeof(value));
    return bits;
}

template <class T> inline T from_bits(uint64_t bits)
{
    T value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

} // namespace emulation

#define threadIdx emulation::thread

struct float4 {
    float x, y, z, w;
};
struct uint4 {
    uint32_t x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w)
{
    return { x, y, z, w };
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return { x, y, z, w };
}

inline int __any_sync(uint32_t, int predicate, int line = __builtin_LINE())
{
    const uint64_t *all = emulation::meet(predicate != 0, line);

    for (uint32_t i = 0; i < emulation::lanes; i++)
        if (all[i])
            return 1;
    return 0;
}
inline int __all_sync(uint32_t mask, int predicate, int line = __builtin_LINE())
{
    return !__any_sync(mask, !predicate, line);
}
inline uint32_t __match_any_sync(uint32_t, uint32_t value, int line = __builtin_LINE())
{
    const uint64_t *all = emulation::meet(value, line);
    uint32_t mask = 0;

    for (uint32_t i = 0; i < emulation::lanes; i++)
        mask |= static_cast<uint32_t>(all[i] == value) << i;
    return mask;
}
inline uint32_t __ballot_sync(uint32_t, int predicate, int line = __builtin_LINE())
{
    const uint64_t *all = emulation::meet(predicate != 0, line);
    uint32_t ballot = 0;

    for (uint32_t i = 0; i < emulation::lanes; i++)
        ballot |= static_cast<uint32_t>(all[i]) << i;
    return ballot;
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline void __syncwarp(int line = __builtin_LINE())
{
    emulation::meet(0, line);
    emulation::note_sync();
}
template <class T>
inline T __shfl_xor_sync(uint32_t, T value, uint32_t mask, int line = __builtin_LINE())
{
    const uint64_t *all = emulation::meet(emulation::to_bits(value), line);

    return emulation::from_bits<T>(all[(threadIdx.x % emulation::lanes) ^ mask]);
}
template <class T> inline T __shfl_sync(uint32_t, T value, int lane, int line = __builtin_LINE())
{
    const uint64_t *all = emulation::meet(emulation::to_bits(value), line);

    return emulation::from_bits<T>(all[static_cast<uint32_t>(lane) % emulation::lanes]);
}
inline int __syncthreads_or(int predicate)
{
    emulation::block *b = emulation::current_block();
    uint32_t generation = b->generation;

    b->any[generation % 2] |= predicate != 0;
    if (++b->arrived == b->threads) {
        b->arrived = 0;
        b->any[(generation + 1) % 2] = false;
        b->generation++;
    } else {
        emulation::sleep_while(&b->generation, generation);
    }
    return b->any[generation % 2];
}
inline void __syncthreads()
{
    __syncthreads_or(0);
}
inline uint32_t __popc(uint32_t x)
{
    return static_cast<uint32_t>(__builtin_popcount(x));
}
inline float __fadd_rn(float a, float b)
{
    return a + b;
}
template <class T, class U> inline T atomicAdd(T *p, U value)
{
    T before = *p;

    *p += value;
    return before;
}
template <class T, class U> inline T atomicOr(T *p, U value)
{
    T before = *p;

    *p |= value;
    return before;
}

/* ---- device_internal.cuh ---- */

inline void check_aligned(uint64_t address, uint32_t bytes)
{
    if (address % bytes)
        emulation::fail("an access that is not aligned");
}
template <class T> inline T __ldcs(const T *p)
{
    check_aligned(reinterpret_cast<uint64_t>(p), sizeof(T));
    return *p;
}
template <class T> inline void __stcs(T *p, const T &value)
{
    check_aligned(reinterpret_cast<uint64_t>(p), sizeof(T));
    *p = value;
}
inline float4 load_float4(const float *p)
{
    float4 v;

    check_aligned(reinterpret_cast<uint64_t>(p), 16);
    memcpy(&v, p, sizeof(v));
    return v;
}
inline uint4 load_uint4(const void *p)
{
    uint4 v;

    check_aligned(reinterpret_cast<uint64_t>(p), 16);
    memcpy(&v, p, sizeof(v));
    return v;
}
inline void store_uint4(void *p, uint4 v)
{
    check_aligned(reinterpret_cast<uint64_t>(p), 16);
    memcpy(p, &v, sizeof(v));
}
inline void store_one(uint32_t *p, uint32_t value)
{
    memcpy(p, &value, sizeof(value));
}
inline void store_one(uint16_t *p, uint16_t value)
{
    memcpy(p, &value, sizeof(value));
}
inline uint32_t narrow_one(float x) /* every NaN as the device makes it */
{
    return x != x ? LK_BF16_NAN : narrow_bf16(x, 1, 0, 0);
}
inline uint32_t narrow_pair(float low, float high)
{
    return narrow_one(low) | narrow_one(high) << 16;
}
inline uint32_t narrow_half_pair(float low, float high)
{
    return narrow_fp16(low) | narrow_fp16(high) << 16;
}
inline float widen_half(uint32_t bits)
{
    return widen_fp16(bits);
}
inline float widen_low(uint32_t pair)
{
    return bits_float(pair << 16);
}
inline float widen_high(uint32_t pair)
{
    return bits_float(pair & 0xffff0000U);
}
inline uint32_t wide_lane_begin(uint32_t lane)
{
    return 4 * lane;
}
inline uint32_t packed_lane_begin(uint32_t lane)
{
    return (lane & 1) * 128 + (lane >> 1) * 8;
}
inline float4 swap_float4(float4 mine)
{
    return make_float4(__shfl_xor_sync(ALL_LANES, mine.x, 1), __shfl_xor_sync(ALL_LANES, mine.y, 1),
                       __shfl_xor_sync(ALL_LANES, mine.z, 1),
                       __shfl_xor_sync(ALL_LANES, mine.w, 1));
}
inline float4 select_float4(bool first, float4 a, float4 b)
{
    return first ? a : b;
}

/* ---- cuda_rings_ops.cuh ---- */

inline uint64_t load_word(uint64_t address)
{
    check_aligned(address, 8);
    emulation::yield();
    return *reinterpret_cast<const volatile uint64_t *>(address);
}
inline void store_word(uint64_t address, uint64_t value)
{
    check_aligned(address, 8);
    emulation::note_store(address);
    *reinterpret_cast<volatile uint64_t *>(address) = value;
}
inline void fence_system()
{
    emulation::yield();
}
inline uint32_t load_abort(uint32_t *address)
{
    volatile uint32_t *word = address;

    if (*word)
        *word = 2;
    return *word;
}
inline uint4 load_slot(uint64_t address)
{
    return load_uint4(reinterpret_cast<const void *>(address));
}
enum slot_store {
    STORE_KEPT,
    STORE_PLAIN,
    STORE_STREAMING,
    STORE_STRONG,
};
template <slot_store> inline void store_slot(uint64_t address, uint4 v)
{
    store_uint4(reinterpret_cast<void *>(address), v);
}
inline void fence_bulk()
{
    emulation::yield();
}
inline void bulk_store(uint64_t to, const void *from, uint32_t bytes)
{
    check_aligned(to | reinterpret_cast<uint64_t>(from) | bytes, 16);
    emulation::bulk_begin(to, from, bytes);
}
template <uint32_t N> inline void bulk_wait_read()
{
    emulation::bulk_read(N);
}
inline void bulk_wait()
{
    emulation::yield();
    emulation::bulk_end();
}
inline void store_lines(uint64_t address, uint64_t first, uint64_t second)
{
    check_aligned(address, 16);
    reinterpret_cast<volatile uint64_t *>(address)[0] = first;
    emulation::yield();
    reinterpret_cast<volatile uint64_t *>(address)[1] = second;
}
inline void load_lines(uint64_t address, uint64_t *first, uint64_t *second)
{
    check_aligned(address, 16);
    *first = reinterpret_cast<const volatile uint64_t *>(address)[0];
    *second = reinterpret_cast<const volatile uint64_t *>(address)[1];
}

struct lk_barrier {
    uint32_t phase;
    uint32_t pending;
    uint32_t count;
};

inline void barrier_init(lk_barrier *b, uint32_t count)
{
    *b = { 0, count, count };
}
inline uint32_t arrive_and_count(uint32_t *arrived)
{
    return (*arrived)++;
}
inline void prefetch_global(uint64_t)
{
}
inline void barrier_arrive(lk_barrier *b)
{
    if (b->pending == 0)
        emulation::fail("an arrival too many at a barrier");
    if (--b->pending == 0) {
        b->pending = b->count;
        b->phase++;
    }
}
inline void bulk_load(void *to, uint64_t from, uint32_t bytes, lk_barrier *b)
{
    check_aligned(reinterpret_cast<uint64_t>(to) | from | bytes, 16);
    emulation::yield();
    memcpy(to, reinterpret_cast<const void *>(from), bytes);
    barrier_arrive(b);
}
inline bool barrier_ended(lk_barrier *b, uint32_t parity)
{
    return b->phase % 2 != parity;
}
inline void barrier_wait(lk_barrier *b, uint32_t parity)
{
    while (!barrier_ended(b, parity))
        emulation::sleep_while(&b->phase, b->phase);
}
inline void rest()
{
    emulation::yield();
}
inline void back_off(uint32_t tries)
{
    if (tries)
        emulation::yield();
}

#endif
