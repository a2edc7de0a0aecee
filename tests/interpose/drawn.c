/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_ROUNDING=stochastic: results are right in the mean, no two calls or replays of a graph round alike, and all ranks
 * get the same bits. argv: ranks, and "group" or nothing. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdbool.h>

#define COUNT 120000
#define CALLS 6

/* A quarter of what lies between two bf16 numbers there: rounded to nearest it is 1. */
#define VALUE (1 + 0x1p-9F)
#define STEP  0x1p-7

static struct meeting *meeting;
static bool group;
static uint64_t (*sums)[CALLS]; /* of the bits of results, by rank, each written by it */

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    float *send, *recv;
};

static void all_reduce(const struct job *job)
{
    size_t first = group ? COUNT / 3 : COUNT;

    NCCL(ncclGroupStart());
    for (size_t at = 0; at < COUNT; at += first)
        NCCL(ncclAllReduce(job->send + at, job->recv + at, first, ncclFloat32, ncclSum, job->comm,
                           job->stream));
    NCCL(ncclGroupEnd());
}

static void until_agreed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        all_reduce(job);
        CUDA(cudaStreamSynchronize(job->stream));
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
}

/* Of the contributions, and of the sum, whose steps are up to twice as large for two ranks, four times for more. */
static void check_spread(const struct job *job, double mean, double variance)
{
    double own = STEP * STEP * 0.25 * 0.75, step = STEP * (job->n == 2 ? 2 : 4);
    double most = job->n * own + step * step / 4, sigma = sqrt(most / COUNT);

    CHECK(fabs(mean - job->n * (double)VALUE) < 5 * sigma);
    CHECK(variance < 1.1 * most && variance > 0.5 * own);
}

static void check(const struct job *job, int call)
{
    double sum = 0, squares = 0, true_sum = job->n * (double)VALUE;

    CUDA(cudaStreamSynchronize(job->stream));
    for (size_t i = 0; i < COUNT; i++) {
        double off = (double)job->recv[i] - true_sum;
        uint32_t bits;

        memcpy(&bits, &job->recv[i], sizeof(bits));
        sums[job->rank][call] = sums[job->rank][call] * 31 + bits;
        sum += off;
        squares += off * off;
    }
    check_spread(job, true_sum + sum / COUNT, squares / COUNT);
    meeting_wait(meeting, job->n);
    CHECK(sums[job->rank][call] == sums[0][call]);
    for (int before = 0; before < call; before++)
        CHECK(sums[0][before] != sums[0][call]);
}

static void replay(const struct job *job)
{
    cudaGraphExec_t executable;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    all_reduce(job);
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (int call = CALLS / 2; call < CALLS; call++) {
        CUDA(cudaGraphLaunch(executable, job->stream));
        check(job, call);
    }
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    (void)arg;
    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(COUNT * sizeof(float));
    job.recv = device_alloc(COUNT * sizeof(float));
    for (size_t i = 0; i < COUNT; i++)
        job.send[i] = VALUE;
    until_agreed(&job);
    for (int call = 0; call < CALLS / 2; call++) {
        all_reduce(&job);
        check(&job, call);
    }
    replay(&job);
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2;

    group = argc > 2;
    sums = mmap(NULL, (size_t)n * sizeof(*sums), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                -1, 0);
    CHECK(sums != MAP_FAILED);
    said_begin();
    meeting = meeting_new();
    return lc_ranks_run(n, rank_main, NULL, 200);
}
