/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of a device for tests of kernels; whatever fails ends the program.
 */
#ifndef LC_TESTS_KERNELS_DEVICE_H
#define LC_TESTS_KERNELS_DEVICE_H

#include "tests/check.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#define CUDA(call)                                                                            \
    do {                                                                                      \
        cudaError_t cuda_err = (call);                                                        \
        if (cuda_err != cudaSuccess)                                                          \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cuda_err)); \
        CHECK(cuda_err == cudaSuccess);                                                       \
    } while (0)

static inline bool device_is_missing(void)
{
    int devices = 0;

    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0)
        return false;
    printf("skipped: no CUDA device or driver\n");
    return true;
}

static inline bool device_has_room(size_t bytes)
{
    size_t free_bytes, all_bytes;

    CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
    return free_bytes >= bytes;
}

static inline void *device_alloc(size_t bytes)
{
    void *ptr;

    CUDA(cudaMalloc(&ptr, bytes ? bytes : 1));
    return ptr;
}

static inline void device_release(void *ptr)
{
    CUDA(cudaFree(ptr));
}

/* A copy from memory that is not pinned, and a memset, may go on when the call has come back, and streams that do not block
 * with the default one do not wait for it. */
static inline void device_put(void *dst, const void *src, size_t bytes)
{
    CUDA(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
}

static inline void device_clear(void *dst, size_t bytes)
{
    CUDA(cudaMemset(dst, 0, bytes));
    CUDA(cudaDeviceSynchronize());
}

static inline void device_get(void *dst, const void *src, size_t bytes)
{
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost));
}

#endif
