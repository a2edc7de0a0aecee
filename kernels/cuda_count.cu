/* SPDX-License-Identifier: Apache-2.0
 *
 * A count in device memory that a graph's replays move on.
 */
#include "kernels/list_internal.h"

#include <cuda_runtime.h>

namespace
{

__global__ void lk_count_kernel(const __grid_constant__ lk_count args)
{
    *args.word += args.by;
}

} // namespace

extern "C" int lk_run_count(const lk_count *count, void *stream)
{
    void *args[] = { const_cast<lk_count *>(count) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(lk_count_kernel), dim3(1), dim3(1), args,
                            0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_count(void)
{
    cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, lk_count_kernel);
}
