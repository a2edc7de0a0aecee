/* SPDX-License-Identifier: Apache-2.0
 *
 * Data warps that have what they read brought into shared memory ahead of time, by bulk copies, instead of holding it in
 * registers: two ranks, whole batches of aligned granules; everything else goes the way of cuda_rings_body.cuh.
 *
 * Each warp has R::stages stages of its own and uses them in turn, one for each batch, whether something is brought or not:
 * use k of stage i is phase k of its barrier. What is fetched belongs to jobs that have been handed over, and a job is
 * reported done when all its batches have been used, so nothing is under way any more when a warp ends or gives a slot back.
 */
#ifndef LK_CUDA_RINGS_BULK_CUH
#define LK_CUDA_RINGS_BULK_CUH

#include "kernels/cuda_rings_body.cuh"

namespace lk_rings_device
{

struct stage {
    lk_barrier *full;
    uint8_t *bytes; /* at a 16-byte border */
};

/* All stages of a CTA: barriers, then bytes. */
template <class V, class R> struct staging {
    static constexpr uint32_t granule = granule_packs * V::pack * sizeof(typename V::element);
    static constexpr uint32_t send = R::send_ahead * granule;
    static constexpr uint32_t reduce = R::reduce_ahead * (granule + LK_GRANULE);
    static constexpr uint32_t take = R::take_ahead * LK_GRANULE;
    static constexpr uint32_t count = (R::send + R::reduce + R::take) * R::stages;
    static constexpr uint32_t bytes = R::stages *
                                      (R::send * send + R::reduce * reduce + R::take * take);

    static_assert(R::stages > 0, "these warps have stages");
    static_assert(V::weight == 1, "values that take more registers have no need of this");
};

template <uint32_t Ahead, class V, class Args> struct send_bulk : send_work<V, Args> {
    using element = typename V::element;
    static constexpr uint32_t granule_bytes = granule_packs * V::pack * sizeof(element);

    __device__ explicit send_bulk(const Args &a) : send_work<V, Args>(a)
    {
    }
    __device__ __forceinline__ bool bulk(const job &j, uint32_t granule, uint32_t count, piece *p)
    {
        return count == Ahead &&
               this->template plain<true, false>(j.first + granule * granule_packs,
                                                 Ahead * granule_packs, j.part, p);
    }
    /* By all lanes; one of them starts the copies. */
    __device__ __forceinline__ void fetch(const job &j, uint32_t granule, uint32_t count,
                                          const stage &s)
    {
        piece p;
        bool whole = bulk(j, granule, count, &p);

        if (this->lane)
            return;
        barrier_expect(s.full, whole ? Ahead * granule_bytes : 0);
        if (whole)
            bulk_load(s.bytes, p.in, Ahead * granule_bytes, s.full);
    }
    /* The stage is there. */
    __device__ __forceinline__ uint32_t use(const job &j, uint32_t granule, uint32_t count,
                                            const stage &s)
    {
        const element *in = reinterpret_cast<const element *>(s.bytes);
        uint32_t mask = 0;
        piece p;

        if (!bulk(j, granule, count, &p))
            return this->singly(j, granule, count);
#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            mask |= this->put_raw(j, granule + i,
                                  V::near(in + i * granule_packs * V::pack, this->lane));
        return mask;
    }
};

/* A granule of a slot's part that lies in shared memory. */
template <class V>
__device__ __forceinline__ uint4 near_slot(const uint8_t *slot, uint32_t granule, uint32_t live,
                                           uint32_t lane)
{
    if (live >> granule & 1)
        return *reinterpret_cast<const uint4 *>(slot + granule * LK_GRANULE +
                                                V::lane_pack(lane) * LK_PACK_BYTES);
    return make_uint4(0, 0, 0, 0);
}

template <uint32_t Ahead, class V, class Args> struct reduce_bulk : reduce_work<V, Args> {
    using element = typename V::element;
    static constexpr uint32_t granule_elements = granule_packs * V::pack;
    static constexpr uint32_t in_bytes = Ahead * granule_elements * sizeof(element);
    static constexpr uint32_t slot_bytes = Ahead * LK_GRANULE;

    __device__ explicit reduce_bulk(const Args &a) : reduce_work<V, Args>(a)
    {
    }
    __device__ __forceinline__ bool bulk(const job &j, uint32_t granule, uint32_t count, piece *p)
    {
        return count == Ahead && this->args.head.rings.shape.ranks == 2 &&
               this->template plain<true, true>(j.first + granule * granule_packs,
                                                Ahead * granule_packs, j.part, p);
    }
    /* The peer's granules of a batch; bits of later ones stay. */
    __device__ __forceinline__ uint32_t live(const job &j, uint32_t granule) const
    {
        return j.live[1 - this->args.head.rings.rank] >> granule & ((1U << Ahead) - 1);
    }
    __device__ __forceinline__ void fetch(const job &j, uint32_t granule, uint32_t count,
                                          const stage &s)
    {
        piece p;
        bool whole = bulk(j, granule, count, &p), slot = whole && live(j, granule);
        uint64_t peer = 1 - this->args.head.rings.rank;

        if (this->lane)
            return;
        fence_bulk_loads();
        barrier_expect(s.full, (whole ? in_bytes : 0) + (slot ? slot_bytes : 0));
        if (whole)
            bulk_load(s.bytes, p.in, in_bytes, s.full);
        if (slot)
            bulk_load(s.bytes + in_bytes, j.slot + j.at[peer] + granule * LK_GRANULE, slot_bytes,
                      s.full);
    }
    __device__ __forceinline__ uint32_t use(const job &j, uint32_t granule, uint32_t count,
                                            const stage &s)
    {
        const element *in = reinterpret_cast<const element *>(s.bytes);
        uint32_t mask = 0;
        piece p;

        if (!bulk(j, granule, count, &p))
            return this->singly(j, granule, count);
        uint32_t there = live(j, granule);
        element *out = reinterpret_cast<element *>(p.out);

#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            mask |= this->put_pair(j, granule + i, V::near(in + i * granule_elements, this->lane),
                                   near_slot<V>(s.bytes + in_bytes, i, there, this->lane),
                                   out + i * granule_elements);
        return mask;
    }
};

template <uint32_t Ahead, class V, class Args> struct take_bulk : take_work<V, Args> {
    using element = typename V::element;
    static constexpr uint32_t bytes = Ahead * LK_GRANULE;

    __device__ explicit take_bulk(const Args &a) : take_work<V, Args>(a)
    {
    }
    __device__ __forceinline__ bool bulk(const job &j, uint32_t granule, uint32_t count, piece *p)
    {
        return count == Ahead &&
               this->template plain<false, true>(j.first + granule * granule_packs,
                                                 Ahead * granule_packs, 0, p);
    }
    __device__ __forceinline__ uint32_t live(const job &j, uint32_t granule) const
    {
        return j.live[0] >> granule & ((1U << Ahead) - 1);
    }
    __device__ __forceinline__ void fetch(const job &j, uint32_t granule, uint32_t count,
                                          const stage &s)
    {
        piece p;
        bool slot = bulk(j, granule, count, &p) && live(j, granule);

        if (this->lane)
            return;
        fence_bulk_loads();
        barrier_expect(s.full, slot ? bytes : 0);
        if (slot)
            bulk_load(s.bytes, j.slot + granule * LK_GRANULE, bytes, s.full);
    }
    __device__ __forceinline__ uint32_t use(const job &j, uint32_t granule, uint32_t count,
                                            const stage &s)
    {
        piece p;

        if (!bulk(j, granule, count, &p))
            return this->singly(j, granule, count);
        uint32_t there = live(j, granule);
        element *out = reinterpret_cast<element *>(p.out);

#pragma unroll
        for (uint32_t i = 0; i < Ahead; i++)
            V::store(out + i * granule_packs * V::pack, this->lane,
                     near_slot<V>(s.bytes, i, there, this->lane));
        return 0;
    }
};

/* The next batch to be fetched. */
struct fetch_place {
    uint32_t number; /* of the job; that before it has been handed over, or there is none before */
    uint32_t batch;
};

__device__ __forceinline__ uint32_t granules_of(const job &j)
{
    return (j.packs + granule_packs - 1) / granule_packs;
}

/* True if the place's batch is in a job that is there; settles on it. Waits for nothing. A job's barrier can be asked, for
 * the one `depth` before it has been handed over. */
__device__ __forceinline__ bool settle_fetch(pipeline *p, fetch_place *at, uint32_t span)
{
    for (;;) {
        const job &j = p->jobs[at->number % depth];

        if (!__all_sync(ALL_LANES,
                        barrier_ended(&p->full[at->number % depth], at->number / depth % 2)) ||
            !j.packs)
            return false;
        uint32_t batches = (granules_of(j) + span - 1) / span;

        if (at->batch < batches)
            return true;
        at->batch -= batches;
        at->number++;
    }
}

/* The stages of one warp. */
template <uint32_t Stages, uint32_t Bytes> struct stage_ring {
    lk_barrier *full;
    uint8_t *bytes;
    uint32_t fetched; /* batches */
    uint32_t used;

    __device__ __forceinline__ stage at(uint32_t batch) const
    {
        return { full + batch % Stages, bytes + batch % Stages * Bytes };
    }
    template <class Work>
    __device__ __forceinline__ void fill(Work *work, pipeline *p, fetch_place *next, uint32_t warps,
                                         uint32_t span)
    {
        while (fetched - used < Stages && settle_fetch(p, next, span)) {
            const job &j = p->jobs[next->number % depth];
            uint32_t granule = next->batch * span, left = granules_of(j) - granule;

            work->fetch(j, granule, left < span ? left : span, at(fetched));
            fetched++;
            next->batch += warps;
        }
    }
};

/* As move_jobs: a warp ends with the jobs, and has used all that it fetched. */
template <uint32_t Ahead, uint32_t Stages, uint32_t Bytes, class Work>
__device__ __forceinline__ void move_staged(Work *work, pipeline *p, uint32_t warp, uint32_t warps,
                                            stage_ring<Stages, Bytes> ring)
{
    uint32_t share = (work->args.head.tile_granules + warps - 1) / warps;
    uint32_t span = share < Ahead ? share : Ahead;
    fetch_place next = { 0, warp };
    uint32_t batch = warp;

    for (uint32_t number = 0;; number++) {
        job *j = &p->jobs[number % depth];
        uint32_t mask = 0;

        barrier_wait(&p->full[number % depth], number / depth % 2);
        if (!j->packs)
            return;
        uint32_t granules = granules_of(*j), batches = (granules + span - 1) / span;

        for (; batch < batches; batch += warps) {
            uint32_t granule = batch * span, left = granules - granule;

            ring.fill(work, p, &next, warps, span);
            stage s = ring.at(ring.used);

            barrier_wait(s.full, ring.used / Stages % 2);
            mask |= work->use(*j, granule, left < span ? left : span, s);
            ring.used++;
            __syncwarp(); /* all have read the stage before it is filled again */
        }
        batch -= batches;
        if (threadIdx.x % 32 == 0 && mask)
            atomicOr(&j->wrote, mask);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(&p->done[number % depth]);
    }
}

template <uint32_t Ahead, uint32_t Bytes, class Work, class R, class Args>
__device__ __forceinline__ void run_staged_warp(const Args &args, pipeline *p, uint32_t warp,
                                                uint32_t warps, lk_barrier *full, uint8_t *bytes)
{
    Work work(args);
    stage_ring<R::stages, Bytes> ring = { full + warp * R::stages, bytes + warp * R::stages * Bytes,
                                          0, 0 };

    move_staged<Ahead, R::stages, Bytes>(&work, p, warp, warps, ring);
}

/* As run_cta. `full` and `bytes` have room for staging<V, R>. */
template <class V, class R, class Args>
__device__ __forceinline__ void run_staged_cta(const Args &args, pipeline *pipelines,
                                               lk_barrier *full, uint8_t *bytes, uint32_t cta,
                                               uint32_t ctas)
{
    using S = staging<V, R>;
    uint32_t warp = threadIdx.x / 32;

    init_pipelines<R>(pipelines);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < S::count; i++)
            barrier_init(&full[i], 1);
        fence_barrier_init();
    }
    __syncthreads();
    if (warp < ROLES) {
        run_control<R>(args, pipelines, warp, cta, ctas);
        return;
    }
    warp -= ROLES;
    if (warp < R::send) {
        run_staged_warp<R::send_ahead, S::send, send_bulk<R::send_ahead, V, Args>, R>(
            args, &pipelines[ROLE_SEND], warp, R::send, full, bytes);
        return;
    }
    warp -= R::send, full += R::send * R::stages, bytes += R::send * R::stages * S::send;
    if (warp < R::reduce) {
        run_staged_warp<R::reduce_ahead, S::reduce, reduce_bulk<R::reduce_ahead, V, Args>, R>(
            args, &pipelines[ROLE_REDUCE], warp, R::reduce, full, bytes);
        return;
    }
    warp -= R::reduce, full += R::reduce * R::stages, bytes += R::reduce * R::stages * S::reduce;
    if (args.head.work == LK_WORK_ALL_REDUCE)
        run_staged_warp<R::take_ahead, S::take, take_bulk<R::take_ahead, V, Args>, R>(
            args, &pipelines[ROLE_TAKE], warp, R::take, full, bytes);
}

} // namespace lk_rings_device

#endif
