/* SPDX-License-Identifier: Apache-2.0
 *
 * What the data warps of the two-shot kernels do with a job, for each type. Granules that lie in one tensor, whole and
 * aligned, go the fast way, several at a time; at borders of tensors and for unaligned ones each lane looks for its own
 * pack.
 */
#ifndef LK_CUDA_RINGS_BODY_CUH
#define LK_CUDA_RINGS_BODY_CUH

#include "kernels/cuda_rings_roles.cuh"
#include "kernels/cuda_rings_values.cuh"

namespace lk_rings_device
{

/* Data warps of each role, and granules that a warp moves at once. What a multiprocessor gets done depends on the loads that
 * it has under way; 7, 17 and 4 warps in 64 registers have about 28, 51 and 16 KB of them. */
template <uint32_t Send, uint32_t Reduce, uint32_t Take, class Path = slot_path> struct warp_roles {
    using path = Path;
    static constexpr uint32_t send = Send, reduce = Reduce, take = Take;
    static constexpr uint32_t warps = control_warps<Path> + Send + Reduce + Take;
    static constexpr uint32_t threads = 32 * warps;
    static constexpr uint32_t send_ahead = 4, reduce_ahead = 2, take_ahead = 8;
    static constexpr uint32_t residents = threads > 512 ? 1 : 2; /* CTAs of a multiprocessor */
    static constexpr uint32_t stages = Path::bulk ? (Send + Reduce) * stage_bytes
                                                  : 0; /* bytes of shared memory */
};

/* Where one pack's elements lie. */
struct piece {
    uint64_t in;
    uint64_t out;
    uint32_t count; /* fewer than a pack's at the end of a tensor; 0: behind it */
};

/* The lists and scalars as one thread sees them. */
template <class V, class Args> struct data {
    using element = typename V::element;
    const Args &args;
    draws random;
    float pre;
    uint32_t lane;

    __device__ explicit data(const Args &a) : args(a), lane(threadIdx.x % 32)
    {
        const lk_ring_head &h = args.head;

        pre = scale_value(h.pre, static_cast<lk_type>(h.pre_type), h.pre_pointer);
        random.seed = h.seed;
        random.index = h.index + (h.device_offset ? *h.device_offset : 0);
    }

    __device__ __forceinline__ uint64_t in_address(const lk_ring_entry &e, uint32_t part,
                                                   uint64_t at) const
    {
        uint64_t stride = args.head.stride ? args.head.stride : e.count;

        return e.in + (part * stride + at) * sizeof(element);
    }
    __device__ __forceinline__ uint64_t out_address(const lk_ring_entry &e, uint64_t at) const
    {
        return e.out + at * sizeof(element);
    }

    /* True if all of `packs` packs of a job from `pack` on lie in the tensor of the first, whole, and at 16-byte borders
     * of what is read (Reads) and written (Writes). All lanes ask the same. */
    template <bool Reads, bool Writes>
    __device__ __forceinline__ bool plain(const job &j, uint32_t pack, uint32_t packs,
                                          piece *out) const
    {
        const lk_ring_entry &e = args.entries[entry_of(args, pack, j.entries)];
        uint64_t at = static_cast<uint64_t>(pack - e.first) * V::pack;

        out->in = in_address(e, j.part, at);
        out->out = out_address(e, at);
        return at + static_cast<uint64_t>(packs) * V::pack <= e.count &&
               ((Reads ? out->in : 0) | (Writes ? out->out : 0)) % 16 == 0;
    }

    /* The pack of this lane alone, in one of the entries. */
    __device__ __forceinline__ piece single(uint32_t pack, uint32_t end, uint32_t part,
                                            const entry_range &entries) const
    {
        piece p = { 0, 0, 0 };

        if (pack < end) {
            const lk_ring_entry &e = args.entries[entry_of(args, pack, entries)];
            uint64_t at = static_cast<uint64_t>(pack - e.first) * V::pack;
            uint64_t left = at < e.count ? e.count - at : 0;

            p.in = in_address(e, part, at);
            p.out = out_address(e, at);
            p.count = left < V::pack ? static_cast<uint32_t>(left) : V::pack;
        }
        return p;
    }
    __device__ __forceinline__ void load_single(const piece &p, float x[V::pack]) const
    {
        const element *in = reinterpret_cast<const element *>(p.in);

        if (p.count == V::pack && p.in % 16 == 0) {
            V::load_pack(in, x);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < V::pack; i++)
            x[i] = i < p.count ? V::load_one(in + i) : 0;
    }
    __device__ __forceinline__ void store_single(const piece &p, const uint4 &wire) const
    {
        element *out = reinterpret_cast<element *>(p.out);

        if (p.count == V::pack && p.out % 16 == 0) {
            V::store_pack(out, wire);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < V::pack; i++)
            if (i < p.count)
                V::store_one_of(out + i, wire, i);
    }

    /* This lane's pack of a part, rounded for the wire; draw: its first number. */
    __device__ __forceinline__ uint4 round(const float x[V::pack], uint32_t part, uint32_t pack,
                                           uint32_t count, uint64_t draw) const
    {
        if constexpr (V::fed)
            return V::feed(x, lk_residual(&args.head, part, pack), count, random, draw);
        else
            return V::to_wire(x, random, draw);
    }

    /* This lane's contribution, as it travels. What is behind the tensor's end stays zero, whatever the factor. */
    __device__ __forceinline__ uint4 contribution(float x[V::pack], uint32_t part, uint32_t pack,
                                                  uint32_t count) const
    {
#pragma unroll
        for (uint32_t i = 0; i < V::pack; i++)
            x[i] = i < count ? multiply(x[i], pre) : 0;
        return round(x, part, pack, count, static_cast<uint64_t>(pack) * V::pack);
    }
    __device__ __forceinline__ uint4 result(float sum[V::pack], uint32_t part, uint32_t pack,
                                            uint32_t count) const
    {
        float post = args.head.post;

#pragma unroll
        for (uint32_t i = 0; i < V::pack; i++)
            sum[i] = i < count ? V::result(sum[i], post) : 0;
        return round(sum, part, pack, count,
                     LK_RESULT_DRAWS + static_cast<uint64_t>(pack) * V::pack);
    }
};

__device__ __forceinline__ bool any_bit(const uint4 &w)
{
    return __any_sync(ALL_LANES, (w.x | w.y | w.z | w.w) != 0) != 0;
}

/* Address of this lane's pack of a slot's granule. */
template <class V>
__device__ __forceinline__ uint64_t slot_pack(uint64_t slot, uint32_t granule, uint32_t lane)
{
    return slot + granule * LK_GRANULE + V::lane_pack(lane) * LK_PACK_BYTES;
}

/* A data warp's writer, for values whose lanes have the packs that V says. */
template <class V, class Path> struct value_writer : slot_writer<Path> {
    __device__ explicit value_writer(uint8_t *stage) : slot_writer<Path>{ stage, 0 }
    {
    }
    __device__ __forceinline__ void put_pack(uint64_t slot, uint32_t granule, uint32_t lane,
                                             uint4 v)
    {
        if constexpr (Path::in_order) {
            int from = static_cast<int>(V::pack_lane(lane));

            v = make_uint4(__shfl_sync(ALL_LANES, v.x, from), __shfl_sync(ALL_LANES, v.y, from),
                           __shfl_sync(ALL_LANES, v.z, from), __shfl_sync(ALL_LANES, v.w, from));
        }
        this->put(slot + granule * LK_GRANULE, Path::in_order ? lane : V::lane_pack(lane), v);
    }
};

template <class V, class Args, class Path> struct send_work : data<V, Args> {
    using base = data<V, Args>;
    using base::lane;
    value_writer<V, Path> writer;

    __device__ send_work(const Args &a, uint8_t *stage) : base(a), writer(stage)
    {
    }
    __device__ __forceinline__ void finish() const
    {
        writer.finish();
    }

    __device__ __forceinline__ uint32_t put(const job &j, uint32_t granule, const uint4 &wire)
    {
        if (!any_bit(wire))
            return 0;
        writer.put_pack(j.slot, granule, lane, wire);
        return 1U << granule;
    }

    __device__ __forceinline__ uint32_t put_raw(const job &j, uint32_t granule,
                                                const typename V::raw &raw)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);
        float x[V::pack];

        V::spread(raw, lane, x);
        return put(j, granule, this->contribution(x, j.part, pack, V::pack));
    }

    template <uint32_t Count>
    __device__ __forceinline__ uint32_t fast(const job &j, uint32_t granule, const piece &p)
    {
        const typename V::element *in = reinterpret_cast<const typename V::element *>(p.in);
        typename V::raw raw[Count];
        uint32_t mask = 0;

#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            raw[i] = V::load(in + i * granule_packs * V::pack, lane);
#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            mask |= put_raw(j, granule + i, raw[i]);
        return mask;
    }

    __device__ __forceinline__ uint32_t slow(const job &j, uint32_t granule)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);
        piece p = this->single(pack, j.first + j.packs, j.part, j.entries);
        float x[V::pack];

        this->load_single(p, x);
        return put(j, granule, this->contribution(x, j.part, pack, p.count));
    }

    /* At a border of tensors what is left and right of it goes in halves, so that few loads wait alone. */
    template <uint32_t Ahead>
    __device__ __forceinline__ uint32_t batch_of(const job &j, uint32_t granule, uint32_t count)
    {
        uint32_t pack = j.first + granule * granule_packs, mask = 0;
        piece p;

        if (count == Ahead && this->template plain<true, false>(j, pack, Ahead * granule_packs, &p))
            return fast<Ahead>(j, granule, p);
        if constexpr (Ahead == 1) {
            return slow(j, granule);
        } else {
            constexpr uint32_t half = (Ahead + 1) / 2;

#pragma unroll 1
            for (uint32_t i = 0; i < count; i += half)
                mask |= batch_of<half>(j, granule + i, count - i < half ? count - i : half);
            return mask;
        }
    }
};

/* Two ranks have a way of their own: their order does not matter, and there is one peer to wait for. With more the loads of
 * up to four peers are under way at once instead of several granules. */
template <class V, class Args, class Path> struct reduce_work : data<V, Args> {
    using base = data<V, Args>;
    using base::args;
    using base::lane;
    value_writer<V, Path> writer;
    static constexpr uint32_t peers_ahead = V::weight < 2 ? 2 : 1;
    static constexpr uint32_t granule_elements = granule_packs * V::pack;
    using element = typename V::element;

    __device__ reduce_work(const Args &a, uint8_t *stage) : base(a), writer(stage)
    {
    }
    __device__ __forceinline__ void finish() const
    {
        writer.finish();
    }
    __device__ __forceinline__ uint64_t segment_of(uint32_t r) const
    {
        return reinterpret_cast<uint64_t>(args.head.rings.segments[r]);
    }

    __device__ __forceinline__ uint4 fetch(const job &j, uint32_t granule, uint32_t r) const
    {
        if (j.live[r] >> granule & 1)
            return load_slot(slot_pack<V>(
                (Path::pull_scatter ? segment_of(r) : 0) + j.slot + j.where[r], granule, lane));
        return make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void scale(float x[V::pack]) const
    {
#pragma unroll
        for (uint32_t k = 0; k < V::pack; k++)
            x[k] = multiply(x[k], this->pre);
    }

    /* sum = everybody's contribution in the order of the ranks. */
    __device__ __forceinline__ void add_all(const job &j, uint32_t granule,
                                            const float own[V::pack], float sum[V::pack]) const
    {
        uint32_t me = args.head.rings.rank, ranks = args.head.rings.shape.ranks;

#pragma unroll 1
        for (uint32_t first = 0; first < ranks; first += peers_ahead) {
            uint4 wire[peers_ahead];

#pragma unroll
            for (uint32_t i = 0; i < peers_ahead; i++)
                if (first + i < ranks && first + i != me)
                    wire[i] = fetch(j, granule, first + i);
#pragma unroll
            for (uint32_t i = 0; i < peers_ahead; i++) {
                float x[V::pack];

                if (first + i >= ranks)
                    break;
                V::from_wire(wire[i], x);
#pragma unroll
                for (uint32_t k = 0; k < V::pack; k++) {
                    float value = first + i == me ? own[k] : x[k];

                    sum[k] = first + i ? add(sum[k], value) : value;
                }
            }
        }
    }

    __device__ __forceinline__ uint32_t put(const job &j, uint32_t granule, const uint4 &wire)
    {
        const lk_rings &rings = args.head.rings;

        if (args.head.work != LK_WORK_ALL_REDUCE || !any_bit(wire))
            return 0;
#pragma unroll 1
        for (uint32_t r = 0; r < rings.shape.ranks; r++)
            if (r != rings.rank)
                writer.put_pack(Path::pull_gather ? segment_of(rings.rank) +
                                                        lk_slot_offset(&rings.shape, LK_GATHER, r,
                                                                       j.at.channel, j.out.slot)
                                                  : segment_of(r) + j.out_slot,
                                granule, lane, wire);
        return 1U << granule;
    }

    /* Own values and the peer's become the result of a granule. */
    __device__ __forceinline__ uint32_t put_pair(const job &j, uint32_t granule,
                                                 const typename V::raw &raw, const uint4 &wire,
                                                 element *out)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);
        float sum[V::pack], x[V::pack];

        V::spread(raw, lane, sum);
        scale(sum);
        V::from_wire(wire, x);
#pragma unroll
        for (uint32_t k = 0; k < V::pack; k++)
            sum[k] = add(sum[k], x[k]);

        uint4 rounded = this->result(sum, j.part, pack, V::pack);

        V::store(out, lane, rounded);
        return put(j, granule, rounded);
    }

    template <uint32_t Count>
    __device__ __forceinline__ uint32_t fast_pair(const job &j, uint32_t granule, const piece &p)
    {
        const element *in = reinterpret_cast<const element *>(p.in);
        element *out = reinterpret_cast<element *>(p.out);
        typename V::raw raw[Count];
        uint4 wire[Count];
        uint32_t mask = 0;

#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            raw[i] = V::load(in + i * granule_elements, lane);
#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            wire[i] = fetch(j, granule + i, 1 - args.head.rings.rank);
#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            mask |= put_pair(j, granule + i, raw[i], wire[i], out + i * granule_elements);
        return mask;
    }

    __device__ __forceinline__ uint32_t fast(const job &j, uint32_t granule, const piece &p)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);
        float own[V::pack], sum[V::pack];

        V::spread(V::load(reinterpret_cast<const element *>(p.in), lane), lane, own);
        scale(own);
        add_all(j, granule, own, sum);

        uint4 rounded = this->result(sum, j.part, pack, V::pack);

        V::store(reinterpret_cast<element *>(p.out), lane, rounded);
        return put(j, granule, rounded);
    }

    __device__ __forceinline__ uint32_t slow(const job &j, uint32_t granule)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);
        piece p = this->single(pack, j.first + j.packs, j.part, j.entries);
        float own[V::pack], sum[V::pack];

        this->load_single(p, own);
        scale(own);
        add_all(j, granule, own, sum);

        uint4 rounded = this->result(sum, j.part, pack, p.count);

        this->store_single(p, rounded);
        return put(j, granule, rounded);
    }

    template <uint32_t Ahead>
    __device__ __forceinline__ uint32_t batch_of(const job &j, uint32_t granule, uint32_t count)
    {
        uint32_t pack = j.first + granule * granule_packs;
        piece p;

        if (count == Ahead && args.head.rings.shape.ranks == 2 &&
            this->template plain<true, true>(j, pack, Ahead * granule_packs, &p))
            return fast_pair<Ahead>(j, granule, p);
        return singly(j, granule, count);
    }

    __device__ __forceinline__ uint32_t singly(const job &j, uint32_t granule, uint32_t count)
    {
        uint32_t pack = j.first + granule * granule_packs;
        uint32_t mask = 0;
        piece p;

#pragma unroll 1
        for (uint32_t i = 0; i < count; i++)
            if (this->template plain<true, true>(j, pack + i * granule_packs, granule_packs, &p))
                mask |= fast(j, granule + i, p);
            else
                mask |= slow(j, granule + i);
        return mask;
    }
};

template <class V, class Args> struct take_work : data<V, Args> {
    using base = data<V, Args>;
    using base::lane;

    __device__ explicit take_work(const Args &a) : base(a)
    {
    }
    __device__ __forceinline__ void finish() const
    {
    }

    __device__ __forceinline__ uint4 get(const job &j, uint32_t granule) const
    {
        if (j.live[0] >> granule & 1)
            return load_slot(slot_pack<V>(j.slot, granule, lane));
        return make_uint4(0, 0, 0, 0);
    }

    template <uint32_t Count>
    __device__ __forceinline__ void fast(const job &j, uint32_t granule, const piece &p)
    {
        typename V::element *out = reinterpret_cast<typename V::element *>(p.out);
        uint4 wire[Count];

#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            wire[i] = get(j, granule + i);
#pragma unroll
        for (uint32_t i = 0; i < Count; i++)
            V::store(out + i * granule_packs * V::pack, lane, wire[i]);
    }

    __device__ __forceinline__ void slow(const job &j, uint32_t granule)
    {
        uint32_t pack = j.first + granule * granule_packs + V::lane_pack(lane);

        this->store_single(this->single(pack, j.first + j.packs, 0, j.entries), get(j, granule));
    }

    template <uint32_t Ahead>
    __device__ __forceinline__ uint32_t batch_of(const job &j, uint32_t granule, uint32_t count)
    {
        uint32_t pack = j.first + granule * granule_packs;
        piece p;

        if (count == Ahead &&
            this->template plain<false, true>(j, pack, Ahead * granule_packs, &p)) {
            fast<Ahead>(j, granule, p);
        } else if constexpr (Ahead == 1) {
            slow(j, granule);
        } else {
            constexpr uint32_t half = (Ahead + 1) / 2;

#pragma unroll 1
            for (uint32_t i = 0; i < count; i += half)
                batch_of<half>(j, granule + i, count - i < half ? count - i : half);
        }
        return 0;
    }
};

/* Batches of Ahead granules, which go the fast way, or of fewer where the tiles are too small to give one to every other
 * warp; with large ones the warps take turns from job to job. */
template <uint32_t Ahead, class Work> struct batches : Work {
    template <class... Args> __device__ explicit batches(const Args &...a) : Work(a...)
    {
    }
    __device__ __forceinline__ uint32_t batch(const job &j, uint32_t granule, uint32_t count)
    {
        return this->template batch_of<Ahead>(j, granule, count);
    }
    __device__ __forceinline__ uint32_t span(uint32_t warps) const
    {
        uint32_t granules = this->args.head.tile_granules;
        uint32_t share = (granules + warps - 1) / warps;

        return share < Ahead && 2 * granules < Ahead * warps ? share : Ahead;
    }
};

/* The data warps of a CTA; `warp` is the number among them. */
template <class V, class R, class Args>
__device__ __forceinline__ void run_data_warp(const Args &args, pipeline *pipelines, uint32_t warp,
                                              uint8_t *stages)
{
    using Path = typename R::path;
    constexpr uint32_t reduce_ahead = R::reduce_ahead > V::weight ? R::reduce_ahead / V::weight : 1;
    uint8_t *stage = Path::bulk ? stages + warp * stage_bytes : nullptr;
    auto run = [pipelines](auto work, uint32_t role, uint32_t number, uint32_t warps) {
        move_jobs(&work, &pipelines[role], number, warps, work.span(warps));
    };

    if (warp < R::send)
        run(batches<R::send_ahead / V::weight, send_work<V, Args, Path>>(args, stage), ROLE_SEND,
            warp, R::send);
    else if (warp < R::send + R::reduce)
        run(batches<reduce_ahead, reduce_work<V, Args, Path>>(args, stage), ROLE_REDUCE,
            warp - R::send, R::reduce);
    else if (args.head.work == LK_WORK_ALL_REDUCE)
        run(batches<R::take_ahead, take_work<V, Args>>(args), ROLE_TAKE, warp - R::send - R::reduce,
            R::take);
}

template <class R> __device__ __forceinline__ void init_pipelines(pipeline *pipelines)
{
    if (threadIdx.x)
        return;
    init_pipeline(&pipelines[ROLE_SEND], R::send);
    init_pipeline(&pipelines[ROLE_REDUCE], R::reduce);
    init_pipeline(&pipelines[ROLE_TAKE], R::take);
}

/* A control warp. */
template <class Path, class Args>
__device__ __forceinline__ void run_control(const Args &args, pipeline *pipelines, uint32_t warp,
                                            uint32_t cta, uint32_t ctas)
{
    using Call = call<Args, Path>;
    Call c(args, cta, ctas);

    if (warp == ROLE_SEND)
        look_for_jobs(c, send_role<Call>(c), &pipelines[ROLE_SEND]);
    else if (warp == ROLE_REDUCE)
        look_for_jobs(c, reduce_role<Call>(c), &pipelines[ROLE_REDUCE]);
    else if (warp >= ROLES)
        publish_jobs(c, pipelines, warp - ROLES);
    else if (c.gathers)
        look_for_jobs(c, take_role<Call>(c), &pipelines[ROLE_TAKE]);
}

/* All of a CTA. stages: R::stages bytes of shared memory. */
template <class V, class R, class Args>
__device__ __forceinline__ void run_cta(const Args &args, pipeline *pipelines, uint32_t cta,
                                        uint32_t ctas, uint8_t *stages = nullptr)
{
    constexpr uint32_t controls = control_warps<typename R::path>;
    uint32_t warp = threadIdx.x / 32;

    init_pipelines<R>(pipelines);
    __syncthreads();
    if (warp < controls)
        run_control<typename R::path>(args, pipelines, warp, cta, ctas);
    else
        run_data_warp<V, R>(args, pipelines, warp - controls, stages);
}

} // namespace lk_rings_device

#endif
