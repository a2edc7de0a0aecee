/* SPDX-License-Identifier: Apache-2.0
 *
 * What the control warps of the two-shot kernels do: who may use which slots, and when. A CTA has three roles: sending
 * contributions, reducing own tiles, taking results, so that none waits for another one's peer.
 *
 * A role goes through its tiles in one order, by (round, channel, peer), where a channel's tile of round j is its j-th one.
 * That leaves no rank waiting for ever, whatever the grids: of all that is not done yet take what is least by (round,
 * channel, send before reduce before take). A send waits for a reduction of an earlier round, a reduction for sends of its
 * own round and takes of earlier ones, a take for a reduction of its own round: all of them less, so done. What its own
 * role has before it is less, too. One slot for each unit is enough.
 *
 * Each role has a warp that looks for places whose slots may be used and hands them to the role's data warps as jobs; one
 * more warp publishes what these have done, of all roles. A look at a word and the fence before one each take about as long
 * as a CTA takes to move half a slot: so they are made by different warps, lanes look at several places of the order at once,
 * one fence serves all that has been done, and what is known of a unit is kept by a lane and not read again for each tile.
 */
#ifndef LK_CUDA_RINGS_ROLES_CUH
#define LK_CUDA_RINGS_ROLES_CUH

#include "kernels/cuda_rings_pipeline.cuh"

namespace lk_rings_device
{

/* The kernel's argument: a launch with room for N entries. */
template <unsigned N> struct ring_args {
    lk_ring_head head;
    lk_ring_entry entries[N];
};

enum role_number {
    ROLE_SEND,
    ROLE_REDUCE,
    ROLE_TAKE,
    ROLES,
};

/* A place in a role's order. */
struct place {
    uint32_t round;
    uint32_t channel;
    uint32_t step; /* peer = rank + step; 0: all peers */
    uint32_t
        unit; /* number of the (first) unit among those of the role in this CTA: by channel, then peer */
};

/* A message of a unit, counted from 1, and the slot that it has. */
struct message {
    uint64_t number;
    uint32_t slot;
};

/* Where the entry of a pack lies in the list: begin <= number < end. */
struct entry_range {
    uint32_t begin, end;
};

/* The entry of a pack of the space, which is one of the range. */
template <class Args>
__device__ __forceinline__ uint32_t entry_of(const Args &args, uint32_t pack, entry_range range)
{
#pragma unroll 1
    while (range.end - range.begin > 1) {
        uint32_t middle = (range.begin + range.end) / 2;

        if (args.entries[middle].first <= pack)
            range.begin = middle;
        else
            range.end = middle;
    }
    return range.begin;
}

/* Those of the packs from `first` to `last`. Few tensors lie between the two: what is near the first one is looked at
 * first. */
template <class Args>
__device__ __forceinline__ entry_range entries_of(const Args &args, uint32_t first, uint32_t last)
{
    uint32_t n = args.head.n, begin = entry_of(args, first, { 0, n });
    entry_range rest = { begin, begin + 1 };

#pragma unroll 1
    for (uint32_t step = 1; rest.end < n && args.entries[rest.end].first <= last; step *= 2)
        rest = { rest.end, n - rest.end > step ? rest.end + step : n };
    return { begin, entry_of(args, last, rest) + 1 };
}

/* Written by the warp that looks before it arrives at `full`, but for `wrote`; read by data warps until they arrive at
 * `done`, and then by the warp that publishes until it arrives at `free`. */
struct job {
    uint64_t
        slot; /* address of the payload: of the destination's slot (send), of the source's (take), of all slots of
                      the leg (reduce; where slots lie at the writer, their offset in its segment) */
    uint64_t out_slot; /* reduce: offset of the result's slot in every destination's segment */
    message out;       /* send, reduce */
    place at;
    uint32_t first; /* pack of the tile space */
    uint32_t packs; /* 0: this is the end */
    uint32_t part;  /* whose part of the input it is; 0 but for a reduce-scatter */
    entry_range
        entries; /* of these packs: each data warp would look for them itself, while its loads wait */
    uint32_t
        wrote; /* granules put into the slot; data warps set bits. Of the end: the call has been cut short */
    uint64_t in[LK_DEVICE_RANKS];    /* number of each source's message (take: [0]) */
    uint32_t live[LK_DEVICE_RANKS];  /* granules that are in its slot (take: [0]) */
    uint32_t where[LK_DEVICE_RANKS]; /* reduce: where its slot lies behind `slot` */
};
using pipeline = pipeline_of<job, 8>;

/* Warps that publish: one, or one of each role. */
template <class Path> constexpr uint32_t publishers = Path::publish_apart ? ROLES : 1;

/* One of each role, and those that publish. */
template <class Path> constexpr uint32_t control_warps = ROLES + publishers<Path>;

/* What all roles know of the call. */
template <class Args, class Path> struct call {
    using path = Path;
    const Args &args;
    uint64_t segment; /* own */
    uint64_t state;
    uint32_t tiles;  /* of each rank's; of each part of a reduce-scatter */
    uint32_t longer; /* ranks below this one have one more */
    uint32_t peers;
    uint32_t cta;
    uint32_t ctas;
    uint32_t lane;
    bool gathers;

    __device__ __forceinline__ call(const Args &a, uint32_t number, uint32_t count)
        : args(a), cta(number), ctas(count), lane(threadIdx.x % 32)
    {
        const lk_ring_head &h = args.head;
        uint32_t granules = h.packs / granule_packs + (h.packs % granule_packs != 0);
        uint32_t all = (granules + h.tile_granules - 1) / h.tile_granules;

        segment = segment_of(h.rings.rank);
        state = reinterpret_cast<uint64_t>(h.rings.state);
        gathers = h.work == LK_WORK_ALL_REDUCE;
        peers = shape().ranks - 1;
        tiles = gathers ? all / shape().ranks : all;
        longer = gathers ? all % shape().ranks : 0;
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
    __device__ __forceinline__ uint32_t peer(uint32_t step) const
    {
        uint32_t r = rank() + step;

        return r < shape().ranks ? r : r - shape().ranks;
    }
    /* Where this rank writes a slot for another one, and where it reads one of its. */
    template <bool Pull>
    __device__ __forceinline__ uint64_t slot_for(uint32_t leg, uint32_t dst, uint32_t channel,
                                                 uint32_t slot) const
    {
        return Pull ? segment + lk_slot_offset(&shape(), leg, dst, channel, slot)
                    : segment_of(dst) + lk_slot_offset(&shape(), leg, rank(), channel, slot);
    }
    template <bool Pull>
    __device__ __forceinline__ uint64_t slot_from(uint32_t leg, uint32_t src, uint32_t channel,
                                                  uint32_t slot) const
    {
        return Pull ? segment_of(src) + lk_slot_offset(&shape(), leg, rank(), channel, slot)
                    : segment + lk_slot_offset(&shape(), leg, src, channel, slot);
    }
    /* The i-th of the others, in the order of the ranks. */
    __device__ __forceinline__ uint32_t source(uint32_t i) const
    {
        return i < rank() ? i : i + 1;
    }
    __device__ __forceinline__ uint32_t tiles_of(uint32_t owner) const
    {
        return tiles + (owner < longer);
    }
    __device__ __forceinline__ uint32_t tile_number(const place &at) const
    {
        return at.channel + at.round * shape().channels;
    }
    /* Of a role in this CTA. */
    __device__ __forceinline__ uint32_t units() const
    {
        return (shape().channels - cta + ctas - 1) / ctas * peers;
    }
    __device__ __forceinline__ uint32_t unit_channel(uint32_t unit) const
    {
        return cta + unit / peers * ctas;
    }

    /* Which packs a tile has. */
    __device__ __forceinline__ void describe(job *out, uint32_t owner, const place &at) const
    {
        uint32_t packs = args.head.tile_granules * granule_packs;
        uint32_t tile = tile_number(at);
        uint32_t first = (gathers ? tile * shape().ranks + owner : tile) * packs;
        uint32_t left = args.head.packs - first;

        out->at = at;
        out->first = first;
        out->packs = packs < left ? packs : left;
        out->part = gathers ? 0 : owner;
        out->entries = entries_of(args, first, first + out->packs - 1);
        out->wrote = 0;
    }

    /* Of a unit between this rank and an owner of tiles. */
    __device__ __forceinline__ uint32_t messages(uint32_t owner, uint32_t channel) const
    {
        uint32_t all = tiles_of(owner);

        return all / shape().channels + (channel < all % shape().channels);
    }
    __device__ __forceinline__ void count(size_t offset, uint32_t more) const
    {
        *reinterpret_cast<volatile uint64_t *>(state + offset) += more;
    }
    /* Of a unit: its messages from the first that its reader has not taken out, as far as it has said, up to `m`. There is a
     * slot for that one if they are not more than slots. */
    __device__ __forceinline__ uint64_t under_way(uint32_t leg, uint32_t dst, uint32_t channel,
                                                  const message &m) const
    {
        return m.number - load_word(segment + lk_credit_offset(&shape(), leg, dst, channel));
    }
    __device__ __forceinline__ uint64_t arrival(uint32_t leg, uint32_t src, uint32_t channel,
                                                const message &m) const
    {
        return load_word(segment + lk_words_offset(&shape(), leg, src, channel) + 8 * m.slot);
    }
    __device__ __forceinline__ void publish(uint32_t leg, uint32_t dst, uint32_t channel,
                                            const message &m, uint32_t wrote) const
    {
        store_word(segment_of(dst) + lk_words_offset(&shape(), leg, rank(), channel) + 8 * m.slot,
                   lk_slot_word(m.number, wrote));
    }
    __device__ __forceinline__ void give_credit(uint32_t leg, uint32_t src, uint32_t channel,
                                                uint64_t number) const
    {
        store_word(segment_of(src) + lk_credit_offset(&shape(), leg, rank(), channel), number);
    }
    __device__ __forceinline__ void say_too_few() const
    {
        volatile uint32_t *word = args.head.rings.too_few;

        if (word)
            *word = 1;
    }
    __device__ __forceinline__ bool aborted() const
    {
        return __any_sync(ALL_LANES, load_abort(args.head.rings.abort)) != 0;
    }
};

/* Bytes of a job's granules that have their bit in `mask`. */
__device__ __forceinline__ uint32_t granule_bytes(const job &j, uint32_t mask)
{
    uint32_t last = (j.packs - 1) / granule_packs;
    uint32_t missing = (last + 1) * LK_GRANULE - j.packs * LK_PACK_BYTES;

    return __popc(mask) * LK_GRANULE - (mask >> last & 1 ? missing : 0);
}

__device__ __forceinline__ uint32_t all_granules(const job &j)
{
    return ALL_LANES >> (31 - (j.packs - 1) / granule_packs);
}

/* Counted by each lane of the warp that publishes. */
struct traffic {
    uint64_t sent;
    uint64_t elided;

    /* Of a job whose slot has gone to `peers` ranks. */
    __device__ __forceinline__ void add(const job &j, uint32_t peers)
    {
        uint32_t live = granule_bytes(j, j.wrote);

        sent += static_cast<uint64_t>(peers) * (live + 8);
        elided += static_cast<uint64_t>(peers) * (granule_bytes(j, all_granules(j)) - live);
    }
};

/* ---- units ---- */

/* How many messages the role's units had had when the call began, for their CTA writes that at its end only. Lane i keeps it
 * of unit i, if there are no more units than lanes. All lanes call everything. */
struct unit_counts {
    uint64_t messages;
    uint32_t slot; /* of the next message */
    bool kept;

    template <class Call> __device__ __forceinline__ void read(const Call &c, size_t offset)
    {
        messages = *reinterpret_cast<const volatile uint64_t *>(c.state + offset);
        slot = static_cast<uint32_t>(messages % c.shape().slots);
    }
    template <class Role> __device__ __forceinline__ void keep(const Role &role)
    {
        uint32_t units = role.c.units();

        kept = units <= 32;
        messages = slot = 0;
        if (kept && role.c.lane < units)
            read(role.c, role.counter(role.c.lane));
    }
    /* The unit's message of a round. */
    template <class Role>
    __device__ __forceinline__ message at(const Role &role, uint32_t unit, uint32_t round) const
    {
        unit_counts found = *this;

        if (kept) {
            found.messages = __shfl_sync(ALL_LANES, messages, static_cast<int>(unit));
            found.slot = __shfl_sync(ALL_LANES, slot, static_cast<int>(unit));
        } else {
            found.read(role.c, role.counter(unit));
        }
        return { found.messages + round + 1, (found.slot + round) % role.c.shape().slots };
    }
};

/* ---- roles. `looks`: this lane has a place. All lanes call message(); the other calls are made by those which have one. ---- */

/* Order of the roles that deal with one peer at a time: a lane for each place. */
template <class Call> struct peer_order {
    const Call &c;

    __device__ __forceinline__ uint32_t lanes() const
    {
        return 1;
    }
    __device__ __forceinline__ bool end(const place &at) const
    {
        return at.round * c.shape().channels + c.cta >= c.tiles_of(0);
    }
    __device__ __forceinline__ void step(place *at) const
    {
        at->unit++;
        if (++at->step <= c.peers)
            return;
        at->step = 1;
        at->channel += c.ctas;
        if (at->channel < c.shape().channels)
            return;
        at->channel = c.cta;
        at->unit = 0;
        at->round++;
    }
    __device__ __forceinline__ void settle(place *at) const
    {
        while (!end(*at) && c.tile_number(*at) >= c.tiles_of(c.peer(at->step)))
            step(at);
    }
    __device__ __forceinline__ place begin() const
    {
        place at = { 0, c.cta, 1, 0 };

        settle(&at);
        return at;
    }
    __device__ __forceinline__ void advance(place *at) const
    {
        step(at);
        settle(at);
    }
    __device__ __forceinline__ uint32_t unit_peer(uint32_t unit) const
    {
        return c.peer(1 + unit % c.peers);
    }
    __device__ __forceinline__ void report() const
    {
    }
};

template <class Call> struct send_role : peer_order<Call> {
    using peer_order<Call>::c;
    unit_counts sent;
    /* Of lane 0, which looks at the place that is next: slots that were waited for of peers which had taken out one of this
     * call, so that they were in it, too; and whether one is being waited for. */
    mutable uint32_t waited = 0;
    mutable bool waits = false;

    __device__ __forceinline__ explicit send_role(const Call &call) : peer_order<Call>{ call }
    {
        sent.keep(*this);
    }
    __device__ __forceinline__ size_t counter(uint32_t unit) const
    {
        return lk_sent_offset(&c.shape(), LK_SCATTER, this->unit_peer(unit), c.unit_channel(unit));
    }
    __device__ __forceinline__ message messages(const place &at) const
    {
        return sent.at(*this, at.unit, at.round);
    }
    __device__ __forceinline__ bool ready(const place &at, const message &m, uint64_t *) const
    {
        uint64_t before = c.under_way(LK_SCATTER, c.peer(at.step), at.channel, m);
        bool has = before <= c.shape().slots;

        waited += has && waits;
        waits = !has && (waits || before <= at.round);
        return has;
    }
    __device__ __forceinline__ void write(const place &at, const message &m, uint64_t, job *j) const
    {
        uint32_t dst = c.peer(at.step);

        c.describe(j, dst, at);
        j->out = m;
        j->slot = c.template slot_for<Call::path::pull_scatter>(LK_SCATTER, dst, at.channel,
                                                                m.slot);
    }
    __device__ __forceinline__ void finish(uint32_t unit) const
    {
        c.count(counter(unit), c.messages(this->unit_peer(unit), c.unit_channel(unit)));
    }
    __device__ __forceinline__ void report() const
    {
        if (c.lane == 0 && waited > LK_WAITS_ALLOWED)
            c.say_too_few();
    }
};

template <class Call> struct take_role : peer_order<Call> {
    using peer_order<Call>::c;
    unit_counts taken;

    __device__ __forceinline__ explicit take_role(const Call &call) : peer_order<Call>{ call }
    {
        taken.keep(*this);
    }
    __device__ __forceinline__ size_t counter(uint32_t unit) const
    {
        return lk_taken_offset(&c.shape(), LK_GATHER, this->unit_peer(unit), c.unit_channel(unit));
    }
    __device__ __forceinline__ message messages(const place &at) const
    {
        return taken.at(*this, at.unit, at.round);
    }
    __device__ __forceinline__ bool ready(const place &at, const message &m, uint64_t *word) const
    {
        *word = c.arrival(LK_GATHER, c.peer(at.step), at.channel, m);
        return static_cast<uint32_t>(*word) == static_cast<uint32_t>(m.number);
    }
    __device__ __forceinline__ void write(const place &at, const message &m, uint64_t word,
                                          job *j) const
    {
        uint32_t src = c.peer(at.step);

        c.describe(j, src, at);
        j->slot = c.template slot_from<Call::path::pull_gather>(LK_GATHER, src, at.channel, m.slot);
        j->in[0] = m.number;
        j->live[0] = static_cast<uint32_t>(word >> 32);
    }
    __device__ __forceinline__ void finish(uint32_t unit) const
    {
        c.count(counter(unit), c.messages(this->unit_peer(unit), c.unit_channel(unit)));
    }
};

/* Of a reduction: what a peer has sent, and the result for it. */
struct message_pair {
    message in, out;
};

/* Own tiles: a lane for each peer of a place. */
template <class Call> struct reduce_role {
    const Call &c;
    uint32_t src; /* this lane's peer */
    uint32_t member;
    unit_counts taken;
    unit_counts sent;

    __device__ __forceinline__ explicit reduce_role(const Call &call)
        : c(call), member(call.lane % call.peers)
    {
        src = c.source(member);
        taken.keep(*this);
        sent.keep(out_counts{ c, *this });
    }
    __device__ __forceinline__ uint32_t unit_peer(uint32_t unit) const
    {
        return c.source(unit % c.peers);
    }
    __device__ __forceinline__ size_t counter(uint32_t unit) const
    {
        return lk_taken_offset(&c.shape(), LK_SCATTER, unit_peer(unit), c.unit_channel(unit));
    }
    struct out_counts {
        const Call &c;
        const reduce_role &role;

        __device__ __forceinline__ size_t counter(uint32_t unit) const
        {
            return lk_sent_offset(&c.shape(), LK_GATHER, role.unit_peer(unit),
                                  c.unit_channel(unit));
        }
    };

    __device__ __forceinline__ uint32_t lanes() const
    {
        return c.peers;
    }
    __device__ __forceinline__ bool end(const place &at) const
    {
        return at.round * c.shape().channels + c.cta >= c.tiles_of(c.rank());
    }
    __device__ __forceinline__ place begin() const
    {
        return { 0, c.cta, 0, 0 };
    }
    __device__ __forceinline__ void advance(place *at) const
    {
        at->channel += c.ctas;
        at->unit += c.peers;
        if (at->channel < c.shape().channels && c.tile_number(*at) < c.tiles_of(c.rank()))
            return;
        at->channel = c.cta;
        at->unit = 0;
        at->round++;
    }
    __device__ __forceinline__ message_pair messages(const place &at) const
    {
        message in = taken.at(*this, at.unit + member, at.round);
        message out = sent.at(out_counts{ c, *this }, at.unit + member, at.round);

        return { in, out };
    }
    __device__ __forceinline__ bool ready(const place &at, const message_pair &m,
                                          uint64_t *word) const
    {
        *word = c.arrival(LK_SCATTER, src, at.channel, m.in);
        return static_cast<uint32_t>(*word) == static_cast<uint32_t>(m.in.number) &&
               (!c.gathers || c.under_way(LK_GATHER, src, at.channel, m.out) <= c.shape().slots);
    }
    __device__ __forceinline__ void write(const place &at, const message_pair &m, uint64_t word,
                                          job *j) const
    {
        size_t slots = lk_slot_offset(&c.shape(), LK_SCATTER, 0, 0, 0);
        size_t slot = lk_slot_offset(&c.shape(), LK_SCATTER,
                                     Call::path::pull_scatter ? c.rank() : src, at.channel,
                                     m.in.slot);

        j->in[src] = m.in.number;
        j->live[src] = static_cast<uint32_t>(word >> 32);
        j->where[src] = static_cast<uint32_t>(slot - slots);
        if (member)
            return;
        c.describe(j, c.rank(), at);
        j->out = m.out;
        j->slot = (Call::path::pull_scatter ? 0 : c.segment) + slots;
        j->out_slot = lk_slot_offset(&c.shape(), LK_GATHER, c.rank(), at.channel, m.out.slot);
    }
    __device__ __forceinline__ void finish(uint32_t unit) const
    {
        uint32_t more = c.messages(c.rank(), c.unit_channel(unit));

        c.count(counter(unit), more);
        if (c.gathers)
            c.count(out_counts{ c, *this }.counter(unit), more);
    }
    __device__ __forceinline__ void report() const
    {
    }
};

/* ---- a warp that looks ---- */

template <class Call, class Role> struct looking_warp {
    static constexpr uint32_t depth = pipeline::depth;

    const Call &c;
    const Role &role;
    pipeline *p;
    place head;     /* of job `made` */
    uint32_t made;  /* jobs that have been handed over */
    uint32_t which; /* of the places that are looked at together, this lane's */
    uint32_t most;  /* of them */

    __device__ __forceinline__ looking_warp(const Call &call, const Role &r, pipeline *pipe)
        : c(call), role(r), p(pipe), head(r.begin()), made(0), which(call.lane / r.lanes()),
          most(32 / r.lanes() < depth ? 32 / r.lanes() : depth)
    {
    }
    /* Places from `head` on become a job each, up to the first that is not ready. True if any was. */
    __device__ __forceinline__ bool look()
    {
        uint32_t number = made + which, found;
        bool has = which < most && has_room(p, number), ready = false;
        place at = head;
        uint64_t word = 0;

        for (uint32_t i = 0; i < which && i < most; i++)
            role.advance(&at);
        has = has && !role.end(at);
        if (!has)
            at = head;
        auto m = role.messages(at);
        if (has)
            ready = role.ready(at, m, &word);
        found = leading_ones(__ballot_sync(ALL_LANES, ready)) / role.lanes();
        if (!found)
            return false;
        if (which < found)
            role.write(at, m, word, &p->jobs[number % depth]);
        __syncwarp();
        if (which < found && c.lane % role.lanes() == 0)
            barrier_arrive(&p->full[number % depth]);
        move_head(at, (found - 1) * role.lanes());
        made += found;
        return true;
    }
    /* Behind the place of that lane. */
    __device__ __forceinline__ void move_head(const place &at, uint32_t lane)
    {
        int from = static_cast<int>(lane);

        head.round = __shfl_sync(ALL_LANES, at.round, from);
        head.channel = __shfl_sync(ALL_LANES, at.channel, from);
        head.step = __shfl_sync(ALL_LANES, at.step, from);
        head.unit = __shfl_sync(ALL_LANES, at.unit, from);
        role.advance(&head);
    }
    /* False: the call is aborted. */
    __device__ __forceinline__ bool look_for_all()
    {
        uint32_t tries = 0;

        while (!role.end(head)) {
            wait_for_room(p, made);
            tries = look() ? 0 : tries + 1;
            if (tries % tries_per_abort_check == tries_per_abort_check - 1 && c.aborted())
                return false;
            back_off(tries);
        }
        return true;
    }
};

template <class Call, class Role>
__device__ __forceinline__ void look_for_jobs(const Call &c, const Role &role, pipeline *p)
{
    looking_warp<Call, Role> warp(c, role, p);
    bool whole = warp.look_for_all();

    hand_over_end(p, warp.made, whole);
    if (!whole)
        return;
    for (uint32_t unit = c.lane; unit < c.units(); unit += 32)
        role.finish(unit);
    role.report();
}

/* ---- the words that are published ---- */

template <class Call> struct ring_words {
    const Call &c;
    traffic t;

    __device__ __forceinline__ bool fenced(uint32_t role) const
    {
        return role == ROLE_SEND || (role == ROLE_REDUCE && c.gathers);
    }
    __device__ __forceinline__ uint32_t unit(uint32_t, const job &j) const
    {
        return j.at.channel << 8 | j.at.step;
    }
    __device__ __forceinline__ void credit(uint32_t role, const job &j, bool last)
    {
        uint32_t n = role == ROLE_SEND ? 0 : role == ROLE_TAKE ? 1 : c.peers;

        t.sent += 8 * n;
        if (!last || role == ROLE_SEND)
            return;
        if (role == ROLE_TAKE) {
            c.give_credit(LK_GATHER, c.peer(j.at.step), j.at.channel, j.in[0]);
            return;
        }
#pragma unroll 1
        for (uint32_t i = 0; i < n; i++)
            c.give_credit(LK_SCATTER, c.source(i), j.at.channel, j.in[c.source(i)]);
    }
    __device__ __forceinline__ void word(uint32_t role, const job &j)
    {
        if (role == ROLE_SEND) {
            c.publish(LK_SCATTER, c.peer(j.at.step), j.at.channel, j.out, j.wrote);
            t.add(j, 1);
            return;
        }
#pragma unroll 1
        for (uint32_t i = 0; i < c.peers; i++)
            c.publish(LK_GATHER, c.source(i), j.at.channel, j.out, j.wrote);
        t.add(j, c.peers);
    }
};

/* which: the role of the warp, where there is one of each. */
template <class Call>
__device__ __forceinline__ void publish_jobs(const Call &c, pipeline *pipelines, uint32_t which)
{
    lk_ring_counts *counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;
    ring_words<Call> words = {
        c,
        {0, 0}
    };
    publishing_warp<ROLES, pipeline, ring_words<Call>, Call::path::jobs_a_fence> warp(&words,
                                                                                      pipelines);

    if (!c.gathers)
        warp.leave_out(ROLE_TAKE);
    if (publishers < typename Call::path >> 1)
        warp.leave_out_all_but(which);
    warp.run();
    if (warp.cut)
        return;
    if (words.t.sent)
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), words.t.sent);
    if (words.t.elided)
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_elided), words.t.elided);
}

} // namespace lk_rings_device

#endif
