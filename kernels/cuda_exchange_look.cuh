/* SPDX-License-Identifier: Apache-2.0
 *
 * The warps that look for messages that can go on.
 */
#ifndef LK_CUDA_EXCHANGE_LOOK_CUH
#define LK_CUDA_EXCHANGE_LOOK_CUH

#include "kernels/cuda_exchange_packs.cuh"

namespace lk_rings_device
{

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
    __device__ __forceinline__ uint32_t place_of(uint32_t channel, uint32_t peer,
                                                 const exchange_cursor &at) const
    {
        if (at.lines || !Call::path::spread)
            return at.tile;
        return lk_message_place(&c.shape(), at.tiles,
                                lk_message_first(&c.shape(), c.rank(), peer, channel), at.tile);
    }
    __device__ __forceinline__ void describe(exchange_job *j, uint32_t channel, uint32_t peer,
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
            of_cta::describe(&p->jobs[number % depth], channel, peer, at, live);
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

} // namespace lk_rings_device

#endif
