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
    lk_barrier free
        [depth]; /* phase k: nobody needs it any more. Where one warp does all that is not the data warps' it
                               knows without */
};

/* ---- control warps ---- */

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
