/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels over a list of tensors. The list travels in the kernel's argument. An entry is cut into chunks of a fixed
 * number of elements, one block each; a block finds its entry by the number of the entry's first chunk. Chunks begin
 * at 16-byte borders of the packed side (elements before the tensor in its first 16-byte group are masked), so that
 * only the first and last tile of a tensor are done element by element.
 */
#include "kernels/device_internal.cuh"
#include "kernels/list_internal.h"

#include <cerrno>
#include <cstddef>

namespace
{

template <unsigned N> struct list_args {
    lk_head head;
    lk_entry entries[N];
};

static_assert(sizeof(list_args<LK_SMALL_ENTRIES>) <= 256, "small size class");
static_assert(sizeof(list_args<LK_MEDIUM_ENTRIES>) <= 4096, "medium size class");
static_assert(sizeof(list_args<LK_MAX_ENTRIES>) <= 32764, "large size class");
static_assert(offsetof(lk_launch, entries) - offsetof(lk_launch, head) == sizeof(lk_head),
              "a launch holds the argument in one piece");

/* What a thread knows besides the entry. */
struct context {
    uint32_t lane;
    float scale;
    uint64_t seed;
    uint64_t index; /* of virtual element 0 */
};

template <bool Stochastic> struct cast_pack {
    using source = float;
    using target = uint16_t;
    using unit = uint16_t; /* the side whose 16-byte groups chunks follow */
    static constexpr bool unit_is_target = true;
    static constexpr bool scales = true;
    static constexpr bool draws = Stochastic;
    static constexpr uint32_t tile = 256;
    static constexpr uint32_t tiles = 4;

    struct wide {
        float4 a, b;
    };

    static __device__ __forceinline__ wide load(const float *src, uint32_t lane)
    {
        const float *p = src + wide_lane_begin(lane);

        return { load_float4(p), load_float4(p + 128) };
    }

    static __device__ __forceinline__ void store(uint16_t *dst, uint32_t v, const wide &in,
                                                 const context &c)
    {
        bool odd = c.lane & 1;
        float4 other = swap_float4(select_float4(odd, in.a, in.b));
        float4 low = select_float4(odd, other, in.a);
        float4 high = select_float4(odd, in.b, other);
        float x[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
        uint32_t begin = v + packed_lane_begin(c.lane);

        store_uint4(dst + begin, convert(x, begin, c));
    }

    static __device__ __forceinline__ uint4 convert(const float x[8], uint32_t v, const context &c)
    {
        float y[8];
        uint32_t random[4] = {};
        uint32_t out[4];
        bool nan = false;

        if (Stochastic)
            philox(c.seed, (c.index + v) / 8, random);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            y[i] = multiply(x[i], c.scale);
            nan |= y[i] != y[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (Stochastic)
                out[i] = __byte_perm(float_bits(y[2 * i]) + (random[i] & 0xffffU),
                                     float_bits(y[2 * i + 1]) + (random[i] >> 16), 0x7632);
            else
                out[i] = narrow_pair(y[2 * i], y[2 * i + 1]);
        }
        if (nan) { /* rare, so not worth registers or instructions above */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (y[2 * i] != y[2 * i])
                    out[i] = __byte_perm(out[i], nan_bf16(x[2 * i]), 0x3254);
                if (y[2 * i + 1] != y[2 * i + 1])
                    out[i] = __byte_perm(out[i], nan_bf16(x[2 * i + 1]), 0x5410);
            }
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }

    static __device__ __forceinline__ uint16_t one(float x, uint32_t v, const context &c)
    {
        uint32_t block[4];
        uint64_t index = c.index + v;

        if (!Stochastic)
            return static_cast<uint16_t>(narrow_bf16(x, c.scale, 0, 0));
        philox(c.seed, index / 8, block);
        /* constant indices only: a variable one would put the block into local memory */
        uint32_t pair = index & 4 ? (index & 2 ? block[3] : block[2])
                                  : (index & 2 ? block[1] : block[0]);
        return static_cast<uint16_t>(
            narrow_bf16(x, c.scale, 1, pair >> 16 * (index & 1) & 0xffffU));
    }
};

struct cast_unpack {
    using source = uint16_t;
    using target = uint32_t;
    using unit = uint16_t;
    static constexpr bool unit_is_target = false;
    static constexpr bool scales = false;
    static constexpr bool draws = false;
    static constexpr uint32_t tile = 256;
    static constexpr uint32_t tiles = 4;
    using wide = uint4;

    static __device__ __forceinline__ wide load(const uint16_t *src, uint32_t lane)
    {
        return load_uint4(src + packed_lane_begin(lane));
    }

    static __device__ __forceinline__ uint4 widen(uint32_t first, uint32_t second)
    {
        return make_uint4(first << 16, first & 0xffff0000U, second << 16, second & 0xffff0000U);
    }

    static __device__ __forceinline__ void store(uint32_t *dst, uint32_t v, const wide &in,
                                                 const context &c)
    {
        bool odd = c.lane & 1;
        uint32_t other0 = __shfl_xor_sync(~0U, odd ? in.x : in.z, 1);
        uint32_t other1 = __shfl_xor_sync(~0U, odd ? in.y : in.w, 1);
        uint32_t *p = dst + v + wide_lane_begin(c.lane);

        store_uint4(p, widen(odd ? other0 : in.x, odd ? other1 : in.y));
        store_uint4(p + 128, widen(odd ? in.z : other0, odd ? in.w : other1));
    }

    static __device__ __forceinline__ uint32_t one(uint16_t x, uint32_t, const context &)
    {
        return static_cast<uint32_t>(x) << 16;
    }
};

template <class T> struct copy {
    using source = T;
    using target = T;
    using unit = T;
    static constexpr bool unit_is_target = true;
    static constexpr bool scales = false;
    static constexpr bool draws = false;
    static constexpr uint32_t group = 16 / sizeof(T);
    static constexpr uint32_t tile = 32 * group;
    static constexpr uint32_t tiles = 8;
    using wide = uint4;

    static __device__ __forceinline__ wide load(const T *src, uint32_t lane)
    {
        return load_uint4(src + lane * group);
    }

    static __device__ __forceinline__ void store(T *dst, uint32_t v, const wide &in,
                                                 const context &c)
    {
        store_uint4(dst + v + c.lane * group, in);
    }

    static __device__ __forceinline__ T one(T x, uint32_t, const context &)
    {
        return x;
    }
};

template <class Op> constexpr uint32_t chunk_elements = LK_WARPS *Op::tiles *Op::tile;

/* Elements between the 16-byte border below an entry's packed side and its first element. */
template <class Op> __host__ __device__ __forceinline__ uint32_t entry_shift(const lk_entry &entry)
{
    uint64_t side = Op::unit_is_target ? entry.dst : entry.src;

    return static_cast<uint32_t>(side % 16 / sizeof(typename Op::unit));
}

/* Last entry whose first chunk is not behind this one. */
template <unsigned N>
__device__ __forceinline__ uint32_t find_entry(const list_args<N> &args, uint32_t chunk)
{
    uint32_t low = 0;
    uint32_t high = args.head.n;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (args.entries[middle].chunk <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Virtual elements [v, v + tile) as far as they lie in [begin, end). */
template <class Op>
__device__ __forceinline__ void narrow_tile(const typename Op::source *src,
                                            typename Op::target *dst, uint32_t v, uint32_t begin,
                                            uint32_t end, const context &c)
{
    typename Op::source x[Op::tile / 32];

    v += c.lane;
#pragma unroll
    for (uint32_t j = 0; j < Op::tile / 32; j++)
        if (v + 32 * j >= begin && v + 32 * j < end)
            x[j] = __ldcs(src + v + 32 * j);
#pragma unroll
    for (uint32_t j = 0; j < Op::tile / 32; j++)
        if (v + 32 * j >= begin && v + 32 * j < end)
            store_one(dst + v + 32 * j, Op::one(x[j], v + 32 * j, c));
}

template <class Op, unsigned N>
__global__ void __launch_bounds__(LK_THREADS, 4)
    lk_list_kernel(const __grid_constant__ list_args<N> args)
{
    using source = typename Op::source;
    using target = typename Op::target;
    constexpr uint32_t span = Op::tiles * Op::tile;
    const lk_entry &entry = args.entries[find_entry(args, blockIdx.x)];
    uint32_t begin = entry_shift<Op>(entry);
    uint32_t end = begin + entry.count;
    uint64_t src_base = entry.src - begin * sizeof(source);
    uint64_t dst_base = entry.dst - begin * sizeof(target);
    const source *src = reinterpret_cast<const source *>(src_base);
    target *dst = reinterpret_cast<target *>(dst_base);
    uint32_t v = (blockIdx.x - entry.chunk) * chunk_elements<Op> + threadIdx.x / 32 * span;
    context c = { threadIdx.x % 32, 1, 0, 0 };
    bool aligned = (src_base | dst_base) % 16 == 0;

    if (Op::scales)
        c.scale = scale_value(args.head.scale, static_cast<lk_type>(args.head.scale_type),
                              args.head.scale_pointer);
    if (Op::draws) {
        c.seed = args.head.seed;
        c.index = args.head.index + dst_base / 2;
        if (args.head.device_offset)
            c.index += *args.head.device_offset;
        aligned = aligned && c.index % 8 == 0;
    }
    if (aligned && v >= begin && v + span <= end) {
        typename Op::wide x[Op::tiles];

#pragma unroll
        for (uint32_t t = 0; t < Op::tiles; t++)
            x[t] = Op::load(src + v + t * Op::tile, c.lane);
#pragma unroll
        for (uint32_t t = 0; t < Op::tiles; t++)
            Op::store(dst, v + t * Op::tile, x[t], c);
        return;
    }
#pragma unroll 1
    for (uint32_t t = 0; t < Op::tiles && v < end; t++, v += Op::tile) {
        if (aligned && v >= begin && v + Op::tile <= end)
            Op::store(dst, v, Op::load(src + v, c.lane), c);
        else
            narrow_tile<Op>(src, dst, v, begin, end, c);
    }
}

/* Fills in the chunk numbers; returns their count, or 0 if a grid cannot hold them. */
template <class Op> uint32_t number_chunks(lk_launch *launch)
{
    uint64_t chunks = 0;

    for (unsigned i = 0; i < launch->head.n; i++) {
        lk_entry *entry = &launch->entries[i];

        entry->chunk = static_cast<uint32_t>(chunks);
        chunks += (uint64_t{ entry->count } + entry_shift<Op>(*entry) + chunk_elements<Op> - 1) /
                  chunk_elements<Op>;
    }
    return chunks <= INT32_MAX ? static_cast<uint32_t>(chunks) : 0;
}

struct kernel_set {
    uint32_t (*number_chunks)(lk_launch *launch);
    const void *small, *medium, *large;
};

template <class Op> kernel_set set_of()
{
    return { number_chunks<Op>,
             reinterpret_cast<const void *>(lk_list_kernel<Op, LK_SMALL_ENTRIES>),
             reinterpret_cast<const void *>(lk_list_kernel<Op, LK_MEDIUM_ENTRIES>),
             reinterpret_cast<const void *>(lk_list_kernel<Op, LK_MAX_ENTRIES>) };
}

kernel_set find_set(lk_work work)
{
    switch (work) {
    case LK_CAST_PACK_NEAREST: return set_of<cast_pack<false>>();
    case LK_CAST_PACK_STOCHASTIC: return set_of<cast_pack<true>>();
    case LK_CAST_UNPACK: return set_of<cast_unpack>();
    case LK_COPY_2: return set_of<copy<uint16_t>>();
    case LK_COPY_4: return set_of<copy<uint32_t>>();
    }
    return {};
}

} // namespace

extern "C" int lk_run_launch(lk_launch *launch, void *stream)
{
    kernel_set set = find_set(launch->work);
    uint32_t chunks = set.number_chunks(launch);
    const void *kernel = launch->head.n <= LK_SMALL_ENTRIES    ? set.small
                         : launch->head.n <= LK_MEDIUM_ENTRIES ? set.medium
                                                               : set.large;
    void *args[] = { &launch->head };

    if (!chunks)
        return -EINVAL;
    return cudaLaunchKernel(kernel, dim3(chunks), dim3(LK_THREADS), args, 0,
                            static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_lists(void)
{
    for (int work = LK_CAST_PACK_NEAREST; work <= LK_COPY_4; work++) {
        kernel_set set = find_set(static_cast<lk_work>(work));

        for (const void *kernel : { set.small, set.medium, set.large }) {
            cudaFuncAttributes attributes;
            cudaError_t err = cudaFuncGetAttributes(&attributes, kernel);

            if (err != cudaSuccess)
                return err;
        }
    }
    return 0;
}
