/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/reduce.h"

#include "common/deadline.h"
#include "common/log.h"
#include "interpose/agree.h"
#include "interpose/comm.h"
#include "interpose/feedback.h"
#include "interpose/peers.h"
#include "interpose/pool.h"
#include "interpose/process.h"
#include "interpose/refusal.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define WIRE sizeof(uint16_t)

/* ---- scratch ---- */

/* What communicators have left, until nothing runs that uses it. A stack; what is taken from it is the whole. Any
 * thread. */
static _Atomic(struct lc_reducer *) kept;

static void keep(struct lc_reducer *reducer)
{
    reducer->next = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &reducer->next, reducer))
        ;
}

/* What a graph has used may be replayed, whatever has become of its communicator, unless that was destroyed in order. */
static bool is_done(const struct lc_reducer *reducer)
{
    bool done = !reducer->open && reducer->captured_uses == 0 &&
                (!reducer->serial ||
                 reducer->backend->cudaEventQuery(reducer->serial) == cudaSuccess);

    if (!done)
        (void)reducer->backend->cudaGetLastError(); /* not the program's error */
    return done;
}

/* Waits for nothing: memory goes to the pool. False: the device still works on the peers' memory. */
static bool free_parts(struct lc_reducer *reducer)
{
    const struct lc_backend *backend = reducer->backend;

    if (!lc_peers_free(reducer->peers))
        return false;
    lc_verify_free(reducer->verify);
    lc_feedback_free(reducer->feedback);
    lc_rounding_free(reducer);
    lc_pool_give(reducer->scratch);
    if (reducer->serial)
        (void)backend->cudaEventDestroy(reducer->serial);
    if (reducer->join)
        (void)backend->cudaEventDestroy(reducer->join);
    for (int i = 0; i < LC_CAPTURES; i++) {
        if (reducer->captured[i].event)
            (void)backend->cudaEventDestroy(reducer->captured[i].event);
    }
    free(reducer);
    return true;
}

/* Also unguarded: none of this needs a current device. */
static bool free_if_done(struct lc_reducer *reducer)
{
    const struct lc_backend *backend = reducer->backend;
    int device = reducer->device;
    struct lc_guard guard;
    bool guarded = lc_guard_begin(backend, device, &guard);
    bool freed = is_done(reducer) && free_parts(reducer);

    if (guarded)
        lc_guard_end(backend, device, &guard);
    return freed;
}

void lc_reducer_free_ended(void)
{
    struct lc_reducer *list = atomic_exchange(&kept, NULL);

    while (list) {
        struct lc_reducer *next = list->next;

        if (!free_if_done(list))
            keep(list);
        list = next;
    }
}

struct lc_reducer *lc_reducer_new(int device, cudaStream_t stream, size_t bytes)
{
    const struct lc_backend *backend = lc_backend();
    struct lc_reducer *reducer;
    struct lc_guard guard;
    int err;

    if (!backend)
        return NULL;
    if (!lc_guard_begin(backend, device, &guard)) {
        lc_warn_once(
            "device %d cannot be used: reductions are not set up and stay with NCCL on all ranks",
            device);
        return NULL;
    }
    lc_reducer_free_ended();
    reducer = calloc(1, sizeof(*reducer));
    if (!reducer) {
        lc_guard_end(backend, device, &guard);
        return NULL;
    }
    *reducer = (struct lc_reducer){ .backend = backend, .device = device, .bytes = bytes };
    err = backend->lk_load_all();
    if (!err)
        err = lc_pool_take(backend, LC_MEMORY_DEVICE, device, bytes, (void **)&reducer->scratch);
    if (!err)
        err = backend->cudaEventCreateWithFlags(&reducer->serial, cudaEventDisableTiming);
    if (!err)
        err = backend->cudaEventCreateWithFlags(&reducer->join, cudaEventDisableTiming);
    for (int i = 0; !err && i < LC_CAPTURES; i++)
        err = backend->cudaEventCreateWithFlags(&reducer->captured[i].event,
                                                cudaEventDisableTiming);
    if (!err)
        err = backend->cudaEventRecord(reducer->serial,
                                       stream); /* a wait in a graph needs one before it */
    if (err)
        (void)backend->cudaGetLastError(); /* not the program's error */
    lc_guard_end(backend, device, &guard);
    if (err) {
        lc_warn_once(
            "device %d: no scratch of %zu MB for reductions (%s): they stay with NCCL on all ranks",
            device, bytes >> 20, backend->lk_error_text(err));
        lc_reducer_free(reducer);
        return NULL;
    }
    return reducer;
}

/* Bounded: work of the program that never ends must not keep it from ending. */
static bool is_idle(struct lc_reducer *reducer)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);

    while (reducer->backend->cudaEventQuery(reducer->serial) == cudaErrorNotReady) {
        (void)reducer->backend->cudaGetLastError();
        if (lc_deadline_passed(until))
            return false;
        (void)poll(NULL, 0, 1);
    }
    return true;
}

bool lc_reducer_busy(const struct lc_reducer *reducer)
{
    const struct lc_backend *backend = reducer->backend;
    struct lc_guard guard;
    bool busy;

    if (!lc_guard_begin(backend, reducer->device, &guard))
        return false;
    busy = backend->cudaEventQuery(reducer->serial) == cudaErrorNotReady;
    (void)backend->cudaGetLastError(); /* not the program's error */
    lc_guard_end(backend, reducer->device, &guard);
    return busy;
}

void lc_reducer_settle(struct lc_reducer *reducer)
{
    struct lc_guard guard;
    bool guarded;

    if (!reducer)
        return;
    guarded = lc_guard_begin(reducer->backend, reducer->device, &guard);
    if (is_idle(reducer)) {
        lc_peers_count(reducer->peers);
        reducer->captured_uses = 0;
    } else {
        lc_warn("device %d: %zu MB of scratch are still in use and stay allocated", reducer->device,
                reducer->bytes >> 20);
    }
    if (guarded)
        lc_guard_end(reducer->backend, reducer->device, &guard);
}

void lc_reducer_free(struct lc_reducer *reducer)
{
    if (!reducer)
        return;
    lc_verify_detach(reducer->verify);
    lc_feedback_detach(reducer->feedback);
    lc_peers_detach(reducer->peers);
    keep(reducer);
}

/* Those that graphs have used go as well, and those whose end no event says, behind a call that waits for all. */
void lc_reducer_free_all(void)
{
    struct lc_reducer *list = atomic_exchange(&kept, NULL);

    while (list) {
        struct lc_reducer *next = list->next;

        if (list->open) {
            lc_pool_drop(list->scratch);
            list->scratch = NULL;
        }
        list->open = false;
        list->captured_uses = 0;
        keep(list);
        list = next;
    }
    lc_reducer_free_ended();
    lc_pool_empty(LC_POOL_ALL);
}

/* ---- order ---- */

/* As the newest runtime declares it; older ones have fewer of the optional arguments behind the third. */
typedef cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                 unsigned long long *id, void *graph, void *dependencies,
                                 void *edges, void *count);

typedef cudaError_t update_capture(cudaStream_t stream, cudaGraphNode_t *nodes, const void *edges,
                                   size_t count, unsigned flags);

int lc_capture_id(const struct lc_backend *backend, cudaStream_t stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    capture_info *ask;
    int err;

    memcpy(&ask, &backend->cudaStreamGetCaptureInfo, sizeof(ask));
    *id = 0;
    err = ask(stream, &status, id, NULL, NULL, NULL, NULL);
    if (!err && status == cudaStreamCaptureStatusInvalidated)
        err = cudaErrorStreamCaptureInvalidated;
    if (err || status != cudaStreamCaptureStatusActive)
        *id = 0;
    return err;
}

int lc_span_begin(struct lc_reducer *reducer, cudaStream_t stream, struct lc_span *span)
{
    const struct lc_backend *backend = reducer->backend;
    int err;

    *span = (struct lc_span){ .reducer = reducer, .stream = stream };
    if (!lc_guard_begin(backend, reducer->device, &span->guard))
        return cudaErrorInvalidDevice;
    err = lc_capture_id(backend, stream, &span->capture);
    if (err)
        lc_span_end(span);
    return err;
}

static struct lc_captured *find_captured(struct lc_reducer *reducer, unsigned long long id)
{
    for (int i = 0; i < LC_CAPTURES; i++) {
        if (reducer->captured[i].id == id)
            return &reducer->captured[i];
    }
    return NULL;
}

static struct lc_captured *take_captured(struct lc_reducer *reducer, unsigned long long id)
{
    struct lc_captured *found = find_captured(reducer, id);

    if (found)
        return found;
    found = &reducer->captured[0];
    for (int i = 1; i < LC_CAPTURES; i++) {
        if (reducer->captured[i].last < found->last)
            found = &reducer->captured[i];
    }
    return found;
}

/* Also on the stream of the use before: a handle may be a new stream's, and the per-thread one is a stream a thread. */
int lc_span_wait(struct lc_span *span)
{
    struct lc_reducer *reducer = span->reducer;
    const struct lc_backend *backend = reducer->backend;
    const struct lc_captured *captured;

    reducer->open = true;
    if (!span->capture)
        return backend->cudaStreamWaitEvent(span->stream, reducer->serial, 0);
    captured = find_captured(reducer, span->capture);
    if (captured)
        return backend->cudaStreamWaitEvent(span->stream, captured->event, 0);
    return backend->cudaStreamWaitEvent(span->stream, reducer->serial, cudaEventWaitExternal);
}

#define FRONTIER 16

/* What the next node of a capturing stream will depend on. */
struct frontier {
    cudaGraphNode_t nodes[FRONTIER];
    uint64_t edges[FRONTIER]; /* cudaGraphEdgeData */
    size_t count;
    bool has_edges;
};

/* False: it is more than that, or the runtime is one without edges, whose sixth argument is the count. */
static bool get_frontier(const struct lc_span *span, struct frontier *out)
{
    const struct lc_backend *backend = span->reducer->backend;
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t *nodes = NULL;
    const void *edges = NULL;
    unsigned long long id;
    size_t count = SIZE_MAX;
    cudaGraph_t graph;
    capture_info *ask;

    memcpy(&ask, &backend->cudaStreamGetCaptureInfo, sizeof(ask));
    if (ask(span->stream, &status, &id, &graph, &nodes, &edges, &count)) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        return false;
    }
    if (status != cudaStreamCaptureStatusActive || count > FRONTIER || (count && !nodes))
        return false;
    out->count = count;
    out->has_edges = edges != NULL;
    memcpy(out->nodes, nodes, count * sizeof(*nodes));
    if (edges)
        memcpy(out->edges, edges, count * sizeof(*out->edges));
    return true;
}

/* Records `serial` behind `before`, the node that did so last in this graph (NULL: none did, or the stream stands behind it),
 * so that the one behind the last use is the last to record. */
static int mark(const struct lc_span *span, cudaGraphNode_t before)
{
    const struct lc_backend *backend = span->reducer->backend;
    update_capture *update;
    int err = 0;

    memcpy(&update, &backend->cudaStreamUpdateCaptureDependencies, sizeof(update));
    if (before)
        err = (int)update(span->stream, &before, NULL, 1, cudaStreamAddCaptureDependencies);
    return err ? err
               : (int)backend->cudaEventRecordWithFlags(span->reducer->serial, span->stream,
                                                        cudaEventRecordExternal);
}

/* The node that records `serial` lies beside what the stream does next, which need not wait for it. */
static int mark_aside(const struct lc_span *span, struct frontier *before,
                      struct lc_captured *captured)
{
    const struct lc_backend *backend = span->reducer->backend;
    struct frontier after;
    update_capture *update;
    int err = mark(span, captured->mark);

    if (err)
        return err;
    captured->mark = get_frontier(span, &after) && after.count == 1 ? after.nodes[0] : NULL;
    if (!captured->mark) /* all that follows stands behind it then */
        return (int)backend->cudaEventRecord(captured->event, span->stream);
    memcpy(&update, &backend->cudaStreamUpdateCaptureDependencies, sizeof(update));
    return (int)update(span->stream, before->nodes, before->has_edges ? before->edges : NULL,
                       before->count, cudaStreamSetCaptureDependencies);
}

static int record_captured(struct lc_span *span)
{
    struct lc_reducer *reducer = span->reducer;
    const struct lc_backend *backend = reducer->backend;
    struct lc_captured *captured = take_captured(reducer, span->capture);
    struct frontier before;
    bool aside = get_frontier(span, &before);
    int err = 0;

    captured->last = ++reducer->captured_uses;
    if (captured->id != span->capture)
        captured->mark = NULL;
    if (!aside) {
        err = mark(span, captured->mark);
        captured->mark = NULL; /* what follows stands behind this record */
    }
    if (err)
        return err;
    captured->id = span->capture;
    err = backend->cudaEventRecord(captured->event, span->stream);
    return err || !aside ? err : mark_aside(span, &before, captured);
}

int lc_span_record(struct lc_span *span)
{
    struct lc_reducer *reducer = span->reducer;
    int err;

    if (span->capture)
        err = record_captured(span);
    else
        err = reducer->backend->cudaEventRecord(reducer->serial, span->stream);
    reducer->open = err != 0;
    return err;
}

void lc_span_end(struct lc_span *span)
{
    lc_guard_end(span->reducer->backend, span->reducer->device, &span->guard);
}

/* ---- bf16 on the wire ---- */

struct lk_scale lc_scale_of(const struct lc_redop *redop, int ranks)
{
    struct lk_scale scale = { .value = 1.0f, .type = LK_FP32 };

    if (redop->kind == LC_REDOP_AVG)
        scale.value = 1.0f / (float)ranks;
    if (redop->kind == LC_REDOP_PREMUL) {
        scale.value = redop->value;
        scale.device_value = redop->device_value;
        scale.type = lc_lk_type(redop->type);
    }
    return scale;
}

/* One call's constants. */
struct cast {
    const struct lc_op *op;
    const struct lc_real *real;
    const struct lc_backend *backend;
    struct lc_reducer *reducer;
    struct lk_scale scale;
    uint64_t ranks, rank;
    bool accurate;
    uint64_t most; /* elements of a piece, but for the last one */
    enum lk_rounding rounding;
    struct lk_rng rng;

    /* What is owed to each element of the contribution, then to each of the own shard of the sum; NULL: no feedback. */
    float *residual;
};

/* A failure of ours after commit is an error at every rank: never a silent way around it. */
static ncclResult_t failed(const struct cast *cast, int err)
{
    if (lc_is_void(err))
        return lc_refuse(cast->op, err);
    lc_error("%s of %zu elements: %s", lc_op_name(cast->op->kind), cast->op->count,
             cast->backend->lk_error_text(err));
    lc_agree_break(cast->op->comm->agree, ncclUnhandledCudaError);
    return ncclUnhandledCudaError;
}

/* Behind a kernel that has rounded so many elements. */
static int rounded(const struct cast *cast, int err, uint64_t elements)
{
    return err ? err : lc_rounding_drawn(cast->reducer, elements, cast->op->stream);
}

static int pack(const struct cast *cast, uint64_t at, uint64_t n, char *to)
{
    const float *send = cast->op->send;
    struct lk_tensor tensor = { (void *)(send + at), n, 0 };
    int err;

    if (cast->residual)
        err = cast->backend->lk_cast_feedback(send + at, n, to, cast->residual + at, &cast->scale,
                                              cast->rounding, &cast->rng, cast->op->stream);
    else
        err = cast->backend->lk_cast_pack(&tensor, 1, to, &cast->scale, cast->rounding, &cast->rng,
                                          cast->op->stream);
    return rounded(cast, err, n);
}

static int unpack(const struct cast *cast, const void *from, uint64_t at, uint64_t n)
{
    struct lk_tensor tensor = { (float *)cast->op->recv + at, n, 0 };

    return cast->backend->lk_cast_unpack(&tensor, 1, from, cast->op->stream);
}

/* The pieces of a reduce-scatter: [at, at + n) of every rank's part, packed one behind the other. */
static int pack_parts(const struct cast *cast, uint64_t at, uint64_t n)
{
    struct lk_tensor *tensors = calloc(cast->ranks, sizeof(*tensors));
    const float *send = cast->op->send;
    int err;

    if (!tensors)
        return cudaErrorMemoryAllocation;
    for (uint64_t r = 0; r < cast->ranks; r++)
        tensors[r] = (struct lk_tensor){ (void *)(send + r * cast->op->count + at), n, r * n };
    err = cast->backend->lk_cast_pack(tensors, cast->ranks, cast->reducer->scratch, &cast->scale,
                                      cast->rounding, &cast->rng, cast->op->stream);
    free(tensors);
    return rounded(cast, err, cast->ranks * n);
}

ncclResult_t lc_exchange(const struct lc_real *real, const char *from, char *to, uint64_t shard,
                         const struct lc_comm *comm, cudaStream_t stream)
{
    ncclComm_t handle = (ncclComm_t)atomic_load_explicit(&comm->handle, memory_order_relaxed);
    ncclResult_t result, end;

    if (real->ncclAlltoAll)
        return real->ncclAlltoAll(from, to, shard, ncclBfloat16, handle, stream);
    result = real->ncclGroupStart();
    for (int r = 0; result == ncclSuccess && r < comm->facts.ranks; r++) {
        result = real->ncclSend(from + r * shard * WIRE, shard, ncclBfloat16, r, handle, stream);
        if (result == ncclSuccess)
            result = real->ncclRecv(to + r * shard * WIRE, shard, ncclBfloat16, r, handle, stream);
    }
    end = real->ncclGroupEnd();
    return result != ncclSuccess ? result : end;
}

static ncclResult_t exchange(const struct cast *cast, const char *from, char *to, uint64_t shard)
{
    return lc_exchange(cast->real, from, to, shard, cast->op->comm, cast->op->stream);
}

static uint64_t padded(uint64_t n)
{
    return (n + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN * LK_PACK_ALIGN;
}

static uint64_t shard_of(const struct cast *cast, uint64_t n)
{
    return padded((n + cast->ranks - 1) / cast->ranks);
}

/* Elements of an all-reduce's residuals: all of the contribution, and of each piece a shard of the result. */
static uint64_t residuals(const struct cast *cast)
{
    uint64_t count = padded(cast->op->count);

    if (!cast->accurate || cast->ranks == 2)
        return count;
    return count + (count + cast->most - 1) / cast->most * shard_of(cast, cast->most);
}

/* The own shard of the result, rounded. With feedback the fp32 sums lie in the result's place meanwhile, which unpacking
 * is going to overwrite. */
static int sum_shard(const struct cast *cast, const char *parts, uint64_t at, uint64_t n, char *own)
{
    const struct lc_op *op = cast->op;
    uint64_t shard = shard_of(cast, n), first = cast->rank * shard;
    uint64_t count = first >= n ? 0 : n - first < shard ? n - first : shard;
    float *sums = (float *)op->recv + at + first;
    float *owed;
    int err;

    if (!cast->residual)
        return rounded(cast,
                       cast->backend->lk_sum_shards(
                           parts, cast->ranks, shard, shard, own, LK_BF16, NULL,
                           cast->rounding == LK_STOCHASTIC ? &cast->rng : NULL, op->stream),
                       shard);
    owed = cast->residual + padded(op->count) + at / cast->most * shard_of(cast, cast->most);
    err = cast->backend->lk_sum_shards(parts, cast->ranks, shard, count, sums, LK_FP32, NULL, NULL,
                                       op->stream);
    if (!err)
        err = cast->backend->lk_cast_feedback(sums, count, own, owed, NULL, cast->rounding,
                                              &cast->rng, op->stream);
    return rounded(cast, err, count);
}

/* All-to-all of bf16, sum in fp32 in rank order, all-gather of the rounded sums: every rank gets the owner's bits. */
static ncclResult_t accurate_all_reduce(const struct cast *cast, uint64_t at, uint64_t n)
{
    const struct lc_op *op = cast->op;
    uint64_t shard = shard_of(cast, n);
    char *wire = cast->reducer->scratch;
    char *parts = wire + cast->ranks * shard * WIRE;
    char *own = wire + cast->rank * shard * WIRE;
    ncclResult_t result = exchange(cast, wire, parts, shard);
    int err;

    if (result != ncclSuccess)
        return result;
    err = sum_shard(cast, parts, at, n, own);
    if (err)
        return failed(cast, err);
    return cast->real->ncclAllGather(own, wire, shard, ncclBfloat16, op->handle, op->stream);
}

/* Two ranks: an all-gather moves as many bytes as an all-reduce, and both add up the same in the same order. The sum
 * need not be rounded again, which would cost more than elsewhere: of two numbers of like size it lies halfway between
 * two others half of the time. */
static ncclResult_t accurate_pair(const struct cast *cast, uint64_t at, uint64_t n)
{
    const struct lc_op *op = cast->op;
    uint64_t slot = padded(n);
    char *wire = cast->reducer->scratch, *own = wire + cast->rank * slot * WIRE;
    ncclResult_t result;
    int err = pack(cast, at, n, own);

    if (err)
        return failed(cast, err);
    result = cast->real->ncclAllGather(own, wire, slot, ncclBfloat16, op->handle, op->stream);
    if (result != ncclSuccess)
        return result;
    err = cast->backend->lk_sum_shards(wire, 2, slot, n, (float *)op->recv + at, LK_FP32, NULL,
                                       NULL, op->stream);
    return err ? failed(cast, err) : ncclSuccess;
}

static ncclResult_t all_reduce_piece(const struct cast *cast, uint64_t at, uint64_t n)
{
    const struct lc_op *op = cast->op;
    char *wire = cast->reducer->scratch;
    ncclResult_t result;
    int err;

    if (cast->accurate && cast->ranks == 2)
        return accurate_pair(cast, at, n);
    err = pack(cast, at, n, wire);
    if (err)
        return failed(cast, err);
    result = cast->accurate ? accurate_all_reduce(cast, at, n)
                            : cast->real->ncclAllReduce(wire, wire, n, ncclBfloat16, ncclSum,
                                                        op->handle, op->stream);
    if (result != ncclSuccess)
        return result;
    err = unpack(cast, wire, at, n);
    return err ? failed(cast, err) : ncclSuccess;
}

static ncclResult_t reduce_scatter_piece(const struct cast *cast, uint64_t at, uint64_t n)
{
    const struct lc_op *op = cast->op;
    char *wire = cast->reducer->scratch;
    char *second = wire + (cast->ranks * n + LK_PACK_ALIGN) / LK_PACK_ALIGN * LK_PACK_ALIGN * WIRE;
    ncclResult_t result;
    int err = pack_parts(cast, at, n);

    if (err)
        return failed(cast, err);
    result = cast->accurate ? exchange(cast, wire, second, n)
                            : cast->real->ncclReduceScatter(wire, second, n, ncclBfloat16, ncclSum,
                                                            op->handle, op->stream);
    if (result != ncclSuccess)
        return result;
    err = cast->accurate
              ? cast->backend->lk_sum_shards(second, cast->ranks, n, n, (float *)op->recv + at,
                                             LK_FP32, NULL, NULL, op->stream)
              : unpack(cast, second, at, n);
    return err ? failed(cast, err) : ncclSuccess;
}

/* Elements that go through the scratch at once: from the scratch's size, which all ranks share. */
static uint64_t piece(const struct cast *cast)
{
    uint64_t room = cast->reducer->bytes / WIRE -
                    UINT64_C(4) * LK_PACK_ALIGN * (uint64_t)(cast->ranks + 1);
    uint64_t n = room;

    if (cast->op->kind == LC_OP_REDUCE_SCATTER)
        n = room / (cast->ranks + (cast->accurate ? cast->ranks : 1));
    else if (cast->accurate)
        n = room / 2 / cast->ranks * cast->ranks;
    return n / LK_PACK_ALIGN * LK_PACK_ALIGN;
}

/* NCCL has refused a call behind others that peers may have got. */
static void break_behind(const struct cast *cast, ncclResult_t error)
{
    unsigned long long id;

    if (!lc_is_void(lc_capture_id(cast->backend, cast->op->stream, &id)))
        lc_agree_break(cast->op->comm->agree, error);
}

ncclResult_t lc_reduce_cast(const struct lc_op *op, const struct lc_redop *redop,
                            const struct lc_real *real)
{
    struct lc_comm *comm = op->comm;
    struct cast cast = { .op = op,
                         .real = real,
                         .reducer = comm->reducer,
                         .backend = comm->reducer->backend,
                         .scale = lc_scale_of(redop, comm->facts.ranks),
                         .ranks = (uint64_t)comm->facts.ranks,
                         .rank = (uint64_t)comm->facts.rank,
                         .accurate = lc_wire_is_accurate(lc_process_config(), comm->facts.ranks) };
    ncclResult_t (*run)(const struct cast *, uint64_t, uint64_t) = op->kind == LC_OP_REDUCE_SCATTER
                                                                       ? reduce_scatter_piece
                                                                       : all_reduce_piece;
    const struct lk_buffers buffer = { op->send, op->recv, op->count };
    ncclResult_t result = ncclSuccess;
    struct lc_check check = { 0 };
    struct lc_span span;
    int err = lc_span_begin(cast.reducer, op->stream, &span);
    int recorded;
    uint64_t at = 0;

    if (err)
        return lc_is_streams_fault(err) ? lc_refuse(op, err) : failed(&cast, err);
    err = lc_span_wait(&span);
    cast.most = piece(&cast);
    cast.rounding = lc_rounding_of(cast.reducer, &cast.rng);
    lc_add(&comm->ledger.drawn, cast.rounding == LK_STOCHASTIC);
    if (!err && op->kind == LC_OP_ALL_REDUCE)
        cast.residual = lc_feedback_of(
            &span, &(struct lc_owing){ &buffer, 1, 1, redop->kind, 0, residuals(&cast) });
    if (!err)
        result = lc_verify_plain(
            cast.reducer, op, &(struct lc_checked){ .captured = span.capture != 0 }, real, &check);
    for (; !err && result == ncclSuccess && at < op->count; at += cast.most)
        result = run(&cast, at, op->count - at < cast.most ? op->count - at : cast.most);
    if (!err && result == ncclSuccess)
        lc_verify_compare(cast.reducer, &check, op, LC_CAST_BF16);
    else if (result != ncclSuccess && at > (cast.accurate ? 0 : cast.most))
        break_behind(&cast, result);
    recorded = lc_span_record(&span); /* also behind a part of the work */
    lc_span_end(&span);
    err = err ? err : recorded;
    return err ? failed(&cast, err) : result;
}
