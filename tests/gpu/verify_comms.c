/* SPDX-License-Identifier: Apache-2.0
 *
 * Every way of making and ending a communicator, each followed by an all-reduce that is checked. */
#include "common/deadline.h"
#include "tests/gpu/verify.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define WAIT_MS 60000

static int rank_of(ncclComm_t comm)
{
    int rank;

    VF_NCCL(ncclCommUserRank(comm, &rank));
    return rank;
}

static int size_of(ncclComm_t comm)
{
    int size;

    VF_NCCL(ncclCommCount(comm, &size));
    return size;
}

/* Non-blocking communicators answer "in progress": waits until the state is another one. */
static void settle(ncclComm_t comm)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    ncclResult_t state = ncclInProgress;

    for (;;) {
        VF_NCCL(ncclCommGetAsyncError(comm, &state));
        if (state != ncclInProgress)
            break;
        if (lc_deadline_passed(deadline))
            vf_die("ncclCommGetAsyncError", "still in progress at the deadline", __FILE__,
                   __LINE__);
        usleep(500);
    }
    VF_NCCL(state);
}

static void started(ncclComm_t comm, ncclResult_t result)
{
    if (result != ncclInProgress)
        VF_NCCL(result);
    settle(comm);
}

void vf_check_comm(struct vf_rank *rank, ncclComm_t comm, cudaStream_t stream, size_t count,
                   const char *what)
{
    const struct vf_type *type = &vf_types[ncclFloat32];
    ncclResult_t result;

    vf_fill_input(type, VF_SUM, rank_of(comm), 0, count, rank->host_in);
    VF_CUDA(cudaMemcpyAsync(rank->device_send, rank->host_in, count * 4, cudaMemcpyHostToDevice,
                            stream));
    rank->calls[VF_ALL_REDUCE]++;
    result = ncclAllReduce(rank->device_send, rank->device_recv, count, ncclFloat32, ncclSum, comm,
                           stream);
    started(comm, result);
    VF_CUDA(cudaStreamSynchronize(stream));
    vf_fill_result(type, VF_SUM, size_of(comm), 0, count, rank->host_want);
    vf_compare(rank, rank->device_recv, rank->host_want, count * 4, what);
}

static void expect(struct vf_rank *rank, const char *what, int got, int wanted)
{
    rank->checks++;
    if (got != wanted)
        vf_fail(rank, "%s: %d, not %d", what, got, wanted);
}

/* Even and odd ranks, in reverse order; then a split that rank 0 stays out of. */
static void split(struct vf_rank *rank)
{
    int color = rank->rank % 2;
    int members = (rank->ranks + 1 - color) / 2;
    ncclComm_t part, others;

    VF_NCCL(ncclCommSplit(rank->comm, color, -rank->rank, &part, NULL));
    expect(rank, "split: size", size_of(part), members);
    expect(rank, "split: rank", rank_of(part), members - 1 - rank->rank / 2);
    vf_check_comm(rank, part, rank->stream, 1001, "all-reduce in a split communicator");
    VF_NCCL(ncclCommDestroy(part));

    VF_NCCL(ncclCommSplit(rank->comm, rank->rank == 0 ? NCCL_SPLIT_NOCOLOR : 7, rank->rank, &others,
                          NULL));
    expect(rank, "split without rank 0: communicator", others != NULL, rank->rank != 0);
    if (!others)
        return;
    vf_check_comm(rank, others, rank->stream, 1001, "all-reduce in a split without rank 0");
    VF_NCCL(ncclCommDestroy(others));
}

/* The last rank is left out and makes no call. */
static void shrink(struct vf_rank *rank)
{
    int out = rank->ranks - 1;
    ncclComm_t rest;

    if (rank->rank == out)
        return;
    VF_NCCL(ncclCommShrink(rank->comm, &out, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
    expect(rank, "shrink: size", size_of(rest), rank->ranks - 1);
    vf_check_comm(rank, rest, rank->stream, 1001, "all-reduce in a shrunk communicator");
    VF_NCCL(ncclCommDestroy(rest));
}

static ncclUniqueId next_id(struct vf_rank *rank)
{
    ncclUniqueId id;

    memset(&id, 0, sizeof(id));
    if (rank->rank == 0)
        VF_NCCL(ncclGetUniqueId(&id));
    VF_CUDA(
        cudaMemcpyAsync(rank->device_send, &id, sizeof(id), cudaMemcpyHostToDevice, rank->stream));
    rank->calls[VF_BROADCAST]++;
    VF_NCCL(ncclBcast(rank->device_send, sizeof(id), ncclUint8, 0, rank->comm, rank->stream));
    VF_CUDA(
        cudaMemcpyAsync(&id, rank->device_send, sizeof(id), cudaMemcpyDeviceToHost, rank->stream));
    VF_CUDA(cudaStreamSynchronize(rank->stream));
    return id;
}

static void non_blocking(struct vf_rank *rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = next_id(rank);
    ncclComm_t comm;
    ncclResult_t result;

    config.blocking = 0;
    result = ncclCommInitRankConfig(&comm, rank->ranks, id, rank->rank, &config);
    started(comm, result);
    vf_check_comm(rank, comm, rank->stream, 4099, "all-reduce, non-blocking communicator");
    result = ncclCommFinalize(comm);
    started(comm, result);
    result = ncclCommDestroy(comm);
    if (result != ncclInProgress) /* from here on the handle may not be asked */
        VF_NCCL(result);
}

static void scalable(struct vf_rank *rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = next_id(rank);
    ncclComm_t comm;

    VF_NCCL(ncclCommInitRankScalable(&comm, rank->ranks, rank->rank, 1, &id, &config));
    vf_check_comm(rank, comm, rank->stream, 1001, "all-reduce, ncclCommInitRankScalable");
    VF_NCCL(ncclCommFinalize(comm));
    VF_NCCL(ncclCommDestroy(comm));
}

/* Made inside a group, ended by abort. */
static void grouped_and_aborted(struct vf_rank *rank)
{
    ncclUniqueId id = next_id(rank);
    ncclComm_t comm;

    VF_NCCL(ncclGroupStart());
    VF_NCCL(ncclCommInitRank(&comm, rank->ranks, id, rank->rank));
    VF_NCCL(ncclGroupEnd());
    vf_check_comm(rank, comm, rank->stream, 1001, "all-reduce, communicator made in a group");
    VF_NCCL(ncclCommAbort(comm));
}

static void check_all(struct vf_rank *rank, ncclComm_t comms[2], cudaStream_t streams[2],
                      float *buffers[2])
{
    size_t count = 1001;

    for (int i = 0; i < 2; i++) {
        vf_fill_input(&vf_types[ncclFloat32], VF_SUM, i, 0, count, rank->host_in);
        VF_CUDA(cudaSetDevice(i));
        VF_CUDA(cudaMemcpyAsync(buffers[i], rank->host_in, count * 4, cudaMemcpyHostToDevice,
                                streams[i]));
        VF_CUDA(cudaStreamSynchronize(streams[i]));
    }
    VF_NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        rank->calls[VF_ALL_REDUCE]++;
        VF_NCCL(ncclAllReduce(buffers[i], buffers[i], count, ncclFloat32, ncclSum, comms[i],
                              streams[i]));
    }
    VF_NCCL(ncclGroupEnd());
    vf_fill_result(&vf_types[ncclFloat32], VF_SUM, 2, 0, count, rank->host_want);
    for (int i = 0; i < 2; i++) {
        VF_CUDA(cudaStreamSynchronize(streams[i]));
        VF_CUDA(cudaSetDevice(i));
        vf_compare(rank, buffers[i], rank->host_want, count * 4, "all-reduce, ncclCommInitAll");
    }
}

/* Two ranks in one process, by the last rank alone (the others wait in the next collective). */
static void init_all(struct vf_rank *rank)
{
    const int devices[2] = { 0, 1 };
    ncclComm_t comms[2];
    cudaStream_t streams[2];
    float *buffers[2];

    if (rank->devices < 2) {
        vf_note(rank, "ncclCommInitAll needs two devices: NCCL refuses one twice in a process");
        return;
    }
    if (rank->rank != rank->ranks - 1)
        return;
    for (int i = 0; i < 2; i++) {
        VF_CUDA(cudaSetDevice(i));
        VF_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        VF_CUDA(cudaMalloc((void **)&buffers[i], 8192));
    }
    VF_NCCL(ncclCommInitAll(comms, 2, devices));
    check_all(rank, comms, streams, buffers);
    for (int i = 0; i < 2; i++) {
        VF_CUDA(cudaSetDevice(i));
        VF_CUDA(cudaFree(buffers[i]));
        VF_CUDA(cudaStreamDestroy(streams[i]));
        VF_NCCL(ncclCommDestroy(comms[i]));
    }
    VF_CUDA(cudaSetDevice(rank->device));
}

void vf_comms(struct vf_rank *rank)
{
    split(rank);
    shrink(rank);
    non_blocking(rank);
    scalable(rank);
    grouped_and_aborted(rank);
    init_all(rank);
    vf_check_comm(rank, rank->comm, rank->stream, 1001,
                  "all-reduce on the first communicator again");
}
