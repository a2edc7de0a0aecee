/* SPDX-License-Identifier: Apache-2.0
 *
 * Augmentation on the device. Contrast needs the mean of the whole output: then a block has an image and goes over it
 * twice, reading the crop from L2 the second time. Otherwise an image is spread over blocks.
 */
#include "kernels/compute_augment.h"
#include "kernels/compute_device.cuh"

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
