/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings at their limits: communicators that end in a group or early, ranks that rings are nothing for, arguments that
 * mean nothing. LOONGCOMM_PEER=force, LOONGCOMM_ALLREDUCE_WIRE=bf16, LOONGCOMM_MIN_BYTES=0. argv: the part. */
#include "tests/interpose/said.h"
#include "tests/interpose/whole_sum.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>

#define COUNT  4099
#define CYCLES 12
#define MANY   60

static struct meeting *meeting;

struct job {
    ncclComm_t comm;
    cudaStream_t stream;
    float *data;
};

static struct job begin(int rank, int n)
{
    struct job job;

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.data = device_alloc(3 * COUNT * sizeof(float));
    return job;
}

static void end(struct job *job)
{
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaFree(job->data));
}

static void reduce_rightly(const struct job *job, int rank, int n)
{
    whole_sum(job->data, COUNT, rank, n, job->comm, job->stream);
}

/* Until all have agreed `times`, at the same call. */
static void agree(const struct job *job, int rank, int n, int times)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        reduce_rightly(job, rank, n);
        meeting_wait(meeting, n);
        agreed = said_count("committed at") == n * times;
        meeting_wait(meeting, n);
    }
}

/* NCCL destroys it when the group ends, and waits until then; a peer that is gone must be heard of meanwhile. */
static int destroyed_in_a_group_while_it_waits(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job, rank, n, 1);
    CHECK(said_count("rings of") == n);
    if (rank == 1) {
        while (!atomic_load(&meeting->word))
            usleep(500);
        usleep(300000);
        _exit(0);
    }
    NCCL(ncclAllReduce(job.data, job.data, COUNT, ncclFloat32, ncclSum, job.comm, job.stream));
    atomic_store(&meeting->word, 1);
    NCCL(ncclGroupStart());
    NCCL(ncclCommDestroy(job.comm));
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(job.stream));
    end(&job);
    return 0;
}

/* And its memory with it. */
static int destroyed_in_a_group_in_order(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job, rank, n, 1);
    NCCL(ncclGroupStart());
    NCCL(ncclCommDestroy(job.comm));
    NCCL(ncclGroupEnd());
    end(&job); /* and nothing is left */
    return 0;
}

static ncclComm_t another(int rank, int n)
{
    ncclComm_t comm;

    meeting_wait(meeting, n);
    if (rank == 0)
        NCCL(ncclGetUniqueId(&meeting->id));
    meeting_wait(meeting, n);
    NCCL(ncclCommInitRank(&comm, n, meeting->id, rank));
    return comm;
}

/* Rank 0: a call on p, the end of a third communicator, a call on q; rank 1 has p and q the other way round. Each is at the
 * end while a call is on the device whose peer comes only behind the other's. */
static int destroyed_between_calls_of_others(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    ncclComm_t p = another(rank, n), q = another(rank, n), first, last;
    cudaStream_t other = stream_up();
    float *more = device_alloc(COUNT * sizeof(float));

    (void)arg;
    agree(&job, rank, n, 1);
    meeting_wait(meeting, n);
    first = rank ? q : p;
    last = rank ? p : q;
    NCCL(ncclAllReduce(job.data, job.data, COUNT, ncclInt32, ncclSum, first, job.stream));
    usleep(200000);
    alarm(20);
    NCCL(ncclCommDestroy(job.comm));
    NCCL(ncclAllReduce(more, more, COUNT, ncclInt32, ncclSum, last, other));
    CUDA(cudaStreamSynchronize(job.stream));
    CUDA(cudaStreamSynchronize(other));
    alarm(0);
    NCCL(ncclCommDestroy(p));
    NCCL(ncclCommDestroy(q));
    CUDA(cudaStreamDestroy(other));
    CUDA(cudaFree(more));
    end(&job);
    return 0;
}

static int count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;

    CHECK(tasks);
    while (readdir(tasks))
        count++;
    closedir(tasks);
    return count;
}

/* More of them than there is room for at a time. A stream is a thread here. */
static int aborted_ones_give_their_room_back(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    int threads = 0;

    (void)arg;
    for (int cycle = 1; cycle <= MANY; cycle++) {
        agree(&job, rank, n, cycle);
        CHECK(said_count("slots\n") == n * cycle);
        NCCL(ncclCommAbort(job.comm));
        job.comm = another(rank, n);
        if (cycle == 4)
            threads = count_threads();
    }
    CHECK(count_threads() <= threads + 2);
    NCCL(ncclCommDestroy(job.comm));
    end(&job);
    return 0;
}

static void capture_a_sum(struct job *job)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    NCCL(ncclAllReduce(job->data, job->data, COUNT, ncclFloat32, ncclSum, job->comm, job->stream));
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

/* Beside one that stays, the last call of each in a graph. */
static int captured_ones_give_their_room_back(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    ncclComm_t stays = another(rank, n);

    (void)arg;
    for (int cycle = 1; cycle <= CYCLES; cycle++) {
        agree(&job, rank, n, cycle);
        CHECK(said_count("slots\n") == n * cycle);
        capture_a_sum(&job);
        NCCL(ncclCommDestroy(job.comm));
        job.comm = another(rank, n);
    }
    NCCL(ncclCommDestroy(job.comm));
    NCCL(ncclCommDestroy(stays));
    end(&job);
    return 0;
}

/* A device without communicators may be reset, and memory that was there before is another one's then. */
static int reset_between_communicators(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job, rank, n, 1);
    for (int cycle = 2; cycle <= 4; cycle++) {
        struct job other = { .data = NULL };

        CUDA(cudaSetDevice(2 + rank));
        other = (struct job){ .comm = another(rank, n),
                              .stream = stream_up(),
                              .data = device_alloc(3 * COUNT * sizeof(float)) };
        agree(&other, rank, n, cycle);
        NCCL(ncclCommDestroy(other.comm));
        CUDA(cudaDeviceReset());
    }
    CUDA(cudaSetDevice(0));
    NCCL(ncclCommDestroy(job.comm));
    end(&job);
    return 0;
}

/* LOONGCOMM_STAGING_MAX is enough for a few at a time. What the aborted ones had is used by nobody any more. */
static int aborted_again_and_again(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    for (int cycle = 1; cycle <= CYCLES; cycle++) {
        agree(&job, rank, n, cycle);
        CHECK(said_count("rings of") == n * cycle);
        NCCL(ncclCommAbort(job.comm));
        CUDA(cudaStreamSynchronize(job.stream));
        meeting_wait(meeting, n);
        if (rank == 0)
            atomic_store(&meeting->has_id, 0);
        meeting_wait(meeting, n);
        job.comm = comm_up(meeting, rank, n);
    }
    agree(&job, rank, n, CYCLES + 1);
    NCCL(ncclCommDestroy(job.comm)); /* with it everything goes that was kept */
    end(&job);
    return 0;
}

/* What NCCL leaves undefined is no error, and nothing is the worse for it. */
static int partly_overlapping(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job, rank, n, 1);
    for (int apart = 1; apart < COUNT; apart += 1000) {
        NCCL(ncclAllReduce(job.data, job.data + apart, COUNT, ncclFloat32, ncclSum, job.comm,
                           job.stream));
        NCCL(ncclAllReduce(job.data + apart, job.data, COUNT, ncclFloat32, ncclSum, job.comm,
                           job.stream));
        NCCL(ncclReduceScatter(job.data, job.data + apart, COUNT / (size_t)n, ncclFloat32, ncclSum,
                               job.comm, job.stream));
        CUDA(cudaStreamSynchronize(job.stream));
        reduce_rightly(&job, rank, n);
    }
    NCCL(ncclCommDestroy(job.comm));
    end(&job);
    return 0;
}

/* The kernels say that they serve fewer ranks. */
static int too_many_ranks(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job, rank, n, 1);
    CHECK(said_count("rings of") == 0 && said_count("more than the kernels library serves") == n);
    NCCL(ncclCommDestroy(job.comm));
    end(&job);
    return 0;
}

/* One thread makes the calls of all. */
static int launches_that_block(int rank, int n, void *arg)
{
    enum {
        RANKS = 3
    };
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    struct job job[RANKS];
    ncclComm_t comms[RANKS];

    (void)rank;
    (void)n;
    (void)arg;
    NCCL(ncclCommInitAll(comms, RANKS, NULL));
    for (int r = 0; r < RANKS; r++) {
        CUDA(cudaSetDevice(r));
        job[r] = (struct job){ comms[r], stream_up(), device_alloc(COUNT * sizeof(float)) };
    }
    while (said_count("committed at") < RANKS) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclGroupStart());
        for (int r = 0; r < RANKS; r++)
            NCCL(ncclAllReduce(job[r].data, job[r].data, COUNT, ncclFloat32, ncclSum, comms[r],
                               job[r].stream));
        NCCL(ncclGroupEnd());
        for (int r = 0; r < RANKS; r++)
            CUDA(cudaStreamSynchronize(job[r].stream));
        usleep(1000);
    }
    CHECK(said_count("rings of") == 0 && said_count("CUDA_LAUNCH_BLOCKING is set") == 1);
    for (int r = 0; r < RANKS; r++) {
        NCCL(ncclCommDestroy(comms[r]));
        end(&job[r]);
    }
    return 0;
}

#if NCCL_VERSION_CODE >= 22807
static void *revoke_it(void *arg)
{
    NCCL(ncclCommRevoke(arg, 0));
    return NULL;
}

static void revoke_elsewhere(ncclComm_t comm)
{
    pthread_t thread;

    CHECK(pthread_create(&thread, NULL, revoke_it, comm) == 0 && pthread_join(thread, NULL) == 0);
}
#endif

/* NCCL refuses calls on a revoked communicator, so a sum that nobody adds up is no success. */
static int nothing_goes_behind_a_revocation(int rank, int n, void *arg)
{
#if NCCL_VERSION_CODE >= 22807
    struct job job = begin(rank, n);
    float *out = job.data + COUNT;

    (void)arg;
    agree(&job, rank, n, 1);
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(job.data, out, COUNT, ncclFloat32, ncclSum, job.comm, job.stream));
    meeting_wait(meeting, n);
    revoke_elsewhere(job.comm);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    meeting_wait(meeting, n);
    CHECK(ncclAllReduce(job.data, out, COUNT, ncclFloat32, ncclSum, job.comm, job.stream) ==
          ncclInvalidUsage);
    CHECK(ncclSend(job.data, COUNT, ncclFloat32, !rank, job.comm, job.stream) == ncclInvalidUsage);
    NCCL(ncclCommAbort(job.comm));
    CUDA(cudaStreamSynchronize(job.stream));
    CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0); /* an abort frees nothing on the device */
    end(&job);
#else
    (void)rank;
    (void)n;
    (void)arg;
#endif
    return 0;
}

/* The last rank hangs; the others go on without it, and what waits for it ends. */
static int shrunk_away_from_one_that_hangs(int rank, int n, void *arg)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    struct job job = begin(rank, n);
    ncclResult_t state;
    int excluded = n - 1;
    ncclComm_t rest;

    (void)arg;
    agree(&job, rank, n, 1);
    if (rank == excluded) {
        meeting_wait(meeting, n);
        while (atomic_load(&meeting->word) < n - 1)
            usleep(1000);
        _exit(0);
    }
    NCCL(ncclAllReduce(job.data, job.data, COUNT, ncclFloat32, ncclSum, job.comm, job.stream));
    usleep(100000);
    CHECK(cudaStreamQuery(job.stream) == cudaErrorNotReady);
    CHECK(ncclCommShrink(job.comm, &rank, 1, &rest, NULL, NCCL_SHRINK_ABORT) ==
          ncclInvalidArgument);
    CHECK(cudaStreamQuery(job.stream) == cudaErrorNotReady); /* what NCCL refuses ends nothing */
    meeting_wait(meeting, n);
    NCCL(ncclCommShrink(job.comm, &excluded, 1, &rest, NULL, NCCL_SHRINK_ABORT));
    while (cudaStreamQuery(job.stream) == cudaErrorNotReady && !lc_deadline_passed(until))
        usleep(1000);
    CUDA(cudaStreamQuery(job.stream));
    NCCL(ncclCommGetAsyncError(job.comm, &state));
    CHECK(state == ncclSuccess); /* of NCCL's own none is left, either */
    job.comm = rest;
    for (int i = 0; i < 40; i++)
        reduce_rightly(&job, rank, n - 1);
    atomic_fetch_add(&meeting->word, 1);
    _exit(0);
}

static const struct nccl_test tests[] = {
    NCCL_TEST(2, destroyed_in_a_group_while_it_waits),
    NCCL_TEST(3, destroyed_in_a_group_in_order),
    NCCL_TEST(2, destroyed_between_calls_of_others),
    NCCL_TEST(2, nothing_goes_behind_a_revocation),
    NCCL_TEST(3, shrunk_away_from_one_that_hangs),
    NCCL_TEST(2, aborted_again_and_again),
    NCCL_TEST(2, aborted_ones_give_their_room_back),
    NCCL_TEST(2, captured_ones_give_their_room_back),
    NCCL_TEST(2, reset_between_communicators),
    NCCL_TEST(3, partly_overlapping),
    NCCL_TEST(3, too_many_ranks),
    NCCL_TEST(1, launches_that_block),
};

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    said_begin();
    meeting = meeting_new();
    for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
        if (strcmp(argv[1], tests[i].name) == 0)
            return lc_ranks_run(tests[i].n, tests[i].run, NULL, 120);
    }
    return 2;
}
