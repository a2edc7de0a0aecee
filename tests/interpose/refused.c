/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls and groups that fail for the program's fault or NCCL's, on one rank: what NCCL would do nothing of is made again
 * and is right at all ranks; what peers have got a part of ends the communicator. Never other numbers. Run with the
 * library preloaded and without. argv: the part. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <pthread.h>
#include <stdbool.h>

#define COUNT 4099

static struct meeting *meeting;
static bool plain; /* no library: NCCL alone */

struct job {
    int rank, n, call;
    ncclComm_t comm, child;
    cudaStream_t stream, second;
    float *data, *out;
};

static struct job begin(int rank, int n)
{
    struct job job = { .rank = rank, .n = n };

    job.comm = comm_up(meeting, rank, n);
    NCCL(ncclCommSplit(job.comm, 0, rank, &job.child, NULL));
    job.stream = stream_up();
    job.second = stream_up();
    job.data = device_alloc((size_t)4 * n * COUNT * sizeof(float));
    job.out = device_alloc((size_t)4 * n * COUNT * sizeof(float));
    return job;
}

static void end(struct job *job, bool aborts)
{
    if (aborts)
        CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0); /* an abort frees nothing on the device */
    NCCL(aborts ? ncclCommAbort(job->child) : ncclCommDestroy(job->child));
    NCCL(aborts ? ncclCommAbort(job->comm) : ncclCommDestroy(job->comm));
    (void)cudaStreamSynchronize(job->stream);
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaStreamDestroy(job->second));
    CUDA(cudaFree(job->data));
    CUDA(cudaFree(job->out));
}

/* Of one kind of call: what is called on the stream, and what has come of it. Each rank's part in `data` is a number of
 * its own in each call, which bf16 holds. */
struct kind {
    const char *name;
    ncclResult_t (*call)(const struct job *job, cudaStream_t stream);
    void (*check)(const struct job *job);
};

static float number(int rank, int call)
{
    return (float)(call % 8 * 8 + rank);
}

static float sum(const struct job *job)
{
    float all = 0;

    for (int r = 0; r < job->n; r++)
        all += number(r, job->call);
    return all;
}

static void check_part(const float *part, size_t count, float want)
{
    for (size_t i = 0; i < count; i++)
        CHECK(part[i] == want);
}

static ncclResult_t all_reduce(const struct job *job, cudaStream_t stream)
{
    return ncclAllReduce(job->data, job->out, COUNT, ncclFloat32, ncclSum, job->comm, stream);
}

static ncclResult_t reduce_scatter(const struct job *job, cudaStream_t stream)
{
    return ncclReduceScatter(job->data, job->out, COUNT, ncclFloat32, ncclSum, job->comm, stream);
}

static void check_sum(const struct job *job)
{
    check_part(job->out, COUNT, sum(job));
}

static ncclResult_t all_to_all(const struct job *job, cudaStream_t stream)
{
    return ncclAlltoAll(job->data, job->out, COUNT, ncclFloat32, job->comm, stream);
}

static ncclResult_t messages(const struct job *job, ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t result = ncclSuccess;

    for (int peer = 0; result == ncclSuccess && peer < job->n; peer++) {
        result = ncclSend(job->data, COUNT, ncclFloat32, peer, comm, stream);
        if (result == ncclSuccess)
            result = ncclRecv(job->out + (size_t)peer * COUNT, COUNT, ncclFloat32, peer, comm,
                              stream);
    }
    return result;
}

static ncclResult_t group_of_messages(const struct job *job, cudaStream_t stream)
{
    ncclResult_t result, ended;

    NCCL(ncclGroupStart());
    result = messages(job, job->comm, stream);
    ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

static void check_messages(const struct job *job)
{
    for (int peer = 0; peer < job->n; peer++)
        check_part(job->out + (size_t)peer * COUNT, COUNT, number(peer, job->call));
}

static ncclResult_t group_of_sums(const struct job *job, cudaStream_t stream)
{
    ncclResult_t result = ncclSuccess, ended;

    NCCL(ncclGroupStart());
    for (size_t i = 0; result == ncclSuccess && i < 3; i++)
        result = ncclAllReduce(job->data + i * COUNT, job->out + i * COUNT, COUNT, ncclFloat32,
                               ncclSum, job->comm, stream);
    ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

static void check_sums(const struct job *job)
{
    check_part(job->out, (size_t)3 * COUNT, sum(job));
}

/* Messages on one communicator, a sum and an all-gather on the other one's second stream. */
static ncclResult_t group_of_both(const struct job *job, cudaStream_t stream)
{
    size_t at = (size_t)job->n * COUNT;
    ncclResult_t result, ended;

    NCCL(ncclGroupStart());
    result = messages(job, job->comm, job->second);
    if (result == ncclSuccess)
        result = ncclAllReduce(job->data, job->out + at, COUNT, ncclFloat32, ncclSum, job->child,
                               stream);
    if (result == ncclSuccess)
        result = ncclAllGather(job->data, job->out + 2 * at, COUNT, ncclFloat32, job->child,
                               stream);
    ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

static void check_both(const struct job *job)
{
    size_t at = (size_t)job->n * COUNT;

    check_messages(job);
    check_part(job->out + at, COUNT, sum(job));
    for (int r = 0; r < job->n; r++)
        check_part(job->out + 2 * at + (size_t)r * COUNT, COUNT, number(r, job->call));
}

static const struct kind kinds[] = {
    {"all-reduce",         all_reduce,        check_sum     },
    { "reduce-scatter",    reduce_scatter,    check_sum     },
    { "all-to-all",        all_to_all,        check_messages},
    { "group of messages", group_of_messages, check_messages},
    { "group of sums",     group_of_sums,     check_sums    },
    { "group of both",     group_of_both,     check_both    },
};
#define KINDS (sizeof(kinds) / sizeof(*kinds))

static void fill(struct job *job)
{
    job->call++;
    for (size_t i = 0; i < (size_t)4 * job->n * COUNT; i++) {
        job->data[i] = number(job->rank, job->call);
        job->out[i] = -1;
    }
}

static void settle(const struct job *job)
{
    CUDA(cudaStreamSynchronize(job->stream));
    CUDA(cudaStreamSynchronize(job->second));
}

static void make(struct job *job, const struct kind *kind)
{
    fill(job);
    NCCL(kind->call(job, job->stream));
    settle(job);
    kind->check(job);
}

/* All kinds, until both communicators have agreed on all of them that they are going to. */
static void agree(struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    const char *peer = getenv("LOONGCOMM_PEER");
    bool rings = peer && strcmp(peer, "force") == 0, agreed = false;

    for (int i = 0; !agreed; i++) {
        CHECK(!lc_deadline_passed(until));
        for (size_t k = 0; k < KINDS; k++)
            make(job, &kinds[k]);
        meeting_wait(meeting, job->n);
        agreed = plain ? i >= 3
                       : said_count("committed at") >= 2 * job->n &&
                             (!rings || said_count("messages to rank") >= job->n * (job->n - 1));
        meeting_wait(meeting, job->n);
    }
}

/* ---- an invalid capture ---- */

static void *malloc_elsewhere(void *arg)
{
    void *ptr = NULL;

    CUDA(cudaSetDevice(*(int *)arg));
    CHECK(cudaMalloc(&ptr, 4096) == cudaErrorStreamCaptureUnsupported);
    return NULL;
}

/* Another thread spoils it. */
static void capture_invalidly(struct job *job)
{
    pthread_t thread;

    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeGlobal));
    CHECK(pthread_create(&thread, NULL, malloc_elsewhere, &job->rank) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void end_capture_invalidly(struct job *job)
{
    cudaGraph_t graph = NULL;

    CHECK(cudaStreamEndCapture(job->stream, &graph) == cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
}

static void make_as_graph(struct job *job, const struct kind *kind)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    fill(job);
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    NCCL(kind->call(job, job->stream));
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, job->stream));
    settle(job);
    kind->check(job);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

/* Of every kind at one rank, or at all. */
static int an_invalid_capture(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job);
    for (size_t turn = 0; turn < 2 * KINDS; turn++) {
        const struct kind *kind = &kinds[turn % KINDS];

        if (plain && kind->call == group_of_both)
            continue; /* NCCL may find it out behind the launch for another communicator */
        if (rank == 0 || turn >= KINDS) {
            capture_invalidly(&job);
            CHECK(kind->call(&job, job.stream) == ncclUnhandledCudaError);
            end_capture_invalidly(&job);
        }
        make(&job, kind);
        if (kind->call != group_of_both)
            make_as_graph(&job, kind);
    }
    for (size_t turn = 0; turn < 3 * KINDS; turn++)
        make(&job, &kinds[turn % KINDS]);
    end(&job, false);
    return 0;
}

/* It cannot be told whether the default stream is captured while one is that waits for it. */
static int the_default_stream_beside_a_capture(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job);
    for (size_t turn = 0; turn < KINDS; turn++) {
        cudaStream_t blocking;
        cudaGraph_t graph;

        if (rank == 0) {
            CUDA(cudaStreamCreate(&blocking));
            CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
            CHECK(kinds[turn].call(&job, NULL) == ncclUnhandledCudaError);
            CUDA(cudaStreamEndCapture(blocking, &graph));
            CUDA(cudaGraphDestroy(graph));
            CUDA(cudaStreamDestroy(blocking));
        }
        for (int i = 0; i < 3; i++)
            make(&job, &kinds[turn]);
    }
    end(&job, false);
    return 0;
}

/* ---- groups ---- */

/* Nothing of one that NCCL refuses for its streams is done, on whatever communicator. */
static int a_group_with_part_of_it_captured(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    cudaStream_t captured = stream_up();

    (void)arg;
    agree(&job);
    for (int turn = 0; turn < 8; turn++) {
        cudaGraph_t graph;

        fill(&job);
        if (rank == 0) {
            CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
            NCCL(ncclGroupStart());
            NCCL(messages(&job, job.comm, job.second));
            for (int i = 0; i < 2; i++)
                NCCL(ncclAllReduce(job.data, job.out, COUNT, ncclFloat32, ncclSum, job.child,
                                   i ? captured : job.stream));
            CHECK(ncclGroupEnd() == ncclInvalidUsage);
            CUDA(cudaStreamEndCapture(captured, &graph));
            CUDA(cudaGraphDestroy(graph));
        }
        for (int i = 0; i < 3; i++)
            make(&job, &kinds[KINDS - 1]);
    }
    CUDA(cudaStreamDestroy(captured));
    end(&job, false);
    return 0;
}

/* Of one that is packed, peers have got nothing. */
static int a_packed_group_that_fails_at_its_end(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);

    (void)arg;
    agree(&job);
    for (int turn = 0; turn < 8; turn++) {
        fill(&job);
        if (rank == 0) {
            lcrig_fail_next("ncclGroupEnd");
            CHECK(group_of_sums(&job, job.stream) == ncclSystemError);
        }
        NCCL(group_of_sums(&job, job.stream));
        settle(&job);
        check_sums(&job);
        make(&job, &kinds[0]);
    }
    end(&job, false);
    return 0;
}

/* A peer waits until it has all or an error; what it has is right. */
static bool comes(struct job *job, ncclResult_t *error)
{
    bool done = false;

    *error = ncclSuccess;
    while (!done && *error == ncclSuccess) {
        usleep(500);
        done = cudaStreamQuery(job->stream) != cudaErrorNotReady &&
               cudaStreamQuery(job->second) != cudaErrorNotReady;
        NCCL(ncclCommGetAsyncError(job->comm, error));
    }
    return *error == ncclSuccess;
}

static ncclResult_t group_of_messages_and_more(const struct job *job)
{
    size_t at = (size_t)job->n * COUNT;
    ncclResult_t result, ended;

    NCCL(ncclGroupStart());
    result = messages(job, job->comm, job->stream);
    if (result == ncclSuccess)
        result = ncclAllGather(job->data, job->out + at, COUNT, ncclFloat32, job->comm,
                               job->stream);
    ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

/* Its messages are with the peers when NCCL does nothing of the rest: to make it again would send them twice. */
static int a_group_that_fails_behind_its_messages(int rank, int n, void *arg)
{
    struct job job = begin(rank, n);
    ncclResult_t error = ncclSuccess;

    (void)arg;
    agree(&job);
    if (rank == 0)
        lcrig_fail_next("ncclGroupEnd");
    fill(&job);
    error = group_of_messages_and_more(&job);
    CHECK(rank != 0 || error == ncclSystemError);
    if (plain) { /* nothing was done: once more */
        if (rank == 0)
            NCCL(group_of_messages_and_more(&job));
        settle(&job);
        check_messages(&job);
    } else if (rank == 0) {
        CHECK(ncclSend(job.data, COUNT, ncclFloat32, 1, job.comm, job.stream) != ncclSuccess);
        CHECK(all_reduce(&job, job.stream) != ncclSuccess);
        meeting_wait(meeting, n);
    } else {
        if (error == ncclSuccess && comes(&job, &error))
            CHECK(!"NCCL's part has come");
        CHECK(error == ncclRemoteError);
        meeting_wait(meeting, n);
    }
    end(&job, !plain);
    return 0;
}

static const struct nccl_test tests[] = {
    NCCL_TEST(2, an_invalid_capture),
    NCCL_TEST(2, the_default_stream_beside_a_capture),
    NCCL_TEST(3, a_group_with_part_of_it_captured),
    NCCL_TEST(2, a_packed_group_that_fails_at_its_end),
    NCCL_TEST(2, a_group_that_fails_behind_its_messages),
};

int main(int argc, char **argv)
{
    plain = getenv("LD_PRELOAD") == NULL;
    CHECK(argc == 2);
    said_begin();
    meeting = meeting_new();
    for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
        if (strcmp(argv[1], tests[i].name) == 0)
            return lc_ranks_run(tests[i].n, tests[i].run, NULL, 60) != 0;
    }
    return 1;
}
