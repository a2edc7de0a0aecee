/* SPDX-License-Identifier: Apache-2.0
 *
 * What befalls one communicator, or one rank, and is not to befall others. argv: the part; the library is preloaded. */
#include "tests/interpose/said.h"
#include "tests/interpose/whole_sum.h"

#include <stdbool.h>
#include <stdlib.h>

#define COUNT 4099

static struct meeting *meeting;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    float *data;
};

static struct job begin(int rank, int n)
{
    struct job job = { .rank = rank, .n = n };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.data = device_alloc(COUNT * sizeof(float));
    return job;
}

static void end(const struct job *job)
{
    NCCL(ncclCommDestroy(job->comm));
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaFree(job->data));
}

static void reduce(const struct job *job, ncclComm_t comm, int rank, int n)
{
    whole_sum(job->data, COUNT, rank, n, comm, job->stream);
}

/* Until so many ranks have said in all that a communicator of theirs has committed. `all` ranks do this. */
static void commit(const struct job *job, ncclComm_t comm, int all, int times)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        reduce(job, comm, job->rank, job->n);
        meeting_wait(meeting, all);
        agreed = said_count("committed at") >= times;
        meeting_wait(meeting, all);
        usleep(1000);
    }
}

/* A split that NCCL refuses at one rank, or that it only simulates there, is not counted: a child's ranks meet all the same,
 * and only they. */
static int split_again(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    ncclComm_t child[2];

    (void)arg;
    if (rank == 0) {
        CHECK(ncclCommSplit(job.comm, -5, rank, &child[0], NULL) == ncclInvalidArgument);
        NCCL(ncclGroupStart());
        NCCL(ncclCommSplit(job.comm, 0, rank, &child[0], NULL));
        (void)ncclGroupSimulateEnd(NULL);
    }
    NCCL(ncclCommSplit(job.comm, 0, rank, &child[0], NULL));
    reduce(&job, job.comm, rank, n);
    NCCL(ncclCommSplit(job.comm, 0, rank, &child[1], NULL));
    commit(&job, child[0], n, n);
    commit(&job, child[1], n, 2 * n);
    for (int call = 0; call < 100; call++)
        reduce(&job, child[call % 3 == 0], rank, n);
    NCCL(ncclCommDestroy(child[1]));
    NCCL(ncclCommDestroy(child[0]));
    end(&job);
    return 0;
}

static const struct nccl_test tests[] = {
    NCCL_TEST(2, split_again),
};

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    said_begin();
    meeting = meeting_new();
    for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
        if (strcmp(argv[1], tests[i].name) == 0)
            return lc_ranks_run(tests[i].n, tests[i].run, NULL, 80) != 0;
    }
    return 2;
}
