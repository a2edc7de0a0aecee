/* SPDX-License-Identifier: Apache-2.0
 *
 * Several operations at once: groups, nested groups, two communicators, two streams, captured graphs. */
#include "tests/gpu/verify.h"

#include <stdio.h>
#include <string.h>

#define COUNT   ((size_t)4099)
#define PIECES  6
#define REPLAYS 4

static const struct vf_type *const f32 = &vf_types[ncclFloat32];

/* Fresh input at the start of the send arena, enqueued on a stream: rank + shift in the role of the rank. */
static void put(struct vf_rank *rank, size_t count, int shift, cudaStream_t stream)
{
    vf_fill_input(f32, VF_SUM, rank->rank + shift, 0, count, rank->host_in);
    VF_CUDA(cudaMemcpyAsync(rank->device_send, rank->host_in, count * 4, cudaMemcpyHostToDevice,
                            stream));
    VF_CUDA(cudaStreamSynchronize(stream)); /* host_in is written again by the next call */
}

/* The sum of what put() gave every rank. */
static void want_sum(struct vf_rank *rank, size_t count, int shift)
{
    float *want = (float *)rank->host_want, *one = (float *)rank->host_got;

    memset(want, 0, count * 4);
    for (int from = 0; from < rank->ranks; from++) {
        vf_fill_input(f32, VF_SUM, from + shift, 0, count, one);
        for (size_t i = 0; i < count; i++)
            want[i] += one[i];
    }
}

static void all_reduce(struct vf_rank *rank, size_t begin, size_t count, ncclComm_t comm,
                       cudaStream_t stream)
{
    rank->calls[VF_ALL_REDUCE]++;
    VF_NCCL(ncclAllReduce(rank->device_send + begin * 4, rank->device_recv + begin * 4, count,
                          ncclFloat32, ncclSum, comm, stream));
}

/* One all-reduce in PIECES pieces, as callers that coalesce do it. depth groups around it. */
static void grouped(struct vf_rank *rank, int depth)
{
    put(rank, COUNT * PIECES, 0, rank->stream);
    for (int i = 0; i < depth; i++)
        VF_NCCL(ncclGroupStart());
    for (size_t i = 0; i < PIECES; i++)
        all_reduce(rank, i * COUNT, COUNT, rank->comm, rank->stream);
    for (int i = 0; i < depth; i++)
        VF_NCCL(ncclGroupEnd());
    vf_fill_result(f32, VF_SUM, rank->ranks, 0, COUNT * PIECES, rank->host_want);
    vf_compare(rank, rank->device_recv, rank->host_want, COUNT * PIECES * 4,
               depth > 1 ? "all-reduces in nested groups" : "all-reduces in a group");
    VF_NCCL(ncclGroupStart());
    VF_NCCL(ncclGroupEnd()); /* an empty one is legal */
}

/* A group of different operations and types. */
static void mixed_group(struct vf_rank *rank)
{
    unsigned char *recv = rank->device_recv, *want = rank->host_want;
    size_t ranks = (size_t)rank->ranks;

    put(rank, COUNT, 0, rank->stream);
    VF_NCCL(ncclGroupStart());
    all_reduce(rank, 0, COUNT, rank->comm, rank->stream);
    rank->calls[VF_ALL_GATHER]++;
    VF_NCCL(ncclAllGather(rank->device_send, recv + COUNT * 4, COUNT * 4, ncclInt8, rank->comm,
                          rank->stream));
    rank->calls[VF_BROADCAST]++;
    VF_NCCL(ncclBroadcast(rank->device_send, recv + COUNT * 4 * (ranks + 1), COUNT, ncclFloat32,
                          rank->ranks - 1, rank->comm, rank->stream));
    VF_NCCL(ncclGroupEnd());
    vf_fill_result(f32, VF_SUM, rank->ranks, 0, COUNT, want);
    for (size_t r = 0; r < ranks; r++)
        vf_fill_input(f32, VF_SUM, (int)r, 0, COUNT, want + COUNT * 4 * (r + 1));
    vf_fill_input(f32, VF_SUM, rank->ranks - 1, 0, COUNT, want + COUNT * 4 * (ranks + 1));
    vf_compare(rank, recv, want, COUNT * 4 * (ranks + 2), "different operations in a group");
}

/* The same order of calls on every rank, two communicators in turn, each with a stream of its own. */
static void two_communicators(struct vf_rank *rank, ncclComm_t second, bool in_group)
{
    cudaStream_t stream;

    VF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    put(rank, COUNT * PIECES, 0, rank->stream);
    if (in_group)
        VF_NCCL(ncclGroupStart());
    for (size_t i = 0; i < PIECES; i++)
        all_reduce(rank, i * COUNT, COUNT, i % 2 ? second : rank->comm,
                   i % 2 ? stream : rank->stream);
    if (in_group)
        VF_NCCL(ncclGroupEnd());
    VF_CUDA(cudaStreamSynchronize(stream));
    vf_fill_result(f32, VF_SUM, rank->ranks, 0, COUNT * PIECES, rank->host_want);
    vf_compare(rank, rank->device_recv, rank->host_want, COUNT * PIECES * 4,
               in_group ? "two communicators in a group" : "two communicators in turn");
    VF_CUDA(cudaStreamDestroy(stream));
}

/* The output of one all-reduce is the input of the next, which runs on another stream. */
static void two_streams(struct vf_rank *rank)
{
    cudaStream_t stream;
    cudaEvent_t event;
    float *want = (float *)rank->host_want;

    VF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    VF_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    put(rank, COUNT, 0, rank->stream);
    all_reduce(rank, 0, COUNT, rank->comm, rank->stream);
    VF_CUDA(cudaEventRecord(event, rank->stream));
    VF_CUDA(cudaStreamWaitEvent(stream, event, 0));
    rank->calls[VF_ALL_REDUCE]++;
    VF_NCCL(ncclAllReduce(rank->device_recv, rank->device_recv, COUNT, ncclFloat32, ncclSum,
                          rank->comm, stream));
    VF_CUDA(cudaEventRecord(event, stream));
    VF_CUDA(cudaStreamWaitEvent(rank->stream, event, 0));
    vf_fill_result(f32, VF_SUM, rank->ranks, 0, COUNT, want);
    for (size_t i = 0; i < COUNT; i++)
        want[i] *= (float)rank->ranks;
    vf_compare(rank, rank->device_recv, want, COUNT * 4,
               "one all-reduce behind another, two streams");
    VF_CUDA(cudaEventDestroy(event));
    VF_CUDA(cudaStreamDestroy(stream));
}

static void all_to_all(struct vf_rank *rank, size_t part, void *to)
{
    rank->calls[VF_ALL_TO_ALL]++;
    VF_NCCL(ncclAlltoAll(rank->device_send, to, part, ncclFloat32, rank->comm, rank->stream));
}

static void check_replay(struct vf_rank *rank, size_t part, int shift)
{
    size_t count = part * (size_t)rank->ranks;
    unsigned char *exchanged = rank->device_recv + count * 4;
    char what[64];

    want_sum(rank, count, shift);
    snprintf(what, sizeof(what), "replay %d: all-reduce", shift);
    vf_compare(rank, rank->device_recv, rank->host_want, count * 4, what);
    for (int from = 0; from < rank->ranks; from++)
        vf_fill_input(f32, VF_SUM, from + shift, (size_t)rank->rank * part, part,
                      rank->host_want + (size_t)from * part * 4);
    snprintf(what, sizeof(what), "replay %d: all-to-all", shift);
    vf_compare(rank, exchanged, rank->host_want, count * 4, what);
}

/* Captured once, replayed with other data each time, eager calls on the same communicator in between. */
static void capture(struct vf_rank *rank)
{
    size_t part = 1021, count = part * (size_t)rank->ranks;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;

    VF_CUDA(cudaStreamBeginCapture(rank->stream, cudaStreamCaptureModeThreadLocal));
    all_reduce(rank, 0, count, rank->comm, rank->stream);
    all_to_all(rank, part, rank->device_recv + count * 4);
    VF_CUDA(cudaStreamEndCapture(rank->stream, &graph));
    VF_CUDA(cudaGraphInstantiateWithFlags(&runnable, graph, 0));
    for (int shift = 0; shift < REPLAYS; shift++) {
        put(rank, count, shift, rank->stream);
        VF_CUDA(cudaGraphLaunch(runnable, rank->stream));
        check_replay(rank, part, shift);
        VF_CUDA(cudaMemsetAsync(rank->device_recv, 0, count * 8, rank->stream));
        all_reduce(rank, 0, count, rank->comm, rank->stream);
        all_to_all(rank, part, rank->device_recv + count * 4);
        check_replay(rank, part, shift);
    }
    for (int i = 0; i < 2 * REPLAYS; i++) /* back to back */
        VF_CUDA(cudaGraphLaunch(runnable, rank->stream));
    check_replay(rank, part, REPLAYS - 1);
    VF_CUDA(cudaGraphExecDestroy(runnable));
    VF_CUDA(cudaGraphDestroy(graph));
}

static void captured_pairs(struct vf_rank *rank)
{
    int right = (rank->rank + 1) % rank->ranks;
    int left = (rank->rank + rank->ranks - 1) % rank->ranks;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;

    VF_CUDA(cudaStreamBeginCapture(rank->stream, cudaStreamCaptureModeThreadLocal));
    VF_NCCL(ncclGroupStart());
    rank->calls[VF_SEND]++;
    VF_NCCL(ncclSend(rank->device_send, COUNT, ncclFloat32, right, rank->comm, rank->stream));
    rank->calls[VF_RECV]++;
    VF_NCCL(ncclRecv(rank->device_recv, COUNT, ncclFloat32, left, rank->comm, rank->stream));
    VF_NCCL(ncclGroupEnd());
    VF_CUDA(cudaStreamEndCapture(rank->stream, &graph));
    VF_CUDA(cudaGraphInstantiateWithFlags(&runnable, graph, 0));
    for (int shift = 0; shift < REPLAYS; shift++) {
        put(rank, COUNT, shift, rank->stream);
        VF_CUDA(cudaGraphLaunch(runnable, rank->stream));
        vf_fill_input(f32, VF_SUM, left + shift, 0, COUNT, rank->host_want);
        vf_compare(rank, rank->device_recv, rank->host_want, COUNT * 4,
                   "replayed send and receive");
    }
    VF_CUDA(cudaGraphExecDestroy(runnable));
    VF_CUDA(cudaGraphDestroy(graph));
}

void vf_order(struct vf_rank *rank)
{
    ncclUniqueId id;
    ncclComm_t second;

    grouped(rank, 1);
    grouped(rank, 3);
    mixed_group(rank);
    two_streams(rank);

    /* The second communicator's id travels over the first, as in programs without another channel. */
    if (rank->rank == 0)
        VF_NCCL(ncclGetUniqueId(&id));
    VF_CUDA(
        cudaMemcpyAsync(rank->device_send, &id, sizeof(id), cudaMemcpyHostToDevice, rank->stream));
    rank->calls[VF_BROADCAST]++;
    VF_NCCL(ncclBroadcast(rank->device_send, rank->device_send, sizeof(id), ncclInt8, 0, rank->comm,
                          rank->stream));
    VF_CUDA(
        cudaMemcpyAsync(&id, rank->device_send, sizeof(id), cudaMemcpyDeviceToHost, rank->stream));
    VF_CUDA(cudaStreamSynchronize(rank->stream));
    VF_NCCL(ncclCommInitRank(&second, rank->ranks, id, rank->rank));
    two_communicators(rank, second, false);
    two_communicators(rank, second, true);
    VF_NCCL(ncclCommDestroy(second));

    capture(rank);
    captured_pairs(rank);
}
