/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange kernel. A CTA has three kinds of data warps: some send, some take, some copy what a rank sends to itself.
 * Sending and taking are pipelines of one control warp each, as in cuda_rings_pipeline.cuh, but without an order: lane p of a
 * control warp looks after the units with peer p, in one channel after another, and whichever unit can go on gets a job.
 * None is waited for alone, which is what lets calls of any groups of messages meet (ring_layout.h).
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

template <uint32_t Send, uint32_t Take, uint32_t Copy> struct exchange_warps {
    static constexpr uint32_t send = Send, take = Take, copy = Copy;
    static constexpr uint32_t threads = 32 * (EXCHANGE_ROLES + Send + Take + Copy);
};

/* Granules that a data warp takes at once. */
constexpr uint32_t exchange_span = 4;

/* Bytes in memory of the caller, and in which rows they lie. */
struct stretch {
    uint64_t address;
    uint64_t row;    /* of the first byte */
    uint64_t offset; /* of the first byte in its row */
    uint32_t bytes;
    uint32_t masked; /* row and offset mean something */
};

/* Written by the control warp, but for `wrote`, as in cuda_rings_pipeline.cuh. */
struct exchange_job {
    stretch memory;
    uint64_t slot;
    uint64_t message; /* of its unit */
    uint32_t peer;
    uint32_t channel;
    uint32_t packs; /* 0: this is the end */
    uint32_t scan;
    uint32_t live; /* take: granules that are in the slot */
    uint32_t wrote;
};
using exchange_pipeline = pipeline_of<exchange_job>;

/* The next tile of a unit; that of the lane which looks after it. */
struct exchange_cursor {
    uint32_t tile;
    uint32_t entry;
};

/* Bytes, counted by lane 0 of a control warp. */
struct exchange_traffic {
    uint64_t sent;
    uint64_t elided;
};

/* Cursors of a CTA: for each role, channel that it has, and rank. */
LK_INLINE size_t exchange_cursors(const lk_ring_shape *s, uint32_t ctas)
{
    return static_cast<size_t>(EXCHANGE_ROLES) * ((s->channels + ctas - 1) / ctas) * s->ranks;
}

template <class Args> struct exchange_call {
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
    __device__ __forceinline__ uint32_t slot_of(uint64_t message) const
    {
        return static_cast<uint32_t>((message - 1) % shape().slots);
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
    __device__ __forceinline__ bool has_tile(uint32_t entry, uint32_t tile) const
    {
        return static_cast<uint64_t>(tile) * tile_bytes(entry) < args.entries[entry].bytes;
    }
    __device__ __forceinline__ stretch stretch_of(uint32_t entry, uint32_t tile) const
    {
        const lk_exchange_entry &e = args.entries[entry];
        const lk_row_mask &mask = args.head.mask;
        uint32_t bytes = tile_bytes(entry);
        uint64_t at = static_cast<uint64_t>(tile) * bytes, left = e.bytes - at;
        stretch s = { e.address + at, 0, 0, left < bytes ? static_cast<uint32_t>(left) : bytes, 0 };

        if (lk_is_masked(&mask, s.address)) {
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
__device__ __forceinline__ pack read_pack(const lk_row_mask &mask, const stretch &s, uint32_t at)
{
    pack p = { make_uint4(0, 0, 0, 0), false };
    uint32_t count, first, last;

    if (at >= s.bytes)
        return p;
    count = s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES;
    if (!s.masked)
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

template <class Args> struct exchange_send_work {
    const Args &args;
    uint32_t lane;

    template <uint32_t Ahead>
    __device__ __forceinline__ uint32_t fast(const exchange_job &j, uint32_t granule) const
    {
        uint32_t at = granule * LK_GRANULE + lane * LK_PACK_BYTES, mask = 0;
        uint4 wire[Ahead];

#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            wire[i] = load_uint4(
                reinterpret_cast<const void *>(j.memory.address + at + i * LK_GRANULE));
#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++) {
            if (j.scan && !any_bit_of(wire[i]))
                continue;
            store_slot(j.slot + at + i * LK_GRANULE, wire[i]);
            mask |= 1U << (granule + i);
        }
        return mask;
    }

    __device__ __forceinline__ uint32_t slow(const exchange_job &j, uint32_t granule) const
    {
        uint32_t at = granule * LK_GRANULE + lane * LK_PACK_BYTES;
        pack p = read_pack(args.head.mask, j.memory, at);
        bool live = __any_sync(ALL_LANES, p.live) != 0;

        if (!live || (j.scan && !j.memory.masked && !any_bit_of(p.bits)))
            return 0;
        store_slot(j.slot + at, p.bits);
        return 1U << granule;
    }

    __device__ __forceinline__ uint32_t batch(const exchange_job &j, uint32_t granule,
                                              uint32_t count) const
    {
        constexpr uint32_t ahead = exchange_span;
        uint32_t mask = 0;

        if (count == ahead && !j.memory.masked && plain_granules(j.memory, granule, ahead))
            return fast<ahead>(j, granule);
#pragma unroll 1
        for (uint32_t i = 0; i < count; i++)
            mask |= slow(j, granule + i);
        return mask;
    }
};

struct exchange_take_work {
    uint32_t lane;

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

    __device__ __forceinline__ uint32_t batch(const exchange_job &j, uint32_t granule,
                                              uint32_t count) const
    {
        constexpr uint32_t ahead = exchange_span;

        if (count == ahead && plain_granules(j.memory, granule, ahead)) {
            fast<ahead>(j, granule);
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

/* This warp's share of what the rank sends to itself: granules of the CTA's tiles. */
template <class Args>
__device__ __forceinline__ void copy_own(const exchange_call<Args> &c, uint32_t warp,
                                         uint32_t warps)
{
    const lk_exchange_head &head = c.args.head;

    for (uint32_t entry = head.sends[c.rank()]; entry < head.sends[c.rank() + 1]; entry++) {
        uint64_t to = c.args.entries[entry].other;
        uint32_t bytes = c.tile_bytes(entry);

        for (uint32_t tile = c.cta; c.has_tile(entry, tile); tile += c.ctas) {
            stretch s = c.stretch_of(entry, tile);
            uint64_t out = to + static_cast<uint64_t>(tile) * bytes;

#pragma unroll 1
            for (uint32_t at = warp * LK_GRANULE + c.lane * LK_PACK_BYTES; at < s.bytes;
                 at += warps * LK_GRANULE)
                store_bytes(out + at, read_pack(head.mask, s, at).bits,
                            s.bytes - at < LK_PACK_BYTES ? s.bytes - at : LK_PACK_BYTES);
        }
    }
}

/* ---- control warps: what a lane does for its peer ---- */

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
    __device__ __forceinline__ bool ready(uint32_t channel, uint64_t message, uint32_t *) const
    {
        uint64_t credit = load_word(c.segment +
                                    lk_credit_offset(&c.shape(), LK_EXCHANGE, c.lane, channel));

        return message - credit <= c.shape().slots;
    }
    __device__ __forceinline__ uint64_t slot(const exchange_job &j) const
    {
        return c.segment_of(j.peer) +
               lk_slot_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel, c.slot_of(j.message));
    }
    /* Lane 0, after the fence. */
    __device__ __forceinline__ void publish(const exchange_job &j, exchange_traffic *t) const
    {
        uint32_t last = (j.packs - 1) / granule_packs;
        uint32_t missing = (last + 1) * LK_GRANULE - j.memory.bytes;
        uint32_t live = __popc(j.wrote) * LK_GRANULE - (j.wrote >> last & 1 ? missing : 0);

        store_word(c.segment_of(j.peer) +
                       lk_words_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel) +
                       8 * c.slot_of(j.message),
                   lk_slot_word(j.message, j.wrote));
        t->sent += live + 8;
        t->elided += j.memory.bytes - live;
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
    __device__ __forceinline__ bool ready(uint32_t channel, uint64_t message, uint32_t *live) const
    {
        uint64_t word = load_word(c.segment +
                                  lk_words_offset(&c.shape(), LK_EXCHANGE, c.lane, channel) +
                                  8 * c.slot_of(message));

        *live = static_cast<uint32_t>(word >> 32);
        return static_cast<uint32_t>(word) == static_cast<uint32_t>(message);
    }
    __device__ __forceinline__ uint64_t slot(const exchange_job &j) const
    {
        return c.segment +
               lk_slot_offset(&c.shape(), LK_EXCHANGE, j.peer, j.channel, c.slot_of(j.message));
    }
    __device__ __forceinline__ void publish(const exchange_job &j, exchange_traffic *t) const
    {
        store_word(c.segment_of(j.peer) +
                       lk_credit_offset(&c.shape(), LK_EXCHANGE, c.rank(), j.channel),
                   j.message);
        t->sent += 8;
    }
};

/* One control warp at work. */
template <class Call, class Role> struct exchange_control {
    const Call &c;
    Role role;
    exchange_pipeline *p;
    exchange_cursor *cursors; /* of this role: [channel / ctas][rank] */
    uint32_t made, published;
    uint32_t last; /* peer whose unit got the last job */
    exchange_traffic t;

    __device__ exchange_control(const Call &call, exchange_pipeline *pipe, exchange_cursor *own)
        : c(call), role{ call }, p(pipe), cursors(own), made(0), published(0), last(31), t{ 0, 0 }
    {
    }
    __device__ __forceinline__ bool mine() const
    {
        return c.lane < c.shape().ranks && c.lane != c.rank();
    }
    __device__ __forceinline__ exchange_cursor *cursor(uint32_t channel) const
    {
        return &cursors[channel / c.ctas * c.shape().ranks + c.lane];
    }
    __device__ __forceinline__ uint32_t first_tile(uint32_t channel) const
    {
        return lk_message_first(&c.shape(), c.rank(), c.lane, channel);
    }
    __device__ __forceinline__ void settle(exchange_cursor *at, uint32_t channel) const
    {
        while (at->entry < role.end(c.lane) && !c.has_tile(at->entry, at->tile))
            *at = { first_tile(channel), at->entry + 1 };
    }
    __device__ __forceinline__ void begin() const
    {
        for (uint32_t channel = c.cta; mine() && channel < c.shape().channels; channel += c.ctas) {
            *cursor(channel) = { first_tile(channel), role.begin(c.lane) };
            settle(cursor(channel), channel);
        }
    }

    /* Done jobs are published, in the order in which they were made. True: there were some. */
    __device__ __forceinline__ bool publish()
    {
        uint32_t ready = published;

        while (ready < made && job_done(p, ready))
            ready++;
        if (ready == published)
            return false;
        fence_system();
        for (; published < ready; published++)
            if (c.lane == 0)
                role.publish(p->jobs[published % depth], &t);
        __syncwarp(); /* jobs are read before they are written again */
        return true;
    }

    /* By the lane that looks after the unit. */
    __device__ __forceinline__ void make(exchange_job *j, uint32_t channel, uint64_t message,
                                         uint32_t live) const
    {
        exchange_cursor *at = cursor(channel);

        j->memory = c.stretch_of(at->entry, at->tile);
        j->message = message;
        j->peer = c.lane;
        j->channel = channel;
        j->slot = role.slot(*j);
        j->packs = (j->memory.bytes + LK_PACK_BYTES - 1) / LK_PACK_BYTES;
        j->scan = static_cast<uint32_t>(c.args.entries[at->entry].other);
        j->live = live;
        j->wrote = 0;
        *role.counter(channel, c.lane) = message;
        at->tile += c.shape().channels;
        settle(at, channel);
    }

    /* Gives a job to each unit of the channel that can go on, as long as there is room. False: no unit has anything left.
     * *moved: there was a job. */
    __device__ __forceinline__ bool visit(uint32_t channel, bool *moved)
    {
        bool left = mine() && cursor(channel)->entry < role.end(c.lane);
        uint64_t message = 0;
        uint32_t live = 0, able;

        if (!__any_sync(ALL_LANES, left))
            return false;
        if (made - published == depth)
            return true;
        if (left) {
            message = *role.counter(channel, c.lane) + 1;
            left = role.ready(channel, message, &live);
        }
        able = __ballot_sync(ALL_LANES, left);
        while (able && made - published < depth) {
            uint32_t above = able & ~(ALL_LANES >> (31 - last));

            last = static_cast<uint32_t>(__ffs(static_cast<int>(above ? above : able)) - 1);
            able &= ~(1U << last);
            if (c.lane == last)
                make(&p->jobs[made % depth], channel, message, live);
            hand_over(p, made++, c.lane);
            *moved = true;
        }
        return true;
    }

    /* False: the call is aborted. */
    __device__ __forceinline__ bool run()
    {
        uint32_t channel = c.cta, empty = 0, tries = 0;
        uint32_t channels = (c.shape().channels - c.cta + c.ctas - 1) / c.ctas;

        begin();
        while (empty < channels || published < made) {
            bool moved = publish();

            empty = visit(channel, &moved) ? 0 : empty + 1;
            channel += c.ctas;
            if (channel >= c.shape().channels)
                channel = c.cta;
            tries = moved ? 0 : tries + 1;
            if (tries % tries_per_abort_check == tries_per_abort_check - 1 && c.aborted())
                return false;
            back_off(tries / channels);
        }
        return true;
    }
};

template <class Role, class Call>
__device__ __forceinline__ void control_exchange(const Call &c, exchange_pipeline *p,
                                                 exchange_cursor *cursors)
{
    lk_ring_counts *counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;
    exchange_control<Call, Role> control(c, p, cursors);

    control.run();
    if (control.published < control.made) /* cut short; the data warps still do what they have */
        for (uint32_t i = control.published; i < control.made; i++)
            barrier_wait(&p->done[i % depth], i / depth % 2);
    if (c.lane == 0)
        p->jobs[control.made % depth].packs = 0;
    hand_over(p, control.made, c.lane);
    if (c.lane == 0) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), control.t.sent);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_elided), control.t.elided);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_sent), control.t.sent);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->exchange_elided),
                  control.t.elided);
    }
}

template <class R> __device__ __forceinline__ void init_exchange(exchange_pipeline *pipelines)
{
    const uint32_t warps[EXCHANGE_ROLES] = { R::send, R::take };

    if (threadIdx.x == 0) {
        for (uint32_t role = 0; role < EXCHANGE_ROLES; role++) {
            for (uint32_t i = 0; i < depth; i++) {
                barrier_init(&pipelines[role].full[i], 1);
                barrier_init(&pipelines[role].done[i], warps[role]);
            }
        }
    }
    __syncthreads();
}

/* All of a CTA. `cursors`: exchange_cursors() of them. */
template <class R, class Args>
__device__ __forceinline__ void run_exchange_cta(const Args &args, exchange_pipeline *pipelines,
                                                 exchange_cursor *cursors, uint32_t cta,
                                                 uint32_t ctas)
{
    using call_type = exchange_call<Args>;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    call_type c(args, cta, ctas);

    init_exchange<R>(pipelines);
    if (warp == EXCHANGE_SEND) {
        control_exchange<exchange_send_role<call_type>>(c, &pipelines[EXCHANGE_SEND], cursors);
    } else if (warp == EXCHANGE_TAKE) {
        control_exchange<exchange_take_role<call_type>>(
            c, &pipelines[EXCHANGE_TAKE],
            cursors + exchange_cursors(&c.shape(), ctas) / EXCHANGE_ROLES);
    } else if (warp < EXCHANGE_ROLES + R::send) {
        exchange_send_work<Args> work = { args, lane };

        move_jobs(&work, &pipelines[EXCHANGE_SEND], warp - EXCHANGE_ROLES, R::send, exchange_span);
    } else if (warp < EXCHANGE_ROLES + R::send + R::take) {
        exchange_take_work work = { lane };

        move_jobs(&work, &pipelines[EXCHANGE_TAKE], warp - EXCHANGE_ROLES - R::send, R::take,
                  exchange_span);
    } else {
        copy_own(c, warp - EXCHANGE_ROLES - R::send - R::take, R::copy);
    }
}

} // namespace lk_rings_device

#endif
