/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls, their inputs and results. Copies are from and to pinned memory, so that nothing waits for a stream. */
#include "tests/gpu/reduce.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A result on its way to the host. */
struct rd_take {
    struct rd_take *next;
    struct rd_call call;
    uint64_t salt;
    bool plain;
    const char *result;
};

void *rd_alloc(struct rd_arena *arena, size_t bytes)
{
    char *start = arena->base + arena->used;

    CHECK(bytes <= arena->size - arena->used);
    arena->used += (bytes + 255) / 256 * 256;
    return start;
}

void rd_prepare(struct rd_rank *me, struct rd_call *call)
{
    size_t size = rd_type_size(call->type), n = (size_t)me->n;
    size_t part = call->count * size * (size_t)me->comms[call->comm].rank;
    char *both;

    if (!call->in_place || call->kind == RD_ROUND) {
        call->send = rd_alloc(&me->device, rd_send_count(call, me->n) * size);
        call->recv = rd_alloc(&me->device, rd_recv_count(call, me->n) * size);
        return;
    }
    both = rd_alloc(&me->device, call->count * size * n);
    call->send = call->kind == RD_ALL_GATHER ? both + part : both;
    call->recv = call->kind == RD_REDUCE_SCATTER ? both + part : both;
}

uint64_t rd_put(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream)
{
    size_t bytes = rd_send_count(call, me->n) * rd_type_size(call->type);
    char *from = rd_alloc(&me->host, bytes);
    uint64_t salt = ++me->salts;

    rd_fill(call, me->n, me->rank, salt, from);
    if (bytes)
        CUDA(cudaMemcpyAsync(call->send, from, bytes, cudaMemcpyHostToDevice, stream));
    return salt;
}

static ncclRedOp_t redop_of(struct rd_rank *me, const struct rd_call *call, bool *made)
{
    static const ncclRedOp_t plain[] = { ncclSum, ncclAvg, ncclMax };
    ncclComm_t comm = me->comms[call->comm].handle;
    float quarter = 0.25f;
    ncclRedOp_t op;

    *made = call->op >= RD_HALF;
    if (!*made)
        return plain[call->op];
    if (call->op == RD_HALF)
        NCCL(ncclRedOpCreatePreMulSum(&op, me->factor, ncclFloat32, ncclScalarDevice, comm));
    else
        NCCL(ncclRedOpCreatePreMulSum(&op, &quarter, ncclFloat32, ncclScalarHostImmediate, comm));
    return op;
}

/* A pre-multiplying operation is destroyed right behind the call, also inside a group, as PyTorch does. */
static void issue_reduction(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream)
{
    ncclComm_t comm = me->comms[call->comm].handle;
    bool made;
    ncclRedOp_t op = redop_of(me, call, &made);

    if (call->kind == RD_ALL_REDUCE)
        NCCL(ncclAllReduce(call->send, call->recv, call->count, call->type, op, comm, stream));
    else
        NCCL(ncclReduceScatter(call->send, call->recv, call->count, call->type, op, comm, stream));
    if (made)
        NCCL(ncclRedOpDestroy(op, comm));
}

void rd_issue(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream)
{
    const struct rd_comm *comm = &me->comms[call->comm];

    switch (call->kind) {
    case RD_ALL_GATHER:
        NCCL(ncclAllGather(call->send, call->recv, call->count, call->type, comm->handle, stream));
        break;
    case RD_BROADCAST:
        NCCL(ncclBroadcast(call->send, call->recv, call->count, call->type, call->root,
                           comm->handle, stream));
        break;
    case RD_ROUND:
        NCCL(ncclGroupStart());
        NCCL(ncclSend(call->send, call->count, call->type, (comm->rank + 1) % me->n, comm->handle,
                      stream));
        NCCL(ncclRecv(call->recv, call->count, call->type, (comm->rank + me->n - 1) % me->n,
                      comm->handle, stream));
        NCCL(ncclGroupEnd());
        break;
    default: issue_reduction(me, call, stream); break;
    }
}

void rd_take(struct rd_rank *me, const struct rd_call *call, uint64_t salt, cudaStream_t stream)
{
    size_t bytes = rd_recv_count(call, me->n) * rd_type_size(call->type);
    struct rd_take *take = malloc(sizeof(*take));
    char *to = rd_alloc(&me->host, bytes);

    CHECK(take);
    *take = (struct rd_take){ .call = *call,
                              .salt = salt,
                              .plain = me->comms[call->comm].plain,
                              .result = to };
    if (bytes)
        CUDA(cudaMemcpyAsync(to, call->recv, bytes, cudaMemcpyDeviceToHost, stream));
    *me->last_take = take;
    me->last_take = &take->next;
}

void rd_once(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream)
{
    uint64_t salt = rd_put(me, call, stream);

    rd_issue(me, call, stream);
    rd_take(me, call, salt, stream);
}

static uint64_t hash_of(uint64_t hash, const char *data, size_t bytes)
{
    uint64_t word;

    for (; bytes >= 8; bytes -= 8, data += 8) {
        memcpy(&word, data, 8);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    while (bytes--)
        hash = (hash ^ (unsigned char)*data++) * 0x100000001b3u;
    return hash;
}

void rd_meet(struct rd_rank *me)
{
    int n = me->n, all = (atomic_fetch_add(&me->shared->arrived, 1) / n + 1) * n;

    while (atomic_load(&me->shared->arrived) < all)
        usleep(200);
}

/* All ranks have the same bits where the collective says so. */
static void compare_digests(struct rd_rank *me)
{
    if (me->rank == 0)
        atomic_store(&me->shared->digest, me->digest);
    rd_meet(me);
    if (atomic_load(&me->shared->digest) != me->digest) {
        fprintf(stderr, "rank %d: results differ from those of rank 0\n", me->rank);
        abort();
    }
    rd_meet(me);
}

void rd_settle(struct rd_rank *me)
{
    struct rd_take *take = me->takes;

    for (int i = 0; i < RD_STREAMS; i++)
        CUDA(cudaStreamSynchronize(me->streams[i]));
    while (take) {
        struct rd_take *next = take->next;
        const struct rd_call *call = &take->call;

        (void)rd_matches(me, call, take->salt, take->result, !take->plain, true);
        me->checks++;
        if (call->kind != RD_REDUCE_SCATTER && call->kind != RD_ROUND)
            me->digest = hash_of(me->digest, take->result,
                                 rd_recv_count(call, me->n) * rd_type_size(call->type));
        free(take);
        take = next;
    }
    me->takes = NULL;
    me->last_take = &me->takes;
    me->device.used = me->host.used = 0;
    compare_digests(me);
}
