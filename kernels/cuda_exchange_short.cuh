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

/* The units of a CTA are numbered from the sends on; every `warps`-th one is a warp's, which moves up to Several of its tiles
 * at once. */
template <class Call, uint32_t Several> struct short_warp {
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
    /* The unit's tile `t` behind `at`, of the same message. */
    __device__ __forceinline__ stretch tile_of(const exchange_cursor &at, uint32_t t) const
    {
        return c.stretch_of(at.entry, at.tile + t * c.shape().channels, at.bytes);
    }
    /* How many tiles the unit has of the message, this one included. */
    __device__ __forceinline__ uint32_t tiles_left(const exchange_cursor &at) const
    {
        return (at.tiles - 1 - at.tile) / c.shape().channels + 1;
    }
    /* Calls body(i, pack, stretch) for this lane's i-th pack of tile t, if it is one of n. */
    template <class Body>
    __device__ __forceinline__ void for_packs(const exchange_cursor &at, uint32_t t, uint32_t n,
                                              Body body) const
    {
        stretch s = tile_of(at, t < n ? t : 0);
        uint32_t packs = t < n ? packs_of(s) : 0;

#pragma unroll
        for (uint32_t i = 0; i < LK_SHORT_GRANULES; i++)
            if (i * granule_packs + c.lane < packs)
                body(i, i * granule_packs + c.lane, s);
    }
    /* Tiles that are moved at once. Those that are made new are not, which may have to wait for more credit than others. */
    __device__ __forceinline__ uint32_t at_once(const exchange_cursor &at) const
    {
        uint32_t left = tiles_left(at), n = left < Several ? left : Several;
        bool fresh = lk_short_refresh(&c.shape(), at.number + 1) ||
                     lk_short_refresh(&c.shape(), at.number + n);

        return fresh ? 1 : n;
    }
    /* True of tiles that can be moved in whole packs. */
    __device__ __forceinline__ bool are_plain(const exchange_cursor &at, uint32_t n) const
    {
        const lk_exchange_entry &e = c.args.entries[at.entry];
        bool masked = false;

        for (uint32_t t = 0; t < n; t++)
            masked = masked || tile_of(at, t).masked;
        return !masked && (e.address | e.bytes) % LK_PACK_BYTES == 0;
    }
    /* Lanes may see the credit come one after another. */
    __device__ __forceinline__ bool has_credit(uint32_t unit, const exchange_cursor &at) const
    {
        uint32_t live;

        return __all_sync(ALL_LANES, sends.role.ready(sends.channel_of(unit), sends.peer_of(unit),
                                                      at, sends.slots, &live)) != 0;
    }
    /* The `n` tiles from `at` on, which the unit has of one message, what is behind them where there are fewer than Tiles
     * left out. The data is on its way to this warp while the credit is. */
    template <uint32_t Tiles>
    __device__ __forceinline__ bool send_plain(uint32_t unit, const exchange_cursor &at, uint32_t n)
    {
        uint64_t to = c.segment_of(sends.peer_of(unit));
        uint32_t channel = sends.channel_of(unit);
        uint4 bits[Tiles][LK_SHORT_GRANULES];
        exchange_cursor last = at;

#pragma unroll
        for (uint32_t t = 0; t < Tiles; t++)
            for_packs(at, t, n, [&](uint32_t i, uint32_t pack, const stretch &s) {
                bits[t][i] = load_uint4(
                    reinterpret_cast<const void *>(s.address + pack * LK_PACK_BYTES));
            });
        last.number += n - 1;
        if (!has_credit(unit, last))
            return false;
#pragma unroll
        for (uint32_t t = 0; t < Tiles; t++)
            for_packs(at, t, n, [&](uint32_t i, uint32_t pack, const stretch &) {
                store_short(short_slot(c.shape(), to, c.rank(), channel, at.number + 1 + t), pack,
                            flag_of(at.number + 1 + t), bits[t][i]);
            });
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
    /* By a sender, behind tile `number` with `packs`. */
    __device__ __forceinline__ void refresh(uint32_t unit, uint64_t number, uint32_t packs) const
    {
        uint32_t peer = sends.peer_of(unit), channel = sends.channel_of(unit);

        if (!lk_short_refresh(&c.shape(), number))
            return;
        refresh_short(short_slot(c.shape(), c.segment_of(peer), c.rank(), channel, number),
                      flag_of(number), packs);
        if (c.lane == 0)
            store_slot_word(c, peer, channel, static_cast<uint32_t>((number - 1) % sends.slots),
                            lk_slot_word(number, 0));
    }
    /* The unit's next tiles of a message, a few at once. How many; 0: there is no credit. */
    __device__ __forceinline__ uint32_t send(uint32_t unit, const exchange_cursor &at)
    {
        stretch s = tile_of(at, 0);
        uint32_t n = at_once(at);
        uint64_t slot = short_slot(c.shape(), c.segment_of(sends.peer_of(unit)), c.rank(),
                                   sends.channel_of(unit), at.number + 1);

        if (!are_plain(at, n))
            n = send_any(unit, at, s, slot);
        else if (n == 1 || !send_plain<Several>(unit, at, n))
            n = send_plain<1>(unit, at, 1);
        for (uint32_t t = 0; t < n; t++) {
            s = tile_of(at, t);
            refresh(unit, at.number + 1 + t, packs_of(s));
            wrote += packs_of(s) * 2 * LK_PACK_BYTES;
        }
        return n;
    }

    __device__ __forceinline__ void store(const stretch &s, uint32_t pack, const uint4 &w) const
    {
        uint32_t at = pack * LK_PACK_BYTES;

        store_bytes(s.address + at, w, s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES);
    }
    /* How many of the bits from the first on all lanes have. */
    static __device__ __forceinline__ uint32_t seen_by_all(uint32_t bits)
    {
        uint32_t n = 0;

        while (__all_sync(ALL_LANES, bits >> n & 1))
            n++;
        return n;
    }
    /* Likewise. How many of the first n are there, and have been taken. */
    template <uint32_t Tiles>
    __device__ __forceinline__ uint32_t take_some(uint32_t unit, const exchange_cursor &at,
                                                  uint32_t n)
    {
        uint32_t channel = takes.channel_of(unit), peer = takes.peer_of(unit), here = 0;
        uint4 bits[Tiles][LK_SHORT_GRANULES];

#pragma unroll
        for (uint32_t t = 0; t < Tiles; t++) {
            bool all = t < n;

            for_packs(at, t, n, [&](uint32_t i, uint32_t pack, const stretch &) {
                all &= load_short(
                    short_slot(c.shape(), c.segment, peer, channel, at.number + 1 + t), pack,
                    flag_of(at.number + 1 + t), &bits[t][i]);
            });
            here |= static_cast<uint32_t>(all) << t;
        }
        n = seen_by_all(here);
        if (!n)
            return 0;
        if (c.lane == 0) /* all lanes have what they loaded */
            store_word(c.segment_of(peer) +
                           lk_credit_offset(&c.shape(), LK_EXCHANGE, c.rank(), channel),
                       at.number + n);
        wrote += 8;
#pragma unroll
        for (uint32_t t = 0; t < Tiles; t++)
            for_packs(at, t, n, [&](uint32_t i, uint32_t pack, const stretch &s) {
                store(s, pack, bits[t][i]);
            });
        return n;
    }
    __device__ __forceinline__ uint32_t take(uint32_t unit, const exchange_cursor &at)
    {
        uint32_t n = at_once(at);

        return n == 1 ? take_some<1>(unit, at, 1) : take_some<Several>(unit, at, n);
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
        uint32_t unit = i < sends.units ? i : i - sends.units, n;
        bool left, some = false;

        for (;;) {
            left = i < sends.units ? sends.has_left(at, unit) : takes.has_left(at, unit);
            n = !left ? 0 : i < sends.units ? send(unit, at) : take(unit, at);
            if (!n)
                break;
            if (i < sends.units)
                sends.advance(&at, unit, n);
            else
                takes.advance(&at, unit, n);
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
template <uint32_t Several, class Args>
__device__ __forceinline__ void run_short_cta(const Args &args, exchange_cursor *cursors,
                                              uint32_t cta, uint32_t ctas, uint32_t threads)
{
    using call_type = exchange_call<Args, slot_path>;
    lk_ring_counts *counts;
    call_type c(args, cta, ctas);
    short_warp<call_type, Several> warp(c, cursors, threadIdx.x / 32, threads / 32);

    if (!warp.run())
        return;
    warp.end();
    counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;
    if (c.lane == 0 && warp.wrote) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), warp.wrote);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_sent), warp.wrote);
    }
}

} // namespace lk_rings_device

#endif
