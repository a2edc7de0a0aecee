/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_program [CALLS]: is linked with NCCL, makes a communicator and so many all-reduces. */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    int calls = argc > 1 ? atoi(argv[1]) : 0;
    float data[4] = { 0 };
    ncclUniqueId id;
    ncclComm_t comm;

    if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess)
        return 1;
    for (int i = 0; i < calls; i++) {
        if (ncclAllReduce(data, data, 4, ncclFloat, ncclSum, comm, NULL) != ncclSuccess)
            return 1;
    }
    (void)puts("this goes to standard error of the doctor");
    return ncclCommDestroy(comm) != ncclSuccess;
}
