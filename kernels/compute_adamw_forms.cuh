/* SPDX-License-Identifier: Apache-2.0
 *
 * Forms of AdamW's second kernel. They differ in how a chunk goes through a block, not in what becomes of an element.
 * ADAMW_UPDATE_FORM chooses; the others are made with LK_COMPUTE_VARIANTS alone, to be measured.
 */
#ifndef LK_COMPUTE_ADAMW_FORMS_CUH
#define LK_COMPUTE_ADAMW_FORMS_CUH

#include "kernels/compute_adamw.h"
#include "kernels/compute_device.cuh"
#include "kernels/cuda_rings_ops.cuh"

/* How memory is touched. */
enum adamw_policy {
    ADAMW_STREAMED, /* evicted first */
    ADAMW_PLAIN,
    ADAMW_LINES, /* reads: not into L1, and 256 bytes into L2 at once */
};

/* Threads of a block, groups of four elements of each in flight, blocks of a multiprocessor; Reverse: from the last chunk
 * to the first, whose gradients the first kernel left in L2; Ahead: the first loads are under way while factors are made. */
template <unsigned T, unsigned U, unsigned B, adamw_policy Reads, adamw_policy Writes, bool R,
          bool A>
struct adamw_form {
    static constexpr unsigned threads = T, groups = U, blocks = B;
    static constexpr adamw_policy reads = Reads, writes = Writes;
    static constexpr bool reverse = R, ahead = A;
};

template <adamw_policy Policy>
__device__ __forceinline__ void form_load4(const float *from, float (&out)[4])
{
    float4 x;

    if constexpr (Policy == ADAMW_STREAMED)
        x = __ldcs(reinterpret_cast<const float4 *>(from));
    else if constexpr (Policy == ADAMW_PLAIN)
        x = *reinterpret_cast<const float4 *>(from);
    else
        asm volatile("ld.global.L1::no_allocate.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "l"(from));
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
}

template <adamw_policy Policy>
__device__ __forceinline__ void form_store4(float *to, const float (&in)[4])
{
    float4 x = make_float4(in[0], in[1], in[2], in[3]);

    if constexpr (Policy == ADAMW_STREAMED)
        __stcs(reinterpret_cast<float4 *>(to), x);
    else
        *reinterpret_cast<float4 *>(to) = x;
}

template <class Form, uint32_t Flags>
__device__ __forceinline__ void form_read(const lk_adamw_entry &entry, uint64_t at,
                                          adamw_group (&out)[Form::groups])
{
#pragma unroll
    for (unsigned j = 0; j < Form::groups; j++, at += 4 * Form::threads) {
        if (Flags & LK_ADAMW_GRAD16)
            load4_bf16(static_cast<const uint16_t *>(entry.grad) + at, out[j].grad);
        else
            form_load4<Form::reads>(static_cast<const float *>(entry.grad) + at, out[j].grad);
        form_load4<Form::reads>(entry.param + at, out[j].param);
        form_load4<Form::reads>(entry.m + at, out[j].m);
        form_load4<Form::reads>(entry.v + at, out[j].v);
    }
}

template <class Form, uint32_t Flags>
__device__ __forceinline__ void form_write(const lk_adamw_entry &entry, uint64_t at,
                                           const adamw_factors &f,
                                           adamw_group (&group)[Form::groups])
{
#pragma unroll
    for (unsigned j = 0; j < Form::groups; j++, at += 4 * Form::threads) {
        adamw_change(&f, &group[j]);
        form_store4<Form::writes>(entry.param + at, group[j].param);
        form_store4<Form::writes>(entry.m + at, group[j].m);
        form_store4<Form::writes>(entry.v + at, group[j].v);
        if (Flags & LK_ADAMW_COPY)
            store4_bf16(entry.copy + at, group[j].param);
    }
}

/* Of thread 0, for all; of no tensor without a chunk. */
__device__ __noinline__ void form_factors(const lk_adamw_launch *launch, uint32_t chunk,
                                          adamw_factors *shared)
{
    adamw_make_factors(launch, shared);
    if (chunk < launch->chunks)
        adamw_tensor_factors(launch, launch->entries + launch->chunk_entry[chunk], shared);
}

/* A chunk that is whole and aligned. All threads of the block come here. */
template <class Form, uint32_t Flags>
__device__ __forceinline__ void form_chunk(const lk_adamw_launch &launch, uint32_t chunk,
                                           const adamw_piece &piece, adamw_factors &shared)
{
    adamw_group group[Form::groups];
    uint64_t at = piece.begin + 4 * threadIdx.x;

    if (Form::ahead)
        form_read<Form, Flags>(piece.entry, at, group);
    if (threadIdx.x == 0)
        form_factors(&launch, chunk, &shared);
    __syncthreads();
    adamw_factors mine = shared;

    if (!mine.apply)
        return;
    if (!Form::ahead)
        form_read<Form, Flags>(piece.entry, at, group);
    for (;;) {
        form_write<Form, Flags>(piece.entry, at, mine, group);
        at += 4 * Form::groups * Form::threads;
        if (at >= piece.end)
            return;
        form_read<Form, Flags>(piece.entry, at, group);
    }
}

/* Of thread 0 alone: its block has read the state, and the last of them changes it. */
__device__ __forceinline__ void form_end(const lk_adamw_launch &launch, const adamw_factors &f)
{
    __threadfence();
    if (atomicInc(&launch.state->tickets[1], gridDim.x - 1) == gridDim.x - 1)
        adamw_end(launch.state, &f);
}

template <class Form>
__global__ void __launch_bounds__(Form::threads, Form::blocks)
    adamw_update_chunks(const __grid_constant__ lk_adamw_launch launch)
{
    __shared__ adamw_factors factors;
    bool some = blockIdx.x < launch.chunks;
    uint32_t chunk = Form::reverse && some ? launch.chunks - 1 - blockIdx.x : blockIdx.x, flags;
    adamw_piece piece = {};

    if (some)
        piece = adamw_find(&launch, chunk);
    flags = piece.entry.flags & (LK_ADAMW_COPY | LK_ADAMW_GRAD16);
    if (!some || adamw_width(&piece) != LK_WHOLE) {
        if (threadIdx.x == 0)
            form_factors(&launch, chunk, &factors);
        __syncthreads();
        adamw_factors mine = factors;

        if (some && mine.apply && threadIdx.x < LK_BLOCK)
            adamw_update_groups(&piece, &mine, threadIdx.x, flags, adamw_width(&piece));
    } else if (flags == 0) {
        form_chunk<Form, 0>(launch, chunk, piece, factors);
    } else if (flags == LK_ADAMW_COPY) {
        form_chunk<Form, LK_ADAMW_COPY>(launch, chunk, piece, factors);
    } else if (flags == LK_ADAMW_GRAD16) {
        form_chunk<Form, LK_ADAMW_GRAD16>(launch, chunk, piece, factors);
    } else {
        form_chunk<Form, LK_ADAMW_COPY | LK_ADAMW_GRAD16>(launch, chunk, piece, factors);
    }
    if (threadIdx.x == 0)
        form_end(launch, factors);
}

/* ---- by bulk copies: a block that stays has three pieces of a chunk under way, changes each in shared memory and sends
 * it back from there ---- */

constexpr unsigned BULK_THREADS = 512, BULK_STAGES = 3;
constexpr uint32_t BULK_PIECE = 4096; /* elements */

struct adamw_stage {
    float param[BULK_PIECE], m[BULK_PIECE], v[BULK_PIECE], grad[BULK_PIECE];
};

constexpr size_t BULK_SHARED = BULK_STAGES * sizeof(adamw_stage);

/* Goes over the pieces of a block's chunks that bulk copies take: those of whole chunks with fp32 gradients and without a
 * copy. */
struct adamw_walk {
    uint32_t nth; /* chunk of the block */
    uint32_t part;
    adamw_piece piece;
};

__device__ __forceinline__ bool bulk_takes(const adamw_piece &piece)
{
    return adamw_width(&piece) == LK_WHOLE &&
           !(piece.entry.flags & (LK_ADAMW_COPY | LK_ADAMW_GRAD16));
}

/* The block's nth chunk, from the last to the first; false behind the end. */
__device__ __forceinline__ bool bulk_find(const lk_adamw_launch &launch, uint32_t nth,
                                          adamw_piece *out)
{
    uint64_t chunk = uint64_t{ nth } * gridDim.x + blockIdx.x;

    if (chunk >= launch.chunks)
        return false;
    *out = adamw_find(&launch, launch.chunks - 1 - static_cast<uint32_t>(chunk));
    return true;
}

/* Thread 0: the walk's next piece into a stage, if there is one. */
__device__ __forceinline__ void bulk_begin(const lk_adamw_launch &launch, adamw_walk &walk,
                                           adamw_stage &stage, lk_barrier *there)
{
    constexpr uint32_t bytes = BULK_PIECE * 4;

    while (walk.part == LK_ADAMW_CHUNK / BULK_PIECE) {
        if (!bulk_find(launch, walk.nth, &walk.piece))
            return;
        walk.nth++;
        walk.part = bulk_takes(walk.piece) ? 0 : walk.part;
    }
    uint64_t at = walk.piece.begin + walk.part++ * BULK_PIECE;

    bulk_load(stage.param, reinterpret_cast<uint64_t>(walk.piece.entry.param + at), bytes, there);
    bulk_load(stage.m, reinterpret_cast<uint64_t>(walk.piece.entry.m + at), bytes, there);
    bulk_load(stage.v, reinterpret_cast<uint64_t>(walk.piece.entry.v + at), bytes, there);
    bulk_load(stage.grad,
              reinterpret_cast<uint64_t>(static_cast<const float *>(walk.piece.entry.grad) + at),
              bytes, there);
}

__device__ __forceinline__ void bulk_change(adamw_stage &stage, const adamw_factors &f)
{
#pragma unroll
    for (unsigned j = 0; j < BULK_PIECE / 4 / BULK_THREADS; j++) {
        unsigned at = 4 * (threadIdx.x + j * BULK_THREADS);
        adamw_group group;

        form_load4<ADAMW_PLAIN>(stage.param + at, group.param);
        form_load4<ADAMW_PLAIN>(stage.m + at, group.m);
        form_load4<ADAMW_PLAIN>(stage.v + at, group.v);
        form_load4<ADAMW_PLAIN>(stage.grad + at, group.grad);
        adamw_change(&f, &group);
        form_store4<ADAMW_PLAIN>(stage.param + at, group.param);
        form_store4<ADAMW_PLAIN>(stage.m + at, group.m);
        form_store4<ADAMW_PLAIN>(stage.v + at, group.v);
    }
}

/* Factors of another tensor, if they are others. */
__device__ __forceinline__ void bulk_factors(const lk_adamw_launch &launch,
                                             const lk_adamw_entry &entry, float (&made_for)[2],
                                             adamw_factors &shared)
{
    if (entry.lr_factor == made_for[0] && entry.weight_decay == made_for[1])
        return;
    made_for[0] = entry.lr_factor;
    made_for[1] = entry.weight_decay;
    __syncthreads(); /* nobody reads those of before */
    if (threadIdx.x == 0)
        adamw_tensor_factors(&launch, &entry, &shared);
    __syncthreads();
}

__global__ void __launch_bounds__(BULK_THREADS, 1)
    adamw_update_bulk(const __grid_constant__ lk_adamw_launch launch)
{
    extern __shared__ adamw_stage stages[];
    __shared__ adamw_factors factors;
    __shared__ lk_barrier there[BULK_STAGES];
    adamw_walk walk = { 0, LK_ADAMW_CHUNK / BULK_PIECE, {} };
    uint32_t stage = 0, parity = 0;
    float made_for[2] = { NAN, NAN };
    adamw_piece piece;
    bool begun = false; /* the first piece has been changed */

    if (threadIdx.x == 0) {
        for (unsigned s = 0; s < BULK_STAGES; s++)
            barrier_init(&there[s], 4); /* an arrival for each of its copies */
        adamw_make_factors(&launch, &factors);
    }
    fence_bulk();
    __syncthreads();
    bool apply = factors.apply;

    for (unsigned s = 0; apply && threadIdx.x == 0 && s < BULK_STAGES; s++)
        bulk_begin(launch, walk, stages[s], &there[s]);
    for (uint32_t nth = 0; apply && bulk_find(launch, nth, &piece); nth++) {
        bulk_factors(launch, piece.entry, made_for, factors);
        if (!bulk_takes(piece)) {
            if (threadIdx.x < LK_BLOCK)
                adamw_update_thread(&piece, &factors, threadIdx.x);
            continue;
        }
        adamw_factors mine = factors;

        for (uint64_t at = piece.begin; at < piece.end; at += BULK_PIECE) {
            adamw_stage &here = stages[stage];
            uint32_t before = stage ? stage - 1 : BULK_STAGES - 1;

            barrier_wait(&there[stage], parity);
            bulk_change(here, mine);
            fence_bulk();
            __syncthreads();
            if (threadIdx.x == 0) {
                bulk_store(reinterpret_cast<uint64_t>(piece.entry.param + at), here.param,
                           BULK_PIECE * 4);
                bulk_store(reinterpret_cast<uint64_t>(piece.entry.m + at), here.m, BULK_PIECE * 4);
                bulk_store(reinterpret_cast<uint64_t>(piece.entry.v + at), here.v, BULK_PIECE * 4);
                bulk_wait_read<3>(); /* the stage before has been sent */
                if (begun)
                    bulk_begin(launch, walk, stages[before], &there[before]);
            }
            begun = true;
            parity ^= stage + 1 == BULK_STAGES;
            stage = stage + 1 < BULK_STAGES ? stage + 1 : 0;
        }
    }
    if (threadIdx.x == 0) {
        bulk_wait();
        form_end(launch, factors);
    }
}

/* ---- which ---- */

constexpr const char *ADAMW_NAMES[] = { "product",
                                        "stores plain",
                                        "loads and stores plain",
                                        "loads of 256 bytes",
                                        "1 group",
                                        "512 threads",
                                        "512 threads, 4 groups",
                                        "1024 threads, 1 group",
                                        "reversed, ahead",
                                        "in bulk",
                                        "3 blocks",
                                        "4 groups, 2 blocks" };
constexpr int ADAMW_FORMS = 12;
constexpr int ADAMW_UPDATE_FORM = 0; /* the product's */

struct adamw_kernel {
    void (*function)(lk_adamw_launch);
    unsigned threads, blocks; /* blocks 0: one for each chunk */
    size_t shared;
};

template <class Form> constexpr adamw_kernel adamw_chunks()
{
    return { adamw_update_chunks<Form>, Form::threads, 0, 0 };
}

template <int Form> constexpr adamw_kernel choose_adamw()
{
    constexpr adamw_policy cs = ADAMW_STREAMED, plain = ADAMW_PLAIN;

    if constexpr (Form == 0)
        return adamw_chunks<adamw_form<256, 2, 4, cs, cs, false, false>>();
    else if constexpr (Form == 1)
        return adamw_chunks<adamw_form<256, 2, 4, cs, plain, true, false>>();
    else if constexpr (Form == 2)
        return adamw_chunks<adamw_form<256, 2, 4, plain, plain, true, false>>();
    else if constexpr (Form == 3)
        return adamw_chunks<adamw_form<256, 2, 4, ADAMW_LINES, cs, true, true>>();
    else if constexpr (Form == 4)
        return adamw_chunks<adamw_form<256, 1, 5, cs, cs, true, true>>();
    else if constexpr (Form == 5)
        return adamw_chunks<adamw_form<512, 2, 2, cs, cs, true, true>>();
    else if constexpr (Form == 6)
        return adamw_chunks<adamw_form<512, 4, 1, cs, cs, true, true>>();
    else if constexpr (Form == 7)
        return adamw_chunks<adamw_form<1024, 1, 1, cs, cs, true, true>>();
    else if constexpr (Form == 8)
        return adamw_chunks<adamw_form<256, 2, 4, cs, cs, true, true>>();
    else if constexpr (Form == 9)
        return { adamw_update_bulk, BULK_THREADS, 132, BULK_SHARED };
    else if constexpr (Form == 10)
        return adamw_chunks<adamw_form<256, 2, 3, cs, cs, true, true>>();
    else
        return adamw_chunks<adamw_form<256, 4, 2, cs, cs, true, true>>();
}

#endif
