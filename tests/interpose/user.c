/* SPDX-License-Identifier: Apache-2.0
 *
 * A library that was linked with NCCL and is opened late, as a Python extension is. */
#include <nccl.h>

int use_nccl(void);
int use_nccl(void)
{
    ncclUniqueId id;
    ncclComm_t comm;
    char buf[4];

    if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, 2, id, 0) != ncclSuccess)
        return 1;
    if (ncclAllReduce(buf, buf, 2, ncclFloat, ncclSum, comm, NULL) != ncclSuccess)
        return 2;
    return ncclCommDestroy(comm) != ncclSuccess;
}
