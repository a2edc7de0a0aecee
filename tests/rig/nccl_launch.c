/* SPDX-License-Identifier: Apache-2.0
 *
 * From a group's operations to pieces of stream work: one piece per communicator, on the stream of its first
 * operation. Other streams of the group are joined by events: they wait for the piece, and the piece for what was on
 * them. All of a group's first joins come before any piece, and all pieces before the last joins, so a stream that
 * waits for one communicator's piece never stands before another's.
 *
 * Pieces of one communicator run in the order of the calls whatever their streams: each waits for the event behind
 * the one before. Between graphs, and between graphs and streams, the same event does it as external record and wait,
 * whose order is that of the launches. */
#include "tests/rig/nccl_internal.h"

#include <stdlib.h>
#include <string.h>

#define OVERLAPS_MAX 512 /* larger groups are not checked for it: the time grows with the square */

struct launch {
    ncclComm_t comm;
    struct rig_plan *plan;
    size_t plan_room;
    cudaStream_t *streams; /* streams[0] carries the piece */
    size_t streams_count, streams_room;
    unsigned long long capture; /* 0: none */
    bool works;                 /* moves any byte */
};

struct batch {
    struct launch *list;
    size_t count, room;
};

/* Communicators go in an order that all ranks have, as with NCCL from 2.26 on: by a number of theirs, not as they were
 * named first. */
static struct launch *find_launch(struct batch *batch, ncclComm_t comm)
{
    size_t at = batch->count;
    struct launch *launch;

    for (size_t i = 0; i < batch->count; i++)
        if (batch->list[i].comm == comm)
            return &batch->list[i];
    batch->list = rig_grow(batch->list, batch->count, &batch->room, sizeof(*batch->list));
    while (at > 0 && memcmp(&batch->list[at - 1].comm->clique->id, &comm->clique->id,
                            sizeof(comm->clique->id)) > 0)
        at--;
    launch = &batch->list[at];
    memmove(launch + 1, launch, (batch->count++ - at) * sizeof(*launch));
    *launch = (struct launch){ .comm = comm, .plan = rig_alloc(sizeof(*launch->plan)) };
    launch->plan->comm = comm;
    return launch;
}

static void add_op(struct batch *batch, const struct rig_op *op)
{
    struct launch *launch = find_launch(batch, op->comm);
    struct rig_plan *plan = launch->plan;
    bool works = op->count > 0 || rig_op_is_p2p(op);
    size_t i;

    plan->ops = rig_grow(plan->ops, plan->count, &launch->plan_room, sizeof(*plan->ops));
    plan->ops[plan->count] = *op;
    plan->ops[plan->count++].choice = rig_tuner_choice(op);
    if (works && !launch->works)
        launch->streams_count = 0; /* NCCL forgets collectives of nothing, their streams too */
    launch->works |= works;
    for (i = 0; i < launch->streams_count; i++)
        if (launch->streams[i] == op->stream)
            return;
    if (launch->streams_count > 0 && !works)
        return;
    launch->streams = rig_grow(launch->streams, launch->streams_count, &launch->streams_room,
                               sizeof(cudaStream_t));
    launch->streams[launch->streams_count++] = op->stream;
}

/* ---- checks ---- */

static cudaError_t capture_of(cudaStream_t stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus status;
    cudaError_t err;

#if CUDART_VERSION >= 13000
    err = cudaStreamGetCaptureInfo(stream, &status, id, NULL, NULL, NULL, NULL);
#else
    err = cudaStreamGetCaptureInfo_v2(stream, &status, id, NULL, NULL, NULL);
#endif
    if (err == cudaSuccess && status == cudaStreamCaptureStatusNone)
        *id = 0;
    return err;
}

static ncclResult_t check_captures(struct launch *launch)
{
    for (size_t i = 0; i < launch->streams_count; i++) {
        unsigned long long id = 0;
        cudaError_t err = capture_of(launch->streams[i], &id);

        if (err != cudaSuccess)
            return rig_error(ncclUnhandledCudaError, "stream: %s", cudaGetErrorString(err));
        if (i > 0 && id != launch->capture)
            return rig_error(ncclInvalidUsage,
                             "streams of one group are not all in the same graph or in none");
        launch->capture = id;
    }
    return ncclSuccess;
}

/* k-th send to oneself goes with the k-th receive. */
static ncclResult_t check_self(const struct rig_plan *plan)
{
    size_t sends = 0, recvs = 0, at = 0;

    for (size_t i = 0; i < plan->count; i++) {
        const struct rig_op *op = &plan->ops[i];

        if (rig_op_is_p2p(op) && op->root == plan->comm->rank) {
            sends += op->kind == RIG_SEND;
            recvs += op->kind == RIG_RECV;
        }
    }
    if (sends != recvs)
        return rig_error(ncclInvalidUsage, "%zu sends to oneself, %zu receives", sends, recvs);
    for (size_t i = 0; i < plan->count && sends > 0; i++) {
        const struct rig_op *op = &plan->ops[i], *recv;

        if (op->kind != RIG_SEND || op->root != plan->comm->rank)
            continue;
        while (plan->ops[at].kind != RIG_RECV || plan->ops[at].root != plan->comm->rank)
            at++;
        recv = &plan->ops[at++];
        if (op->count * rig_type_size(op->type) != recv->count * rig_type_size(recv->type))
            lcrig_fail("mismatch: rank %d sends %zu x %s to itself and receives %zu x %s", op->root,
                       op->count, rig_type_name(op->type), recv->count, rig_type_name(recv->type));
    }
    return ncclSuccess;
}

static size_t parts(const struct rig_op *op, bool of_result)
{
    size_t n = (size_t)op->comm->n;

    switch (op->kind) {
    case RIG_ALL_GATHER:
    case RIG_GATHER: return of_result ? n : 1;
    case RIG_REDUCE_SCATTER:
    case RIG_SCATTER: return of_result ? 1 : n;
    case RIG_ALL_TO_ALL: return n;
    default: return 1;
    }
}

/* Does what op writes overlap what other reads or writes? Roots' buffers only count at the root. */
static bool overlaps(const struct rig_op *op, const struct rig_op *other, bool with_result)
{
    const char *theirs = with_result ? other->recv : other->send;
    size_t mine_bytes = op->count * rig_type_size(op->type) * parts(op, true);
    size_t their_bytes = other->count * rig_type_size(other->type) * parts(other, with_result);
    bool rooted = other->kind == RIG_REDUCE || other->kind == RIG_GATHER ||
                  other->kind == RIG_BROADCAST || other->kind == RIG_SCATTER;
    bool root_writes = other->kind == RIG_REDUCE || other->kind == RIG_GATHER;

    if (op->kind == RIG_SEND || (with_result && other->kind == RIG_SEND) ||
        (!with_result && other->kind == RIG_RECV))
        return false;
    if ((op->kind == RIG_REDUCE || op->kind == RIG_GATHER) && op->root != op->comm->rank)
        return false;
    if (rooted && other->root != other->comm->rank && with_result == root_writes)
        return false;
    return mine_bytes && their_bytes && op->recv < theirs + their_bytes &&
           theirs < op->recv + mine_bytes;
}

/* Operations of one group run at once, so none may touch another's result. A rank may receive from itself in place. */
static void check_overlaps(const struct rig_plan *plan)
{
    for (size_t i = 0; i < plan->count && plan->count <= OVERLAPS_MAX; i++) {
        for (size_t j = 0; j < plan->count; j++) {
            const struct rig_op *a = &plan->ops[i], *b = &plan->ops[j];

            if (i == j || (a->kind == RIG_RECV && b->kind == RIG_SEND && a->root == b->root &&
                           a->root == plan->comm->rank && a->recv == b->send))
                continue;
            if (overlaps(a, b, false) || overlaps(a, b, true))
                lcrig_fail("rank %d: the result of %s overlaps a buffer of %s in one group",
                           plan->comm->rank, rig_kind_name(a->kind), rig_kind_name(b->kind));
        }
    }
}

/* Two ranks of one communicator, one stream: the second could start only after the first, which waits for it. */
static void check_streams(const struct batch *batch)
{
    for (size_t i = 0; i < batch->count; i++)
        for (size_t j = 0; j < i; j++)
            if (batch->list[i].comm->clique == batch->list[j].comm->clique &&
                batch->list[i].streams[0] == batch->list[j].streams[0] &&
                batch->list[i].comm->device == batch->list[j].comm->device)
                lcrig_fail("ranks %d and %d of one communicator on one stream: a deadlock",
                           batch->list[j].comm->rank, batch->list[i].comm->rank);
}

static ncclResult_t check(struct batch *batch)
{
    ncclResult_t result = ncclSuccess;

    check_streams(batch);
    for (size_t i = 0; i < batch->count && result == ncclSuccess; i++) {
        cudaSetDevice(batch->list[i].comm->device);
        result = check_captures(&batch->list[i]);
        if (result == ncclSuccess)
            result = check_self(batch->list[i].plan);
        if (result == ncclSuccess)
            check_overlaps(batch->list[i].plan);
    }
    return result;
}

/* ---- the steps ---- */

static cudaError_t join_before(struct launch *launch)
{
    ncclComm_t comm = launch->comm;
    cudaError_t err = cudaSuccess;

    for (size_t i = 1; i < launch->streams_count && err == cudaSuccess; i++) {
        err = cudaEventRecord(comm->join, launch->streams[i]);
        if (err == cudaSuccess)
            err = cudaStreamWaitEvent(launch->streams[0], comm->join, 0);
    }
    return err;
}

static cudaError_t wait_for_last(struct launch *launch)
{
    ncclComm_t comm = launch->comm;

    if (!launch->capture)
        return comm->was_launched ? cudaStreamWaitEvent(launch->streams[0], comm->order, 0)
                                  : cudaSuccess;
    if (comm->was_captured && comm->last_capture == launch->capture)
        return cudaStreamWaitEvent(launch->streams[0], comm->captured, 0);
    return cudaStreamWaitEvent(launch->streams[0], comm->order, cudaEventWaitExternal);
}

static cudaError_t record_last(struct launch *launch)
{
    ncclComm_t comm = launch->comm;
    cudaError_t err;

    comm->was_launched = true;
    if (!launch->capture)
        return cudaEventRecord(comm->order, launch->streams[0]);
    comm->was_captured = true;
    comm->last_capture = launch->capture;
    err = cudaEventRecordWithFlags(comm->order, launch->streams[0], cudaEventRecordExternal);
    if (err != cudaSuccess)
        return err;
    return cudaEventRecord(comm->captured, launch->streams[0]);
}

static cudaError_t enqueue(struct launch *launch)
{
    ncclComm_t comm = launch->comm;
    struct rig_plan *plan = launch->plan;
    struct lcrig_work work = {
        .name = "NCCL",
        .run = rig_plan_run,
        .release = rig_plan_release,
        .arg = plan,
        .is_kernel = launch->works,
    };
    cudaError_t err = wait_for_last(launch);

    if (err != cudaSuccess)
        return err;
    if (plan->count == 1)
        work.name = rig_kind_name(plan->ops[0].kind);
    plan->in_graph = launch->capture != 0;
    pthread_mutex_lock(&comm->lock);
    comm->refs++;
    comm->plans++;
    comm->in_graphs += plan->in_graph;
    pthread_mutex_unlock(&comm->lock);
    launch->plan = NULL; /* the stream's from here on */
    err = lcrig_enqueue(launch->streams[0], &work);
    return err == cudaSuccess ? record_last(launch) : err;
}

static cudaError_t join_after(struct launch *launch)
{
    cudaEvent_t event = launch->capture ? launch->comm->captured : launch->comm->order;
    cudaError_t err = cudaSuccess;

    for (size_t i = 1; i < launch->streams_count && err == cudaSuccess; i++)
        err = cudaStreamWaitEvent(launch->streams[i], event, 0);
    return err;
}

static ncclResult_t for_each(struct batch *batch, cudaError_t (*step)(struct launch *))
{
    for (size_t i = 0; i < batch->count; i++) {
        struct launch *launch = &batch->list[i];
        cudaError_t err;

        cudaSetDevice(launch->comm->device);
        pthread_mutex_lock(&launch->comm->launch_lock);
        err = step(launch);
        pthread_mutex_unlock(&launch->comm->launch_lock);
        if (err != cudaSuccess)
            return rig_error(ncclUnhandledCudaError, "launch: %s", cudaGetErrorString(err));
    }
    return ncclSuccess;
}

static void batch_free(struct batch *batch)
{
    for (size_t i = 0; i < batch->count; i++) {
        if (batch->list[i].plan)
            free(batch->list[i].plan->ops);
        free(batch->list[i].plan);
        free(batch->list[i].streams);
    }
    free(batch->list);
}

ncclResult_t rig_launch(const struct rig_op *ops, size_t count)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    struct batch batch = { 0 };
    ncclResult_t result;
    int device;

    if (cudaGetDevice(&device) != cudaSuccess)
        return rig_error(ncclUnhandledCudaError, "no current device");
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (size_t i = 0; i < count; i++)
        add_op(&batch, &ops[i]);
    result = check(&batch);
    if (result == ncclSuccess)
        result = for_each(&batch, join_before);
    if (result == ncclSuccess)
        result = for_each(&batch, enqueue);
    if (result == ncclSuccess)
        result = for_each(&batch, join_after);
    batch_free(&batch);
    cudaSetDevice(device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return result;
}
