/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange kernel of calls that have few tiles in slots for each unit: between two ranks with 64 channels, messages of up
 * to 2 MB. A team of warps has a unit, waits for it alone, moves its tiles and says so itself. Such calls take as long as a
 * tile does on its way, and this one is shorter than that over warps that look, warps that move and warps that publish.
 */
#ifndef LK_CUDA_EXCHANGE_DIRECT_CUH
#define LK_CUDA_EXCHANGE_DIRECT_CUH

#include "kernels/cuda_exchange_body.cuh"

namespace lk_rings_device
{

/* Tiles of a unit in a call, at most. The words of all come behind one fence, when there is credit for all, and so does the
 * credit of all that are taken. Of a tiles sent by one call and b taken by another a - 1 and b - 1 may be what the other waits
 * for, so a unit needs a + b - 1 slots. With four tiles, of 8 MB between two H200, this way takes 29.4 us where pipelines take 28.0
 * (perf/results/h200-x2-nvlink). */
constexpr uint32_t direct_tiles = 2;

/* Units of a CTA in one role, at most: with many teams that look the fences of those that send take long. */
constexpr uint32_t direct_units = 2;

/* Granules that a warp takes at once. Eight warps have a slot between them. */
constexpr uint32_t direct_span = 4;

/* Warps that move messages, shared out to the units of a CTA, and that copy what a rank sends to itself. */
template <uint32_t Moving, uint32_t Copying> struct direct_warps {
    static_assert(Moving >= 2 * direct_units, "each unit has a warp");
    static constexpr uint32_t moving = Moving, copying = Copying;
    static constexpr uint32_t threads = 32 * (Moving + Copying);
};

/* Of a team, in shared memory. Its first warp looks for all, with a rest between two looks: where eight warps looked at once
 * without one, exchanges of 2 MB between two H200 took 400 us at times, or did not end at all. */
struct direct_team {
    lk_barrier
        ready[direct_tiles];     /* the first warp has written what follows of the tile, or `cut` */
    uint32_t live[direct_tiles]; /* take: granules that are in the slot */
    uint32_t cut;                /* the call is aborted; never taken back */
    uint32_t wrote
        [direct_tiles]; /* granules put into the slot: each warp adds its own, the last to arrive reads */
    uint32_t arrived; /* warps that are through with all tiles (arrive_and_count) */
};

/* By one thread, before a barrier of all. */
static __device__ __forceinline__ void init_team(direct_team *team)
{
    for (uint32_t i = 0; i < direct_tiles; i++) {
        barrier_init(&team->ready[i], 1);
        team->wrote[i] = 0;
    }
    team->cut = 0;
    team->arrived = 0;
}

template <class Call, class Role> struct direct_warp : exchange_units<Call, Role> {
    using of_cta = exchange_units<Call, Role>;
    using of_cta::c;
    using of_cta::role;
    using of_cta::slots;

    direct_team *team;
    uint32_t warp; /* of the team */
    uint32_t warps;
    uint32_t unit;
    exchange_cursor at;
    exchange_job mine; /* of lane i: the i-th tile */
    uint32_t tiles;

    __device__ __forceinline__ direct_warp(const Call &call, direct_team *t, uint32_t number,
                                           uint32_t count, uint32_t of_unit)
        : of_cta(call), team(t), warp(number), warps(count), unit(of_unit), at{}, mine{}, tiles(0)
    {
    }
    /* False: the call is aborted. */
    __device__ __forceinline__ bool look(exchange_job *j) const
    {
        for (uint32_t tries = 1;
             !__all_sync(ALL_LANES, role.ready(j->channel, j->peer, at, slots, &j->live));
             tries++) {
            if (tries % tries_per_abort_check == 0 && c.aborted())
                return false;
            rest();
        }
        return true;
    }
    __device__ __forceinline__ bool wait_for(exchange_job *j) const
    {
        if (warp == 0) {
            bool found = look(j);

            if (c.lane == 0) {
                team->live[tiles] = j->live;
                if (!found)
                    team->cut = 1;
                barrier_arrive(&team->ready[tiles]);
            }
            return found;
        }
        barrier_wait(&team->ready[tiles], 0);
        j->live = team->live[tiles];
        return !__any_sync(ALL_LANES, team->cut);
    }
    /* This warp's part of the tile goes into L2 while it waits. */
    __device__ __forceinline__ void fetch(const exchange_job &j) const
    {
        for (uint32_t g = warp * direct_span; g * granule_packs < j.packs; g += warps * direct_span)
            for (uint32_t i = 0; i < direct_span; i++) {
                uint32_t from = (g + i) * LK_GRANULE + c.lane * LK_PACK_BYTES;

                if (from < j.memory.bytes)
                    prefetch_global(j.memory.address + from);
            }
    }
    template <class Work> __device__ __forceinline__ void move(Work *work, const exchange_job &j)
    {
        uint32_t granules = (j.packs + granule_packs - 1) / granule_packs, wrote = 0;

        for (uint32_t g = warp * direct_span; g < granules; g += warps * direct_span)
            wrote |= work->batch(j, g, granules - g < direct_span ? granules - g : direct_span);
        if (c.lane == 0 && wrote)
            atomicOr(&team->wrote[tiles], wrote);
    }
    /* All tiles of the unit. False: the call is aborted. */
    template <class Work> __device__ __forceinline__ bool move_all(Work *work, bool fetches)
    {
        of_cta::place(&at, unit);
        while (of_cta::has_left(at, unit)) {
            exchange_job j;

            of_cta::describe(&j, of_cta::channel_of(unit), of_cta::peer_of(unit), at, 0);
            if (fetches)
                fetch(j);
            if (!wait_for(&j))
                return false;
            move(work, j);
            if (c.lane == tiles)
                mine = j;
            tiles++;
            of_cta::advance(&at, unit, 1);
        }
        return true;
    }
    /* True of one warp: all of the team have moved what they had, and what they did comes before what it does next. */
    __device__ __forceinline__ bool is_last() const
    {
        uint32_t before = 0;

        __syncwarp();
        if (c.lane == 0)
            before = arrive_and_count(&team->arrived);
        before = __shfl_sync(ALL_LANES, before, 0);
        __syncwarp(); /* a shuffle orders nothing */
        return before + 1 == warps;
    }
    /* By the last warp of a team that has sent. */
    __device__ __forceinline__ void publish(exchange_words<Call> *words)
    {
        bool has = c.lane < tiles;

        if (has)
            mine.wrote = team->wrote[c.lane];
        if (__any_sync(ALL_LANES, has && mine.wrote))
            fence_system();
        if (has) {
            words->credit(EXCHANGE_SEND, mine, true);
            words->word(EXCHANGE_SEND, mine);
        }
    }
    /* Of one that has taken: one credit for all tiles. */
    __device__ __forceinline__ void give_credit(exchange_words<Call> *words)
    {
        if (c.lane < tiles)
            words->credit(EXCHANGE_TAKE, mine, c.lane + 1 == tiles);
    }
};

template <class Args, class Call>
__device__ __forceinline__ void send_directly(const Call &c, direct_team *team, uint32_t warp,
                                              uint32_t warps, uint32_t unit)
{
    direct_warp<Call, exchange_send_role<Call>> sender(c, team, warp, warps, unit);
    exchange_send_work<Args, typename Call::path, direct_span> work = {
        c.args,
        c.lane,
        {nullptr, 0}
    };
    exchange_words<Call> words = {
        c,
        {0, 0}
    };

    if (!sender.move_all(&work, true) || !sender.tiles || !sender.is_last())
        return;
    sender.publish(&words);
    if (c.lane == 0)
        sender.keep(sender.at, unit);
    count_traffic(c, words.t);
}

template <class Call>
__device__ __forceinline__ void take_directly(const Call &c, direct_team *team, uint32_t warp,
                                              uint32_t warps, uint32_t unit)
{
    direct_warp<Call, exchange_take_role<Call>> taker(c, team, warp, warps, unit);
    exchange_take_work<direct_span> work = { c.args.head.rings.abort, c.lane };
    exchange_words<Call> words = {
        c,
        {0, 0}
    };

    if (!taker.move_all(&work, false) || !taker.tiles || !taker.is_last())
        return;
    taker.give_credit(&words);
    if (c.lane == 0)
        taker.keep(taker.at, unit);
    count_traffic(c, words.t);
}

/* All of a CTA. teams: R::moving of them. The units are numbered from the sends on; the warps that are left copy. */
template <class R, class Args>
__device__ __forceinline__ void run_direct_cta(const Args &args, direct_team *teams, uint32_t cta,
                                               uint32_t ctas)
{
    using call_type = exchange_call<Args, unmasked_path<exchange_path>>;
    uint32_t warp = threadIdx.x / 32, units, warps, team;
    call_type c(args, cta, ctas);

    if (threadIdx.x < R::moving)
        init_team(&teams[threadIdx.x]);
    __syncthreads();
    units = exchange_units<call_type, exchange_send_role<call_type>>(c).units;
    warps = R::moving / (2 * units);
    team = warp / warps;
    if (team < units)
        send_directly<Args>(c, &teams[team], warp % warps, warps, team);
    else if (team < 2 * units)
        take_directly(c, &teams[team], warp % warps, warps, team - units);
    else
        copy_own(c, warp - 2 * units * warps, R::moving + R::copying - 2 * units * warps);
}

/* Tiles that this rank's messages of a list have in the fullest unit to or from `peer`. */
inline uint64_t tiles_of_unit(const lk_exchange_launch &launch, const uint16_t *borders,
                              uint32_t peer)
{
    const lk_ring_shape *s = &launch.head.rings.shape;
    uint64_t n = 0;

    for (uint32_t i = borders[peer]; i < borders[peer + 1]; i++)
        n += (lk_message_tiles(s, launch.entries[i].bytes) + s->channels - 1) / s->channels;
    return n;
}

/* True of calls that this kernel runs. */
inline bool runs_directly(const lk_exchange_launch &launch)
{
    const lk_exchange_head &head = launch.head;
    const lk_ring_shape *s = &head.rings.shape;
    uint32_t half = (lk_leg_slots(s, LK_EXCHANGE) + 1) / 2;
    uint32_t most = half < direct_tiles ? half : direct_tiles;
    uint32_t units = (s->channels + head.ctas - 1) / head.ctas * (s->ranks - 1);

    if (!units || units > direct_units || head.mask.rows)
        return false;
    for (uint32_t peer = 0; peer < s->ranks; peer++)
        if (peer != head.rings.rank && (tiles_of_unit(launch, head.sends, peer) > most ||
                                        tiles_of_unit(launch, head.takes, peer) > most))
            return false;
    return true;
}

} // namespace lk_rings_device

#endif
