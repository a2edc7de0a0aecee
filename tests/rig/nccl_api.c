/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations' entry points: check, describe, hand to the group. */
#include "tests/rig/nccl_internal.h"

/* Which buffers the call uses on this rank. */
static bool needs_send(const struct rig_op *op)
{
    if (op->kind == RIG_BROADCAST || op->kind == RIG_SCATTER)
        return op->root == op->comm->rank;
    return op->kind != RIG_RECV;
}

static bool needs_recv(const struct rig_op *op)
{
    if (op->kind == RIG_REDUCE || op->kind == RIG_GATHER)
        return op->root == op->comm->rank;
    return op->kind != RIG_SEND;
}

static ncclResult_t check(const struct rig_op *op, const char *call)
{
    size_t size = rig_type_size(op->type);

    if (size == 0)
        return rig_error(ncclInvalidArgument, "%s: type %d", call, (int)op->type);
    if (op->root < 0 || op->root >= op->comm->n)
        return rig_error(ncclInvalidArgument, "%s: rank %d of %d", call, op->root, op->comm->n);
    if (op->count > SIZE_MAX / size / (size_t)op->comm->n)
        return rig_error(ncclInvalidArgument, "%s: count %zu", call, op->count);
    if (op->count && ((needs_send(op) && !op->send) || (needs_recv(op) && !op->recv)))
        return rig_error(ncclInvalidArgument, "%s: buffer is NULL", call);
    if (lcrig_fault(call))
        return rig_error(ncclSystemError, "%s: injected fault", call);
    return ncclSuccess;
}

static ncclResult_t submit(struct rig_op op, const ncclRedOp_t *redop)
{
    const char *call = rig_kind_name(op.kind);
    ncclResult_t result = rig_comm_ready(op.comm, call);

    if (result == ncclSuccess)
        result = check(&op, call);
    if (result == ncclSuccess && redop)
        result = rig_redop_resolve(op.comm, *redop, op.type, &op.redop);
    if (result != ncclSuccess)
        return rig_group_note(result);
    rig_group_start();
    rig_group_add_op(&op);
    return rig_group_end();
}

ncclResult_t pncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return submit(
        (struct rig_op){ RIG_ALL_REDUCE, send, recv, count, type, .comm = comm, .stream = stream },
        &op);
}
RIG_EXPORT(AllReduce)

ncclResult_t pncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                         ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_REDUCE, send, recv, count, type, .root = root, .comm = comm,
                                   .stream = stream },
                  &op);
}
RIG_EXPORT(Reduce)

ncclResult_t pncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_REDUCE_SCATTER, send, recv, count, type, .comm = comm,
                                   .stream = stream },
                  &op);
}
RIG_EXPORT(ReduceScatter)

ncclResult_t pncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                            ncclComm_t comm, cudaStream_t stream)
{
    return submit(
        (struct rig_op){ RIG_ALL_GATHER, send, recv, count, type, .comm = comm, .stream = stream },
        NULL);
}
RIG_EXPORT(AllGather)

ncclResult_t pncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                            int root, ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_BROADCAST, send, recv, count, type, .root = root,
                                   .comm = comm, .stream = stream },
                  NULL);
}
RIG_EXPORT(Broadcast)

/* Through the public name, as NCCL does it: who counts both calls counts this one twice. */
ncclResult_t pncclBcast(void *buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream)
{
    return ncclBroadcast(buff, buff, count, type, root, comm, stream);
}
RIG_EXPORT(Bcast)

ncclResult_t pncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return submit(
        (struct rig_op){ RIG_ALL_TO_ALL, send, recv, count, type, .comm = comm, .stream = stream },
        NULL);
}
RIG_EXPORT(AlltoAll)

ncclResult_t pncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_GATHER, send, recv, count, type, .root = root, .comm = comm,
                                   .stream = stream },
                  NULL);
}
RIG_EXPORT(Gather)

ncclResult_t pncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                          ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_SCATTER, send, recv, count, type, .root = root, .comm = comm,
                                   .stream = stream },
                  NULL);
}
RIG_EXPORT(Scatter)

ncclResult_t pncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                       ncclComm_t comm, cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_SEND, send, NULL, count, type, .root = peer, .comm = comm,
                                   .stream = stream },
                  NULL);
}
RIG_EXPORT(Send)

ncclResult_t pncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                       cudaStream_t stream)
{
    return submit((struct rig_op){ RIG_RECV, NULL, recv, count, type, .root = peer, .comm = comm,
                                   .stream = stream },
                  NULL);
}
RIG_EXPORT(Recv)
