/* SPDX-License-Identifier: Apache-2.0
 *
 * Augmentation on the device. A warp has 32 columns of the output and goes down some of its rows: a column's place is found
 * once, and what lines of the image have there is kept while rows lie between the same ones. Contrast needs the mean of the
 * whole output: then a block has an image and goes over it twice. Otherwise an image is spread over blocks.
 */
#include "kernels/compute_augment.h"
#include "kernels/compute_device.cuh"

namespace
{

constexpr unsigned THREADS = 512, WARPS = THREADS / 32;
constexpr uint32_t STRIPS = WARPS; /* of rows: a block that is alone has as much for each warp */

/* Two lines of the image at a column of the output; ~0: not yet one of them. */
struct line_pair {
    uint32_t first, second;
    augment_pixel upper, lower;
};

/* Lines that are there are not read again: rows of the output go down. */
__device__ __forceinline__ void move_to(const lk_augment &a, uint64_t image,
                                        const augment_place &row, const augment_place &column,
                                        line_pair &lines)
{
    if (row.first != lines.first) {
        lines.upper = row.first == lines.second ? lines.lower
                                                : augment_line(&a, image, row.first, &column);
        lines.first = row.first;
    }
    if (row.second != lines.second) {
        lines.lower = row.second == row.first ? lines.upper
                                              : augment_line(&a, image, row.second, &column);
        lines.second = row.second;
    }
}

/* Has what a warp will read of the first 32 lines from `line` to `last` on its way, as far as its outer columns show. */
__device__ __forceinline__ void expect_lines(const lk_augment &a, uint64_t image, uint32_t line,
                                             uint32_t last, const augment_place &column)
{
    uint32_t ends[] = { __shfl_sync(~0U, column.first, 0), __shfl_sync(~0U, column.first, 31) };

    line += threadIdx.x % 32;
    if (line > last)
        return;
#pragma unroll
    for (uint32_t end : ends)
        asm volatile(
            "prefetch.global.L2 [%0];"
            :
            : "l"(a.images + image * a.image_stride + line * a.row_stride + end * a.channels));
}

/* Every `step`-th of an image's parts from `part`: calls with(y, x, pixel) for each of their pixels. */
template <typename With>
__device__ __forceinline__ void for_pixels(const lk_augment &a, const lk_augment_choice &choice,
                                           augment_ratios ratios, uint64_t image, uint32_t part,
                                           uint32_t step, With with)
{
    uint32_t across = (a.out_width + 31) / 32, lane = threadIdx.x % 32;

    for (; part < across * STRIPS; part += step) {
        uint32_t strip = part / across, x = part % across * 32 + lane;
        uint32_t end = (strip + 1) * a.out_height / STRIPS;
        augment_place column = augment_column(&a, &choice, ratios, x);
        line_pair lines = { ~0U, ~0U, {}, {} };
        uint32_t y = strip * a.out_height / STRIPS;

        if (y < end)
            expect_lines(a, image, augment_row(&choice, ratios, y).first,
                         augment_row(&choice, ratios, end - 1).second, column);
        if (x >= a.out_width)
            continue;
        for (; y < end; y++) {
            augment_place row = augment_row(&choice, ratios, y);

            move_to(a, image, row, column, lines);
            with(y, x, augment_mix(&lines.upper, &lines.lower, row.part));
        }
    }
}

template <lk_type Type> struct augment_out {
    using element = uint16_t;
};
template <> struct augment_out<LK_FP32> {
    using element = float;
};

template <lk_type Type> __device__ __forceinline__ auto narrow(float x)
{
    if constexpr (Type == LK_FP32) {
        return x;
    } else if constexpr (Type == LK_BF16) {
        uint16_t bits;

        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return x == x ? bits : static_cast<uint16_t>(float_bits(x) >> 16 | 0x40U); /* nan_bf16() */
    } else {
        return static_cast<uint16_t>(narrow_fp16(x));
    }
}

/* What is drawn for a block's image, and the mean of gray; shared by its threads. */
struct augment_shared {
    lk_augment_choice choice;
    unsigned long long units;
    float mean;
};

template <lk_type Type, uint32_t Channels>
__global__ void __launch_bounds__(THREADS, 2)
    augment_kernel(const __grid_constant__ lk_augment_launch launch)
{
    __shared__ augment_shared shared;
    lk_augment a = launch.augment;
    uint64_t image = blockIdx.x, plane = uint64_t{ a.out_height } * a.out_width, mine = 0;
    uint32_t part = blockIdx.y * WARPS + threadIdx.x / 32, step = gridDim.y * WARPS;
    auto *out = static_cast<typename augment_out<Type>::element *>(a.out) +
                image * Channels * plane;

    a.channels = Channels;
    if (threadIdx.x == 0) {
        shared.choice = augment_draw(&launch, image);
        shared.units = 0;
        shared.mean = 0;
        if (a.choices && blockIdx.y == 0)
            a.choices[image] = shared.choice;
    }
    __syncthreads();
    lk_augment_choice own = shared.choice;
    augment_ratios ratios = augment_find_ratios(&a, &own);
    uint32_t steps = augment_steps(&a, &own);

    if (gridDim.y == 1 && own.contrast != 1) {
        for_pixels(a, own, ratios, image, part, step,
                   [&](uint32_t, uint32_t, const augment_pixel &p) {
                       mine += augment_gray_units(&a, &own, steps, p);
                   });
        atomicAdd(&shared.units, static_cast<unsigned long long>(mine));
        __syncthreads();
        if (threadIdx.x == 0)
            shared.mean = augment_mean(&a, shared.units);
        __syncthreads();
    }
    float mean = shared.mean;

    for_pixels(a, own, ratios, image, part, step,
               [&](uint32_t y, uint32_t x, const augment_pixel &p) {
                   augment_pixel done = augment_finish(&launch, &own, steps, y, x, mean, p);
                   auto *at = out + y * a.out_width + x;

#pragma unroll
                   for (uint32_t i = 0; i < Channels; i++)
                       at[i * plane] = narrow<Type>(done.v[i]);
               });
}

using kernel = void (*)(lk_augment_launch);

/* [type][3 channels] */
const kernel kernels[3][2] = {
    {augment_kernel<LK_FP32,  1>, augment_kernel<LK_FP32, 3>},
    { augment_kernel<LK_BF16, 1>, augment_kernel<LK_BF16, 3>},
    { augment_kernel<LK_FP16, 1>, augment_kernel<LK_FP16, 3>},
};

} // namespace

extern "C" int lk_run_augment(const lk_augment_launch *launch, void *stream)
{
    const lk_augment &a = launch->augment;
    uint32_t parts = (a.out_width + 31) / 32 * STRIPS;
    uint32_t blocks = a.contrast > 0 ? 1 : (parts + WARPS - 1) / WARPS;
    unsigned type = a.out_type == LK_FP32 ? 0 : a.out_type == LK_BF16 ? 1 : 2;
    void *args[] = { const_cast<lk_augment_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(kernels[type][a.channels == 3]),
                            dim3(a.count, blocks < 1024 ? blocks : 1024), dim3(THREADS), args, 0,
                            static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_augment(void)
{
    int err = 0;

    for (unsigned i = 0; i < 6; i++) {
        const void *each[] = { reinterpret_cast<const void *>(kernels[i / 2][i % 2]) };

        err = err ? err : load_kernels(each, 1);
    }
    return err;
}
