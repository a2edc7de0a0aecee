/* SPDX-License-Identifier: Apache-2.0
 *
 * Send and receive: alone, in rings, between all pairs (to oneself included), with parts of any size. */
#include "tests/gpu/verify.h"

#include <stdio.h>

static void send(struct vf_rank *rank, const void *from, size_t count, const struct vf_type *type,
                 int peer)
{
    rank->calls[VF_SEND]++;
    VF_NCCL(ncclSend(from, count, type->type, peer, rank->comm, rank->stream));
}

static void receive(struct vf_rank *rank, void *to, size_t count, const struct vf_type *type,
                    int peer)
{
    rank->calls[VF_RECV]++;
    VF_NCCL(ncclRecv(to, count, type->type, peer, rank->comm, rank->stream));
}

/* Neighbours 0-1, 2-3, ...: the even one sends first. No group. */
static void lone(struct vf_rank *rank, const struct vf_type *type, size_t count)
{
    int peer = rank->rank ^ 1;
    size_t bytes = count * type->size;
    unsigned char *from = rank->device_send + type->size; /* unaligned on purpose */
    char what[128];

    if (peer >= rank->ranks)
        return;
    vf_fill_bits(type->size, rank->rank, peer, count, rank->host_in);
    vf_fill_bits(type->size, peer, rank->rank, count, rank->host_want);
    VF_CUDA(cudaMemcpyAsync(from, rank->host_in, bytes, cudaMemcpyHostToDevice, rank->stream));
    if (rank->rank < peer) {
        send(rank, from, count, type, peer);
        receive(rank, rank->device_recv, count, type, peer);
    } else {
        receive(rank, rank->device_recv, count, type, peer);
        send(rank, from, count, type, peer);
    }
    snprintf(what, sizeof(what), "lone send and receive %s count %zu", type->name, count);
    vf_compare(rank, rank->device_recv, rank->host_want, bytes, what);
}

static void ring(struct vf_rank *rank, const struct vf_type *type, size_t count)
{
    int right = (rank->rank + 1) % rank->ranks;
    int left = (rank->rank + rank->ranks - 1) % rank->ranks;
    size_t bytes = count * type->size;
    char what[128];

    vf_fill_bits(type->size, rank->rank, right, count, rank->host_in);
    vf_fill_bits(type->size, left, rank->rank, count, rank->host_want);
    VF_CUDA(cudaMemcpyAsync(rank->device_send, rank->host_in, bytes, cudaMemcpyHostToDevice,
                            rank->stream));
    VF_NCCL(ncclGroupStart());
    send(rank, rank->device_send, count, type, right);
    receive(rank, rank->device_recv, count, type, left);
    VF_NCCL(ncclGroupEnd());
    snprintf(what, sizeof(what), "ring %s count %zu", type->name, count);
    vf_compare(rank, rank->device_recv, rank->host_want, bytes, what);
}

/* Rows from source to target: some none, some many, the same at both ends. */
static size_t rows(int source, int target, size_t scale)
{
    return (size_t)((source * 3 + target * 5) % 4) * scale;
}

/* What torch does for all_to_all_single with unequal parts: a send and a receive for every rank. */
static void all_pairs(struct vf_rank *rank, const struct vf_type *type, size_t scale)
{
    size_t sent = 0, got = 0, at = 0;
    char what[128];

    for (int peer = 0; peer < rank->ranks; peer++) {
        size_t to = rows(rank->rank, peer, scale), from = rows(peer, rank->rank, scale);

        vf_fill_bits(type->size, rank->rank, peer, to, rank->host_in + sent);
        vf_fill_bits(type->size, peer, rank->rank, from, rank->host_want + got);
        sent += to * type->size;
        got += from * type->size;
    }
    VF_CUDA(cudaMemcpyAsync(rank->device_send, rank->host_in, sent, cudaMemcpyHostToDevice,
                            rank->stream));
    VF_NCCL(ncclGroupStart());
    sent = 0;
    for (int peer = 0; peer < rank->ranks; peer++) {
        size_t to = rows(rank->rank, peer, scale), from = rows(peer, rank->rank, scale);

        send(rank, rank->device_send + sent, to, type, peer);
        receive(rank, rank->device_recv + at, from, type, peer);
        sent += to * type->size;
        at += from * type->size;
    }
    VF_NCCL(ncclGroupEnd());
    snprintf(what, sizeof(what), "all pairs %s scale %zu", type->name, scale);
    vf_compare(rank, rank->device_recv, rank->host_want, got, what);
}

/* Several messages between the same two ranks in one group arrive in the order of the calls. */
static void several(struct vf_rank *rank)
{
    const struct vf_type *type = &vf_types[ncclInt32];
    int right = (rank->rank + 1) % rank->ranks;
    int left = (rank->rank + rank->ranks - 1) % rank->ranks;
    size_t count = (size_t)5 * 333;

    vf_fill_bits(type->size, rank->rank, right, count, rank->host_in);
    vf_fill_bits(type->size, left, rank->rank, count, rank->host_want);
    VF_CUDA(cudaMemcpyAsync(rank->device_send, rank->host_in, count * type->size,
                            cudaMemcpyHostToDevice, rank->stream));
    VF_NCCL(ncclGroupStart());
    for (size_t i = 0; i < 5; i++) {
        send(rank, rank->device_send + i * 333 * type->size, 333, type, right);
        receive(rank, rank->device_recv + i * 333 * type->size, 333, type, left);
    }
    VF_NCCL(ncclGroupEnd());
    vf_compare(rank, rank->device_recv, rank->host_want, count * type->size,
               "several messages in one group");
}

void vf_pairs(struct vf_rank *rank)
{
    static const size_t counts[] = { 0, 1, 3, VF_BIG };

    for (int t = 0; t < ncclNumTypes; t++) {
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            lone(rank, &vf_types[t], counts[i]);
            ring(rank, &vf_types[t], counts[i]);
        }
        all_pairs(rank, &vf_types[t], 1);
        all_pairs(rank, &vf_types[t], 1001);
    }
    several(rank);
}
