/* SPDX-License-Identifier: Apache-2.0
 *
 * What the compute kernels share on the device.
 */
#ifndef LK_COMPUTE_DEVICE_CUH
#define LK_COMPUTE_DEVICE_CUH

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

/* True in the block that is the last of the grid to get here; what the others wrote before is then visible to all of its
 * threads. The counter is 0 before and after a launch. */
static __device__ __forceinline__ bool is_last_block(uint32_t *counter)
{
    __shared__ bool last;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last)
        __threadfence();
    return last;
}

/* A kernel that may begin before what is in front of it in its stream has ended touches no memory before this. */
static __device__ __forceinline__ void wait_for_the_last()
{
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/* From here on what is launched next may begin, if it waits itself. */
static __device__ __forceinline__ void let_the_next_begin()
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* Rows are gone through from the last to the first. What was launched before wrote its last rows last, and what comes behind
 * reads the first ones first, as products do: as far as they go, both find them in L2. */
static __device__ __forceinline__ uint64_t from_the_end(uint64_t nth, uint64_t count)
{
    return count - 1 - nth;
}

/* The same of groups of `each`, the last of which may have fewer: where a group begins; at or beyond `count`: there is no such
 * group. Differences to the next ones are negative, modulo 2^64. */
static __device__ __forceinline__ uint64_t group_from_the_end(uint64_t nth, uint64_t each,
                                                              uint64_t count)
{
    return (count - 1) / each * each - nth * each;
}

/* The sum over the block's threads, a power of two of them, as a tree; `sums` may be used again behind it. */
static __device__ __forceinline__ float block_sum(float *sums, float mine)
{
    sums[threadIdx.x] = mine;
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    mine = sums[0];
    __syncthreads();
    return mine;
}

/* Whether a block on the current device may have so much shared memory. */
static inline bool device_has(size_t shared)
{
    int device = 0, most = 0;

    if (shared <= 48 * 1024)
        return true;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
               cudaSuccess &&
           shared <= static_cast<size_t>(most);
}

/* Whether this file's kernels wait for what is before them: as they were compiled for compute capability 9, and not where the
 * code for an older one serves a newer device. Written when they are loaded, by each caller alike; relaxed, false is safe. */
static bool kernels_wait;

static inline int find_whether_kernels_wait(const void *kernel)
{
    cudaFuncAttributes attributes = {};
    int err = cudaFuncGetAttributes(&attributes, kernel);

    __atomic_store_n(&kernels_wait, !err && attributes.ptxVersion >= 90, __ATOMIC_RELAXED);
    return err;
}

/* A kernel that waits itself: it may begin before what is in front of it in the stream has ended. */
static inline int launch_early(const void *kernel, void **args, dim3 grid, unsigned threads,
                               size_t shared, void *stream)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = __atomic_load_n(&kernels_wait, __ATOMIC_RELAXED);
    return cudaLaunchKernelExC(&config, kernel, args);
}

static inline int load_kernels(const void *const *kernels, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        cudaFuncAttributes attributes;
        cudaError_t err = cudaFuncGetAttributes(&attributes, kernels[i]);

        if (err != cudaSuccess)
            return err;
    }
    return 0;
}

#endif
