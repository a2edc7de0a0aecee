/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_VERIFY on the rig: what has been compared, and what came of it. argv: ranks, and "mistaken" if the kernels
 * are. The path is what the environment makes it. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>

#define COUNT   20011  /* 80 KB */
#define LARGE   300007 /* more than the scratch holds */
#define TENSORS 3
#define TENSOR  3001

static struct meeting *meeting;
static bool mistaken;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    float *send, *recv;
};

static float value(int rank, size_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u + i;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) / (1 << 24) + 0.5);
}

static void fill(const struct job *job, size_t count)
{
    for (size_t i = 0; i < count; i++)
        job->send[i] = value(job->rank, i);
}

/* Elements of a sum, from `first` of the ranks' values on. The program's result is ours, mistakes and all. */
static void check(const struct job *job, const float *got, size_t count, size_t first)
{
    double diff = 0, norm = 0;

    CUDA(cudaStreamSynchronize(job->stream));
    for (size_t i = 0; i < count; i++) {
        double want = 0;

        for (int r = 0; r < job->n; r++)
            want += value(r, first + i);
        diff += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    CHECK((sqrt(diff / norm) > 1e-2) == mistaken);
}

static void all_reduce(const struct job *job, size_t count, float *out)
{
    NCCL(ncclAllReduce(job->send, out, count, ncclFloat32, ncclSum, job->comm, job->stream));
}

static void alone(const struct job *job)
{
    size_t part = COUNT / (size_t)job->n;

    fill(job, COUNT);
    all_reduce(job, COUNT, job->recv);
    check(job, job->recv, COUNT, 0);
    fill(job, COUNT);
    all_reduce(job, COUNT, job->send);
    check(job, job->send, COUNT, 0);
    for (int in_place = 0; in_place < 2; in_place++) {
        float *out = in_place ? job->send + (size_t)job->rank * part : job->recv;

        fill(job, COUNT);
        NCCL(ncclReduceScatter(job->send, out, part, ncclFloat32, ncclSum, job->comm, job->stream));
        check(job, out, part, (size_t)job->rank * part);
    }
}

static void grouped(const struct job *job)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        float *out = in_place ? job->send : job->recv;

        fill(job, (size_t)TENSORS * TENSOR);
        NCCL(ncclGroupStart());
        for (size_t t = 0; t < TENSORS; t++)
            NCCL(ncclAllReduce(job->send + t * TENSOR, out + t * TENSOR, TENSOR, ncclFloat32,
                               ncclSum, job->comm, job->stream));
        NCCL(ncclGroupEnd());
        check(job, out, (size_t)TENSORS * TENSOR, 0);
    }
}

/* Once per thread that makes the call: whoever waits in it for the device waits for ever. */
static void wait_for(void *gate)
{
    while (!atomic_load((_Atomic int *)gate))
        usleep(500);
}

static void nothing_is_waited_for(const struct job *job)
{
    _Atomic int gate = 0;

    fill(job, COUNT);
    CUDA(cudaLaunchHostFunc(job->stream, wait_for, &gate));
    all_reduce(job, COUNT, job->recv);
    atomic_store(&gate, 1);
    check(job, job->recv, COUNT, 0);
}

static void what_cannot_be_compared_is_counted(const struct job *job)
{
    cudaGraphExec_t executable;
    cudaGraph_t graph;

    fill(job, LARGE);
    all_reduce(job, LARGE, job->recv);
    check(job, job->recv, LARGE, 0);
    fill(job, COUNT);
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    all_reduce(job, COUNT, job->recv);
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; i++)
        CUDA(cudaGraphLaunch(executable, job->stream));
    check(job, job->recv, COUNT, 0);
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
}

/* Too small for bf16, and no group: without rings that is NCCL's own. */
static void until_agreed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        fill(job, COUNT);
        NCCL(ncclGroupStart()); /* as packing is agreed on in groups only */
        all_reduce(job, COUNT / 2, job->recv);
        NCCL(ncclAllReduce(job->send + COUNT / 2, job->recv + COUNT / 2, COUNT / 2, ncclInt32,
                           ncclMin, job->comm, job->stream));
        NCCL(ncclGroupEnd());
        CUDA(cudaStreamSynchronize(job->stream));
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(LARGE * sizeof(float));
    job.recv = device_alloc(LARGE * sizeof(float));
    until_agreed(&job);
    what_cannot_be_compared_is_counted(&job);
    grouped(&job);
    alone(&job);
    nothing_is_waited_for(&job);
    for (int i = 0; i < 10; i++)
        alone(&job);
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

static char folder[] = "/tmp/lc-verified-XXXXXX";

static void check_reports(int n, int calls)
{
    char command[512];

    (void)snprintf(
        command, sizeof(command),
        "cat %s/*.json | tr -d ' \n' | grep -o '\"verify\":{\"begun\":%d,\"verified\":%d,"
        "\"unlike\":%d,\"not_verified\":2,' | wc -l | grep -qx %d && rm -r %s",
        folder, calls, calls, mistaken ? calls : 0, n, folder);
    CHECK(unsetenv("LD_PRELOAD") == 0 && system(command) == 0);
}

int main(int argc, char **argv)
{
    const char *verify = getenv("LOONGCOMM_VERIFY");
    int n = argc > 1 ? atoi(argv[1]) : 2, calls, result;

    CHECK(verify);
    calls = atoi(verify);
    mistaken = argc > 2;
    CHECK(mkdtemp(folder) && setenv("LOONGCOMM_DIR", folder, 1) == 0 &&
          setenv("LOONGCOMM_REPORT", "json", 1) == 0);
    said_begin();
    meeting = meeting_new();
    result = lc_ranks_run(n, rank_main, NULL, 200);
    if (result)
        return result;
    CHECK(said_count("verified call") == n * calls);
    CHECK(said_count("agrees with NCCL") == (mistaken ? 0 : n * calls));
    CHECK(said_count("differs from NCCL") == (mistaken ? n * calls : 0));
    check_reports(n, calls);
    return 0;
}
