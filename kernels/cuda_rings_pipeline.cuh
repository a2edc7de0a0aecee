/* SPDX-License-Identifier: Apache-2.0
 *
 * What a CTA of the two-shot kernels does with slots: who may use which, and when.
 *
 * A CTA has three roles: sending contributions, reducing own tiles, taking results. Each is a pipeline of its own of one
 * control warp and several data warps, so that no role waits for another one's peer. The control warp looks ahead: when a
 * tile's slots may be used it hands a job to the data warps, and when they have done a job it publishes it, both without
 * waiting for either, so that neither a slow peer nor the fence before a word holds up the moving of data. A data warp
 * touches slots of a job only; it never looks at a word and never waits for another rank.
 *
 * A role goes through its tiles in one order, by (round, channel, peer), where a channel's tile of round j is its j-th one.
 * That leaves no rank waiting for ever, whatever the grids: of all that is not done yet take what is least by (round,
 * channel, send before reduce before take). A send waits for a reduction of an earlier round, a reduction for sends of its
 * own round and takes of earlier ones, a take for a reduction of its own round: all of them less, so done. What its own
 * role has before it is less, too. One slot for each unit is enough.
 */
#ifndef LK_CUDA_RINGS_PIPELINE_CUH
#define LK_CUDA_RINGS_PIPELINE_CUH

#include "kernels/cuda_rings_ops.cuh"
#include "kernels/rings_internal.h"

namespace lk_rings_device
{

constexpr uint32_t depth = 8; /* jobs of a role under way, at most; a power of two */
constexpr uint32_t granule_packs = LK_GRANULE / LK_PACK_BYTES;
constexpr uint32_t tries_per_abort_check = 1024;

static_assert((depth & (depth - 1)) == 0, "numbers of jobs wrap");
static_assert(granule_packs == 32, "a lane moves a pack of each granule");
static_assert(LK_DEVICE_RANKS <= 32, "a lane of the control warp looks after each peer");

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

/* Written by the control warp before it arrives at `full`, but for `wrote`; read by data warps until they arrive at
 * `done`. */
struct job {
    uint64_t
        slot; /* address of the payload: of the destination's slot (send), of the source's (take), of all slots of
                      the leg (reduce) */
    uint64_t out_slot; /* reduce: offset of the result's slot in every destination's segment */
    uint32_t first;    /* pack of the tile space */
    uint32_t packs;    /* 0: this is the end */
    uint32_t part;     /* whose part of the input it is; 0 but for a reduce-scatter */
    uint32_t wrote;    /* granules put into the slot; data warps set bits, for the control warp */
    uint32_t live[LK_DEVICE_RANKS]; /* granules that are in the slot, of each source (take: [0]) */
    uint32_t at[LK_DEVICE_RANKS];   /* reduce: where each source's slot lies behind `slot` */
};

template <class Job> struct pipeline_of {
    Job jobs[depth];
    lk_barrier full[depth]; /* phase k: job k * depth + i is there */
    lk_barrier done[depth]; /* phase k: the data warps are through with it */
};
using pipeline = pipeline_of<job>;

/* A place in a role's order. */
struct place {
    uint32_t round;
    uint32_t channel;
    uint32_t step; /* peer = rank + step */
};

/* What all roles know of the call. With Peek a word is looked at before it is acquired: an acquiring load throws away what
 * the multiprocessor has cached, also when the word is not there yet, and costs a second way to memory when it is. */
template <class Args, bool Peek> struct call {
    const Args &args;
    uint64_t tiles;   /* of the space; of each part of a reduce-scatter */
    uint64_t segment; /* own */
    uint64_t state;
    uint32_t cta;
    uint32_t ctas;
    uint32_t lane;
    bool gathers;

    __device__ call(const Args &a, uint32_t number, uint32_t count)
        : args(a), cta(number), ctas(count), lane(threadIdx.x % 32)
    {
        const lk_ring_head &h = args.head;
        uint32_t granules = h.packs / granule_packs + (h.packs % granule_packs != 0);

        tiles = (granules + h.tile_granules - 1) / h.tile_granules;
        segment = segment_of(h.rings.rank);
        state = reinterpret_cast<uint64_t>(h.rings.state);
        gathers = h.work == LK_WORK_ALL_REDUCE;
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
    __device__ __forceinline__ uint64_t tiles_of(uint32_t owner) const
    {
        return gathers ? lk_tiles_of(&shape(), tiles, owner) : tiles;
    }
    __device__ __forceinline__ uint64_t tile_number(const place &at) const
    {
        return at.channel + static_cast<uint64_t>(at.round) * shape().channels;
    }

    /* Which packs a tile has. */
    __device__ __forceinline__ void describe(job *out, uint32_t owner, const place &at) const
    {
        uint64_t tile = tile_number(at);
        uint64_t packs = args.head.tile_granules * granule_packs;
        uint64_t first = (gathers ? tile * shape().ranks + owner : tile) * packs;
        uint64_t left = args.head.packs - first;

        out->first = static_cast<uint32_t>(first);
        out->packs = static_cast<uint32_t>(packs < left ? packs : left);
        out->part = gathers ? 0 : owner;
        out->wrote = 0;
    }

    /* A counter of the private state: what it was when the call began, for its CTA writes it at the end only. */
    __device__ __forceinline__ uint64_t counter(size_t offset) const
    {
        return *reinterpret_cast<const volatile uint64_t *>(state + offset);
    }
    __device__ __forceinline__ void count(size_t offset, uint64_t messages) const
    {
        *reinterpret_cast<volatile uint64_t *>(state + offset) += messages;
    }
    __device__ __forceinline__ uint64_t messages(uint32_t owner, uint32_t channel) const
    {
        return lk_tiles_in(&shape(), tiles_of(owner), channel);
    }
    __device__ __forceinline__ uint32_t slot_of(uint64_t message) const
    {
        return static_cast<uint32_t>((message - 1) % shape().slots);
    }
    /* Of a unit: its messages from the first that its reader has not taken out, as far as it has said, up to `message`.
     * There is a slot for that one if they are not more than slots. */
    __device__ __forceinline__ uint64_t under_way(uint32_t leg, uint32_t dst, uint32_t channel,
                                                  uint64_t message) const
    {
        uint64_t word = segment + lk_credit_offset(&shape(), leg, dst, channel);

        if (Peek) {
            uint64_t seen = message - peek_word(word);

            if (seen > shape().slots)
                return seen;
        }
        return message - load_word(word);
    }
    __device__ __forceinline__ bool has_credit(uint32_t leg, uint32_t dst, uint32_t channel,
                                               uint64_t message) const
    {
        return under_way(leg, dst, channel, message) <= shape().slots;
    }
    __device__ __forceinline__ uint64_t arrival(uint32_t leg, uint32_t src, uint32_t channel,
                                                uint64_t message) const
    {
        uint64_t word = segment + lk_words_offset(&shape(), leg, src, channel) +
                        8 * slot_of(message);

        if (Peek) {
            uint64_t seen = peek_word(word);

            if (static_cast<uint32_t>(seen) != static_cast<uint32_t>(message))
                return seen;
        }
        return load_word(word);
    }
    __device__ __forceinline__ void publish(uint32_t leg, uint32_t dst, uint32_t channel,
                                            uint64_t message, uint32_t wrote) const
    {
        store_word(segment_of(dst) + lk_words_offset(&shape(), leg, rank(), channel) +
                       8 * slot_of(message),
                   lk_slot_word(message, wrote));
    }
    __device__ __forceinline__ void give_credit(uint32_t leg, uint32_t src, uint32_t channel,
                                                uint64_t message) const
    {
        store_word(segment_of(src) + lk_credit_offset(&shape(), leg, rank(), channel), message);
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

/* Counted by lane 0 of a control warp. */
struct traffic {
    uint64_t sent;
    uint64_t elided;

    __device__ __forceinline__ void add(const job &j, uint32_t copies)
    {
        uint32_t live = granule_bytes(j, j.wrote);

        sent += static_cast<uint64_t>(copies) * (live + 8);
        elided += static_cast<uint64_t>(copies) * (granule_bytes(j, all_granules(j)) - live);
    }
};

/* ---- roles: what a control warp does. All lanes call everything; results are the same in all of them. ---- */

/* Order of the roles that deal with one peer at a time. */
template <class Call> struct peer_order {
    const Call &c;

    __device__ __forceinline__ bool end(const place &at) const
    {
        return static_cast<uint64_t>(at.round) * c.shape().channels + c.cta >= c.tiles_of(0);
    }
    __device__ __forceinline__ void step(place *at) const
    {
        if (++at->step < c.shape().ranks)
            return;
        at->step = 1;
        at->channel += c.ctas;
        if (at->channel < c.shape().channels)
            return;
        at->channel = c.cta;
        at->round++;
    }
    __device__ __forceinline__ bool exists(const place &at) const
    {
        return c.tile_number(at) < c.tiles_of(c.peer(at.step));
    }
    __device__ __forceinline__ void settle(place *at) const
    {
        while (!end(*at) && !exists(*at))
            step(at);
    }
    __device__ __forceinline__ place begin() const
    {
        place at = { 0, c.cta, 1 };

        settle(&at);
        return at;
    }
    __device__ __forceinline__ void advance(place *at) const
    {
        step(at);
        settle(at);
    }
};

template <class Call> struct send_role : peer_order<Call> {
    using peer_order<Call>::c;

    /* Slots that were waited for of peers which had taken out one of this call, so that they were in it, too; and whether
     * one is being waited for. */
    mutable uint32_t waited = 0;
    mutable bool waits = false;

    __device__ __forceinline__ uint64_t message(const place &at, uint32_t dst) const
    {
        return c.counter(lk_sent_offset(&c.shape(), LK_SCATTER, dst, at.channel)) + at.round + 1;
    }
    __device__ __forceinline__ bool prepare(const place &at, job *j) const
    {
        uint32_t dst = c.peer(at.step);
        uint64_t m = message(at, dst);
        uint64_t before = c.under_way(LK_SCATTER, dst, at.channel, m);

        if (!__all_sync(ALL_LANES, before <= c.shape().slots)) {
            waits |= before <= at.round;
            return false;
        }
        waited += waits;
        waits = false;
        if (c.lane == 0) {
            c.describe(j, dst, at);
            j->slot = c.segment_of(dst) +
                      lk_slot_offset(&c.shape(), LK_SCATTER, c.rank(), at.channel, c.slot_of(m));
        }
        return true;
    }
    __device__ __forceinline__ void publish(const place &at, const job &j, traffic *t) const
    {
        uint32_t dst = c.peer(at.step);

        if (c.lane == 0) {
            c.publish(LK_SCATTER, dst, at.channel, message(at, dst), j.wrote);
            t->add(j, 1);
        }
    }
    __device__ __forceinline__ void finish(uint32_t channel) const
    {
        if (c.lane < c.shape().ranks && c.lane != c.rank())
            c.count(lk_sent_offset(&c.shape(), LK_SCATTER, c.lane, channel),
                    c.messages(c.lane, channel));
        if (channel == c.cta && c.lane == 0 && waited > LK_WAITS_ALLOWED)
            c.say_too_few();
    }
};

template <class Call> struct take_role : peer_order<Call> {
    using peer_order<Call>::c;

    __device__ __forceinline__ uint64_t message(const place &at, uint32_t src) const
    {
        return c.counter(lk_taken_offset(&c.shape(), LK_GATHER, src, at.channel)) + at.round + 1;
    }
    __device__ __forceinline__ bool prepare(const place &at, job *j) const
    {
        uint32_t src = c.peer(at.step);
        uint64_t m = message(at, src);
        uint64_t word = c.arrival(LK_GATHER, src, at.channel, m);

        if (!__all_sync(ALL_LANES, static_cast<uint32_t>(word) == static_cast<uint32_t>(m)))
            return false;
        if (c.lane == 0) {
            c.describe(j, src, at);
            j->slot = c.segment +
                      lk_slot_offset(&c.shape(), LK_GATHER, src, at.channel, c.slot_of(m));
            j->live[0] = static_cast<uint32_t>(word >> 32);
        }
        return true;
    }
    __device__ __forceinline__ void publish(const place &at, const job &, traffic *t) const
    {
        uint32_t src = c.peer(at.step);

        if (c.lane == 0) {
            c.give_credit(LK_GATHER, src, at.channel, message(at, src));
            t->sent += 8;
        }
    }
    __device__ __forceinline__ void finish(uint32_t channel) const
    {
        if (c.lane < c.shape().ranks && c.lane != c.rank())
            c.count(lk_taken_offset(&c.shape(), LK_GATHER, c.lane, channel),
                    c.messages(c.lane, channel));
    }
};

/* Own tiles. Every peer has got as many messages of a channel as this rank has had tiles in it: one number, and one slot,
 * for all of them. They have sent as many, and what they have sent in exchanges. */
template <class Call> struct reduce_role {
    const Call &c;

    __device__ __forceinline__ bool end(const place &at) const
    {
        return static_cast<uint64_t>(at.round) * c.shape().channels + c.cta >= c.tiles_of(c.rank());
    }
    __device__ __forceinline__ void settle(place *at) const
    {
        if (at->channel < c.shape().channels && c.tile_number(*at) < c.tiles_of(c.rank()))
            return;
        at->channel = c.cta;
        at->round++;
    }
    __device__ __forceinline__ place begin() const
    {
        return { 0, c.cta, 0 };
    }
    __device__ __forceinline__ void advance(place *at) const
    {
        at->channel += c.ctas;
        settle(at);
    }
    __device__ __forceinline__ bool mine() const
    {
        return c.lane < c.shape().ranks && c.lane != c.rank();
    }
    /* Of this lane's peer. */
    __device__ __forceinline__ uint64_t message_in(const place &at) const
    {
        return c.counter(lk_taken_offset(&c.shape(), LK_SCATTER, c.lane, at.channel)) + at.round +
               1;
    }
    __device__ __forceinline__ uint64_t message_out(const place &at) const
    {
        return c.counter(lk_sent_offset(&c.shape(), LK_GATHER, c.peer(1), at.channel)) + at.round +
               1;
    }
    __device__ __forceinline__ bool prepare(const place &at, job *j) const
    {
        uint64_t in = mine() ? message_in(at) : 1, out = message_out(at);
        size_t slots = lk_slot_offset(&c.shape(), LK_SCATTER, 0, 0, 0);
        uint64_t word = 0;
        bool ready = true;

        if (mine()) {
            word = c.arrival(LK_SCATTER, c.lane, at.channel, in);
            ready = static_cast<uint32_t>(word) == static_cast<uint32_t>(in) &&
                    (!c.gathers || c.has_credit(LK_GATHER, c.lane, at.channel, out));
        }
        if (!__all_sync(ALL_LANES, ready))
            return false;
        if (mine()) {
            size_t slot = lk_slot_offset(&c.shape(), LK_SCATTER, c.lane, at.channel, c.slot_of(in));

            j->live[c.lane] = static_cast<uint32_t>(word >> 32);
            j->at[c.lane] = static_cast<uint32_t>(slot - slots);
        }
        if (c.lane == 0) {
            c.describe(j, c.rank(), at);
            j->slot = c.segment + slots;
            j->out_slot = lk_slot_offset(&c.shape(), LK_GATHER, c.rank(), at.channel,
                                         c.slot_of(out));
        }
        return true;
    }
    __device__ __forceinline__ void publish(const place &at, const job &j, traffic *t) const
    {
        uint32_t peers = c.shape().ranks - 1;

        if (mine()) {
            if (c.gathers)
                c.publish(LK_GATHER, c.lane, at.channel, message_out(at), j.wrote);
            c.give_credit(LK_SCATTER, c.lane, at.channel, message_in(at));
        }
        if (c.lane == 0) {
            if (c.gathers)
                t->add(j, peers);
            t->sent += peers * 8;
        }
    }
    __device__ __forceinline__ void finish(uint32_t channel) const
    {
        if (!mine())
            return;
        c.count(lk_taken_offset(&c.shape(), LK_SCATTER, c.lane, channel),
                c.messages(c.rank(), channel));
        if (c.gathers)
            c.count(lk_sent_offset(&c.shape(), LK_GATHER, c.lane, channel),
                    c.messages(c.rank(), channel));
    }
};

/* ---- the control warp ---- */

template <class Pipeline> __device__ __forceinline__ bool job_done(Pipeline *p, uint32_t number)
{
    return __all_sync(ALL_LANES, barrier_ended(&p->done[number % depth], number / depth % 2)) != 0;
}

/* The job's fields have been written by any lanes of this warp. */
template <class Pipeline>
__device__ __forceinline__ void hand_over(Pipeline *p, uint32_t number, uint32_t lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(&p->full[number % depth]);
}

/* False: the call is aborted. Jobs below *made have been handed over. Ahead: most jobs under way. */
template <uint32_t Ahead, class Call, class Role>
__device__ __forceinline__ bool run_jobs(const Call &c, const Role &role, pipeline *p,
                                         uint32_t *made, traffic *t)
{
    place head = role.begin(), tail = head;
    uint32_t published = 0, tries = 0;

    while (!role.end(tail)) {
        uint32_t ready = published;

        tries++;
        while (ready < *made && job_done(p, ready))
            ready++;
        if (ready > published) {
            fence_system();
            for (; published < ready; published++) {
                role.publish(tail, p->jobs[published % depth], t);
                role.advance(&tail);
            }
            __syncwarp(); /* jobs are read before they are written again */
            tries = 0;
        }
        if (!role.end(head) && *made - published < Ahead &&
            role.prepare(head, &p->jobs[*made % depth])) {
            hand_over(p, (*made)++, c.lane);
            role.advance(&head);
            tries = 0;
        }
        if (tries % tries_per_abort_check == tries_per_abort_check - 1 && c.aborted())
            return false;
        back_off(tries);
    }
    return true;
}

template <uint32_t Ahead, class Call, class Role>
__device__ __forceinline__ void control(const Call &c, const Role &role, pipeline *p)
{
    lk_ring_counts *counts = &reinterpret_cast<lk_ring_state *>(c.state)->counts;
    traffic t = { 0, 0 };
    uint32_t made = 0;
    bool whole = run_jobs<Ahead>(c, role, p, &made, &t);

    if (!whole) /* data warps still have what was handed over, which waits for nobody */
        for (uint32_t i = made < depth ? 0 : made - depth; i < made; i++)
            barrier_wait(&p->done[i % depth], i / depth % 2);
    if (c.lane == 0)
        p->jobs[made % depth].packs = 0;
    hand_over(p, made, c.lane);
    if (!whole)
        return;
    for (uint32_t channel = c.cta; channel < c.shape().channels; channel += c.ctas)
        role.finish(channel);
    if (c.lane == 0) {
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_sent), t.sent);
        atomicAdd(reinterpret_cast<unsigned long long *>(&counts->bytes_elided), t.elided);
    }
}

/* ---- data warps ---- */

/* Work.batch(job, granule, count) moves granules and returns a bit for each that it put into a slot. Batches of `span`
 * granules go round the warps, and on from job to job, so that all have the same share of any sizes. */
template <class Work, class Pipeline>
__device__ __forceinline__ void move_jobs(Work *work, Pipeline *p, uint32_t warp, uint32_t warps,
                                          uint32_t span)
{
    uint32_t lane = threadIdx.x % 32;
    uint32_t batch = warp;

    for (uint32_t number = 0;; number++) {
        auto *j = &p->jobs[number % depth];
        uint32_t granules, batches, mask = 0;

        barrier_wait(&p->full[number % depth], number / depth % 2);
        if (!j->packs)
            return;
        granules = (j->packs + granule_packs - 1) / granule_packs;
        batches = (granules + span - 1) / span;
        for (; batch < batches; batch += warps) {
            uint32_t granule = batch * span;

            mask |= work->batch(*j, granule, granules - granule < span ? granules - granule : span);
        }
        batch -= batches;
        if (lane == 0 && mask)
            atomicOr(&j->wrote, mask);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&p->done[number % depth]);
    }
}

} // namespace lk_rings_device

#endif
