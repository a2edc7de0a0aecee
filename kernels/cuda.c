/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/exchange_internal.h"
#include "kernels/list_internal.h"
#include "kernels/rings_internal.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <string.h>

/* Minor versions of one CUDA major share a driver; 32 KB of kernel arguments came with 12.1. */
#define DRIVER_NEEDED (CUDART_VERSION / 1000 == 12 ? 12010 : CUDART_VERSION / 1000 * 1000)

_Static_assert(CUDART_VERSION >= 12010, "kernel arguments of 32,764 bytes need CUDA 12.1");

LK_API const char *lk_backend(void)
{
    return "cuda";
}

LK_API int lk_driver_needed(void)
{
    return DRIVER_NEEDED;
}

LK_API const char *lk_error_text(int result)
{
    if (result == -EINVAL)
        return "invalid argument or forbidden overlap";
    if (result == -ENOSYS)
        return "a library of the vendor is missing: lk_blas_error() has more";
    if (result == -EIO)
        return "a library of the vendor failed: lk_blas_error() has more";
    if (result == -ENOTSUP)
        return "not supported by this device";
    return result < 0 ? "unknown error" : cudaGetErrorString((cudaError_t)result);
}

LK_API int lk_load_all(void)
{
    int driver = 0;
    cudaError_t err = cudaDriverGetVersion(&driver);
    int result;

    if (err != cudaSuccess)
        return err;
    if (driver < DRIVER_NEEDED)
        return cudaErrorInsufficientDriver;
    result = lk_load_lists();
    if (!result)
        result = lk_load_sum();
    if (!result)
        result = lk_load_compare();
    if (!result)
        result = lk_load_feedback();
    return result ? result : lk_load_count();
}

LK_API int lk_rings_load(void)
{
    int result = lk_load_rings();

    return result ? result : lk_load_exchange();
}

static const struct {
    const char *name;
    void *function;
} runtime[] = {
#define LK_RT(name) { #name, (void *)name },
#include "kernels/runtime.def"
#undef LK_RT
};

LK_API void *lk_runtime_symbol(const char *name)
{
    for (size_t i = 0; i < sizeof(runtime) / sizeof(*runtime); i++) {
        if (strcmp(runtime[i].name, name) == 0)
            return runtime[i].function;
    }
    return NULL;
}
