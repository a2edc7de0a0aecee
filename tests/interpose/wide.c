/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_MAX_CTAS on the rig: sums take as many CTAs as it says, eager, in groups and in graphs; what a communicator has had
 * it keeps, so that a second one stays with NCCL, and one behind it has as many again. argv: ranks, the library of grids.c,
 * CTAs that are expected, and "threads", or "shared": all ranks are on one device. LOONGCOMM_PEER=force, no exchanges. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>

#define MOST   ((size_t)300000) /* fp32 of a call */
#define GROUP  5
#define ROUNDS 6

static struct meeting *meeting;
static uint32_t (*grids_largest)(int device);
static uint32_t expected;

struct job {
    int rank, n, device;
    cudaStream_t stream;
    float *send, *recv;
};

static size_t draw(uint64_t *state, size_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(*state >> 33) % below;
}

/* Small whole numbers, whose sums are exact. */
static float value_of(size_t i, int rank)
{
    return (float)((i * 5 + (size_t)rank * 3) % 17);
}

static void fill(const struct job *job, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        job->send[i] = value_of(i, job->rank);
        job->recv[i] = -1;
    }
}

static void check(const struct job *job, size_t from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float sum = 0;

        for (int r = 0; r < job->n; r++)
            sum += value_of(from + i, r);
        CHECK(job->recv[i] == sum);
    }
}

static void sum(const struct job *job, ncclComm_t comm, size_t count)
{
    fill(job, count);
    NCCL(ncclAllReduce(job->send, job->recv, count, ncclFloat32, ncclSum, comm, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, 0, count);
}

static void scatter(const struct job *job, ncclComm_t comm, size_t count)
{
    count /= (size_t)job->n;
    fill(job, count * (size_t)job->n);
    NCCL(ncclReduceScatter(job->send, job->recv, count, ncclFloat32, ncclSum, comm, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, (size_t)job->rank * count, count);
}

static void issue_group(const struct job *job, ncclComm_t comm, size_t count)
{
    size_t each = count / GROUP;

    NCCL(ncclGroupStart());
    for (size_t i = 0; i < GROUP; i++)
        NCCL(ncclAllReduce(job->send + i * each, job->recv + i * each, each, ncclFloat32, ncclSum,
                           comm, job->stream));
    NCCL(ncclGroupEnd());
}

static void group(const struct job *job, ncclComm_t comm, size_t count)
{
    fill(job, count);
    issue_group(job, comm, count);
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, 0, count / GROUP * GROUP);
}

static cudaGraphExec_t capture(const struct job *job, ncclComm_t comm)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    issue_group(job, comm, MOST);
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void replay(const struct job *job, cudaGraphExec_t exec)
{
    fill(job, MOST);
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, 0, MOST / GROUP * GROUP);
}

/* Sums until the ranks together have said so often what becomes of the communicator. */
static void until_said(const struct job *job, ncclComm_t comm, const char *what, int times)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);

    for (bool said = false; !said;) {
        CHECK(!lc_deadline_passed(until));
        sum(job, comm, 1000);
        meeting_wait(meeting, job->n);
        said = said_count(what) >= times;
        meeting_wait(meeting, job->n);
    }
}

/* All of what such a communicator may have. */
static void use(const struct job *job, ncclComm_t comm, uint64_t seed)
{
    cudaGraphExec_t exec;

    (void)grids_largest(job->device);
    sum(job, comm, MOST);
    CHECK(grids_largest(job->device) == expected);
    exec = capture(job, comm);
    CHECK(grids_largest(job->device) == expected);
    for (int i = 0; i < ROUNDS; i++) {
        sum(job, comm, 1 + draw(&seed, MOST));
        scatter(job, comm, (size_t)job->n + draw(&seed, MOST));
        group(job, comm, GROUP + draw(&seed, MOST));
        replay(job, exec);
    }
    CHECK(grids_largest(job->device) == expected);
    CUDA(cudaGraphExecDestroy(exec));
}

static ncclComm_t made(const struct job *job)
{
    ncclComm_t comm;

    CUDA(cudaSetDevice(job->device));
    NCCL(ncclCommInitRank(&comm, job->n, meeting_id(meeting, job->rank), job->rank));
    return comm;
}

static ncclComm_t another(const struct job *job)
{
    meeting_wait(meeting, job->n);
    if (job->rank == 0)
        atomic_store(&meeting->has_id, 0);
    meeting_wait(meeting, job->n);
    return made(job);
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n, .device = *(const bool *)arg ? 0 : rank };
    ncclComm_t first = made(&job), second, third;

    job.stream = stream_up();
    job.send = device_alloc(MOST * sizeof(float));
    job.recv = device_alloc(MOST * sizeof(float));
    until_said(&job, first, "committed at", n);
    CHECK(said_count("in peers' memory, ") == n);
    use(&job, first, 1);

    second = another(&job);
    until_said(&job, second, "committed at", 2 * n);
    CHECK(said_count("in peers' memory, ") == n && said_count("leave it no room") > 0);
    (void)grids_largest(job.device);
    for (int i = 0; i < ROUNDS; i++)
        sum(&job, second, MOST);
    CHECK(grids_largest(job.device) == 0);
    sum(&job, first, MOST);
    CHECK(grids_largest(job.device) == expected);

    NCCL(ncclCommDestroy(first));
    third = another(&job);
    until_said(&job, third, "committed at", 3 * n);
    CHECK(said_count("in peers' memory, ") == 2 * n);
    use(&job, third, 2);
    NCCL(ncclCommDestroy(second));
    NCCL(ncclCommDestroy(third));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

/* For the kernels of all ranks. */
static void share_grids(void)
{
    int fd = memfd_create("grids", 0);
    char path[64];

    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)getpid(), fd);
    CHECK(setenv("LCTEST_GRIDS", path, 1) == 0);
}

int main(int argc, char **argv)
{
    bool threads = argc > 4 && strcmp(argv[4], "threads") == 0;
    bool shared = argc > 4 && strcmp(argv[4], "shared") == 0;
    void *kernels = argc > 3 ? dlopen(argv[2], RTLD_NOW | RTLD_LOCAL) : NULL, *addr;

    CHECK(kernels && setenv("LOONGCOMM_KERNELS", argv[2], 1) == 0);
    addr = dlsym(kernels, "grids_largest");
    CHECK(addr && memcpy(&grids_largest, &addr, sizeof(addr)));
    expected = (uint32_t)strtoul(argv[3], NULL, 10);
    said_begin();
    if (shared)
        share_grids();
    meeting = meeting_new();
    return (threads ? lc_ranks_run_threads : lc_ranks_run)(atoi(argv[1]), rank_main, &shared, 100);
}
