/* SPDX-License-Identifier: Apache-2.0
 *
 * A communicator that finds too little of the device left stays with NCCL, which the report says; when an earlier one is gone,
 * the next gets its rings. LOONGCOMM_PEER=force, two ranks of the rig. argv: `graphs`, a captured all-to-all keeps its grid,
 * or `memory`, LOONGCOMM_STAGING_MAX is for two communicators. */
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

static struct job job_up(int rank)
{
    struct job job = { .rank = rank, .stream = stream_up() };

    job.send = device_alloc(RANKS * COUNT * sizeof(float));
    job.recv = device_alloc(RANKS * COUNT * sizeof(float));
    return job;
}

static void job_down(const struct job *job)
{
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaFree(job->send));
    CUDA(cudaFree(job->recv));
}

static void message(const struct job *job, ncclComm_t comm)
{
    NCCL(ncclGroupStart());
    NCCL(ncclSend(job->send, COUNT, ncclFloat32, !job->rank, comm, job->stream));
    NCCL(ncclRecv(job->recv, COUNT, ncclFloat32, !job->rank, comm, job->stream));
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(job->stream));
}

static int beside_memory(int rank, int n, void *arg)
{
    ncclComm_t comms[4];
    struct job job;

    comms[0] = comm_up(meeting, rank, n);
    job = job_up(rank);
    for (int i = 0; i < 3; i++) {
        comms[i] = i ? another(&job) : comms[0];
        until_said(&job, comms[i], "committed at", (i + 1) * RANKS);
        CHECK(said_count("in peers' memory, ") == (i < 2 ? i + 1 : 2) * RANKS);
        CHECK((said_count("MB of LOONGCOMM_STAGING_MAX: its calls go through NCCL") > 0) ==
              (i == 2)); /* who knows first */
    }
    for (int i = 0; i < 60; i++) {
        sum(&job, comms[i % 3]);
        message(&job, comms[i % 3]);
    }
    NCCL(ncclCommDestroy(comms[0]));
    comms[3] = another(&job);
    until_said(&job, comms[3], "committed at", 4 * RANKS);
    CHECK(said_count("in peers' memory, ") == 3 * RANKS);
    for (int i = 1; i < 4; i++)
        NCCL(ncclCommDestroy(comms[i]));
    job_down(&job);
    return 0;
}

static int beside_graphs(int rank, int n, void *arg)
{
    ncclComm_t first, second, third;
    cudaGraphExec_t exec;
    cudaGraph_t graph;
    struct job job;

    first = comm_up(meeting, rank, n);
    job = job_up(rank);
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
    job_down(&job);
    return 0;
}

static int old_stderr;

/* What this process and its children write to standard error goes to a file, which is given back. */
static int begin_report(void)
{
    int file = memfd_create("report", 0);

    old_stderr = dup(STDERR_FILENO);
    CHECK(file >= 0 && old_stderr >= 0 && dup2(file, STDERR_FILENO) == STDERR_FILENO);
    return file;
}

static void check_report(int file)
{
    static char text[1 << 16];

    CHECK(dup2(old_stderr, STDERR_FILENO) == STDERR_FILENO);
    CHECK(pread(file, text, sizeof(text) - 1, 0) > 0);
    (void)fputs(text, stderr);
    CHECK(strstr(text, "nccl (no-peer-memory)") &&
          strstr(text, "stayed with NCCL since memory between"));
}

int main(int argc, char **argv)
{
    bool graphs = argc > 1 && strcmp(argv[1], "graphs") == 0;
    int report = begin_report(), failed;

    said_begin();
    meeting = meeting_new();
    failed = lc_ranks_run(RANKS, graphs ? beside_graphs : beside_memory, NULL, 60);
    check_report(report);
    return failed;
}
