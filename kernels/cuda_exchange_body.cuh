/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange kernel. A CTA has three kinds of data warps: some send, some take, some copy what a rank sends to itself.
 * Sending and taking are pipelines as in cuda_rings_pipeline.cuh, but without an order: lanes of a warp that looks are shared
 * out to the CTA's units, of all channels, as far as they go, and look at the next messages of each, and whichever unit can go
 * on gets jobs. None is waited for alone, which is what lets calls of any groups of messages meet (ring_layout.h).
 */
#ifndef LK_CUDA_EXCHANGE_BODY_CUH
#define LK_CUDA_EXCHANGE_BODY_CUH

#include "kernels/cuda_exchange_data.cuh"
#include "kernels/cuda_exchange_look.cuh"

namespace lk_rings_device
{

template <class Call>
__device__ __forceinline__ void store_slot_word(const Call &c, uint32_t peer, uint32_t channel,
                                                uint32_t slot, uint64_t word)
{
    store_word(c.segment_of(peer) + lk_words_offset(&c.shape(), LK_EXCHANGE, c.rank(), channel) +
                   8 * slot,
               word);
}

template <class Call>
__device__ __forceinline__ void count_traffic(const Call &c, const exchange_traffic &t)
{
    lk_ring_counts *counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;

    if (t.sent) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), t.sent);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_sent), t.sent);
    }
    if (t.elided) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_elided), t.elided);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_elided), t.elided);
    }
}

template <class Call> struct exchange_words {
    const Call &c;
    exchange_traffic t;

    __device__ __forceinline__ bool fenced(uint32_t role) const
    {
        return role == EXCHANGE_SEND;
    }
    __device__ __forceinline__ uint32_t unit(uint32_t, const exchange_job &j) const
    {
        return j.channel << 8 | j.peer;
    }
    __device__ __forceinline__ void credit(uint32_t role, const exchange_job &j, bool last)
    {
        if (role == EXCHANGE_SEND) {
            /* Here, because a word of the same slot may follow that somebody does wait for. */
            if (j.lines && j.refresh)
                store_slot_word(c, j.peer, j.channel, j.index, lk_slot_word(j.message, 0));
            return;
        }
        t.sent += 8;
        if (last)
            store_word(c.segment_of(j.peer) +
                           lk_credit_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel),
                       j.message);
    }
    __device__ __forceinline__ void word(uint32_t, const exchange_job &j)
    {
        uint32_t last = (j.packs - 1) / granule_packs;
        uint32_t missing = (last + 1) * LK_GRANULE - j.memory.bytes;
        uint32_t live = __popc(j.wrote) * LK_GRANULE - (j.wrote >> last & 1 ? missing : 0);

        if (j.lines) {
            t.sent += j.packs * 2 * LK_PACK_BYTES;
            return;
        }
        store_slot_word(c, j.peer, j.channel, j.index, lk_slot_word(j.message, j.wrote));
        t.sent += live + 8;
        t.elided += j.memory.bytes - live;
    }
};

/* Of the entry `e`, to `dst`: tiles in slots that this CTA sends. */
template <class Call>
__device__ __forceinline__ uint32_t tiles_in_slots(const Call &c, uint32_t e, uint32_t dst)
{
    const lk_ring_shape &s = c.shape();
    uint32_t tiles = c.tiles_of(e, c.tile_bytes(e)), n = 0;

    if (dst == c.rank() || lk_message_is_short(&s, c.args.entries[e].bytes))
        return 0;
    for (uint32_t channel = c.cta; channel < s.channels; channel += c.ctas) {
        uint32_t first = lk_message_first(&s, c.rank(), dst, channel);

        n += first < tiles ? (tiles - 1 - first) / s.channels + 1 : 0;
    }
    return n;
}

/* All that this CTA sends in slots, if it is so few tiles that one fence should serve them; else 0. By all lanes. Of 4 MB
 * between two ranks a CTA has two, and 64 CTAs over NVLink take 20.5 us with a fence for each, 18.1 with one for both. Where
 * there are more, waiting for several gains nothing, and costs up to 10 % where most are zeros (perf/results/h200-x2-nvlink). */
constexpr uint32_t few_tiles = 4;
template <class Call> __device__ __forceinline__ uint32_t tiles_to_fence_at_once(const Call &c)
{
    const uint16_t *sends = c.args.head.sends;
    uint32_t n = 0, dst = 0;

    if (sends[c.shape().ranks] > 32)
        return 0;
    if (c.lane < sends[c.shape().ranks]) {
        while (sends[dst + 1] <= c.lane)
            dst++;
        n = tiles_in_slots(c, c.lane, dst);
    }
#pragma unroll
    for (int half = 16; half; half /= 2)
        n += __shfl_xor_sync(ALL_LANES, n, half);
    return n <= few_tiles && n <= lk_leg_slots(&c.shape(), LK_EXCHANGE) ? n : 0;
}

/* which: the role of the warp, where there is one of each. */
template <class Call>
__device__ __forceinline__ void publish_messages(const Call &c, exchange_pipeline *pipelines,
                                                 uint32_t which)
{
    exchange_words<Call> words = {
        c,
        {0, 0}
    };
    publishing_warp<EXCHANGE_ROLES, exchange_pipeline, exchange_words<Call>,
                    Call::path::jobs_a_fence>
        warp(&words, pipelines);

    if (exchange_publishers < typename Call::path >> 1)
        warp.leave_out_all_but(which);
    if (which == EXCHANGE_SEND)
        warp.few = tiles_to_fence_at_once(c);
    warp.run();
    count_traffic(c, words.t);
}

template <class R> __device__ __forceinline__ void init_exchange(exchange_pipeline *pipelines)
{
    if (threadIdx.x == 0) {
        init_pipeline(&pipelines[EXCHANGE_SEND], R::send);
        init_pipeline(&pipelines[EXCHANGE_TAKE], R::take);
    }
    __syncthreads();
}

/* A warp that copies what the rank sends to itself. stages: where its pieces are; there: barriers of all of them. */
template <class R, class Call>
__device__ __forceinline__ void run_copy_warp(const Call &c, uint32_t warp, uint8_t *stages,
                                              lk_barrier *there)
{
    if constexpr (R::bulk > 0)
        copy_own_in_bulk<R::bulk>(c, warp, R::copy, stages + warp * R::bulk * bulk_piece,
                                  there + warp * R::bulk);
    else
        copy_own(c, warp, R::copy);
}

/* All of a CTA. `cursors`: exchange_cursors() of them; stages: R::stages bytes of shared memory; there: a barrier for each
 * piece of a bulk copy. */
template <class R, class Args>
__device__ __forceinline__ void run_exchange_cta(const Args &args, exchange_pipeline *pipelines,
                                                 exchange_cursor *cursors, uint32_t cta,
                                                 uint32_t ctas, uint8_t *stages = nullptr,
                                                 lk_barrier *there = nullptr)
{
    using Path = typename R::path;
    using call_type = exchange_call<Args, Path>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    call_type c(args, cta, ctas);

    if constexpr (R::bulk > 0)
        for (uint32_t i = threadIdx.x; i < R::copy * R::bulk; i += R::threads)
            barrier_init(&there[i], 1);
    init_exchange<R>(pipelines);
    if (warp == EXCHANGE_SEND) {
        look_for_messages<exchange_send_role<call_type>>(c, &pipelines[EXCHANGE_SEND], cursors);
        return;
    }
    if (warp == EXCHANGE_TAKE) {
        look_for_messages<exchange_take_role<call_type>>(
            c, &pipelines[EXCHANGE_TAKE],
            cursors + exchange_cursors(&c.shape(), ctas) / EXCHANGE_ROLES);
        return;
    }
    if (warp < R::controls) {
        publish_messages(c, pipelines, warp - EXCHANGE_ROLES);
        return;
    }
    warp -= R::controls;
    if (warp < R::send) {
        uint8_t *stage = Path::bulk ? stages + R::copy * R::bulk * bulk_piece + warp * stage_bytes
                                    : nullptr;
        exchange_send_work<Args, Path> work = {
            args,
            lane,
            {stage, 0}
        };

        move_jobs(&work, &pipelines[EXCHANGE_SEND], warp, R::send, exchange_span);
    } else if (warp < R::send + R::take) {
        exchange_take_work<> work = { args.head.rings.abort, lane };

        move_jobs(&work, &pipelines[EXCHANGE_TAKE], warp - R::send, R::take, exchange_span);
    } else {
        run_copy_warp<R>(c, warp - R::send - R::take, stages, there);
    }
}

} // namespace lk_rings_device

#endif
