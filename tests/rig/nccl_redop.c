/* SPDX-License-Identifier: Apache-2.0
 *
 * Reduction operators of the user. A handle carries its communicator's salt, so that it is none of another's. */
#include "tests/rig/nccl_internal.h"

#include <string.h>

#define OPS_PER_COMM 65536

static unsigned handle_base(ncclComm_t comm)
{
    return ncclNumOps + comm->salt * OPS_PER_COMM;
}

/* The index of an operator of comm, -1 if it is none. Called with the lock held. */
static long find(ncclComm_t comm, unsigned op)
{
    unsigned at = op - handle_base(comm);

    if (op < handle_base(comm) || at >= comm->user_ops_count || !comm->user_ops[at].used)
        return -1;
    return (long)at;
}

ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                       ncclScalarResidence_t residence, ncclComm_t comm)
{
    ncclResult_t result = rig_comm_ready(comm, "ncclRedOpCreatePreMulSum");
    size_t size = rig_type_size(datatype), at;
    struct rig_user_op mine = { .used = true, .type = datatype };

    if (result != ncclSuccess)
        return result;
    if (!op || !scalar || size == 0 ||
        (residence != ncclScalarDevice && residence != ncclScalarHostImmediate))
        return rig_error(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: bad argument");
    mine.op.kind = RIG_PREMUL;
    if (residence == ncclScalarDevice)
        mine.op.device_scalar = scalar;
    else
        memcpy(&mine.op.scalar, scalar, size);
    pthread_mutex_lock(&comm->lock);
    for (at = 0; at < comm->user_ops_count && comm->user_ops[at].used; at++)
        ;
    if (at == comm->user_ops_count) {
        comm->user_ops = rig_grow(comm->user_ops, comm->user_ops_count, &comm->user_ops_room,
                                  sizeof(*comm->user_ops));
        comm->user_ops_count++;
    }
    comm->user_ops[at] = mine;
    pthread_mutex_unlock(&comm->lock);
    *op = (ncclRedOp_t)(handle_base(comm) + at);
    return ncclSuccess;
}
RIG_EXPORT(RedOpCreatePreMulSum)

ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    ncclResult_t result = rig_comm_check(comm, "ncclRedOpDestroy");
    long at;

    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->lock);
    at = find(comm, op);
    if (at >= 0)
        comm->user_ops[at].used = false;
    pthread_mutex_unlock(&comm->lock);
    return at >= 0 ? ncclSuccess
                   : rig_error(ncclInvalidArgument, "ncclRedOpDestroy: no operator of this one");
}
RIG_EXPORT(RedOpDestroy)

ncclResult_t rig_redop_resolve(ncclComm_t comm, ncclRedOp_t op, ncclDataType_t type,
                               struct rig_redop *out)
{
    static const enum rig_redop_kind builtin[ncclNumOps] = {
        [ncclSum] = RIG_SUM, [ncclProd] = RIG_PROD, [ncclMax] = RIG_MAX,
        [ncclMin] = RIG_MIN, [ncclAvg] = RIG_AVG,
    };
    ncclResult_t result = ncclSuccess;
    long at;

    if ((unsigned)op < ncclNumOps) {
        *out = (struct rig_redop){ .kind = builtin[op] };
        return ncclSuccess;
    }
    pthread_mutex_lock(&comm->lock);
    at = find(comm, op);
    if (at < 0 || comm->user_ops[at].type != type)
        result = ncclInvalidArgument;
    else
        *out = comm->user_ops[at].op;
    pthread_mutex_unlock(&comm->lock);
    if (result != ncclSuccess)
        rig_error(result, "operator %u is none of this communicator and type %s", (unsigned)op,
                  rig_type_name((int)type));
    return result;
}
