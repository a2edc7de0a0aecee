/* SPDX-License-Identifier: Apache-2.0
 *
 * What the warps of an exchange share: a call, its jobs, and where a unit stands.
 */
#ifndef LK_CUDA_EXCHANGE_CALL_CUH
#define LK_CUDA_EXCHANGE_CALL_CUH

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

} // namespace lk_rings_device

#endif
