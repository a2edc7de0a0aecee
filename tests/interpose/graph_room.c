/* SPDX-License-Identifier: Apache-2.0
 *
 * A captured all-to-all keeps its grid, so that a communicator that comes later finds too little of the device left and
 * stays with NCCL; when the first one is gone, the next gets its rings. LOONGCOMM_PEER=force, two ranks of the rig. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#define RANKS 2
#define COUNT 3000 /* for each rank, fp32 */

static struct meeting *meeting;

struct job {
    int rank;
    cudaStream_t stream;
    float *send, *recv;
};

static void sum(const struct job *job, ncclComm_t comm)
{
    for (size_t i = 0; i < COUNT; i++)
        job->send[i] = (float)(job->rank + 1);
    NCCL(ncclAllReduce(job->send, job->recv, COUNT, ncclFloat32, ncclSum, comm, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    for (size_t i = 0; i < COUNT; i++)
        CHECK(job->recv[i] == 3.0f);
}

/* Sums until the ranks together have said so often what becomes of the communicator. */
static void until_said(const struct job *job, ncclComm_t comm, const char *what, int times)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);

    for (bool said = false; !said;) {
        CHECK(!lc_deadline_passed(until));
        sum(job, comm);
        meeting_wait(meeting, RANKS);
        said = said_count(what) >= times;
        meeting_wait(meeting, RANKS);
    }
}

static void replay(const struct job *job, cudaGraphExec_t exec)
{
    for (size_t i = 0; i < RANKS * COUNT; i++)
        job->send[i] = (float)(job->rank * 10 + (int)(i / COUNT));
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    for (size_t i = 0; i < RANKS * COUNT; i++)
        CHECK(job->recv[i] == (float)((int)(i / COUNT) * 10 + job->rank));
}

static ncclComm_t another(const struct job *job)
{
    meeting_wait(meeting, RANKS);
    if (job->rank == 0)
        atomic_store(&meeting->has_id, 0);
    meeting_wait(meeting, RANKS);
    return comm_up(meeting, job->rank, RANKS);
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank };
    ncclComm_t first, second, third;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    first = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(RANKS * COUNT * sizeof(float));
    job.recv = device_alloc(RANKS * COUNT * sizeof(float));
    until_said(&job, first, "committed at", RANKS);
    CUDA(cudaStreamBeginCapture(job.stream, cudaStreamCaptureModeThreadLocal));
    NCCL(ncclAlltoAll(job.send, job.recv, COUNT, ncclFloat32, first, job.stream));
    CUDA(cudaStreamEndCapture(job.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    replay(&job, exec);

    second = another(&job);
    until_said(&job, second, "leave it no room", 1); /* who knows first */
    until_said(&job, second, "committed at", 2 * RANKS);
    CHECK(said_count("in peers' memory, ") == RANKS);
    for (int i = 0; i < 20; i++) {
        sum(&job, second);
        replay(&job, exec);
    }

    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    NCCL(ncclCommDestroy(first));
    third = another(&job);
    until_said(&job, third, "committed at", 3 * RANKS);
    CHECK(said_count("in peers' memory, ") == 2 * RANKS);
    NCCL(ncclCommDestroy(second));
    NCCL(ncclCommDestroy(third));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

int main(void)
{
    said_begin();
    meeting = meeting_new();
    return lc_ranks_run(RANKS, rank_main, NULL, 60);
}
