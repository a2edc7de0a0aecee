/* SPDX-License-Identifier: Apache-2.0
 *
 * A preloaded library that stands between us and NCCL, as profilers do. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>

static unsigned calls;

__attribute__((destructor)) static void print(void)
{
    printf("traced %u all-reduces\n", calls);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    static __typeof(ncclAllReduce) *real;

    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "ncclAllReduce");
    calls++;
    return real(send, recv, count, type, op, comm, stream);
}
