/* SPDX-License-Identifier: Apache-2.0
 *
 * The one-shot kernel: a thread sends some packs to everybody and adds what everybody sent, then the next ones. It waits
 * for packs in rising order and has sent one before it waits for it: whoever waits for a pack waits for a thread that has
 * smaller ones left to wait for, if any. So no two ranks can wait for each other, whatever their grids.
 */
#ifndef LK_CUDA_RINGS_LINES_CUH
#define LK_CUDA_RINGS_LINES_CUH

#include "kernels/cuda_rings_body.cuh"

namespace lk_rings_device
{

constexpr uint32_t pack_lines = LK_PACK_BYTES / 4;

struct lines {
    uint64_t number;
    uint64_t flag; /* in the upper half */
    size_t own;    /* offset of what this rank sends, in everybody's segment */

    __device__ lines(const lk_ring_head &h, uint64_t n)
        : number(n), flag(n << 32),
          own(lk_lines_offset(&h.rings.shape, static_cast<uint32_t>(n & 1), h.rings.rank))
    {
    }

    __device__ __forceinline__ void send(const lk_ring_head &h, uint32_t pack, const uint4 &w) const
    {
        for (uint32_t r = 0; r < h.rings.shape.ranks; r++) {
            uint64_t at = reinterpret_cast<uint64_t>(h.rings.segments[r]) + own;

            if (r == h.rings.rank)
                continue;
            store_lines(at + lk_short_line(pack, 0), flag | w.x, flag | w.y);
            store_lines(at + lk_short_line(pack, 2), flag | w.z, flag | w.w);
        }
    }

    /* Where `src` writes into this rank's segment. */
    __device__ __forceinline__ uint64_t from(const lk_ring_head &h, uint32_t src) const
    {
        return reinterpret_cast<uint64_t>(h.rings.segments[h.rings.rank]) +
               lk_lines_offset(&h.rings.shape, static_cast<uint32_t>(number & 1), src);
    }

    __device__ __forceinline__ bool here(const uint64_t line[pack_lines]) const
    {
        uint32_t want = static_cast<uint32_t>(flag >> 32);

        return line[0] >> 32 == want && line[1] >> 32 == want && line[2] >> 32 == want &&
               line[3] >> 32 == want;
    }
    static __device__ __forceinline__ void load(uint64_t at, uint32_t pack,
                                                uint64_t line[pack_lines])
    {
        load_lines(at + lk_short_line(pack, 0), &line[0], &line[1]);
        load_lines(at + lk_short_line(pack, 2), &line[2], &line[3]);
    }

    /* Until the lines of a pack are here. False: the call is aborted. */
    __device__ __forceinline__ bool wait(const lk_ring_head &h, uint64_t at, uint32_t pack,
                                         uint64_t line[pack_lines]) const
    {
        for (uint32_t tries = 1; !here(line); tries++) {
            if (tries % tries_per_abort_check == 0 && load_abort(h.rings.abort))
                return false;
            back_off(tries);
            load(at, pack, line);
        }
        return true;
    }
};

/* Packs of a thread, `step` apart, that it sends before it waits for any of them; the last ones may lie behind the call's
 * end. */
template <class V, uint32_t Ahead> struct batch {
    piece p[Ahead];
    uint4 own[Ahead];
};

template <class V, uint32_t Ahead, class Args>
__device__ __forceinline__ void send_batch(const data<V, Args> &d, const lines &l, uint32_t pack,
                                           uint32_t step, batch<V, Ahead> *b)
{
    const lk_ring_head &h = d.args.head;
    float x[Ahead][V::pack];

#pragma unroll
    for (uint32_t i = 0; i < Ahead; i++) {
        b->p[i] = d.single(pack + i * step, h.packs, 0, { 0, h.n });
        d.load_single(b->p[i], x[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < Ahead; i++) {
        if (pack + i * step < h.packs) {
            b->own[i] = d.contribution(x[i], 0, pack + i * step, b->p[i].count);
            l.send(h, pack + i * step, b->own[i]);
        }
    }
}

/* What a rank's lines add to the sums. The loads of a batch are under way together. */
template <class V, uint32_t Ahead, class Args>
__device__ __forceinline__ bool add_rank(const data<V, Args> &d, const lines &l, uint32_t rank,
                                         uint32_t pack, uint32_t step, const batch<V, Ahead> &b,
                                         float sum[Ahead][V::pack])
{
    const lk_ring_head &h = d.args.head;
    uint64_t at = l.from(h, rank), line[Ahead][pack_lines];
    bool theirs = rank != h.rings.rank;

#pragma unroll
    for (uint32_t i = 0; i < Ahead; i++)
        if (theirs && pack + i * step < h.packs)
            l.load(at, pack + i * step, line[i]);
#pragma unroll
    for (uint32_t i = 0; i < Ahead; i++) {
        uint4 w = b.own[i];
        float x[V::pack];

        if (theirs && pack + i * step < h.packs) {
            if (!l.wait(h, at, pack + i * step, line[i]))
                return false;
            w = make_uint4(static_cast<uint32_t>(line[i][0]), static_cast<uint32_t>(line[i][1]),
                           static_cast<uint32_t>(line[i][2]), static_cast<uint32_t>(line[i][3]));
        }
        V::from_wire(w, x);
#pragma unroll
        for (uint32_t k = 0; k < V::pack; k++)
            sum[i][k] = rank ? add(sum[i][k], x[k]) : x[k];
    }
    return true;
}

template <class V, uint32_t Ahead, class Args>
__device__ __forceinline__ bool add_batch(const data<V, Args> &d, const lines &l, uint32_t pack,
                                          uint32_t step, const batch<V, Ahead> &b)
{
    const lk_ring_head &h = d.args.head;
    float sum[Ahead][V::pack];

    for (uint32_t r = 0; r < h.rings.shape.ranks; r++)
        if (!add_rank<V, Ahead>(d, l, r, pack, step, b, sum))
            return false;
#pragma unroll
    for (uint32_t i = 0; i < Ahead; i++)
        if (pack + i * step < h.packs)
            d.store_single(b.p[i], d.result(sum[i], 0, pack + i * step, b.p[i].count));
    return true;
}

/* By a thread of each CTA when all of them know the call's number: the last one moves the state on, which nobody reads any
 * more. So nothing is left to be done when the sums are there. */
__device__ __forceinline__ void count_lines(const lk_ring_head &h, uint64_t number, uint32_t sent,
                                            uint32_t ctas)
{
    lk_ring_state *state = static_cast<lk_ring_state *>(h.rings.state);
    uint64_t bytes = static_cast<uint64_t>(sent) * pack_lines * 8 * (h.rings.shape.ranks - 1);

    if (ctas > 1 && atomicAdd(&state->lines_done, 1U) != ctas - 1)
        return;
    state->lines_done = 0;
    state->lines = number;
    atomicAdd(reinterpret_cast<unsigned long long *>(&state->counts.bytes_sent), bytes);
}

/* Ahead: packs of a batch. */
template <class V, uint32_t Ahead, class Args>
__device__ __forceinline__ void run_lines(const Args &args, uint32_t cta, uint32_t ctas,
                                          uint32_t threads)
{
    const lk_ring_head &h = args.head;
    const volatile lk_ring_state *state = static_cast<const lk_ring_state *>(h.rings.state);
    data<V, Args> d(args);
    lines l(h, lk_next_lines(state->lines));
    uint32_t whole = h.rings.shape.line_bytes / LK_PACK_BYTES, step = ctas * threads;
    uint32_t pack = cta * threads + threadIdx.x;
    batch<V, Ahead> b = {};
    bool good = true, refresh;

    if (pack < h.packs)
        send_batch<V, Ahead>(d, l, pack, step, &b);
    /* What each thread says here needs the number, so all have it then. */
    refresh = __syncthreads_or(lk_lines_refresh(l.number));
    if (threadIdx.x == 0)
        count_lines(h, l.number, refresh ? whole : h.packs, ctas);
    while (good && pack < h.packs) {
        good = add_batch<V, Ahead>(d, l, pack, step, b);
        pack += Ahead * step;
        if (good && pack < h.packs)
            send_batch<V, Ahead>(d, l, pack, step, &b);
    }
    pack = cta * threads + threadIdx.x;
    pack += (h.packs > pack ? (h.packs - pack + step - 1) / step : 0) * step;
    for (; refresh && good && pack < whole; pack += step)
        l.send(h, pack, make_uint4(0, 0, 0, 0));
}

} // namespace lk_rings_device

#endif
