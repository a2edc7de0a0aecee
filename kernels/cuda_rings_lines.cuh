/* SPDX-License-Identifier: Apache-2.0
 *
 * The one-shot kernel: a thread has a pack, sends it to everybody and adds what everybody sent. It meets packs in rising
 * order and sends one before it waits for it, so that no two ranks can wait for each other, whatever their grids.
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
            uint64_t at = reinterpret_cast<uint64_t>(h.rings.segments[r]) + own +
                          static_cast<uint64_t>(pack) * pack_lines * 8;

            if (r == h.rings.rank)
                continue;
            store_lines(at, flag | w.x, flag | w.y);
            store_lines(at + 16, flag | w.z, flag | w.w);
        }
    }

    __device__ __forceinline__ bool here(uint64_t line) const
    {
        return line >> 32 == flag >> 32;
    }

    /* False: the call is aborted. */
    __device__ __forceinline__ bool receive(const lk_ring_head &h, uint32_t src, uint32_t pack,
                                            uint4 *w) const
    {
        uint64_t at = reinterpret_cast<uint64_t>(h.rings.segments[h.rings.rank]) +
                      lk_lines_offset(&h.rings.shape, static_cast<uint32_t>(number & 1), src) +
                      static_cast<uint64_t>(pack) * pack_lines * 8;

        for (uint32_t tries = 1;; tries++) {
            uint64_t line[pack_lines];

            load_lines(at, &line[0], &line[1]);
            load_lines(at + 16, &line[2], &line[3]);
            if (here(line[0]) && here(line[1]) && here(line[2]) && here(line[3])) {
                *w = make_uint4(static_cast<uint32_t>(line[0]), static_cast<uint32_t>(line[1]),
                                static_cast<uint32_t>(line[2]), static_cast<uint32_t>(line[3]));
                return true;
            }
            if (tries % tries_per_abort_check == 0 && load_abort(h.rings.abort))
                return false;
            back_off(tries);
        }
    }
};

/* What a thread has sent and not yet added to. */
struct sent_pack {
    piece p;
    uint4 own;
};

template <class V, class Args>
__device__ __forceinline__ sent_pack send_pack(const data<V, Args> &d, const lines &l,
                                               uint32_t pack)
{
    sent_pack s;
    float x[V::pack];

    s.p = d.single(pack, d.args.head.packs, 0, { 0, d.args.head.n });
    d.load_single(s.p, x);
    s.own = d.contribution(x, pack, s.p.count);
    l.send(d.args.head, pack, s.own);
    return s;
}

template <class V, class Args>
__device__ __forceinline__ bool add_pack(const data<V, Args> &d, const lines &l, uint32_t pack,
                                         const sent_pack &s)
{
    const lk_ring_head &h = d.args.head;
    float x[V::pack], sum[V::pack];

    for (uint32_t r = 0; r < h.rings.shape.ranks; r++) {
        uint4 w = s.own;

        if (r != h.rings.rank && !l.receive(h, r, pack, &w))
            return false;
        V::from_wire(w, x);
#pragma unroll
        for (uint32_t i = 0; i < V::pack; i++)
            sum[i] = r ? add(sum[i], x[i]) : x[i];
    }
    d.store_single(s.p, d.result(sum, pack, s.p.count));
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

template <class V, class Args>
__device__ __forceinline__ void run_lines(const Args &args, uint32_t cta, uint32_t ctas,
                                          uint32_t threads)
{
    const lk_ring_head &h = args.head;
    const volatile lk_ring_state *state = static_cast<const lk_ring_state *>(h.rings.state);
    data<V, Args> d(args);
    lines l(h, lk_next_lines(state->lines));
    uint32_t whole = h.rings.shape.line_bytes / LK_PACK_BYTES;
    uint32_t pack = cta * threads + threadIdx.x;
    sent_pack s = {};
    bool good = true, refresh;

    if (pack < h.packs)
        s = send_pack(d, l, pack);
    /* What each thread says here needs the number, so all have it then. */
    refresh = __syncthreads_or(lk_lines_refresh(l.number));
    if (threadIdx.x == 0)
        count_lines(h, l.number, refresh ? whole : h.packs, ctas);
    while (good && pack < h.packs) {
        good = add_pack(d, l, pack, s);
        pack += ctas * threads;
        if (good && pack < h.packs)
            s = send_pack(d, l, pack);
    }
    for (; refresh && good && pack < whole; pack += ctas * threads)
        l.send(h, pack, make_uint4(0, 0, 0, 0));
}

} // namespace lk_rings_device

#endif
