/* SPDX-License-Identifier: Apache-2.0
 *
 * The data warps of an exchange: those that fill slots and lines, that empty them, and that copy what a rank sends to
 * itself.
 */
#ifndef LK_CUDA_EXCHANGE_DATA_CUH
#define LK_CUDA_EXCHANGE_DATA_CUH

#include "kernels/cuda_exchange_packs.cuh"

namespace lk_rings_device
{

/* True if `count` granules from `granule` on are whole and begin at a 16-byte border. */
__device__ __forceinline__ bool plain_granules(const stretch &s, uint32_t granule, uint32_t count)
{
    return s.address % 16 == 0 && (granule + count) * LK_GRANULE <= s.bytes;
}

__device__ __forceinline__ bool any_bit_of(const uint4 &w)
{
    return __any_sync(ALL_LANES, (w.x | w.y | w.z | w.w) != 0) != 0;
}

/* Span: granules of a batch, if it is whole. */
template <class Args, class Path, uint32_t Span = exchange_span> struct exchange_send_work {
    static_assert(Span >= LK_SHORT_GRANULES, "a tile in lines is a warp's alone");

    const Args &args;
    uint32_t lane;
    slot_writer<Path> writer;

    __device__ __forceinline__ void finish() const
    {
        writer.finish();
    }
    __device__ __forceinline__ bool is_masked(const exchange_job &j) const
    {
        return Path::masks && j.memory.masked;
    }

    /* Those of `Ahead` granules that have a bit in `which`. */
    template <uint32_t Ahead>
    __device__ __forceinline__ uint32_t fast(const exchange_job &j, uint32_t granule,
                                             uint32_t which, uint32_t scan)
    {
        uint32_t at = granule * LK_GRANULE + lane * LK_PACK_BYTES, mask = 0;
        uint4 wire[Ahead];

#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            if (which >> i & 1)
                wire[i] = load_uint4(
                    reinterpret_cast<const void *>(j.memory.address + at + i * LK_GRANULE));
#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++) {
            if (!(which >> i & 1) || (scan && !any_bit_of(wire[i])))
                continue;
            writer.put(j.slot + (granule + i) * LK_GRANULE, lane, wire[i]);
            mask |= 1U << (granule + i);
        }
        return mask;
    }

    __device__ __forceinline__ uint32_t slow(const exchange_job &j, uint32_t granule)
    {
        uint32_t at = granule * LK_GRANULE + lane * LK_PACK_BYTES;
        pack p = read_pack<Path>(args.head.mask, j.memory, at);
        bool live = __any_sync(ALL_LANES, p.live) != 0;

        if (!live || (j.scan && !is_masked(j) && !any_bit_of(p.bits)))
            return 0;
        writer.put(j.slot + granule * LK_GRANULE, lane, p.bits);
        return 1U << granule;
    }

    /* Plain granules of a masked stretch. */
    __device__ __forceinline__ uint32_t masked(const exchange_job &j, uint32_t granule,
                                               uint32_t count)
    {
        granule_rows rows = rows_of(args.head.mask, j.memory, granule, count);
        uint32_t mask = 0;

        if (count == Span && rows.whole)
            mask = fast<Span>(j, granule, rows.whole, 0);
#pragma unroll 1
        for (uint32_t left = rows.live & ~(mask >> granule); left; left &= left - 1)
            mask |= slow(j, granule + static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1);
        return mask;
    }

    /* All of the tile: it is no longer than a batch. */
    __device__ __forceinline__ void lines(const exchange_job &j) const
    {
        uint64_t flag = flag_of(j.message);

#pragma unroll 1
        for (uint32_t pack = lane; pack < j.packs; pack += 32)
            store_short(j.slot, pack, flag,
                        read_pack<Path>(args.head.mask, j.memory, pack * LK_PACK_BYTES).bits);
    }

    __device__ __forceinline__ uint32_t batch(const exchange_job &j, uint32_t granule,
                                              uint32_t count)
    {
        uint32_t mask = 0;

        if (j.refresh && granule == 0)
            refresh_short(j.refresh, flag_of(j.message), j.lines ? j.packs : 0);
        if (j.lines) {
            lines(j);
            return 0;
        }
        if (!is_masked(j) && plain_granules(j.memory, granule, count)) {
            if (count == Span)
                return fast<Span>(j, granule, ~0U, j.scan);
#pragma unroll 1
            for (uint32_t i = 0; i < count; i++)
                mask |= fast<1>(j, granule + i, ~0U, j.scan);
            return mask;
        }
        if (is_masked(j) && args.head.mask.row_bytes >= rows_to_look_at &&
            plain_granules(j.memory, granule, count))
            return masked(j, granule, count);
#pragma unroll 1
        for (uint32_t i = 0; i < count; i++)
            mask |= slow(j, granule + i);
        return mask;
    }
};

template <uint32_t Span = exchange_span> struct exchange_take_work {
    uint32_t *abort;
    uint32_t lane;

    __device__ __forceinline__ void finish() const
    {
    }
    __device__ __forceinline__ uint4 get(const exchange_job &j, uint32_t granule) const
    {
        if (j.live >> granule & 1)
            return load_slot(j.slot + granule * LK_GRANULE + lane * LK_PACK_BYTES);
        return make_uint4(0, 0, 0, 0);
    }

    template <uint32_t Ahead>
    __device__ __forceinline__ void fast(const exchange_job &j, uint32_t granule) const
    {
        uint64_t to = j.memory.address + granule * LK_GRANULE + lane * LK_PACK_BYTES;
        uint4 wire[Ahead];

#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            wire[i] = get(j, granule + i);
#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            store_uint4(reinterpret_cast<void *>(to + i * LK_GRANULE), wire[i]);
    }

    /* Some lines are there, so the others come. */
    __device__ __forceinline__ void lines(const exchange_job &j) const
    {
        uint64_t flag = flag_of(j.message);

#pragma unroll 1
        for (uint32_t pack = lane; pack < j.packs; pack += 32) {
            uint32_t at = pack * LK_PACK_BYTES;
            uint4 w;

            for (uint32_t tries = 1; !load_short(j.slot, pack, flag, &w); tries++) {
                if (tries % tries_per_abort_check == 0 && load_abort(abort))
                    return;
                back_off(tries);
            }
            store_bytes(j.memory.address + at, w,
                        j.memory.bytes - at < LK_PACK_BYTES ? j.memory.bytes - at : LK_PACK_BYTES);
        }
    }

    __device__ __forceinline__ uint32_t batch(const exchange_job &j, uint32_t granule,
                                              uint32_t count) const
    {
        if (j.lines) {
            lines(j);
            return 0;
        }
        if (count == Span && plain_granules(j.memory, granule, count)) {
            fast<Span>(j, granule);
            return 0;
        }
#pragma unroll 1
        for (uint32_t i = 0; i < count; i++) {
            uint32_t at = (granule + i) * LK_GRANULE + lane * LK_PACK_BYTES;

            if (at < j.memory.bytes)
                store_bytes(j.memory.address + at, get(j, granule + i),
                            j.memory.bytes - at < LK_PACK_BYTES ? j.memory.bytes - at
                                                                : LK_PACK_BYTES);
        }
        return 0;
    }
};

/* What the rank sends to itself: a part of a tile, from `at` on. */
template <uint32_t Granules>
__device__ __forceinline__ void copy_plain(const stretch &s, uint64_t to, uint32_t at)
{
    uint4 bits[Granules];

#pragma unroll
    for (uint32_t i = 0; i < Granules; i++)
        bits[i] = load_uint4(reinterpret_cast<const void *>(s.address + at + i * LK_GRANULE));
#pragma unroll
    for (uint32_t i = 0; i < Granules; i++)
        store_uint4(reinterpret_cast<void *>(to + at + i * LK_GRANULE), bits[i]);
}

/* Likewise of a masked stretch: granules with a live row and a dead one are copied otherwise, and those without live rows
 * not read. */
template <uint32_t Granules>
__device__ __forceinline__ void copy_masked(const stretch &s, uint64_t to, uint32_t at,
                                            const granule_rows &rows)
{
    uint4 bits[Granules];

#pragma unroll
    for (uint32_t i = 0; i < Granules; i++) {
        bits[i] = make_uint4(0, 0, 0, 0);
        if (rows.whole >> i & 1)
            bits[i] = load_uint4(reinterpret_cast<const void *>(s.address + at + i * LK_GRANULE));
    }
#pragma unroll
    for (uint32_t i = 0; i < Granules; i++)
        if (!((rows.live & ~rows.whole) >> i & 1))
            store_uint4(reinterpret_cast<void *>(to + at + i * LK_GRANULE), bits[i]);
}

template <class Call>
__device__ __forceinline__ void copy_granules(const Call &c, const stretch &s, uint64_t to,
                                              uint32_t granule, uint32_t count)
{
    const lk_row_mask &mask = c.args.head.mask;
    uint32_t at = granule * LK_GRANULE + c.lane * LK_PACK_BYTES, left = ~0U;
    bool plain = count == exchange_span && to % 16 == 0 && plain_granules(s, granule, count);

    if (plain && !(Call::path::masks && s.masked)) {
        copy_plain<exchange_span>(s, to, at);
        return;
    }
    if (plain && Call::path::masks && mask.row_bytes >= rows_to_look_at) {
        granule_rows rows = rows_of(mask, s, granule, count);

        copy_masked<exchange_span>(s, to, at, rows);
        left = rows.live & ~rows.whole;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < count; i++, at += LK_GRANULE)
        if (at < s.bytes && left >> i & 1)
            store_bytes(to + at, read_pack<typename Call::path>(mask, s, at).bits,
                        s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES);
}

/* This warp's share: batches of granules go round the warps of all CTAs. */
template <class Call>
__device__ __forceinline__ void copy_own(const Call &c, uint32_t warp, uint32_t warps)
{
    const lk_exchange_head &head = c.args.head;
    constexpr uint32_t bytes = exchange_span * LK_GRANULE;

    for (uint32_t entry = head.sends[c.rank()]; entry < head.sends[c.rank() + 1]; entry++) {
        uint64_t to = c.args.entries[entry].other;
        uint64_t all = (c.args.entries[entry].bytes + bytes - 1) / bytes;

        for (uint64_t i = c.cta + static_cast<uint64_t>(warp) * c.ctas; i < all;
             i += static_cast<uint64_t>(warps) * c.ctas) {
            stretch s = c.stretch_of(entry, i, bytes);

            copy_granules(c, s, to + i * bytes, 0, exchange_span);
        }
    }
}

/* The same by bulk copies: pieces go round the warps of all CTAs, several under way in each. What is masked or lies oddly
 * is copied as above. */
template <uint32_t Pieces> struct bulk_copier {
    static_assert(Pieces >= 2, "one piece leaves while the next one comes");
    uint8_t *stage;    /* Pieces * bulk_piece */
    lk_barrier *there; /* [Pieces], whose phases end when a piece has come */
    uint64_t to[Pieces];
    uint32_t bytes[Pieces];
    uint32_t begun; /* pieces */
    uint32_t ended;

    /* The oldest piece goes on to where it belongs. */
    __device__ __forceinline__ void pass_on()
    {
        uint32_t i = ended % Pieces;

        barrier_wait(&there[i], ended / Pieces % 2);
        bulk_store(to[i], stage + i * bulk_piece, bytes[i]);
        ended++;
    }
    __device__ __forceinline__ void copy(uint64_t from, uint64_t dst, uint32_t size)
    {
        uint32_t i = begun % Pieces;

        if (begun - ended == Pieces - 1)
            pass_on();
        bulk_wait_read<1>(); /* so the one that had this place has left it */
        to[i] = dst;
        bytes[i] = size;
        bulk_load(stage + i * bulk_piece, from, size, &there[i]);
        begun++;
    }
    __device__ __forceinline__ void end()
    {
        while (ended != begun)
            pass_on();
        bulk_wait();
    }
};

/* By all lanes of a warp; the first one copies. */
template <uint32_t Pieces, class Call>
__device__ __forceinline__ void copy_own_in_bulk(const Call &c, uint32_t warp, uint32_t warps,
                                                 uint8_t *stage, lk_barrier *there)
{
    const lk_exchange_head &head = c.args.head;
    bulk_copier<Pieces> copier = { stage, there, {}, {}, 0, 0 };

    for (uint32_t entry = head.sends[c.rank()]; entry < head.sends[c.rank() + 1]; entry++) {
        uint64_t to = c.args.entries[entry].other;
        uint64_t all = (c.args.entries[entry].bytes + bulk_piece - 1) / bulk_piece;

        for (uint64_t i = c.cta + static_cast<uint64_t>(warp) * c.ctas; i < all;
             i += static_cast<uint64_t>(warps) * c.ctas) {
            stretch s = c.stretch_of(entry, i, bulk_piece);

            if (s.masked || (s.address | to | s.bytes) % LK_PACK_BYTES)
                copy_granules(c, s, to + i * bulk_piece, 0, bulk_piece / LK_GRANULE);
            else if (c.lane == 0)
                copier.copy(s.address, to + i * bulk_piece, s.bytes);
        }
    }
    if (c.lane == 0)
        copier.end();
}

} // namespace lk_rings_device

#endif
