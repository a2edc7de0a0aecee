/* SPDX-License-Identifier: Apache-2.0
 *
 * As much of an NCCL as the doctor's tests need: one rank, nothing is moved. */
#include <nccl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

ncclResult_t ncclGetVersion(int *version)
{
    const char *other = getenv("LC_FAKE_NCCL_VERSION");

    *version = other ? atoi(other) : 22809;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof(*id));
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result ? "error" : "no error";
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    *comm = malloc(1);
    return *comm ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    *count = 1;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    *device = 0;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return ncclSuccess;
}
