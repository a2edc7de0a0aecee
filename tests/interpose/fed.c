/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of many all-reduces with bf16 on the wire, LOONGCOMM_ALLREDUCE_WIRE=bf16-accurate: with error feedback they stay
 * near the true ones, without it they drift away. argv: ranks, a word, or none: "rings", "rings-group" and "rings-scatter"
 * (LOONGCOMM_PEER=force), which have it, too, or "without", "no-room" and "group", which have none. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdbool.h>

#define COUNT 265003 /* more than goes through the scratch at once */
#define STEPS 30
#define NEAR  0.03 /* a rounding of each contribution and one of the sum */
#define PARTS 5    /* of what goes in a group */
#define FAR   0.1

static struct meeting *meeting;
static bool without, group, scatter, stochastic;
static double near = NEAR;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    float *send, *recv, *other;
    double *sum;
};

/* Alike at every step: what rounding loses, it loses again. */
static float value(int rank, size_t i)
{
    return 1.001f + (float)(i % 100) / 128 + (float)rank / 100;
}

static double want(const struct job *job, size_t i)
{
    double sum = 0;

    for (int r = 0; r < job->n; r++)
        sum += value(r, i);
    return sum;
}

static void fill(const struct job *job, float *to, float factor)
{
    for (size_t i = 0; i < COUNT; i++)
        to[i] = factor * value(job->rank, i);
}

static void all_reduce_part(const struct job *job, const float *send, size_t at, size_t count)
{
    NCCL(ncclAllReduce(send + at, job->recv + at, count, ncclFloat32, ncclSum, job->comm,
                       job->stream));
}

/* As an all-reduce. What is left of equal parts is too small to be rounded. */
static void reduce_scatter(const struct job *job, const float *send, size_t count)
{
    size_t part = count / (size_t)job->n, all = part * (size_t)job->n;
    float *own = job->recv + (size_t)job->rank * part;

    NCCL(ncclReduceScatter(send, own, part, ncclFloat32, ncclSum, job->comm, job->stream));
    NCCL(ncclAllGather(own, job->recv, part, ncclFloat32, job->comm, job->stream));
    if (all < count)
        all_reduce_part(job, send, all, count - all);
}

static void all_reduce(const struct job *job, const float *send, size_t count)
{
    size_t part = COUNT / PARTS + 7;

    if (scatter) {
        reduce_scatter(job, send, count);
        return;
    }
    if (!group) {
        all_reduce_part(job, send, 0, count);
        return;
    }
    NCCL(ncclGroupStart());
    for (size_t at = 0; at < count; at += part)
        all_reduce_part(job, send, at, count - at < part ? count - at : part);
    NCCL(ncclGroupEnd());
}

static void until_agreed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        fill(job, job->other, 1);
        all_reduce(job, job->other, COUNT);
        CUDA(cudaStreamSynchronize(job->stream));
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
}

/* Largest distance of the sums so far from what they should be. */
static double add(const struct job *job, int step)
{
    double worst = 0;

    CUDA(cudaStreamSynchronize(job->stream));
    for (size_t i = 0; i < COUNT; i++) {
        job->sum[i] += job->recv[i];
        worst = fmax(worst, fabs(job->sum[i] - (step + 1) * want(job, i)));
    }
    return worst;
}

static void sums_stay_near(const struct job *job)
{
    double worst = 0;

    fill(job, job->send, 1);
    for (int step = 0; step < STEPS; step++) {
        all_reduce(job, job->send, COUNT);
        worst = add(job, step);
        CHECK(without || worst < near);
    }
    CHECK(without == (worst > (stochastic ? 2 : 1) * FAR));
    memset(job->sum, 0, COUNT * sizeof(*job->sum));
}

/* The graph's first launch owes nothing. */
static void so_do_those_of_a_graph(const struct job *job)
{
    cudaGraphExec_t executable;
    cudaGraph_t graph;
    float *send = device_alloc(COUNT * sizeof(float));

    fill(job, send, 1);
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    all_reduce(job, send, COUNT);
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (int step = 0; step < STEPS / 3; step++) {
        CUDA(cudaGraphLaunch(executable, job->stream));
        CHECK(add(job, step) < near);
    }
    memset(job->sum, 0, COUNT * sizeof(*job->sum));
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaFree(send));
}

/* Nobody says that other data have come to a place. No result is more wrong for it than two roundings make it. */
static void other_data_at_the_address_come_to_no_harm(const struct job *job)
{
    for (int step = 0; step < 4; step++) {
        float factor = step ? 1e-3f : 1e6f;

        fill(job, job->send, factor);
        all_reduce(job, job->send, COUNT);
        CUDA(cudaStreamSynchronize(job->stream));
        for (size_t i = 0; i < COUNT; i++)
            CHECK(fabs(job->recv[i] / (factor * want(job, i)) - 1) < (stochastic ? 0.026 : 0.017));
    }
}

/* As if it were new. */
static void another_count_owes_nothing(const struct job *job)
{
    float *keep = calloc(COUNT, sizeof(float));

    CHECK(keep);
    fill(job, job->send, 1);
    fill(job, job->other, 1);
    all_reduce(job, job->send, COUNT);
    for (size_t less = 24; (less -= 8) < 24;) {
        all_reduce(job, job->send, COUNT - less);
        CUDA(cudaStreamSynchronize(job->stream));
        memcpy(keep, job->recv, (COUNT - less) * sizeof(float));
        all_reduce(job, job->other, COUNT - less);
        CUDA(cudaStreamSynchronize(job->stream));
        CHECK(memcmp(keep, job->recv, (COUNT - less) * sizeof(float)) == 0);
    }
    free(keep);
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    (void)arg;
    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(COUNT * sizeof(float));
    job.recv = device_alloc(COUNT * sizeof(float));
    job.other = device_alloc(COUNT * sizeof(float));
    job.sum = calloc(COUNT, sizeof(*job.sum));
    CHECK(job.sum);
    until_agreed(&job);
    sums_stay_near(&job);
    if (!without) {
        so_do_those_of_a_graph(&job);
        other_data_at_the_address_come_to_no_harm(&job);
        if (!stochastic)
            another_count_owes_nothing(&job);
    }
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    CUDA(cudaFree(job.other));
    free(job.sum);
    return 0;
}

int main(int argc, char **argv)
{
    const char *word = argc > 2 ? argv[2] : "", *rounding = getenv("LOONGCOMM_ROUNDING");
    int n = argc > 1 ? atoi(argv[1]) : 2, result;

    without = strcmp(word, "without") == 0 || strcmp(word, "no-room") == 0 ||
              strcmp(word, "group") == 0;
    group = strcmp(word, "group") == 0 || strcmp(word, "rings-group") == 0;
    scatter = strcmp(word, "rings-scatter") == 0;
    stochastic = rounding && strcmp(rounding, "stochastic") == 0;
    if (stochastic)
        near = 3 * NEAR; /* they may owe several roundings */
    said_begin();
    meeting = meeting_new();
    result = lc_ranks_run(n, rank_main, NULL, 200);
    if (result)
        return result;
    CHECK(said_count("no room for all buffers") == (strcmp(word, "no-room") == 0 ? n : 0));
    CHECK(said_count("that go through NCCL go without") == (strcmp(word, "group") == 0 ? n : 0));
    return 0;
}
