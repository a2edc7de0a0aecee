/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators that are aborted while something of ours waits on their stream. Two ranks, bf16 on the wire. */
#include "tests/rig/test_nccl.h"

#include "common/deadline.h"

#include <stdbool.h>

#define RANKS 2
#define COMMS 3
#define COUNT 4096

static struct meeting *meetings;

struct job {
    int rank;
    ncclComm_t comm[COMMS];
    cudaStream_t stream;
    float *data;
};

static void all_reduce(const struct job *job, int comm)
{
    NCCL(ncclAllReduce(job->data, job->data, COUNT, ncclFloat32, ncclAvg, job->comm[comm],
                       job->stream));
}

/* Until it is committed. */
static void warm_up(const struct job *job, int comm, struct meeting *meeting)
{
    until_bf16(job->comm[comm], job->stream, job->data, COUNT);
    meeting_wait(meeting, RANKS);
}

static void wait_for(void *gate)
{
    while (!atomic_load((_Atomic int *)gate))
        usleep(500);
}

static size_t free_memory(void)
{
    size_t left, all;

    CUDA(cudaMemGetInfo(&left, &all));
    return left;
}

static void abort_all(const struct job *job, bool grouped)
{
    int64_t before = lc_now_ns();

    if (grouped)
        NCCL(ncclGroupStart());
    for (int i = 0; i < COMMS; i++)
        NCCL(ncclCommAbort(job->comm[i]));
    if (grouped)
        NCCL(ncclGroupEnd());
    CHECK(lc_now_ns() - before < 20000 * INT64_C(1000000));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank };
    _Atomic int gate = 0;
    size_t left = 0;

    (void)arg;
    CUDA(cudaSetDevice(rank));
    job.stream = stream_up();
    CUDA(cudaMalloc((void **)&job.data, COUNT * sizeof(float)));
    memset(job.data, 0, COUNT * sizeof(float));
    for (int round = 0; round < 3; round++) {
        struct meeting *meeting = &meetings[round * COMMS];

        for (int i = 0; i < COMMS; i++) {
            job.comm[i] = comm_up(&meeting[i], rank, n);
            warm_up(&job, i, &meeting[i]);
        }
        if (round == 0)
            left = free_memory();
        CHECK(free_memory() == left); /* what the aborted ones had is in use again */
        for (size_t i = 0; i < COUNT; i++)
            job.data[i] = (float)rank;
        all_reduce(&job, round);
        CUDA(cudaStreamSynchronize(job.stream));
        CHECK(job.data[0] == 0.5f && job.data[COUNT - 1] == 0.5f);
        atomic_store(&gate, 0);
        CUDA(cudaLaunchHostFunc(job.stream, wait_for, &gate));
        for (int i = 0; i < COMMS; i++)
            all_reduce(&job, i);
        meeting_wait(meeting, RANKS);
        abort_all(&job, round != 1);
        atomic_store(&gate, 1);
        CUDA(cudaStreamSynchronize(job.stream));
        meeting_wait(meeting, RANKS);
    }
    job.comm[0] = comm_up(&meetings[3 * COMMS], rank, n);
    warm_up(&job, 0, &meetings[3 * COMMS]);
    NCCL(ncclCommDestroy(job.comm[0])); /* with it everything goes that was kept */
    CUDA(cudaFree(job.data));
    CUDA(cudaStreamDestroy(job.stream));
    return 0;
}

int main(void)
{
    meetings = mmap(NULL, (3 * COMMS + 1) * sizeof(*meetings), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(meetings != MAP_FAILED);
    return lc_ranks_run(RANKS, rank_main, NULL, 200);
}
