/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives through rings where something is out of the ordinary: on the rig. LOONGCOMM_PEER=force,
 * LOONGCOMM_EXCHANGE_MIN_BYTES=2000. */
#include "kernels/rings.h"
#include "tests/interpose/content.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <stdbool.h>
#include <sys/wait.h>

#define ROOM ((size_t)12 << 20)
#define SUMS 40000

#define AHEAD       8 /* messages that are sent before one is received */
#define AHEAD_BYTES ((size_t)512 << 10)

static struct meeting *meeting;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    char *send, *recv;
    float *sums;
};

static struct job set_up(int rank, int n)
{
    struct job job = { .rank = rank, .n = n };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(ROOM);
    job.recv = device_alloc(ROOM);
    job.sums = device_alloc(SUMS * sizeof(float));
    return job;
}

static void free_buffers(const struct job *job)
{
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaFree(job->send));
    CUDA(cudaFree(job->recv));
    CUDA(cudaFree(job->sums));
}

static void end(const struct job *job)
{
    NCCL(ncclCommDestroy(job->comm));
    free_buffers(job);
}

static void give_up(const struct job *job)
{
    CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0); /* an abort frees nothing on the device */
    NCCL(ncclCommAbort(job->comm));
}

static void send_to(const struct job *job, int peer, size_t at, size_t bytes)
{
    NCCL(ncclSend(job->send + at, bytes, ncclInt8, peer, job->comm, job->stream));
}

static void recv_from(const struct job *job, int peer, size_t at, size_t bytes)
{
    NCCL(ncclRecv(job->recv + at, bytes, ncclInt8, peer, job->comm, job->stream));
}

static void settle(const struct job *job)
{
    CUDA(cudaStreamSynchronize(job->stream));
}

/* A message to each other rank and back. */
static void all_pairs(const struct job *job, size_t bytes, unsigned salt)
{
    content_fill(job->send, bytes, salt * 64 + (unsigned)job->rank);
    memset(job->recv, 0xa5, bytes * (size_t)job->n);
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < job->n; peer++) {
        send_to(job, peer, 0, bytes);
        recv_from(job, peer, (size_t)peer * bytes, bytes);
    }
    NCCL(ncclGroupEnd());
    settle(job);
    for (int peer = 0; peer < job->n; peer++)
        CHECK(content_is(job->recv + (size_t)peer * bytes, bytes, salt * 64 + (unsigned)peer));
}

static bool all_pairs_agreed(int n)
{
    return said_count("messages to rank") >=
               n * (n - 1) && /* more: it was said in a simulation, too */
           said_count("messages from rank") >= n * (n - 1);
}

static void until_agreed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    for (unsigned call = 0; !agreed; call++) {
        CHECK(!lc_deadline_passed(until));
        all_pairs(job, 3000, call);
        meeting_wait(meeting, job->n);
        agreed = all_pairs_agreed(job->n);
        meeting_wait(meeting, job->n);
    }
}

/* One end calls the sum first, the other one the message, as programs may where NCCL buffers it. */
static int sums_and_messages_may_cross(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);
    struct lc_deadline until;

    until_agreed(&job);
    until = lc_deadline_in_ms(PATIENCE_MS);
    while (said_count("committed at") < n) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclAllReduce(job.sums, job.sums, SUMS, ncclFloat32, ncclSum, job.comm, job.stream));
        settle(&job);
        meeting_wait(meeting, n);
    }
    meeting_wait(meeting, n);
    CHECK(said_count("committed at") == n);
    for (unsigned turn = 0; turn < 20; turn++) {
        bool first = (unsigned)rank == turn % 2;

        content_fill(job.send, 60000, turn);
        for (int i = 0; i < SUMS; i++)
            job.sums[i] = (float)(i % 100 + rank);
        if (first)
            send_to(&job, 1 - rank, 0, 60000);
        NCCL(ncclAllReduce(job.sums, job.sums, SUMS, ncclFloat32, ncclSum, job.comm, job.stream));
        if (!first)
            recv_from(&job, 1 - rank, 0, 60000);
        settle(&job);
        CHECK(first || content_is(job.recv, 60000, turn));
        for (int i = 0; i < SUMS; i++)
            CHECK(job.sums[i] == (float)(2 * (i % 100) + 1));
    }
    end(&job);
    return 0;
}

/* Both ends send first: programs do where NCCL buffers as much. */
static int both_ends_may_send_first(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);
    size_t bytes = AHEAD_BYTES;

    until_agreed(&job);
    content_fill(job.send, AHEAD * bytes, (unsigned)rank);
    for (size_t i = 0; i < AHEAD; i++)
        send_to(&job, 1 - rank, i * bytes, bytes);
    for (size_t i = 0; i < AHEAD; i++)
        recv_from(&job, 1 - rank, i * bytes, bytes);
    settle(&job);
    CHECK(content_is(job.recv, AHEAD * bytes, 1 - (unsigned)rank));
    end(&job);
    return 0;
}

/* More than one launch has of a pair. */
static int a_group_may_have_very_many_messages(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    until_agreed(&job);
    for (size_t i = 0; i < 3000; i++)
        content_fill(job.send + i * 2500, 2500, i * 2 + (unsigned)rank);
    NCCL(ncclGroupStart());
    for (size_t i = 0; i < 3000; i++) {
        recv_from(&job, 1 - rank, i * 2500, 2500);
        send_to(&job, 1 - rank, i * 2500, 2500);
    }
    NCCL(ncclGroupEnd());
    settle(&job);
    for (size_t i = 0; i < 3000; i++)
        CHECK(content_is(job.recv + i * 2500, 2500, i * 2 + 1 - (unsigned)rank));
    end(&job);
    return 0;
}

/* What never took place counts for nobody: else the ends would not agree about which message is which. */
static int calls_that_never_took_place_do_not_count(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    all_pairs(&job, 3000, 1);
    for (int i = 0; i < 3; i++) { /* of nothing */
        NCCL(ncclGroupStart());
        send_to(&job, 1 - rank, 0, 0);
        send_to(&job, 1 - rank, 0, 0);
        recv_from(&job, 1 - rank, 0, 0);
        recv_from(&job, 1 - rank, 0, 0);
        NCCL(ncclGroupEnd());
        settle(&job);
    }
    if (rank == 0) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < 5; i++)
            send_to(&job, 1, 0, 3000);
        NCCL(ncclGroupSimulateEnd(NULL));
        CHECK(ncclSend(NULL, 3000, ncclInt8, 1, job.comm, job.stream) != ncclSuccess);
        CHECK(ncclSend(job.send, 1, ncclInt8, 77, job.comm, job.stream) != ncclSuccess);
        NCCL(ncclGroupStart());
        send_to(&job, 1, 0, 3000);
        CHECK(ncclSend(NULL, 3000, ncclInt8, 1, job.comm, job.stream) != ncclSuccess);
        CHECK(ncclGroupEnd() != ncclSuccess);
    }
    until_agreed(&job);
    if (rank == 0) {
        NCCL(ncclGroupStart());
        send_to(&job, 1, 0, 3000);
        NCCL(ncclGroupSimulateEnd(NULL));
    }
    for (unsigned call = 0; call < 20; call++)
        all_pairs(&job, call % 2 ? 3000 : 100, 100 + call);
    end(&job);
    return 0;
}

/* Of the hub's group one message goes through rings and one does not; the spoke calls them one after the other, in either
 * order. Neither part of the group may wait for the other one. */
static int parts_of_a_group_do_not_wait_for_each_other(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    until_agreed(&job);
    for (unsigned turn = 0; turn < 40; turn++) {
        size_t to_hub = turn % 2 ? 9000 : 40, from_hub = turn % 2 ? 40 : 9000;

        content_fill(job.send, 9000, turn);
        if (rank == 0) {
            NCCL(ncclGroupStart());
            send_to(&job, 1, 0, from_hub);
            recv_from(&job, 1, 0, to_hub);
            NCCL(ncclGroupEnd());
        } else if (turn / 2 % 2) {
            recv_from(&job, 0, 0, from_hub);
            send_to(&job, 0, 0, to_hub);
        } else {
            send_to(&job, 0, 0, to_hub);
            recv_from(&job, 0, 0, from_hub);
        }
        settle(&job);
        CHECK(content_is(job.recv, rank ? from_hub : to_hub, turn));
    }
    end(&job);
    return 0;
}

static void pair_in_group(const struct job *job, size_t at, cudaStream_t stream)
{
    int peer = 1 - job->rank;

    NCCL(ncclGroupStart());
    for (size_t i = 0; i < 2; i++) { /* one through rings, one that is too small */
        size_t bytes = i ? 40 : 9000;

        NCCL(ncclSend(job->send + at + i * 10000, bytes, ncclInt8, peer, job->comm, stream));
        NCCL(ncclRecv(job->recv + at + i * 10000, bytes, ncclInt8, peer, job->comm, stream));
    }
    NCCL(ncclGroupEnd());
}

/* While both are made, and what is not captured runs in between. */
static int two_graphs_may_be_made_at_once(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);
    cudaStream_t stream[2] = { stream_up(), stream_up() };
    cudaGraphExec_t exec[2];
    cudaGraph_t graph;

    until_agreed(&job);
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamBeginCapture(stream[i], cudaStreamCaptureModeRelaxed));
    for (size_t i = 0; i < 4; i++)
        pair_in_group(&job, i * 20000, stream[i % 2]);
    pair_in_group(&job, 80000, job.stream);
    for (int i = 0; i < 2; i++) {
        CUDA(cudaStreamEndCapture(stream[i], &graph));
        CUDA(cudaGraphInstantiate(&exec[i], graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    settle(&job);
    for (unsigned turn = 0; turn < 3; turn++) {
        content_fill(job.send, 100000, turn * 2 + (unsigned)rank);
        memset(job.recv, 0xa5, 100000);
        for (int i = 0; i < 2; i++)
            CUDA(cudaGraphLaunch(exec[i], job.stream));
        pair_in_group(&job, 80000, job.stream);
        settle(&job);
        content_fill(job.send, 100000, turn * 2 + 1 - (unsigned)rank); /* as the peer sent */
        for (size_t i = 0; i < 5; i++) {
            CHECK(memcmp(job.recv + i * 20000, job.send + i * 20000, 9000) == 0);
            CHECK(memcmp(job.recv + i * 20000 + 10000, job.send + i * 20000 + 10000, 40) == 0);
        }
        meeting_wait(meeting, n); /* who still sends does not send what is filled in next */
    }
    for (int i = 0; i < 2; i++) {
        CUDA(cudaGraphExecDestroy(exec[i]));
        CUDA(cudaStreamDestroy(stream[i]));
    }
    end(&job);
    return 0;
}

#define GRAPHS 16

/* One part of the hub's group: the spoke takes what goes through NCCL first, and sends then what goes through rings. */
static void hub_and_spoke(const struct job *job, size_t bytes)
{
    if (job->rank == 0) {
        NCCL(ncclGroupStart());
        send_to(job, 1, 0, 40);
        recv_from(job, 1, 0, bytes);
        NCCL(ncclGroupEnd());
    } else {
        recv_from(job, 0, 0, 40);
        send_to(job, 0, 0, bytes);
    }
}

/* Nor does either part of a group wait for the other one in any of so many. */
static int many_graphs_may_be_made_at_once(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n), captured[GRAPHS];
    cudaGraphExec_t exec[GRAPHS];
    cudaGraph_t graph;

    until_agreed(&job);
    for (int i = 0; i < GRAPHS; i++) {
        captured[i] = job;
        captured[i].stream = stream_up();
        CUDA(cudaStreamBeginCapture(captured[i].stream, cudaStreamCaptureModeRelaxed));
    }
    for (int i = 0; i < GRAPHS; i++)
        hub_and_spoke(&captured[i], 9000);
    for (int i = 0; i < GRAPHS; i++) {
        CUDA(cudaStreamEndCapture(captured[i].stream, &graph));
        CUDA(cudaGraphInstantiate(&exec[i], graph, 0));
        CUDA(cudaGraphDestroy(graph));
        CUDA(cudaStreamDestroy(captured[i].stream));
    }
    for (unsigned i = 0; i < GRAPHS; i++) {
        content_fill(job.send, 9000, i);
        CUDA(cudaGraphLaunch(exec[i], job.stream));
        settle(&job);
        CHECK(content_is(job.recv, rank ? 40 : 9000, i));
        CUDA(cudaGraphExecDestroy(exec[i]));
    }
    end(&job);
    return 0;
}

#define BRANCHES 20

/* Each copies one of `lines`, beside all others. */
static void branch_out(cudaStream_t stream, const cudaStream_t *branches, cudaEvent_t event,
                       char *lines)
{
    CUDA(cudaEventRecord(event, stream));
    for (int i = 0; i < BRANCHES; i++)
        CUDA(cudaStreamWaitEvent(branches[i], event, 0));
    for (int i = 0; i < BRANCHES; i++) {
        CUDA(cudaMemsetAsync(lines + (ptrdiff_t)64 * i, i, 64, branches[i]));
        CUDA(cudaEventRecord(event, branches[i]));
        CUDA(cudaStreamWaitEvent(stream, event, 0));
    }
}

/* NCCL's part has a stream of its own, so that the other one does not end in its kernel. */
static void pair_on_two_streams(const struct job *job, size_t at, cudaStream_t beside)
{
    int peer = 1 - job->rank;

    NCCL(ncclGroupStart());
    NCCL(ncclSend(job->send + at + 10000, 40, ncclInt8, peer, job->comm, beside));
    NCCL(ncclRecv(job->recv + at + 10000, 40, ncclInt8, peer, job->comm, beside));
    send_to(job, peer, at, 9000);
    recv_from(job, peer, at, 9000);
    NCCL(ncclGroupEnd());
}

/* What comes behind a graph waits for all of it, also where the graph is too wide to be looked at. */
static int branches_do_not_end_the_order(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);
    cudaStream_t beside = stream_up(), branches[BRANCHES];
    cudaGraphExec_t exec;
    cudaGraph_t graph;
    cudaEvent_t event;

    until_agreed(&job);
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int i = 0; i < BRANCHES; i++)
        branches[i] = stream_up();
    CUDA(cudaStreamBeginCapture(job.stream, cudaStreamCaptureModeRelaxed));
    CUDA(cudaEventRecord(event, job.stream));
    CUDA(cudaStreamWaitEvent(beside, event, 0));
    for (size_t i = 0; i < 3; i++) {
        pair_on_two_streams(&job, i * 20000, beside);
        if (i == 0)
            branch_out(job.stream, branches, event, job.recv + 100000);
    }
    CUDA(cudaEventRecord(event, beside));
    CUDA(cudaStreamWaitEvent(job.stream, event, 0));
    CUDA(cudaStreamEndCapture(job.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    for (unsigned turn = 0; turn < 3; turn++) {
        content_fill(job.send, 60000, turn * 2 + (unsigned)rank);
        CUDA(cudaGraphLaunch(exec, job.stream));
        settle(&job);
        content_fill(job.send, 60000, turn * 2 + 1 - (unsigned)rank); /* as the peer sent */
        for (size_t i = 0; i < 3; i++) {
            CHECK(memcmp(job.recv + i * 20000, job.send + i * 20000, 9000) == 0);
            CHECK(memcmp(job.recv + i * 20000 + 10000, job.send + i * 20000 + 10000, 40) == 0);
        }
        meeting_wait(meeting, n); /* who still sends does not send what is filled in next */
    }
    CUDA(cudaGraphExecDestroy(exec));
    for (int i = 0; i < BRANCHES; i++)
        CUDA(cudaStreamDestroy(branches[i]));
    CUDA(cudaStreamDestroy(beside));
    CUDA(cudaEventDestroy(event));
    end(&job);
    return 0;
}

/* Fewer sends to oneself than receives. */
static int unequal_messages_to_oneself_are_refused(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    until_agreed(&job);
    CHECK(ncclSend(job.send, 3000, ncclInt8, rank, job.comm, job.stream) == ncclInvalidUsage);
    all_pairs(&job, 3000, 7);
    for (unsigned turn = 0; turn < 9; turn++) {
        NCCL(ncclGroupStart());
        send_to(&job, rank, 0, 3000);
        if (rank == 0) { /* nothing of it is done */
            send_to(&job, 1, 0, 3000);
            CHECK(ncclGroupEnd() == ncclInvalidUsage);
        } else {
            recv_from(&job, rank, 3000, 3000);
            NCCL(ncclGroupEnd());
        }
        all_pairs(&job, 3000, 8 + turn);
    }
    end(&job);
    return 0;
}

/* Else the next message would be taken for it. */
static int messages_from_nowhere_are_refused(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    until_agreed(&job);
    if (rank == 0) /* the others hear that it has failed */
        CHECK(ncclSend(NULL, 3000, ncclInt8, 1, job.comm, job.stream) != ncclSuccess);
    meeting_wait(meeting, n);
    give_up(&job);
    free_buffers(&job);
    return 0;
}

/* Where a launch lasts as long as the kernel, nothing could run beside it. */
static int blocking_launches_leave_messages_to_nccl(int rank, int n, void *arg)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;
    struct job job;

    if (rank == 1)
        CHECK(setenv("CUDA_LAUNCH_BLOCKING", "1", 1) == 0);
    job = set_up(rank, n);
    for (unsigned call = 0; !agreed; call++) { /* the others */
        CHECK(!lc_deadline_passed(until));
        all_pairs(&job, 3000, call);
        meeting_wait(meeting, n);
        agreed = said_count("messages to rank 2") == 1 && said_count("messages to rank 0") == 1;
        meeting_wait(meeting, n);
    }
    for (unsigned call = 0; call < 64; call++)
        all_pairs(&job, 3000, call);
    meeting_wait(meeting, n);
    CHECK(said_count("messages to rank 1") == 0 && said_count("messages from rank 1") == 0);
    CHECK(said_count("messages to rank 2") == 1 && said_count("messages from rank 2") == 1);
    end(&job);
    return 0;
}

/* A message that its peer never takes ends when the communicator is aborted. */
static int an_abort_ends_what_nobody_receives(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);

    until_agreed(&job);
    if (rank == 0)
        send_to(&job, 1, 0, (size_t)10 << 20);
    meeting_wait(meeting, n);
    if (rank == 0)
        CHECK(cudaStreamQuery(job.stream) == cudaErrorNotReady);
    else
        CHECK(comm_error_within(job.comm, 0) == ncclSuccess);
    meeting_wait(meeting, n);
    if (rank == 0) {
        give_up(&job);
        settle(&job);
    } else {
        ncclResult_t result = ncclSuccess;

        for (int i = 0; i < 30000 && result == ncclSuccess; i++) { /* until it has heard of it */
            result = ncclRecv(job.recv, 3000, ncclInt8, 0, job.comm, job.stream);
            if (result == ncclSuccess)
                result = comm_error_within(job.comm, 1);
        }
        CHECK(result == ncclRemoteError);
        give_up(&job);
    }
    meeting_wait(meeting, n); /* a process that ends tells others for a short time only */
    free_buffers(&job);
    return 0;
}

/* The communicator has never had a collective: its ranks have voted for pairs only. */
static int a_lost_rank_is_an_error(int rank, int n, void *arg)
{
    struct job job = set_up(rank, n);
    ncclResult_t result;

    until_agreed(&job);
    if (rank == 1)
        _exit(3);
    result = ncclRecv(job.recv, 30000, ncclInt8, 1, job.comm, job.stream);
    CHECK(result == ncclRemoteError || comm_error_within(job.comm, 30000) == ncclRemoteError);
    settle(&job);
    give_up(&job);
    free_buffers(&job);
    return 0;
}

static const struct {
    int n;
    lc_rank_main *run;
    const char *name;
    bool loses_one;
} tests[] = {
    {2,  sums_and_messages_may_cross,                 "sums_and_messages_may_cross",                 false},
    { 2, both_ends_may_send_first,                    "both_ends_may_send_first",                    false},
    { 2, a_group_may_have_very_many_messages,         "a_group_may_have_very_many_messages",         false},
    { 2, calls_that_never_took_place_do_not_count,    "calls_that_never_took_place_do_not_count",
     false                                                                                                },
    { 2, parts_of_a_group_do_not_wait_for_each_other, "parts_of_a_group_do_not_wait_for_each_other",
     false                                                                                                },
    { 2, two_graphs_may_be_made_at_once,              "two_graphs_may_be_made_at_once",              false},
    { 2, many_graphs_may_be_made_at_once,             "many_graphs_may_be_made_at_once",             false},
    { 2, branches_do_not_end_the_order,               "branches_do_not_end_the_order",               false},
    { 3, unequal_messages_to_oneself_are_refused,     "unequal_messages_to_oneself_are_refused",
     false                                                                                                },
    { 3, messages_from_nowhere_are_refused,           "messages_from_nowhere_are_refused",           false},
    { 3, blocking_launches_leave_messages_to_nccl,    "blocking_launches_leave_messages_to_nccl",
     false                                                                                                },
    { 2, an_abort_ends_what_nobody_receives,          "an_abort_ends_what_nobody_receives",          false},
    { 2, a_lost_rank_is_an_error,                     "a_lost_rank_is_an_error",                     true },
};

static int run(size_t i)
{
    int fate[8];

    meeting_reset(meeting);
    said_begin();
    if (!tests[i].loses_one)
        return lc_ranks_run(tests[i].n, tests[i].run, NULL, 60);
    CHECK(lc_ranks_watch(tests[i].n, tests[i].run, NULL, 60, fate) == 0);
    return !(WIFEXITED(fate[0]) && WEXITSTATUS(fate[0]) == 0 && WIFEXITED(fate[1]) &&
             WEXITSTATUS(fate[1]) == 3);
}

int main(int argc, char **argv)
{
    int failed = 0;

    meeting = meeting_new();
    for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
        if ((argc < 2 || strcmp(argv[1], tests[i].name) == 0) && run(i) != 0) {
            fprintf(stderr, "%s failed\n", tests[i].name);
            failed++;
        }
    }
    return failed != 0;
}
