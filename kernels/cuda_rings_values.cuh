/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements and packs of the rings. A pack is 16 bytes of the wire; a lane computes on its values in fp32. A warp moves a
 * granule (32 packs) in accesses that are contiguous over the warp on both sides, see device_internal.cuh.
 */
#ifndef LK_CUDA_RINGS_VALUES_CUH
#define LK_CUDA_RINGS_VALUES_CUH

#include "kernels/cuda_rings_ops.cuh"
#include "kernels/device_random.cuh"
#include "kernels/rings_internal.h"

namespace lk_rings_device
{

/* Where the random bits of a call come from; `index` is that of the tile space's first element. */
struct draws {
    uint64_t seed;
    uint64_t index;
};

__device__ __forceinline__ float add(float a, float b)
{
    return __fadd_rn(a, b);
}

__device__ __forceinline__ void widen_bf16_pack(const uint4 &pack, float x[8])
{
    const uint32_t words[4] = { pack.x, pack.y, pack.z, pack.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = widen_low(words[i]);
        x[2 * i + 1] = widen_high(words[i]);
    }
}

__device__ __forceinline__ uint4 narrow_bf16_pack(const float x[8])
{
    return make_uint4(narrow_pair(x[0], x[1]), narrow_pair(x[2], x[3]), narrow_pair(x[4], x[5]),
                      narrow_pair(x[6], x[7]));
}

/* Both sides fp32. */
struct value_fp32 {
    using element = float;
    static constexpr bool fed = false;  /* rounding adds what a residual owes */
    static constexpr uint32_t pack = 4; /* elements */
    static constexpr uint32_t weight =
        1; /* a warp moves fewer granules at once where each takes more registers */
    using raw = float4;

    static __device__ __forceinline__ uint32_t lane_pack(uint32_t lane)
    {
        return lane;
    }
    static __device__ __forceinline__ uint32_t pack_lane(uint32_t pack)
    {
        return pack;
    }

    /* A granule's source elements, as they lie. */
    static __device__ __forceinline__ raw load(const float *granule, uint32_t lane)
    {
        return load_float4(granule + 4 * lane);
    }

    /* To the values of this lane's pack. */
    static __device__ __forceinline__ void spread(const raw &in, uint32_t, float x[4])
    {
        x[0] = in.x, x[1] = in.y, x[2] = in.z, x[3] = in.w;
    }

    static __device__ __forceinline__ void load_pack(const float *p, float x[4])
    {
        spread(load_float4(p), 0, x);
    }

    static __device__ __forceinline__ float load_one(const float *p)
    {
        return __ldcs(p);
    }

    /* NaNs have the bits that the device's arithmetic gives them; only that they are not zero matters here. */
    static __device__ __forceinline__ uint4 to_wire(const float x[4], const draws &, uint64_t)
    {
        return make_uint4(float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3]));
    }

    static __device__ __forceinline__ void from_wire(const uint4 &w, float x[4])
    {
        x[0] = bits_float(w.x), x[1] = bits_float(w.y), x[2] = bits_float(w.z);
        x[3] = bits_float(w.w);
    }

    static __device__ __forceinline__ float result(float sum, float post)
    {
        float y = multiply(sum, post);

        return y != y ? bits_float(LK_FP32_NAN) : y;
    }

    static __device__ __forceinline__ void store(float *granule, uint32_t lane, const uint4 &w)
    {
        store_uint4(granule + 4 * lane, w);
    }

    static __device__ __forceinline__ void store_pack(float *p, const uint4 &w)
    {
        store_uint4(p, w);
    }

    static __device__ __forceinline__ void store_one_of(float *p, const uint4 &w, uint32_t i)
    {
        store_one(reinterpret_cast<uint32_t *>(p), i == 0   ? w.x
                                                   : i == 1 ? w.y
                                                   : i == 2 ? w.z
                                                            : w.w);
    }
};

__device__ __forceinline__ uint32_t half_of(const uint4 &w, uint32_t i)
{
    uint32_t pair = i < 4 ? (i < 2 ? w.x : w.y) : (i < 6 ? w.z : w.w);

    return pair >> 16 * (i & 1) & 0xffffU;
}

/* fp32 tensors, bf16 wire. */
template <bool Stochastic> struct value_fp32_bf16 {
    using element = float;
    static constexpr bool fed = false;
    static constexpr uint32_t pack = 8;
    static constexpr uint32_t weight = Stochastic ? 2 : 1;
    struct raw {
        float4 a, b;
    };

    static __device__ __forceinline__ uint32_t lane_pack(uint32_t lane)
    {
        return packed_lane_begin(lane) / 8;
    }
    static __device__ __forceinline__ uint32_t pack_lane(uint32_t pack)
    {
        return pack % 16 * 2 + pack / 16;
    }

    static __device__ __forceinline__ raw load(const float *granule, uint32_t lane)
    {
        const float *p = granule + wide_lane_begin(lane);

        return { load_float4(p), load_float4(p + 128) };
    }

    static __device__ __forceinline__ void spread(const raw &in, uint32_t lane, float x[8])
    {
        bool odd = lane & 1;
        float4 other = swap_float4(select_float4(odd, in.a, in.b));
        float4 low = select_float4(odd, other, in.a);
        float4 high = select_float4(odd, in.b, other);

        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }

    static __device__ __forceinline__ void load_pack(const float *p, float x[8])
    {
        float4 low = load_float4(p), high = load_float4(p + 4);

        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }

    static __device__ __forceinline__ float load_one(const float *p)
    {
        return __ldcs(p);
    }

    static __device__ __forceinline__ uint4 to_wire(const float x[8], const draws &d,
                                                    uint64_t index)
    {
        return Stochastic ? narrow_stochastic(x, d.seed, d.index + index) : narrow_bf16_pack(x);
    }

    static __device__ __forceinline__ void from_wire(const uint4 &w, float x[8])
    {
        widen_bf16_pack(w, x);
    }

    static __device__ __forceinline__ float result(float sum, float post)
    {
        return multiply(sum, post);
    }

    static __device__ __forceinline__ uint4 wide(uint32_t first, uint32_t second)
    {
        return make_uint4(first << 16, first & 0xffff0000U, second << 16, second & 0xffff0000U);
    }

    static __device__ __forceinline__ void store(float *granule, uint32_t lane, const uint4 &w)
    {
        bool odd = lane & 1;
        uint32_t other0 = __shfl_xor_sync(ALL_LANES, odd ? w.x : w.z, 1);
        uint32_t other1 = __shfl_xor_sync(ALL_LANES, odd ? w.y : w.w, 1);
        float *p = granule + wide_lane_begin(lane);

        store_uint4(p, wide(odd ? other0 : w.x, odd ? other1 : w.y));
        store_uint4(p + 128, wide(odd ? w.z : other0, odd ? w.w : other1));
    }

    static __device__ __forceinline__ void store_pack(float *p, const uint4 &w)
    {
        store_uint4(p, wide(w.x, w.y));
        store_uint4(p + 4, wide(w.z, w.w));
    }

    static __device__ __forceinline__ void store_one_of(float *p, const uint4 &w, uint32_t i)
    {
        store_one(reinterpret_cast<uint32_t *>(p), half_of(w, i) << 16);
    }
};

/* The same with error feedback. */
template <bool Stochastic> struct value_fp32_bf16_fed : value_fp32_bf16<Stochastic> {
    static constexpr bool fed = true;
    static constexpr uint32_t weight = 4;

    /* Of the first `count` elements; what is behind them owes nothing. owed: the pack's residuals. */
    static __device__ __forceinline__ uint4 feed(const float x[8], float *owed, uint32_t count,
                                                 const draws &d, uint64_t index)
    {
        uint32_t random[4] = {}, out[4];

        if (Stochastic)
            random_eight(d.seed, d.index + index, random);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            float4 *at = reinterpret_cast<float4 *>(owed) + half;
            float4 e = count > 4 * half ? __ldcs(at) : make_float4(0, 0, 0, 0);
            const uint32_t *bits = random + 2 * half;
            const float *y = x + 4 * half;

            out[2 * half] = lk_feed(y[0], &e.x, Stochastic, bits[0] & 0xffffU) |
                            lk_feed(y[1], &e.y, Stochastic, bits[0] >> 16) << 16;
            out[2 * half + 1] = lk_feed(y[2], &e.z, Stochastic, bits[1] & 0xffffU) |
                                lk_feed(y[3], &e.w, Stochastic, bits[1] >> 16) << 16;
            if (count > 4 * half)
                __stcs(at, e);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

/* Both sides of one 16-bit type. */
template <bool Half> struct value_16 {
    using element = uint16_t;
    static constexpr bool fed = false;
    static constexpr uint32_t pack = 8;
    static constexpr uint32_t weight = 1;
    using raw = uint4;

    static __device__ __forceinline__ uint32_t lane_pack(uint32_t lane)
    {
        return lane;
    }
    static __device__ __forceinline__ uint32_t pack_lane(uint32_t pack)
    {
        return pack;
    }

    static __device__ __forceinline__ raw load(const uint16_t *granule, uint32_t lane)
    {
        return load_uint4(granule + 8 * lane);
    }

    static __device__ __forceinline__ void spread(const raw &in, uint32_t, float x[8])
    {
        from_wire(in, x);
    }

    static __device__ __forceinline__ void load_pack(const uint16_t *p, float x[8])
    {
        from_wire(load_uint4(p), x);
    }

    static __device__ __forceinline__ float load_one(const uint16_t *p)
    {
        uint32_t bits = __ldcs(p);

        return Half ? widen_half(bits) : widen_bf16(bits);
    }

    static __device__ __forceinline__ uint4 to_wire(const float x[8], const draws &, uint64_t)
    {
        if constexpr (Half)
            return make_uint4(narrow_half_pair(x[0], x[1]), narrow_half_pair(x[2], x[3]),
                              narrow_half_pair(x[4], x[5]), narrow_half_pair(x[6], x[7]));
        else
            return narrow_bf16_pack(x);
    }

    static __device__ __forceinline__ void from_wire(const uint4 &w, float x[8])
    {
        if constexpr (Half) {
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                x[i] = widen_half(half_of(w, i));
        } else {
            widen_bf16_pack(w, x);
        }
    }

    static __device__ __forceinline__ float result(float sum, float post)
    {
        return multiply(sum, post);
    }

    static __device__ __forceinline__ void store(uint16_t *granule, uint32_t lane, const uint4 &w)
    {
        store_uint4(granule + 8 * lane, w);
    }

    static __device__ __forceinline__ void store_pack(uint16_t *p, const uint4 &w)
    {
        store_uint4(p, w);
    }

    static __device__ __forceinline__ void store_one_of(uint16_t *p, const uint4 &w, uint32_t i)
    {
        store_one(p, static_cast<uint16_t>(half_of(w, i)));
    }
};

} // namespace lk_rings_device

#endif
