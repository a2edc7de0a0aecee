/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes at any address, rows under a mask, and lines of short messages.
 */
#ifndef LK_CUDA_EXCHANGE_PACKS_CUH
#define LK_CUDA_EXCHANGE_PACKS_CUH

#include "kernels/cuda_exchange_call.cuh"

namespace lk_rings_device
{

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

} // namespace lk_rings_device

#endif
