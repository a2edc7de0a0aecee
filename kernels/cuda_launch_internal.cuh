/* SPDX-License-Identifier: Apache-2.0
 *
 * How kernels are launched that write to other devices.
 */
#ifndef LK_CUDA_LAUNCH_INTERNAL_CUH
#define LK_CUDA_LAUNCH_INTERNAL_CUH

#include <cuda_runtime.h>

/* Memory of other devices is waited for by this kernel's fences alone, and not by those of kernels beside it. */
static inline unsigned lk_launch_domain(cudaLaunchAttribute *attribute)
{
    int device = 0, domains = 0;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&domains, cudaDevAttrMemSyncDomainCount, device) != cudaSuccess ||
        domains < 2)
        return 0;
    attribute->id = cudaLaunchAttributeMemSyncDomain;
    attribute->val.memSyncDomain = cudaLaunchMemSyncDomainRemote;
    return 1;
}

#endif
