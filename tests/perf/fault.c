/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into a worker to break what the benchmark must notice. LCTEST_FAULT=KIND:CALL:RANK, from a
 * call on, counted from 0 per process, at one rank (as in LCRIG_RANK) or, -1, at all. `corrupt` changes one
 * byte of the result, in stream order; `skip` does nothing and claims success; `hang` never returns; `die`
 * kills the process. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static struct {
    char kind[16];
    int call;
    int rank;
} fault;
static int calls; /* by the worker's only thread */

static void *real(const char *name)
{
    void *symbol = dlsym(RTLD_NEXT, name);

    if (!symbol)
        abort();
    return symbol;
}

static int fault_due(const char *kind)
{
    const char *rank = getenv("LCRIG_RANK");
    const char *text = getenv("LCTEST_FAULT");

    if (!fault.kind[0] &&
        (!text || sscanf(text, "%15[a-z]:%d:%d", fault.kind, &fault.call, &fault.rank) != 3))
        return 0;
    return strcmp(kind, fault.kind) == 0 && calls >= fault.call && rank &&
           (fault.rank < 0 || atoi(rank) == fault.rank);
}

static void before(void)
{
    while (fault_due("hang"))
        pause();
    if (fault_due("die"))
        raise(SIGKILL);
}

static void after(void *result, size_t bytes, cudaStream_t stream)
{
    if (fault_due("corrupt") &&
        cudaMemsetAsync((char *)result + bytes / 2, 0x5a, 1, stream) != cudaSuccess)
        abort();
    calls++;
}

EXPORT ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream)
{
    __typeof__(&ncclAlltoAll) call = real("ncclAlltoAll");
    ncclResult_t err;

    before();
    err = fault_due("skip") ? ncclSuccess : call(send, recv, count, type, comm, stream);
    after(recv, count, stream);
    return err;
}

EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    __typeof__(&ncclAllReduce) call = real("ncclAllReduce");
    ncclResult_t err;

    before();
    err = fault_due("skip") ? ncclSuccess : call(send, recv, count, type, op, comm, stream);
    after(recv, count, stream);
    return err;
}

EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream)
{
    __typeof__(&ncclReduceScatter) call = real("ncclReduceScatter");
    ncclResult_t err;

    before();
    err = fault_due("skip") ? ncclSuccess : call(send, recv, count, type, op, comm, stream);
    after(recv, count, stream);
    return err;
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream)
{
    __typeof__(&ncclAllGather) call = real("ncclAllGather");
    ncclResult_t err;

    before();
    err = fault_due("skip") ? ncclSuccess : call(send, recv, count, type, comm, stream);
    after(recv, count, stream);
    return err;
}
