/* SPDX-License-Identifier: Apache-2.0
 *
 * One collective at a time: all types, operations and sizes, in and out of place, aligned and not. */
#include "tests/gpu/verify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNTOUCHED 0xa5

enum shape {
    REDUCES = 1,    /* combines; else it moves bits */
    SEND_PARTS = 2, /* the send buffer has one part for each rank */
    RECV_PARTS = 4, /* the receive buffer has */
    ROOTED = 8,
    ONE_BUFFER = 16, /* always in place */
    NEVER_IN_PLACE = 32,
};

static const struct {
    const char *name;
    enum vf_op op;
    unsigned shape;
} collectives[] = {
    {"AllReduce",      VF_ALL_REDUCE,     REDUCES                                 },
    { "Reduce",        VF_REDUCE,         REDUCES | ROOTED                        },
    { "ReduceScatter", VF_REDUCE_SCATTER, REDUCES | SEND_PARTS                    },
    { "AllGather",     VF_ALL_GATHER,     RECV_PARTS                              },
    { "Broadcast",     VF_BROADCAST,      ROOTED                                  },
    { "Bcast",         VF_BROADCAST,      ROOTED | ONE_BUFFER                     },
    { "AlltoAll",      VF_ALL_TO_ALL,     SEND_PARTS | RECV_PARTS | NEVER_IN_PLACE},
    { "Gather",        VF_GATHER,         ROOTED | RECV_PARTS                     },
    { "Scatter",       VF_SCATTER,        ROOTED | SEND_PARTS                     },
};
#define COLLECTIVES (sizeof(collectives) / sizeof(collectives[0]))

/* One call, planned. */
struct plan {
    size_t which; /* of collectives[] */
    const struct vf_type *type;
    enum vf_redop redop;
    size_t count;
    int root;
    bool in_place;
    size_t offset; /* elements by which both buffers are moved off their alignment */
    size_t send_bytes, recv_bytes;
    unsigned char *send, *recv; /* device */
};

static void lay_out(struct vf_rank *rank, struct plan *plan)
{
    unsigned shape = collectives[plan->which].shape;
    size_t part = plan->count * plan->type->size;
    size_t all = part * (size_t)rank->ranks;
    size_t own = part * (size_t)rank->rank;
    bool is_root = rank->rank == plan->root;
    unsigned char *base = rank->device_recv + VF_GUARD + plan->offset * plan->type->size;

    plan->send_bytes = shape & SEND_PARTS ? all : part;
    plan->recv_bytes = shape & RECV_PARTS ? all : part;
    if ((shape & ROOTED) && !is_root) {
        if (shape & SEND_PARTS)
            plan->send_bytes = 0;
        if (shape & (RECV_PARTS | REDUCES))
            plan->recv_bytes = 0;
    }
    plan->recv = base;
    plan->send = rank->device_send + VF_GUARD + plan->offset * plan->type->size;
    if (!plan->in_place)
        return;
    plan->send = base;
    if ((shape & SEND_PARTS) && plan->send_bytes)
        plan->recv = base + own;
    if ((shape & RECV_PARTS) && plan->recv_bytes)
        plan->send = base + own;
}

/* What this rank sends. A broadcast's other ranks have something to lose. */
static void make_input(const struct vf_rank *rank, const struct plan *plan)
{
    unsigned shape = collectives[plan->which].shape;
    size_t part = plan->count * plan->type->size;

    if (shape & REDUCES) {
        vf_fill_input(plan->type, plan->redop, rank->rank, 0, plan->send_bytes / plan->type->size,
                      rank->host_in);
        return;
    }
    for (size_t done = 0, to = 0; done < plan->send_bytes; done += part, to++)
        vf_fill_bits(plan->type->size, rank->rank, shape & SEND_PARTS ? (int)to : 63, plan->count,
                     rank->host_in + done);
}

static void make_result(const struct vf_rank *rank, const struct plan *plan)
{
    unsigned shape = collectives[plan->which].shape;
    size_t part = plan->count * plan->type->size;
    int target = shape & SEND_PARTS ? rank->rank : 63;

    if (shape & REDUCES) {
        vf_fill_result(plan->type, plan->redop, rank->ranks,
                       shape & SEND_PARTS ? (size_t)rank->rank * plan->count : 0,
                       plan->recv_bytes / plan->type->size, rank->host_want);
        return;
    }
    for (size_t done = 0, from = 0; done < plan->recv_bytes; done += part, from++)
        vf_fill_bits(plan->type->size, shape & RECV_PARTS ? (int)from : plan->root, target,
                     plan->count, rank->host_want + done);
}

static ncclRedOp_t make_redop(struct vf_rank *rank, const struct plan *plan, void **scalar)
{
    static const ncclRedOp_t plain[] = { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
    unsigned char value[8] = { 0 };
    ncclRedOp_t op;

    *scalar = NULL;
    if (plan->redop < VF_SCALED_HOST)
        return plain[plan->redop];
    vf_encode(plan->type, vf_scale(plan->type), value);
    if (plan->redop == VF_SCALED_HOST) {
        VF_NCCL(ncclRedOpCreatePreMulSum(&op, value, plan->type->type, ncclScalarHostImmediate,
                                         rank->comm));
        return op;
    }
    VF_CUDA(cudaMalloc(scalar, sizeof(value)));
    VF_CUDA(cudaMemcpyAsync(*scalar, value, sizeof(value), cudaMemcpyHostToDevice, rank->stream));
    VF_NCCL(ncclRedOpCreatePreMulSum(&op, *scalar, plan->type->type, ncclScalarDevice, rank->comm));
    return op;
}

static void call(struct vf_rank *rank, const struct plan *plan, ncclRedOp_t op)
{
    const void *send = plan->send;
    void *recv = plan->recv;
    size_t n = plan->count;
    ncclDataType_t type = plan->type->type;
    ncclComm_t comm = rank->comm;
    cudaStream_t stream = rank->stream;

    rank->calls[collectives[plan->which].op]++;
    switch (collectives[plan->which].op) {
    case VF_ALL_REDUCE: VF_NCCL(ncclAllReduce(send, recv, n, type, op, comm, stream)); return;
    case VF_REDUCE: VF_NCCL(ncclReduce(send, recv, n, type, op, plan->root, comm, stream)); return;
    case VF_REDUCE_SCATTER:
        VF_NCCL(ncclReduceScatter(send, recv, n, type, op, comm, stream));
        return;
    case VF_ALL_GATHER: VF_NCCL(ncclAllGather(send, recv, n, type, comm, stream)); return;
    case VF_ALL_TO_ALL: VF_NCCL(ncclAlltoAll(send, recv, n, type, comm, stream)); return;
    case VF_GATHER: VF_NCCL(ncclGather(send, recv, n, type, plan->root, comm, stream)); return;
    case VF_SCATTER: VF_NCCL(ncclScatter(send, recv, n, type, plan->root, comm, stream)); return;
    default: break;
    }
    if (collectives[plan->which].shape & ONE_BUFFER)
        VF_NCCL(ncclBcast(recv, n, type, plan->root, comm, stream));
    else
        VF_NCCL(ncclBroadcast(send, recv, n, type, plan->root, comm, stream));
}

static void describe(const struct plan *plan, const char *part, char *out, size_t room)
{
    snprintf(out, room, "%s %s %s count %zu root %d%s%s: %s", collectives[plan->which].name,
             plan->type->name,
             collectives[plan->which].shape & REDUCES ? vf_redop_names[plan->redop] : "",
             plan->count, plan->root, plan->in_place ? " in place" : "",
             plan->offset ? " unaligned" : "", part);
}

/* The receive buffer, what lies around it, and the send buffer, which must not change. */
static void check(struct vf_rank *rank, const struct plan *plan)
{
    unsigned char guard[VF_GUARD];
    bool amid_input = plan->in_place && (collectives[plan->which].shape & SEND_PARTS) &&
                      plan->send_bytes;
    bool sole = (collectives[plan->which].shape & ROOTED) && plan->recv_bytes == 0 &&
                plan->in_place;
    char what[256];

    memset(guard, UNTOUCHED, sizeof(guard));
    describe(plan, "result", what, sizeof(what));
    vf_compare(rank, plan->recv, rank->host_want, plan->recv_bytes, what);
    if (!amid_input && !sole) {
        describe(plan, "bytes before the receive buffer", what, sizeof(what));
        vf_compare(rank, plan->recv - VF_GUARD, guard, VF_GUARD, what);
        describe(plan, "bytes behind the receive buffer", what, sizeof(what));
        vf_compare(rank, plan->recv + plan->recv_bytes, guard, VF_GUARD, what);
    }
    if (!plan->in_place) {
        describe(plan, "send buffer", what, sizeof(what));
        vf_compare(rank, plan->send, rank->host_in, plan->send_bytes, what);
    }
}

static void run(struct vf_rank *rank, struct plan *plan)
{
    size_t whole = 2 * VF_GUARD + plan->offset * plan->type->size;
    size_t part = plan->count * plan->type->size;
    size_t parts = collectives[plan->which].shape & (SEND_PARTS | RECV_PARTS) ? (size_t)rank->ranks
                                                                              : 1;
    void *scalar;
    ncclRedOp_t op;

    lay_out(rank, plan);
    make_input(rank, plan);
    make_result(rank, plan);
    VF_CUDA(cudaMemsetAsync(rank->device_recv, UNTOUCHED, whole + part * parts, rank->stream));
    VF_CUDA(cudaMemcpyAsync(plan->send, rank->host_in, plan->send_bytes, cudaMemcpyHostToDevice,
                            rank->stream));
    op = make_redop(rank, plan, &scalar);
    call(rank, plan, op);
    if (plan->redop >= VF_SCALED_HOST)
        VF_NCCL(ncclRedOpDestroy(op, rank->comm)); /* at once: torch does so too */
    check(rank, plan);
    if (scalar)
        VF_CUDA(cudaFree(scalar));
}

/* In and out of place, aligned and not; or, where there are many cases, one of these in turn. */
static void run_variants(struct vf_rank *rank, struct plan plan, bool all)
{
    unsigned shape = collectives[plan.which].shape;

    for (unsigned variant = 0; variant < 4; variant++) {
        if (!all && variant != rank->turn % 4)
            continue;
        plan.in_place = (variant & 1) != 0;
        plan.offset = variant & 2 ? 1 : 0;
        if (shape & NEVER_IN_PLACE)
            plan.in_place = false;
        if (shape & ONE_BUFFER)
            plan.in_place = true;
        plan.root = shape & ROOTED ? (int)(rank->turn / 4 % (unsigned)rank->ranks) : 0;
        run(rank, &plan);
    }
    rank->turn++;
}

static bool applies(const struct vf_rank *rank, const struct plan *plan)
{
    bool is_float = plan->type->kind == 'f';

    if (!(collectives[plan->which].shape & REDUCES))
        return plan->redop == VF_SUM;
    if (is_float && plan->type->size == 1 && !rank->fp8_sums)
        return false;
    /* NCCL multiplies by 1/n first: exact for powers of two only. */
    return !(is_float && plan->redop == VF_AVG && (rank->ranks & (rank->ranks - 1)) != 0);
}

static bool too_long(const struct vf_rank *rank, const struct plan *plan)
{
    bool parts = (collectives[plan->which].shape & (SEND_PARTS | RECV_PARTS)) != 0;

    if (plan->count < VF_BIG)
        return false;
    if (plan->redop != VF_SUM)
        return plan->which != 0 || plan->type->type != ncclFloat32;
    return rank->quick && parts && plan->type->type != ncclInt8 && plan->type->type != ncclBfloat16;
}

static void run_sizes(struct vf_rank *rank, struct plan plan)
{
    static const size_t counts[] = { 0, 1, 3, VF_BIG };

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        plan.count = counts[i];
        if (applies(rank, &plan) && !too_long(rank, &plan))
            run_variants(rank, plan, plan.redop == VF_SUM && plan.count < VF_BIG);
    }
}

void vf_collectives(struct vf_rank *rank)
{
    for (size_t which = 0; which < COLLECTIVES; which++) {
        for (int type = 0; type < ncclNumTypes; type++) {
            for (int redop = 0; redop < VF_REDOPS; redop++)
                run_sizes(rank, (struct plan){ .which = which,
                                               .type = &vf_types[type],
                                               .redop = (enum vf_redop)redop });
        }
    }
}
