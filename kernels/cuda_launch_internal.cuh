/* SPDX-License-Identifier: Apache-2.0
 *
 * How kernels are launched that write to other devices.
 */
#ifndef LK_CUDA_LAUNCH_INTERNAL_CUH
#define LK_CUDA_LAUNCH_INTERNAL_CUH

#include "kernels/rings_internal.h"

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

/* All but the grid. `shared`: bytes of the call. */
static inline int lk_launch_kernel(const lk_ring_kernel &kernel, uint32_t ctas, size_t shared,
                                   const void *launch, void *stream)
{
    void *args[] = { const_cast<void *>(launch) };
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    config.gridDim = dim3(ctas);
    config.blockDim = dim3(kernel.threads);
    config.dynamicSmemBytes = shared + kernel.shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (!kernel.same_domain)
        config.numAttrs = lk_launch_domain(attributes);
    if (kernel.early) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs++;
    }
    return cudaLaunchKernelExC(&config, kernel.kernel, args);
}

/* Absent from the library that is installed. */
#pragma weak lk_find_variant

#endif
