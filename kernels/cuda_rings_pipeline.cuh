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

constexpr uint32_t depth = 8; /* jobs of a role under way, at most; a power of two */
constexpr uint32_t granule_packs = LK_GRANULE / LK_PACK_BYTES;
constexpr uint32_t tries_per_abort_check = 1024;

static_assert((depth & (depth - 1)) == 0, "numbers of jobs wrap");
static_assert(granule_packs == 32, "a lane moves a pack of each granule");
static_assert(LK_DEVICE_RANKS <= 32, "a lane of the control warp looks after each peer");

template <class Job> struct pipeline_of {
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
    return number < depth || barrier_ended(&p->free[number % depth], (number / depth - 1) % 2);
}

/* What has been handed over waits for nobody, so this does not, either. */
template <class Pipeline> __device__ __forceinline__ void wait_for_room(Pipeline *p, uint32_t made)
{
    if (made >= depth)
        barrier_wait(&p->free[made % depth], (made / depth - 1) % 2);
}

/* By all lanes, after the last job. */
template <class Pipeline>
__device__ __forceinline__ void hand_over_end(Pipeline *p, uint32_t made, bool whole)
{
    auto *j = &p->jobs[made % depth];

    wait_for_room(p, made);
    if (threadIdx.x % 32 == 0) {
        j->packs = 0;
        j->wrote = !whole;
        barrier_arrive(&p->full[made % depth]);
    }
}

/* ---- the warp that publishes ---- */

/* What the data warps of several roles have done, of each role in the order of its jobs. Words.lanes<Role>() lanes look after
 * each job, of which the i-th calls Words.publish<Role>(job, i). A job without packs is the last one of its role. */
template <uint32_t Roles, class Pipeline, class Words> struct publishing_warp {
    Words *words;
    Pipeline *pipelines;
    uint32_t lane;
    uint32_t published[Roles]; /* jobs */
    bool over[Roles];
    bool cut; /* the call was cut short */

    static_assert(Roles * depth <= 32, "a lane for each job under way");

    __device__ __forceinline__ publishing_warp(Words *w, Pipeline *all)
        : words(w), pipelines(all), lane(threadIdx.x % 32), cut(false)
    {
#pragma unroll
        for (uint32_t role = 0; role < Roles; role++) {
            published[role] = 0;
            over[role] = false;
        }
    }
    /* Bit role * depth + i: the role's i-th job from `published` on is done. Those before that are published. */
    __device__ __forceinline__ uint32_t done() const
    {
        uint32_t number = lane % depth;
        bool ended = false;

#pragma unroll
        for (uint32_t role = 0; role < Roles; role++) {
            if (lane / depth == role) {
                number += published[role];
                ended = barrier_ended(&pipelines[role].done[number % depth], number / depth % 2);
            }
        }
        return __ballot_sync(ALL_LANES, ended);
    }
    template <uint32_t Role> __device__ __forceinline__ void publish(uint32_t done)
    {
        uint32_t n = leading_ones(done >> Role * depth | ~((1U << depth) - 1));
        uint32_t lanes = words->template lanes<Role>(), which = lane / lanes, most = 32 / lanes;
        Pipeline *p = &pipelines[Role];

        n = n < depth ? n : depth;
        for (uint32_t begin = 0; begin < n && !over[Role]; begin += most) {
            uint32_t number = published[Role] + begin + which;
            auto &j = p->jobs[number % depth];
            bool has = which < most && begin + which < n, end = has && !j.packs;

            if (has && !end)
                words->template publish<Role>(j, lane % lanes);
            cut = cut || __any_sync(ALL_LANES, end && j.wrote);
            over[Role] = __any_sync(ALL_LANES, end);
            __syncwarp(); /* all have read what may be written again */
            if (has && !end && lane % lanes == 0)
                barrier_arrive(&p->free[number % depth]);
        }
        published[Role] += n;
    }
    template <uint32_t Role> __device__ __forceinline__ void publish_from(uint32_t done)
    {
        publish<Role>(done);
        if constexpr (Role + 1 < Roles)
            publish_from<Role + 1>(done);
    }
    __device__ __forceinline__ bool ended() const
    {
        bool all = true;

#pragma unroll
        for (uint32_t role = 0; role < Roles; role++)
            all = all && over[role];
        return all;
    }
    __device__ __forceinline__ void run()
    {
        uint32_t first = 0;

#pragma unroll
        for (uint32_t role = 0; role < Roles; role++)
            first |= 1U << role * depth;
        while (!ended()) {
            uint32_t jobs = done();

            if (jobs & first) {
                __syncwarp(); /* a ballot orders nothing: who publishes is not who saw that it is done */
                fence_system();
                publish_from<0>(jobs);
            } else {
                rest();
            }
        }
    }
};

/* By one thread, before a barrier of all. */
template <class Pipeline>
__device__ __forceinline__ void init_pipeline(Pipeline *p, uint32_t data_warps)
{
    for (uint32_t i = 0; i < depth; i++) {
        barrier_init(&p->full[i], 1);
        barrier_init(&p->done[i], data_warps);
        barrier_init(&p->free[i], 1);
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
        if (lane == 0 && mask)
            atomicOr(&j->wrote, mask);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&p->done[number % depth]);
    }
}

} // namespace lk_rings_device

#endif
