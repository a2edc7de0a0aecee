/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange kernel. A CTA has three kinds of data warps: some send, some take, some copy what a rank sends to itself.
 * Sending and taking are pipelines as in cuda_rings_pipeline.cuh, but without an order: lanes of a warp that looks are shared
 * out to the CTA's units, of all channels, as far as they go, and look at the next messages of each, and whichever unit can go
 * on gets jobs. None is waited for alone, which is what lets calls of any groups of messages meet (ring_layout.h).
 */
#ifndef LK_CUDA_EXCHANGE_BODY_CUH
#define LK_CUDA_EXCHANGE_BODY_CUH

#include "kernels/cuda_rings_pipeline.cuh"
#include "kernels/exchange_internal.h"

namespace lk_rings_device
{

template <unsigned N> struct exchange_args {
    lk_exchange_head head;
    lk_exchange_entry entries[N];
};

enum exchange_role_number {
    EXCHANGE_SEND,
    EXCHANGE_TAKE,
    EXCHANGE_ROLES,
};

/* Warps that publish: one, or one of each role. */
template <class Path>
constexpr uint32_t exchange_publishers = Path::publish_apart ? EXCHANGE_ROLES : 1;

/* What a rank sends to itself is copied by warps with loads and stores, or, with Bulk, through so many pieces of shared
 * memory by one thread of each. */
constexpr uint32_t bulk_piece = 4096;

template <uint32_t Send, uint32_t Take, uint32_t Copy, class Path = slot_path, uint32_t Bulk = 0>
struct exchange_warps {
    using path = Path;
    static constexpr uint32_t send = Send, take = Take, copy = Copy, bulk = Bulk;
    static constexpr uint32_t controls = EXCHANGE_ROLES + exchange_publishers<Path>;
    static constexpr uint32_t threads = 32 * (controls + Send + Take + Copy);
    /* bytes of shared memory */
    static constexpr uint32_t stages = (Path::bulk ? Send * stage_bytes : 0) +
                                       Copy * Bulk * bulk_piece;
};

/* Granules that a data warp takes at once. */
constexpr uint32_t exchange_span = 8;
static_assert(exchange_span >= LK_SHORT_GRANULES, "a tile in lines is a warp's alone");

/* Words and credits do not wait for each other: between two H200 over NVLink 1 % less time for 256 MB, dense or with zeros,
 * 1.5 % for 16 MB, and 4 % where slots are few; never more (perf/results/h200-x2-nvlink). */
struct exchange_path : slot_path {
    static constexpr bool publish_apart = true;
};

/* To be measured beside it: each channel has the tiles of a message in their order. */
struct in_turn_path : exchange_path {
    static constexpr bool spread = false;
};

/* Of calls without a mask of rows. */
template <class Path> struct unmasked_path : Path {
    static constexpr bool masks = false;
};

/* Bytes in memory of the caller, and in which rows they lie. */
struct stretch {
    uint64_t address;
    uint64_t row;    /* of the first byte */
    uint64_t offset; /* of the first byte in its row */
    uint32_t bytes;
    uint32_t masked; /* row and offset mean something */
};

/* Written by the warp that looks, but for `wrote`, as in cuda_rings_roles.cuh. */
struct exchange_job {
    stretch memory;
    uint64_t slot;
    uint64_t message; /* of its unit */
    uint32_t peer;
    uint32_t channel;
    uint32_t packs; /* 0: this is the end */
    uint32_t scan;
    uint32_t live;    /* take: granules that are in the slot */
    uint32_t index;   /* of the message's slot */
    uint32_t wrote;   /* of the end: the call has been cut short */
    uint32_t lines;   /* it is short, and `slot` is one for lines */
    uint64_t refresh; /* send: the slot whose lines all get the message's flag, or 0 */
};
using exchange_pipeline = pipeline_of<exchange_job, 16>;

/* Where a unit stands: its next message is the tile `tile` of the message `entry`. Of the lanes of the role's warp that looks;
 * its number goes back to the private state at the end. */
struct exchange_cursor {
    uint64_t number; /* messages so far */
    uint32_t slot;   /* of the next one */
    uint32_t entry;
    uint32_t tile;
    uint32_t tiles; /* of the entry */
    uint32_t bytes; /* of its tiles */
    uint32_t lines; /* the entry is short */
};

/* Bytes, counted by each lane of the warp that publishes. */
struct exchange_traffic {
    uint64_t sent;
    uint64_t elided;
};

/* Cursors of a CTA: for each role, channel that it has, and peer. */
LK_INLINE size_t exchange_cursors(const lk_ring_shape *s, uint32_t ctas)
{
    return static_cast<size_t>(EXCHANGE_ROLES) * ((s->channels + ctas - 1) / ctas) * (s->ranks - 1);
}

template <class Args, class Path> struct exchange_call {
    using path = Path;
    const Args &args;
    uint64_t segment; /* own */
    uint64_t state;
    uint32_t cta;
    uint32_t ctas;
    uint32_t lane;

    __device__ exchange_call(const Args &a, uint32_t number, uint32_t count)
        : args(a), segment(reinterpret_cast<uint64_t>(a.head.rings.segments[a.head.rings.rank])),
          state(reinterpret_cast<uint64_t>(a.head.rings.state)), cta(number), ctas(count),
          lane(threadIdx.x % 32)
    {
    }
    __device__ __forceinline__ const lk_ring_shape &shape() const
    {
        return args.head.rings.shape;
    }
    __device__ __forceinline__ uint32_t rank() const
    {
        return args.head.rings.rank;
    }
    __device__ __forceinline__ uint64_t segment_of(uint32_t r) const
    {
        return reinterpret_cast<uint64_t>(args.head.rings.segments[r]);
    }
    /* A counter of a unit; its lane alone reads and writes it. */
    __device__ __forceinline__ volatile uint64_t *counter(size_t offset) const
    {
        return reinterpret_cast<volatile uint64_t *>(state + offset);
    }
    __device__ __forceinline__ bool aborted() const
    {
        return __any_sync(ALL_LANES, load_abort(args.head.rings.abort)) != 0;
    }

    __device__ __forceinline__ uint32_t tile_bytes(uint32_t entry) const
    {
        return lk_message_granules(&shape(), args.entries[entry].bytes) * LK_GRANULE;
    }
    __device__ __forceinline__ uint32_t tiles_of(uint32_t entry, uint32_t bytes) const
    {
        uint64_t all = args.entries[entry].bytes;

        return static_cast<uint32_t>((all + bytes - 1) / bytes);
    }
    __device__ __forceinline__ stretch stretch_of(uint32_t entry, uint64_t tile,
                                                  uint32_t bytes) const
    {
        const lk_exchange_entry &e = args.entries[entry];
        const lk_row_mask &mask = args.head.mask;
        uint64_t at = tile * bytes, left = e.bytes - at;
        stretch s = { e.address + at, 0, 0, left < bytes ? static_cast<uint32_t>(left) : bytes, 0 };

        if (Path::masks && lk_is_masked(&mask, s.address)) {
            uint64_t begin = s.address - reinterpret_cast<uint64_t>(mask.base);

            s.masked = 1;
            s.row = begin / mask.row_bytes;
            s.offset = begin - s.row * mask.row_bytes;
        }
        return s;
    }
};

/* ---- packs ---- */

/* The `count` bytes at an address, 1 .. 16, padded with zeros. */
__device__ __forceinline__ uint4 load_bytes(uint64_t address, uint32_t count)
{
    uint32_t w[4] = { 0, 0, 0, 0 };

    if (count == LK_PACK_BYTES && address % 16 == 0)
        return load_uint4(reinterpret_cast<const void *>(address));
    if (count == LK_PACK_BYTES && address % 4 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            w[i] = __ldcs(reinterpret_cast<const uint32_t *>(address) + i);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < LK_PACK_BYTES; i++)
            if (i < count)
                w[i / 4] |= static_cast<uint32_t>(
                                __ldcs(reinterpret_cast<const unsigned char *>(address) + i))
                            << 8 * (i % 4);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void store_bytes(uint64_t address, const uint4 &v, uint32_t count)
{
    const uint32_t w[4] = { v.x, v.y, v.z, v.w };

    if (count == LK_PACK_BYTES && address % 16 == 0) {
        store_uint4(reinterpret_cast<void *>(address), v);
    } else if (count == LK_PACK_BYTES && address % 4 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            store_one(reinterpret_cast<uint32_t *>(address) + i, w[i]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < LK_PACK_BYTES; i++)
            if (i < count)
                reinterpret_cast<unsigned char *>(address)[i] = static_cast<unsigned char>(
                    w[i / 4] >> 8 * (i % 4));
    }
}

/* Which row, counted from the stretch's first one, the byte at `offset` + at lies in. */
__device__ __forceinline__ uint32_t row_of(const lk_row_mask &mask, const stretch &s, uint32_t at)
{
    uint64_t byte = s.offset + at;

    if (mask.row_bytes >> 31)
        return byte >= mask.row_bytes; /* no stretch has more than two */
    return static_cast<uint32_t>(byte) / static_cast<uint32_t>(mask.row_bytes);
}

struct pack {
    uint4 bits;
    bool live; /* a live row has a byte in it */
};

/* Pack of this lane in a granule of a stretch, as it arrives. Dead bytes are not read. */
template <class Path>
__device__ __forceinline__ pack read_pack(const lk_row_mask &mask, const stretch &s, uint32_t at)
{
    pack p = { make_uint4(0, 0, 0, 0), false };
    uint32_t count, first, last;

    if (at >= s.bytes)
        return p;
    count = s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES;
    if (!Path::masks || !s.masked)
        return { load_bytes(s.address + at, count), true };
    first = row_of(mask, s, at);
    last = row_of(mask, s, at + count - 1);
    if (first == last) {
        if (lk_is_live(mask.bits, s.row + first))
            return { load_bytes(s.address + at, count), true };
        return p;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < count; i++) {
        uint32_t value;

        if (!lk_is_live(mask.bits, s.row + row_of(mask, s, at + i)))
            continue;
        p.live = true;
        value = static_cast<uint32_t>(
                    __ldcs(reinterpret_cast<const unsigned char *>(s.address + at) + i))
                << 8 * (i % 4);
        p.bits.x |= i / 4 == 0 ? value : 0;
        p.bits.y |= i / 4 == 1 ? value : 0;
        p.bits.z |= i / 4 == 2 ? value : 0;
        p.bits.w |= i / 4 == 3 ? value : 0;
    }
    return p;
}

/* Granules of a stretch, a bit for each. */
struct granule_rows {
    uint32_t live;  /* a live row has a byte in it */
    uint32_t whole; /* all its bytes are of live rows */
};

/* Rows of which a granule has few enough for one lane to look at all of them. */
constexpr uint64_t rows_to_look_at = 64;

/* Of `count` granules from `granule` on, bit 0 the first one's. A lane looks at the rows of one granule, so the bits of all
 * of them come in the time of one. By all lanes; s is masked and has rows of at least rows_to_look_at bytes. */
__device__ __forceinline__ granule_rows rows_of(const lk_row_mask &mask, const stretch &s,
                                                uint32_t granule, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32, at = (granule + lane) * LK_GRANULE;
    bool any = false, all = lane < count && at < s.bytes;

    if (all) {
        uint32_t end = s.bytes - at < LK_GRANULE ? s.bytes : at + LK_GRANULE;
        uint32_t last = row_of(mask, s, end - 1);

#pragma unroll 1
        for (uint32_t row = row_of(mask, s, at); row <= last; row++) {
            bool live = lk_is_live(mask.bits, s.row + row);

            any = any || live;
            all = all && live;
        }
    }
    return { __ballot_sync(ALL_LANES, any), __ballot_sync(ALL_LANES, all) };
}

/* ---- lines ---- */

__device__ __forceinline__ uint64_t flag_of(uint64_t message)
{
    return static_cast<uint64_t>(lk_short_flag(message)) << 32;
}

/* Where tile `message` from src lies in a segment. */
__device__ __forceinline__ uint64_t short_slot(const lk_ring_shape &shape, uint64_t segment,
                                               uint32_t src, uint32_t channel, uint64_t message)
{
    return segment + lk_short_offset(&shape, src, channel, lk_short_slot(&shape, message));
}

__device__ __forceinline__ void store_short(uint64_t slot, uint32_t pack, uint64_t flag,
                                            const uint4 &w)
{
    store_lines(slot + lk_short_line(pack, 0), flag | w.x, flag | w.y);
    store_lines(slot + lk_short_line(pack, 2), flag | w.z, flag | w.w);
}

/* False: not all of the pack is there. */
__device__ __forceinline__ bool load_short(uint64_t slot, uint32_t pack, uint64_t flag, uint4 *w)
{
    uint64_t line[4];

    load_lines(slot + lk_short_line(pack, 0), &line[0], &line[1]);
    load_lines(slot + lk_short_line(pack, 2), &line[2], &line[3]);
    *w = make_uint4(static_cast<uint32_t>(line[0]), static_cast<uint32_t>(line[1]),
                    static_cast<uint32_t>(line[2]), static_cast<uint32_t>(line[3]));
    return (((line[0] ^ flag) | (line[1] ^ flag) | (line[2] ^ flag) | (line[3] ^ flag)) >> 32) == 0;
}

/* By a warp: the lines of all packs from `first` on, with nothing in them. */
__device__ __forceinline__ void refresh_short(uint64_t slot, uint64_t flag, uint32_t first)
{
#pragma unroll 1
    for (uint32_t pack = first + threadIdx.x % 32; pack < LK_SHORT_PACKS; pack += 32)
        store_short(slot, pack, flag, make_uint4(0, 0, 0, 0));
}

/* ---- data warps ---- */

/* True if `count` granules from `granule` on are whole and begin at a 16-byte border. */
__device__ __forceinline__ bool plain_granules(const stretch &s, uint32_t granule, uint32_t count)
{
    return s.address % 16 == 0 && (granule + count) * LK_GRANULE <= s.bytes;
}

__device__ __forceinline__ bool any_bit_of(const uint4 &w)
{
    return __any_sync(ALL_LANES, (w.x | w.y | w.z | w.w) != 0) != 0;
}

template <class Args, class Path> struct exchange_send_work {
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

        if (count == exchange_span && rows.whole)
            mask = fast<exchange_span>(j, granule, rows.whole, 0);
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
            if (count == exchange_span)
                return fast<exchange_span>(j, granule, ~0U, j.scan);
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

struct exchange_take_work {
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
        if (count == exchange_span && plain_granules(j.memory, granule, count)) {
            fast<exchange_span>(j, granule);
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

/* ---- the warps that look ---- */

template <class Call> struct exchange_send_role {
    const Call &c;

    __device__ __forceinline__ uint32_t begin(uint32_t peer) const
    {
        return c.args.head.sends[peer];
    }
    __device__ __forceinline__ uint32_t end(uint32_t peer) const
    {
        return c.args.head.sends[peer + 1];
    }
    __device__ __forceinline__ volatile uint64_t *counter(uint32_t channel, uint32_t peer) const
    {
        return c.counter(lk_sent_offset(&c.shape(), LK_EXCHANGE, peer, channel));
    }
    /* May the message behind `at` go on? slots: of a unit, as lk_exchange_slots. */
    __device__ __forceinline__ bool ready(uint32_t channel, uint32_t peer,
                                          const exchange_cursor &at, uint32_t slots,
                                          uint32_t *) const
    {
        uint64_t credit = load_word(c.segment +
                                    lk_credit_offset(&c.shape(), LK_EXCHANGE, peer, channel));

        if (at.lines && !lk_short_refresh(&c.shape(), at.number + 1))
            slots = lk_short_slots(&c.shape());
        return at.number + 1 - credit <= slots;
    }
    __device__ __forceinline__ uint64_t line_slot(const exchange_job &j) const
    {
        return short_slot(c.shape(), c.segment_of(j.peer), c.rank(), j.channel, j.message);
    }
    __device__ __forceinline__ uint64_t refreshed(const exchange_job &j) const
    {
        return lk_short_refresh(&c.shape(), j.message) ? line_slot(j) : 0;
    }
    __device__ __forceinline__ uint64_t slot(const exchange_job &j) const
    {
        return Call::path::pull_exchange
                   ? c.segment + lk_slot_offset(&c.shape(), LK_EXCHANGE, j.peer, j.channel, j.index)
                   : c.segment_of(j.peer) +
                         lk_slot_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel, j.index);
    }
};

template <class Call> struct exchange_take_role {
    const Call &c;

    __device__ __forceinline__ uint32_t begin(uint32_t peer) const
    {
        return c.args.head.takes[peer];
    }
    __device__ __forceinline__ uint32_t end(uint32_t peer) const
    {
        return c.args.head.takes[peer + 1];
    }
    __device__ __forceinline__ volatile uint64_t *counter(uint32_t channel, uint32_t peer) const
    {
        return c.counter(lk_taken_offset(&c.shape(), LK_EXCHANGE, peer, channel));
    }
    __device__ __forceinline__ bool ready(uint32_t channel, uint32_t peer,
                                          const exchange_cursor &at, uint32_t, uint32_t *live) const
    {
        uint64_t word, flag = flag_of(at.number + 1);
        uint4 first;

        if (at.lines)
            return load_short(short_slot(c.shape(), c.segment, peer, channel, at.number + 1), 0,
                              flag, &first);
        word = load_word(c.segment + lk_words_offset(&c.shape(), LK_EXCHANGE, peer, channel) +
                         8 * at.slot);
        *live = static_cast<uint32_t>(word >> 32);
        return static_cast<uint32_t>(word) == static_cast<uint32_t>(at.number + 1);
    }
    __device__ __forceinline__ uint64_t line_slot(const exchange_job &j) const
    {
        return short_slot(c.shape(), c.segment, j.peer, j.channel, j.message);
    }
    __device__ __forceinline__ uint64_t refreshed(const exchange_job &) const
    {
        return 0;
    }
    __device__ __forceinline__ uint64_t slot(const exchange_job &j) const
    {
        return Call::path::pull_exchange
                   ? c.segment_of(j.peer) +
                         lk_slot_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel, j.index)
                   : c.segment +
                         lk_slot_offset(&c.shape(), LK_EXCHANGE, j.peer, j.channel, j.index);
    }
};

/* The units of a CTA in one role, by channel, then peer. */
template <class Call, class Role> struct exchange_units {
    const Call &c;
    Role role;
    uint32_t peers;
    uint32_t slots; /* of a unit */
    uint32_t units;

    __device__ __forceinline__ explicit exchange_units(const Call &call)
        : c(call), role{ call }, peers(call.shape().ranks - 1),
          slots(lk_leg_slots(&call.shape(), LK_EXCHANGE)),
          units((call.shape().channels - call.cta + call.ctas - 1) / call.ctas * peers)
    {
    }
    __device__ __forceinline__ uint32_t channel_of(uint32_t unit) const
    {
        return c.cta + unit / peers * c.ctas;
    }
    __device__ __forceinline__ uint32_t peer_of(uint32_t unit) const
    {
        uint32_t i = unit % peers;

        return i < c.rank() ? i : i + 1;
    }
    __device__ __forceinline__ bool has_left(const exchange_cursor &at, uint32_t unit) const
    {
        return at.entry < role.end(peer_of(unit));
    }
    /* Where the unit's share of an entry begins; entries in which it has none are left out. */
    __device__ __forceinline__ void enter(exchange_cursor *at, uint32_t unit) const
    {
        uint32_t peer = peer_of(unit);

        for (; at->entry < role.end(peer); at->entry++) {
            at->lines = lk_message_is_short(&c.shape(), c.args.entries[at->entry].bytes);
            at->bytes = c.tile_bytes(at->entry);
            at->tiles = c.tiles_of(at->entry, at->bytes);
            at->tile = lk_message_first(&c.shape(), c.rank(), peer, channel_of(unit));
            if (at->tile < at->tiles)
                return;
        }
    }
    /* By `n` messages, less than there are slots. */
    __device__ __forceinline__ void advance(exchange_cursor *at, uint32_t unit, uint32_t n) const
    {
        at->number += n;
        at->slot += n;
        at->slot -= at->slot < slots ? 0 : slots;
        while (n && at->entry < role.end(peer_of(unit))) {
            uint32_t left = (at->tiles - 1 - at->tile) / c.shape().channels;

            if (n <= left) {
                at->tile += n * c.shape().channels;
                return;
            }
            n -= left + 1;
            at->entry++;
            enter(at, unit);
        }
    }
    __device__ __forceinline__ void place(exchange_cursor *at, uint32_t unit) const
    {
        at->number = *role.counter(channel_of(unit), peer_of(unit));
        at->slot = static_cast<uint32_t>(at->number % slots);
        at->entry = role.begin(peer_of(unit));
        enter(at, unit);
    }
    __device__ __forceinline__ void keep(const exchange_cursor &at, uint32_t unit) const
    {
        *role.counter(channel_of(unit), peer_of(unit)) = at.number;
    }
};

/* One of them at work. A visit looks at a group of units: lane k * group + i at the k-th next message of one of them, which
 * i stands for in this visit, so that units take turns in being the first. */
template <class Call, class Role> struct exchange_looking_warp : exchange_units<Call, Role> {
    using of_cta = exchange_units<Call, Role>;
    using of_cta::c;
    using of_cta::role;
    using of_cta::slots;
    using of_cta::units;
    static constexpr uint32_t depth = exchange_pipeline::depth;

    exchange_pipeline *p;
    exchange_cursor *cursors; /* of this role: [unit] */
    uint32_t made;
    uint32_t group; /* units of a visit */
    uint32_t which; /* of the next messages of a unit, this lane's */
    uint32_t most;  /* of them */
    uint32_t turn;

    __device__ __forceinline__ exchange_looking_warp(const Call &call, exchange_pipeline *pipe,
                                                     exchange_cursor *own)
        : of_cta(call), p(pipe), cursors(own), made(0), turn(0)
    {
        group = units < 32 ? units : 32;
        which = c.lane / group;
        most = 32 / group;
        most = most < depth ? most : depth;
        most = most < slots ? most : slots;
    }
    __device__ __forceinline__ void begin() const
    {
        for (uint32_t unit = c.lane; unit < units; unit += 32)
            of_cta::place(&cursors[unit], unit);
        __syncwarp();
    }
    __device__ __forceinline__ void end() const
    {
        for (uint32_t unit = c.lane; unit < units; unit += 32)
            of_cta::keep(cursors[unit], unit);
    }
    __device__ __forceinline__ uint32_t place_of(uint32_t channel, uint32_t peer,
                                                 const exchange_cursor &at) const
    {
        if (at.lines || !Call::path::spread)
            return at.tile;
        return lk_message_place(&c.shape(), at.tiles,
                                lk_message_first(&c.shape(), c.rank(), peer, channel), at.tile);
    }
    __device__ __forceinline__ void write(exchange_job *j, uint32_t channel, uint32_t peer,
                                          const exchange_cursor &at, uint32_t live) const
    {
        j->memory = c.stretch_of(at.entry, place_of(channel, peer, at), at.bytes);
        j->message = at.number + 1;
        j->peer = peer;
        j->channel = channel;
        j->index = at.slot;
        j->lines = at.lines;
        j->slot = at.lines ? role.line_slot(*j) : role.slot(*j);
        j->refresh = role.refreshed(*j);
        j->packs = (j->memory.bytes + LK_PACK_BYTES - 1) / LK_PACK_BYTES;
        j->scan = static_cast<uint32_t>(c.args.entries[at.entry].other);
        j->live = live;
        j->wrote = 0;
    }
    /* How many of the unit's next messages, from its first on, have their bit. */
    __device__ __forceinline__ uint32_t in_a_row(uint32_t bits) const
    {
        uint32_t n = 0, shift = c.lane % group;

        while (n < most && bits >> (shift + n * group) & 1)
            n++;
        return n;
    }

    /* Gives jobs to units from `first` on that can go on, as long as there is room. False: none of them has anything
     * left. *moved: there was a job. */
    __device__ __forceinline__ bool visit(uint32_t first, bool *moved)
    {
        uint32_t unit = first + (c.lane + turn) % group, live = 0, number, room, able, gets_all;
        bool left = which < most && unit < units, gets;
        uint32_t channel = of_cta::channel_of(unit), peer = of_cta::peer_of(unit);
        exchange_cursor at;

        if (left) {
            at = cursors[unit];
            of_cta::advance(&at, unit, which);
            left = of_cta::has_left(at, unit);
        }
        if (!__any_sync(ALL_LANES, left))
            return false;
        room = leading_ones(__ballot_sync(ALL_LANES, c.lane < depth && has_room(p, made + c.lane)));
        able = __ballot_sync(ALL_LANES, left && role.ready(channel, peer, at, slots, &live));
        __syncwarp(); /* a ballot orders nothing: who writes a job is not who saw that it has a place */
        gets = which < in_a_row(able);
        gets_all = __ballot_sync(ALL_LANES, gets);
        number = made + static_cast<uint32_t>(__popc(gets_all & ((1U << c.lane) - 1)));
        gets = gets && number - made < room;
        if (gets) {
            write(&p->jobs[number % depth], channel, peer, at, live);
            barrier_arrive(&p->full[number % depth]);
        }
        gets_all = __ballot_sync(ALL_LANES, gets);
        if (gets && which + 1 == in_a_row(gets_all)) {
            of_cta::advance(&at, unit, 1);
            cursors[unit] = at;
        }
        __syncwarp(); /* before somebody else looks after the unit */
        made += static_cast<uint32_t>(__popc(gets_all));
        turn = turn + 1 == group ? 0 : turn + 1;
        *moved = *moved || gets_all;
        return true;
    }

    /* False: the call is aborted. */
    __device__ __forceinline__ bool run()
    {
        uint32_t first = 0, empty = 0, tries = 0, groups = (units + group - 1) / group;

        begin();
        while (empty < groups) {
            bool moved = false;

            wait_for_room(p, made);
            empty = visit(first, &moved) ? 0 : empty + 1;
            first = first + group < units ? first + group : 0;
            tries = moved ? 0 : tries + 1;
            if (tries % tries_per_abort_check == tries_per_abort_check - 1 && c.aborted())
                return false;
            back_off(tries / groups);
        }
        return true;
    }
};

template <class Role, class Call>
__device__ __forceinline__ void look_for_messages(const Call &c, exchange_pipeline *p,
                                                  exchange_cursor *cursors)
{
    exchange_looking_warp<Call, Role> warp(c, p, cursors);
    bool whole = warp.run();

    hand_over_end(p, warp.made, whole);
    if (whole)
        warp.end();
}

/* ---- the words that are published ---- */

template <class Call>
__device__ __forceinline__ void store_slot_word(const Call &c, uint32_t peer, uint32_t channel,
                                                uint32_t slot, uint64_t word)
{
    store_word(c.segment_of(peer) + lk_words_offset(&c.shape(), LK_EXCHANGE, c.rank(), channel) +
                   8 * slot,
               word);
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

/* which: the role of the warp, where there is one of each. */
template <class Call>
__device__ __forceinline__ void publish_messages(const Call &c, exchange_pipeline *pipelines,
                                                 uint32_t which)
{
    lk_ring_counts *counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;
    exchange_words<Call> words = {
        c,
        {0, 0}
    };
    publishing_warp<EXCHANGE_ROLES, exchange_pipeline, exchange_words<Call>,
                    Call::path::jobs_a_fence>
        warp(&words, pipelines);

    if (exchange_publishers < typename Call::path >> 1)
        warp.leave_out_all_but(which);
    warp.run();
    if (words.t.sent) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), words.t.sent);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_sent), words.t.sent);
    }
    if (words.t.elided) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_elided), words.t.elided);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_elided), words.t.elided);
    }
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
        exchange_take_work work = { args.head.rings.abort, lane };

        move_jobs(&work, &pipelines[EXCHANGE_TAKE], warp - R::send, R::take, exchange_span);
    } else {
        run_copy_warp<R>(c, warp - R::send - R::take, stages, there);
    }
}

} // namespace lk_rings_device

#endif
