/* SPDX-License-Identifier: Apache-2.0
 *
 * How the warps of a CTA share out the work of the kernels that go through slots. A role is a pipeline of several data
 * warps and of control warps, which look ahead: when slots may be used they hand a job to the data warps, and when these have
 * done a job they publish it, both without waiting for either, so that neither a slow peer nor the fence before a word holds
 * up the moving of data. A data warp touches slots of a job only; it never looks at a word and never waits for another rank.
 */
#ifndef LK_CUDA_RINGS_PIPELINE_CUH
#define LK_CUDA_RINGS_PIPELINE_CUH

#include "kernels/cuda_rings_ops.cuh"
#include "kernels/rings_internal.h"

namespace lk_rings_device
{

constexpr uint32_t granule_packs = LK_GRANULE / LK_PACK_BYTES;
constexpr uint32_t tries_per_abort_check = 1024;

static_assert(granule_packs == 32, "a lane moves a pack of each granule");
static_assert(LK_DEVICE_RANKS <= 32, "a lane of the control warp looks after each peer");

/* The way that payload and words take. Others, to be measured beside this one, derive from it. */
struct slot_path {
    static constexpr slot_store store = STORE_KEPT;
    static constexpr bool bulk = false; /* payload by bulk copies out of shared memory */
    static constexpr bool in_order =
        false; /* a warp's lanes store a granule's packs in their order, whatever they have */
    static constexpr bool pull_scatter = false, pull_gather = false,
                          pull_exchange = false; /* slots lie at the writer */
    static constexpr bool publish_apart = false; /* a warp for each role publishes */
    static constexpr bool masks = true;          /* of rows, where an exchange has one */
    static constexpr bool spread =
        true; /* tiles in the order of lk_message_place; both sides alike */
    static constexpr uint32_t jobs_a_fence = 1; /* that are waited for, for a while */
};

constexpr uint32_t stage_granules = 3; /* of a warp whose payload goes by bulk copies */
constexpr uint32_t stage_bytes = stage_granules * LK_GRANULE;

/* Puts granules into slots for one data warp. All lanes call everything; `stage`: stage_bytes of shared memory, with bulk
 * copies. */
template <class Path> struct slot_writer {
    uint8_t *stage;
    uint32_t next; /* granule of `stage` */

    /* Pack `pack` of the granule at `granule` is this lane's. */
    __device__ __forceinline__ void put(uint64_t granule, uint32_t pack, const uint4 &v)
    {
        if constexpr (Path::bulk)
            put_in_bulk(granule, pack, v);
        else
            store_slot<Path::store>(granule + pack * LK_PACK_BYTES, v);
    }
    __device__ __forceinline__ void put_in_bulk(uint64_t granule, uint32_t pack, const uint4 &v)
    {
        uint8_t *to = stage + next * LK_GRANULE;
        bool first = threadIdx.x % 32 == 0;

        next = next + 1 == stage_granules ? 0 : next + 1;
        if (first)
            bulk_wait_read<stage_granules - 1>();
        __syncwarp();
        *reinterpret_cast<uint4 *>(to + pack * LK_PACK_BYTES) = v;
        fence_bulk();
        __syncwarp();
        if (first)
            bulk_store(granule, to, LK_GRANULE);
    }
    /* Before this warp says that it is through with a job. */
    __device__ __forceinline__ void finish() const
    {
        if (Path::bulk && threadIdx.x % 32 == 0)
            bulk_wait();
    }
};

/* Depth: jobs of a role under way, at most. */
template <class Job, uint32_t Depth> struct pipeline_of {
    static constexpr uint32_t depth = Depth;
    static_assert((depth & (depth - 1)) == 0, "numbers of jobs wrap");

    Job jobs[depth];
    lk_barrier full[depth]; /* phase k: job k * depth + i is there */
    lk_barrier done[depth]; /* phase k: the data warps are through with it */
    lk_barrier free[depth]; /* phase k: nobody needs it any more */
};

static __device__ __forceinline__ uint32_t leading_ones(uint32_t bits)
{
    return bits == ALL_LANES ? 32 : static_cast<uint32_t>(__ffs(static_cast<int>(~bits))) - 1;
}

/* ---- a warp that looks for jobs of a role ---- */

/* A job has a place; the one `depth` before that which is handed over next has had one. */
template <class Pipeline> __device__ __forceinline__ bool has_room(Pipeline *p, uint32_t number)
{
    constexpr uint32_t depth = Pipeline::depth;

    return number < depth || barrier_ended(&p->free[number % depth], (number / depth - 1) % 2);
}

/* What has been handed over waits for nobody, so this does not, either. */
template <class Pipeline> __device__ __forceinline__ void wait_for_room(Pipeline *p, uint32_t made)
{
    constexpr uint32_t depth = Pipeline::depth;

    if (made >= depth)
        barrier_wait(&p->free[made % depth], (made / depth - 1) % 2);
}

/* By all lanes, after the last job. */
template <class Pipeline>
__device__ __forceinline__ void hand_over_end(Pipeline *p, uint32_t made, bool whole)
{
    constexpr uint32_t depth = Pipeline::depth;
    auto *j = &p->jobs[made % depth];

    wait_for_room(p, made);
    if (threadIdx.x % 32 == 0) {
        j->packs = 0;
        j->wrote = !whole;
        barrier_arrive(&p->full[made % depth]);
    }
}

/* ---- the warp that publishes ---- */

/* What the data warps of several roles have done, of each role in the order of its jobs, a lane for each job under way. The
 * lane that has seen a job done calls Words.credit(role, job, last), and behind a fence Words.word(role, job) if
 * Words.fenced(role). A credit says that the payload of slots has been read, for which no fence is needed: data warps arrive
 * when they have stored what they read, so no load is under way any more. It is a count, so only the last of several that a
 * unit gets at once may be written: jobs of one unit have one Words.unit(job). A word says that all stores of the job are
 * there for the other rank: where nothing was stored it needs no fence either, and does not wait for one. A job without
 * packs is the last one of its role.
 *
 * Where a role has few jobs in all, they wait for each other for a while, so that one fence serves them: the second fence of
 * a CTA that has two would come after the first. */
template <uint32_t Roles, class Pipeline, class Words, uint32_t JobsAFence> struct publishing_warp {
    static constexpr uint32_t depth = Pipeline::depth;
    static constexpr uint32_t patience = 16; /* rests, for jobs that one fence could serve, too */

    Words *words;
    Pipeline *pipelines;
    uint32_t lane;
    uint32_t role;      /* this lane's, as the next one; Roles: none */
    uint32_t published; /* jobs */
    uint32_t waited;
    uint32_t few; /* jobs of role 0 in all, if they are to share a fence; or 0. All lanes' */
    bool over;
    bool cut; /* the call was cut short */

    static_assert(Roles * depth <= 32, "a lane for each job under way");

    __device__ __forceinline__ publishing_warp(Words *w, Pipeline *all)
        : words(w), pipelines(all), lane(threadIdx.x % 32), role(lane / depth), published(0),
          waited(0), few(0), over(role >= Roles), cut(false)
    {
    }
    /* The role has no jobs. */
    __device__ __forceinline__ void leave_out(uint32_t which)
    {
        over = over || role == which;
    }
    __device__ __forceinline__ void leave_out_all_but(uint32_t which)
    {
        over = over || role != which;
    }
    /* Fewer have been done than one fence is to serve, and none of them is the last. done: how many jobs of this lane's role
     * could be published. */
    __device__ __forceinline__ bool too_early(bool has, bool end, uint32_t done)
    {
        uint32_t ready = __popc(__ballot_sync(ALL_LANES, has && !end && words->fenced(role)));
        bool enough = few ? __shfl_sync(ALL_LANES, published + done, 0) >= few
                          : ready >= JobsAFence;

        if (!ready || enough || __any_sync(ALL_LANES, end) || waited == patience) {
            waited = 0;
            return false;
        }
        waited++;
        return true;
    }
    /* Lane role * depth + i: the role's i-th job from `published` on is done. Those before that are published. */
    __device__ __forceinline__ bool done() const
    {
        uint32_t number = published + lane % depth;

        return !over && barrier_ended(&pipelines[role].done[number % depth], number / depth % 2);
    }
    /* How many of the role's jobs are done, from the first on. */
    __device__ __forceinline__ uint32_t in_a_row(uint32_t done) const
    {
        uint32_t n = leading_ones((over ? 0 : done >> role * depth) | ~((1U << depth) - 1));

        return over ? 0 : n < depth ? n : depth;
    }
    /* Jobs that are done. False: there was none. */
    __device__ __forceinline__ bool publish()
    {
        uint32_t n = in_a_row(__ballot_sync(ALL_LANES, done()));
        bool has = lane % depth < n, end = false, fenced = false;
        uint32_t number = published + lane % depth, unit = 0x80000000U + lane, ends;
        auto *j = &pipelines[over ? 0 : role].jobs[number % depth];

        if (!__any_sync(ALL_LANES, has))
            return false;
        if ((JobsAFence > 1 || few) && too_early(has && j->wrote, has && !j->packs, n))
            return false;
        if (has) {
            end = !j->packs;
            cut = cut || (end && j->wrote);
            fenced = words->fenced(role);
        }
        has = has && !end;
        if (has)
            unit = role << 24 | words->unit(role, *j);
        bool last = !(__match_any_sync(ALL_LANES, unit) >> lane >> 1);
        if (has)
            words->credit(role, *j, last);
        __syncwarp(); /* what it stores comes before words of other lanes */
        bool waits = has && fenced && j->wrote;
        if (has && !waits) {
            if (fenced)
                words->word(role, *j);
            barrier_arrive(&pipelines[role].free[number % depth]);
        }
        if (__any_sync(ALL_LANES, waits))
            fence_system();
        if (waits) {
            words->word(role, *j);
            barrier_arrive(&pipelines[role].free[number % depth]);
        }
        ends = __ballot_sync(ALL_LANES, end);
        __syncwarp(); /* a unit's next credit may be another lane's, and must not be overtaken by this one */
        published += n;
        over = over || (ends >> role * depth & ((1U << depth) - 1));
        return true;
    }
    __device__ __forceinline__ void run()
    {
        while (!__all_sync(ALL_LANES, over))
            if (!publish())
                rest();
        cut = __any_sync(ALL_LANES, cut) != 0;
    }
};

/* By one thread, before a barrier of all. */
template <class Pipeline>
__device__ __forceinline__ void init_pipeline(Pipeline *p, uint32_t data_warps)
{
    for (uint32_t i = 0; i < Pipeline::depth; i++) {
        barrier_init(&p->full[i], 1);
        barrier_init(&p->done[i], data_warps);
        barrier_init(&p->free[i], 1);
    }
}

/* ---- data warps ---- */

/* Work.batch(job, granule, count) moves granules and returns a bit for each that it put into a slot; Work.finish() ends when
 * they are there as far as this warp is concerned. Batches of `span`
 * granules go round the warps, and on from job to job, so that all have the same share of any sizes. */
template <class Work, class Pipeline>
__device__ __forceinline__ void move_jobs(Work *work, Pipeline *p, uint32_t warp, uint32_t warps,
                                          uint32_t span)
{
    constexpr uint32_t depth = Pipeline::depth;
    uint32_t lane = threadIdx.x % 32;
    uint32_t batch = warp;

    for (uint32_t number = 0;; number++) {
        auto *j = &p->jobs[number % depth];
        uint32_t granules, batches, mask = 0;

        barrier_wait(&p->full[number % depth], number / depth % 2);
        if (!j->packs) {
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&p->done[number % depth]);
            return;
        }
        granules = (j->packs + granule_packs - 1) / granule_packs;
        batches = (granules + span - 1) / span;
        for (; batch < batches; batch += warps) {
            uint32_t granule = batch * span;

            mask |= work->batch(*j, granule, granules - granule < span ? granules - granule : span);
        }
        batch -= batches;
        work->finish();
        if (lane == 0 && mask)
            atomicOr(&j->wrote, mask);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&p->done[number % depth]);
    }
}

} // namespace lk_rings_device

#endif
