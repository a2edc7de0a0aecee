/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange kernel of calls that have short messages only. A warp has units of its own, of either kind, and moves their
 * tiles itself: it looks at each in turn and waits for none alone, as the kernel for all messages does. A CTA has no
 * barrier and no roles, so what a call costs is a load of the data, its way to the peer, and a look at the lines there.
 */
#ifndef LK_CUDA_EXCHANGE_SHORT_CUH
#define LK_CUDA_EXCHANGE_SHORT_CUH

#include "kernels/cuda_exchange_body.cuh"

namespace lk_rings_device
{

/* True of what can be moved in whole packs. */
__device__ __forceinline__ bool whole_packs(uint64_t address, uint32_t bytes)
{
    return (address | bytes) % LK_PACK_BYTES == 0;
}

/* The units of a CTA are numbered from the sends on; every `warps`-th one is a warp's. */
template <class Call> struct short_warp {
    using send_units = exchange_units<Call, exchange_send_role<Call>>;
    using take_units = exchange_units<Call, exchange_take_role<Call>>;

    const Call &c;
    send_units sends;
    take_units takes;
    exchange_cursor *cursors; /* of the CTA */
    uint32_t warp;
    uint32_t warps;
    uint32_t both;  /* units of either kind */
    uint64_t wrote; /* bytes to peers */

    __device__ __forceinline__ short_warp(const Call &call, exchange_cursor *of_cta, uint32_t w,
                                          uint32_t n)
        : c(call), sends(call), takes(call), cursors(of_cta), warp(w), warps(n),
          both(sends.units + takes.units), wrote(0)
    {
    }

    __device__ __forceinline__ uint32_t packs_of(const stretch &s) const
    {
        return (s.bytes + LK_PACK_BYTES - 1) / LK_PACK_BYTES;
    }
    /* Lanes may see the credit come one after another. */
    __device__ __forceinline__ bool has_credit(uint32_t unit, const exchange_cursor &at) const
    {
        uint32_t live;

        return __all_sync(ALL_LANES, sends.role.ready(sends.channel_of(unit), sends.peer_of(unit),
                                                      at, sends.slots, &live)) != 0;
    }
    /* The data is on its way to this warp while the credit is. */
    __device__ __forceinline__ bool send_plain(uint32_t unit, const exchange_cursor &at,
                                               const stretch &s, uint64_t slot) const
    {
        uint64_t flag = flag_of(at.number + 1);
        uint32_t packs = packs_of(s);
        uint4 bits[LK_SHORT_GRANULES];

#pragma unroll
        for (uint32_t i = 0; i < LK_SHORT_GRANULES; i++) {
            uint32_t pack = i * granule_packs + c.lane;

            if (pack < packs)
                bits[i] = load_uint4(
                    reinterpret_cast<const void *>(s.address + pack * LK_PACK_BYTES));
        }
        if (!has_credit(unit, at))
            return false;
#pragma unroll
        for (uint32_t i = 0; i < LK_SHORT_GRANULES; i++) {
            uint32_t pack = i * granule_packs + c.lane;

            if (pack < packs)
                store_short(slot, pack, flag, bits[i]);
        }
        return true;
    }
    __device__ __forceinline__ bool send_any(uint32_t unit, const exchange_cursor &at,
                                             const stretch &s, uint64_t slot) const
    {
        uint64_t flag = flag_of(at.number + 1);
        uint32_t packs = packs_of(s);

        if (!has_credit(unit, at))
            return false;
#pragma unroll 1
        for (uint32_t pack = c.lane; pack < packs; pack += 32)
            store_short(
                slot, pack, flag,
                read_pack<typename Call::path>(c.args.head.mask, s, pack * LK_PACK_BYTES).bits);
        return true;
    }
    /* The unit's next tile. False: there is no credit. */
    __device__ __forceinline__ bool send(uint32_t unit, const exchange_cursor &at)
    {
        stretch s = c.stretch_of(at.entry, at.tile, at.bytes);
        uint64_t slot = short_slot(c.shape(), c.segment_of(sends.peer_of(unit)), c.rank(),
                                   sends.channel_of(unit), at.number + 1);
        bool done = !s.masked && whole_packs(s.address, s.bytes) ? send_plain(unit, at, s, slot)
                                                                 : send_any(unit, at, s, slot);

        if (!done)
            return false;
        if (lk_short_refresh(&c.shape(), at.number + 1)) {
            refresh_short(slot, flag_of(at.number + 1), packs_of(s));
            if (c.lane == 0)
                store_slot_word(c, sends.peer_of(unit), sends.channel_of(unit), at.slot,
                                lk_slot_word(at.number + 1, 0));
        }
        wrote += packs_of(s) * 2 * LK_PACK_BYTES;
        return true;
    }

    __device__ __forceinline__ void store(const stretch &s, uint32_t pack, const uint4 &w) const
    {
        uint32_t at = pack * LK_PACK_BYTES;

        store_bytes(s.address + at, w, s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES);
    }
    /* Likewise. False: it is not there, or not all of it. */
    __device__ __forceinline__ bool take(uint32_t unit, const exchange_cursor &at)
    {
        stretch s = c.stretch_of(at.entry, at.tile, at.bytes);
        uint32_t channel = takes.channel_of(unit), peer = takes.peer_of(unit);
        uint64_t slot = short_slot(c.shape(), c.segment, peer, channel, at.number + 1);
        uint64_t flag = flag_of(at.number + 1);
        uint32_t packs = packs_of(s);
        uint4 bits[LK_SHORT_GRANULES];
        bool here = true;

#pragma unroll
        for (uint32_t i = 0; i < LK_SHORT_GRANULES; i++) {
            uint32_t pack = i * granule_packs + c.lane;

            if (pack < packs)
                here &= load_short(slot, pack, flag, &bits[i]);
        }
        if (!__all_sync(ALL_LANES, here))
            return false;
        if (c.lane == 0) /* all lanes have what they loaded */
            store_word(c.segment_of(peer) +
                           lk_credit_offset(&c.shape(), LK_EXCHANGE, c.rank(), channel),
                       at.number + 1);
        wrote += 8;
#pragma unroll
        for (uint32_t i = 0; i < LK_SHORT_GRANULES; i++) {
            uint32_t pack = i * granule_packs + c.lane;

            if (pack < packs)
                store(s, pack, bits[i]);
        }
        return true;
    }

    __device__ __forceinline__ void begin() const
    {
        for (uint32_t i = warp + c.lane * warps; i < both; i += 32 * warps) {
            if (i < sends.units)
                sends.place(&cursors[i], i);
            else
                takes.place(&cursors[i], i - sends.units);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void end() const
    {
        for (uint32_t i = warp + c.lane * warps; i < both; i += 32 * warps) {
            if (i < sends.units)
                sends.keep(cursors[i], i);
            else
                takes.keep(cursors[i], i - sends.units);
        }
    }
    /* What can be moved of a unit. False: it has nothing left. */
    __device__ __forceinline__ bool move_unit(uint32_t i, bool *moved)
    {
        exchange_cursor at = cursors[i];
        uint32_t unit = i < sends.units ? i : i - sends.units;
        bool left, some = false;

        for (;;) {
            left = i < sends.units ? sends.has_left(at, unit) : takes.has_left(at, unit);
            if (!left || !(i < sends.units ? send(unit, at) : take(unit, at)))
                break;
            if (i < sends.units)
                sends.advance(&at, unit, 1);
            else
                takes.advance(&at, unit, 1);
            some = true;
        }
        if (some && c.lane == 0) /* behind a vote of all lanes, who have read it */
            cursors[i] = at;
        __syncwarp();
        *moved = *moved || some;
        return left;
    }
    /* False: no unit has anything left. */
    __device__ __forceinline__ bool move_all(bool *moved)
    {
        bool left = false;

        for (uint32_t i = warp; i < both; i += warps)
            left = move_unit(i, moved) || left;
        return left;
    }
    /* Warps that have no units copy what the rank sends to itself, or all do. */
    __device__ __forceinline__ void copy() const
    {
        uint32_t first = both < warps ? both : 0;

        if (warp >= first)
            copy_own(c, warp - first, warps - first);
    }
    /* False: the call is aborted. */
    __device__ __forceinline__ bool run()
    {
        bool left, moved = false;
        uint32_t tries = 0;

        begin();
        left = move_all(&moved);
        copy();
        while (left) {
            moved = false;
            left = move_all(&moved);
            tries = moved ? 0 : tries + 1;
            if (tries % tries_per_abort_check == tries_per_abort_check - 1 && c.aborted())
                return false;
            if (left)
                back_off(tries);
        }
        return true;
    }
};

/* All of a CTA. `cursors`: exchange_cursors() of them. */
template <class Args>
__device__ __forceinline__ void run_short_cta(const Args &args, exchange_cursor *cursors,
                                              uint32_t cta, uint32_t ctas, uint32_t threads)
{
    using call_type = exchange_call<Args, slot_path>;
    call_type c(args, cta, ctas);
    short_warp<call_type> warp(c, cursors, threadIdx.x / 32, threads / 32);

    if (!warp.run())
        return;
    warp.end();
    if (c.lane == 0)
        count_traffic(c, { warp.wrote, 0 });
}

} // namespace lk_rings_device

#endif
