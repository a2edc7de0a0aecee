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

__global__ void __launch_bounds__(THREADS, 2)
    augment_kernel(const __grid_constant__ lk_augment_launch launch)
{
    __shared__ lk_augment_choice choice;
    __shared__ unsigned long long units;
    __shared__ float mean;
    const lk_augment &a = launch.augment;
    uint64_t image = blockIdx.x;
    uint32_t pixels = a.out_height * a.out_width, step = gridDim.y * THREADS;
    uint64_t mine = 0;

    if (threadIdx.x == 0) {
        choice = augment_draw(&launch, image);
        units = 0;
        mean = 0;
        if (a.choices && blockIdx.y == 0)
            a.choices[image] = choice;
    }
    __syncthreads();
    if (gridDim.y == 1 && choice.contrast != 1) {
        for (uint64_t at = threadIdx.x; at < pixels; at += THREADS)
            mine += augment_gray_units(&a, &choice, image, static_cast<uint32_t>(at) / a.out_width,
                                       static_cast<uint32_t>(at) % a.out_width);
        atomicAdd(&units, static_cast<unsigned long long>(mine));
        __syncthreads();
        if (threadIdx.x == 0)
            mean = augment_mean(&a, units);
        __syncthreads();
    }
    for (uint64_t at = uint64_t{ blockIdx.y } * THREADS + threadIdx.x; at < pixels; at += step)
        augment_pixel(&launch, &choice, image, static_cast<uint32_t>(at) / a.out_width,
                      static_cast<uint32_t>(at) % a.out_width, mean);
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
