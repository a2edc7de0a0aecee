/* SPDX-License-Identifier: Apache-2.0
 *
 * Augmentation on the device. Contrast needs the mean of the whole output: then a block has an image and goes over it
 * twice, reading the crop from L2 the second time. Otherwise an image is spread over blocks.
 */
#ifdef LK_COMPUTE_VARIANTS
#include "kernels/compute_augment_columns.cuh"
#else
#include "kernels/compute_augment.h"
#include "kernels/compute_device.cuh"

LK_INLINE struct augment_pixel augment_sample(const struct lk_augment *a,
                                              const struct lk_augment_choice *c,
                                              struct augment_ratios ratios, uint64_t image,
                                              uint32_t y, uint32_t x)
{
    const uint8_t *base = a->images + image * a->image_stride;
    struct augment_place row = augment_at(y, ratios.rows, c->top, c->height);
    struct augment_place col = augment_at(c->flip ? a->out_width - 1 - x : x, ratios.columns,
                                          c->left, c->width);
    const uint8_t *upper = base + row.first * a->row_stride;
    const uint8_t *lower = base + row.second * a->row_stride;
    uint32_t left = col.first * a->channels, right = col.second * a->channels;
    struct augment_pixel out;

    for (uint32_t i = 0; i < 3; i++) {
        uint32_t channel = i < a->channels ? i : 0;
        float high = (float)upper[left + channel], low = (float)lower[left + channel];

        high += ((float)upper[right + channel] - high) * col.part;
        low += ((float)lower[right + channel] - low) * col.part;
        out.v[i] = augment_part(high + (low - high) * row.part);
    }
    return out;
}

/* The i-th step; what leaves everything as it is, is left out. Gray has no saturation and no hue. */
LK_INLINE void augment_step(const struct lk_augment *a, const struct lk_augment_choice *c,
                            uint32_t i, float mean, struct augment_pixel *p)
{
    uint32_t step = c->order >> 2 * i & 3U;

    if (a->channels == 1 && step >= AUGMENT_SATURATION)
        return;
    if (step == AUGMENT_BRIGHTNESS && c->brightness != 1)
        augment_blend(p, c->brightness, 0);
    if (step == AUGMENT_CONTRAST && c->contrast != 1)
        augment_blend(p, c->contrast, mean);
    if (step == AUGMENT_SATURATION && c->saturation != 1)
        augment_blend(p, c->saturation, augment_gray(p));
    if (step == AUGMENT_HUE && c->hue != 0)
        augment_turn(p, c->hue);
}

/* A pixel's part of the mean of gray at the step of contrast, in units of 2^-20: whole numbers have one sum in any order. */
LK_INLINE uint32_t augment_gray_units(const struct lk_augment *a, const struct lk_augment_choice *c,
                                      struct augment_ratios ratios, uint64_t image, uint32_t y,
                                      uint32_t x)
{
    struct augment_pixel p = augment_sample(a, c, ratios, image, y, x);

    for (uint32_t i = 0; (c->order >> 2 * i & 3U) != AUGMENT_CONTRAST; i++)
        augment_step(a, c, i, 0, &p);
    return (uint32_t)((a->channels == 3 ? augment_gray(&p) : p.v[0]) * 0x1p20F + 0.5F);
}

LK_INLINE void augment_store(const struct lk_augment *a, uint64_t at, float value)
{
    if (a->out_type == LK_FP32)
        ((float *)a->out)[at] = value;
    else
        ((uint16_t *)a->out)[at] = (uint16_t)(a->out_type == LK_BF16 ? narrow_bf16(value, 1, 0, 0)
                                                                     : narrow_fp16(value));
}

/* One pixel of the output, all channels. mean: of gray at the step of contrast. */
LK_INLINE void augment_pixel(const struct lk_augment_launch *launch,
                             const struct lk_augment_choice *c, struct augment_ratios ratios,
                             uint64_t image, uint32_t y, uint32_t x, float mean)
{
    const struct lk_augment *a = &launch->augment;
    uint64_t plane = (uint64_t)a->out_height * a->out_width;
    uint64_t at = image * a->channels * plane + (uint64_t)y * a->out_width + x;
    struct augment_pixel p = augment_sample(a, c, ratios, image, y, x);
    int erased = y - c->erase_top < c->erase_height && x - c->erase_left < c->erase_width;

    for (uint32_t i = 0; i < 4; i++)
        augment_step(a, c, i, mean, &p);
    for (uint32_t i = 0; i < a->channels; i++)
        augment_store(a, at + i * plane,
                      erased ? a->erase_value[i] : (p.v[i] - a->mean[i]) * launch->inverse_std[i]);
}

namespace
{

constexpr unsigned THREADS = 512;
constexpr uint32_t PIXELS = 8 * THREADS; /* of a block that is not alone */

/* Every so many pixels of an image, without a division for each. */
struct pixel_walk {
    uint32_t x, y, right, down;
};

__device__ __forceinline__ pixel_walk begin_walk(const lk_augment &a, uint32_t first, uint32_t step)
{
    return { first % a.out_width, first / a.out_width, step % a.out_width, step / a.out_width };
}

__device__ __forceinline__ void next(const lk_augment &a, pixel_walk &at)
{
    at.x += at.right;
    at.y += at.down;
    if (at.x >= a.out_width) {
        at.x -= a.out_width;
        at.y++;
    }
}

__global__ void __launch_bounds__(THREADS, 2)
    augment_kernel(const __grid_constant__ lk_augment_launch launch)
{
    __shared__ lk_augment_choice choice;
    __shared__ unsigned long long units;
    __shared__ float mean;
    const lk_augment &a = launch.augment;
    uint64_t image = blockIdx.x;
    uint64_t mine = 0;

    if (threadIdx.x == 0) {
        choice = augment_draw(&launch, image);
        units = 0;
        mean = 0;
        if (a.choices && blockIdx.y == 0)
            a.choices[image] = choice;
    }
    __syncthreads();
    lk_augment_choice own = choice;
    augment_ratios ratios = augment_find_ratios(&a, &own);

    if (gridDim.y == 1 && own.contrast != 1) {
        for (pixel_walk at = begin_walk(a, threadIdx.x, THREADS); at.y < a.out_height; next(a, at))
            mine += augment_gray_units(&a, &own, ratios, image, at.y, at.x);
        atomicAdd(&units, static_cast<unsigned long long>(mine));
        __syncthreads();
        if (threadIdx.x == 0)
            mean = augment_mean(&a, units);
        __syncthreads();
    }
    for (pixel_walk at = begin_walk(a, blockIdx.y * THREADS + threadIdx.x, gridDim.y * THREADS);
         at.y < a.out_height; next(a, at))
        augment_pixel(&launch, &own, ratios, image, at.y, at.x, mean);
}

} // namespace

extern "C" int lk_run_augment(const lk_augment_launch *launch, void *stream)
{
    const lk_augment &a = launch->augment;
    uint64_t pixels = uint64_t{ a.out_height } * a.out_width;
    uint64_t blocks = a.contrast > 0 ? 1 : (pixels + PIXELS - 1) / PIXELS;
    void *args[] = { const_cast<lk_augment_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(augment_kernel),
                            dim3(a.count, static_cast<unsigned>(blocks < 1024 ? blocks : 1024)),
                            dim3(THREADS), args, 0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_augment(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(augment_kernel) };

    return load_kernels(kernels, 1);
}
#endif
