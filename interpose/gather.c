/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/gather.h"

#include "common/log.h"
#include "interpose/agree.h"
#include "interpose/comm.h"
#include "interpose/process.h"
#include "interpose/reduce.h"

#include <stdlib.h>
#include <string.h>

struct item {
    struct lc_op op; /* its communicator is pinned */
    struct lc_choice choice;
    struct lc_redop redop;
    uint64_t done; /* elements that some batch has, or NCCL got; op.count: all */
};

/* n tensors of one kind, or parts of tensors, packed at `packed`; `length` elements with the gaps. */
struct batch {
    const struct item *first;
    size_t n;
    uint64_t length;
    char *packed;
    struct lk_tensor *send, *recv;
    struct batch *next;
};

/* What one thread has gathered. Freed when the group ends. */
struct lc_gather {
    struct item *items;
    size_t n, room;
    struct batch *inside; /* called in the open group, to be unpacked behind it */
};

static size_t wire_size(const struct item *item)
{
    return item->choice.path == LC_PATH_CAST ? 2 : lc_type_size(item->op.type);
}

static ncclResult_t failed(const struct lc_op *op, const char *what)
{
    lc_error("grouped all-reduce: %s", what);
    if (op->comm->agree)
        lc_agree_break(op->comm->agree, ncclSystemError);
    return ncclSystemError;
}

ncclResult_t lc_gather_add(struct lc_op *op, const struct lc_choice *choice,
                           const struct lc_redop *redop)
{
    struct lc_gather *gather = lc_thread.gather;
    struct item *items;
    size_t room;

    if (!gather) {
        gather = calloc(1, sizeof(*gather));
        if (!gather)
            return failed(op, "out of memory");
        lc_thread.gather = gather;
    }
    if (gather->n == gather->room) {
        room = gather->room ? 2 * gather->room : 64;
        items = realloc(gather->items, room * sizeof(*items));
        if (!items)
            return failed(op, "out of memory");
        gather->items = items;
        gather->room = room;
    }
    gather->items[gather->n++] = (struct item){ *op, *choice, *redop, 0 };
    return ncclSuccess;
}

/* By what the handles meant when the calls were made: one may since have been destroyed and given out again. */
static bool same_factor(const struct lc_redop *a, const struct lc_redop *b)
{
    return a->kind == b->kind && a->type == b->type && a->device_value == b->device_value &&
           memcmp(&a->value, &b->value, sizeof(a->value)) == 0;
}

static bool same_batch(const struct item *a, const struct item *b)
{
    return a->op.comm == b->op.comm && a->op.stream == b->op.stream && a->op.type == b->op.type &&
           a->choice.path == b->choice.path &&
           (a->choice.path == LC_PATH_CAST ? same_factor(&a->redop, &b->redop)
                                           : a->op.redop == b->op.redop);
}

static uint64_t padded(uint64_t count)
{
    return (count + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN * LK_PACK_ALIGN;
}

static void free_batch(struct batch *batch)
{
    if (!batch)
        return;
    free(batch->send);
    free(batch->recv);
    free(batch);
}

static struct batch *new_batch(const struct item *first, size_t most, char *packed)
{
    struct batch *batch = calloc(1, sizeof(*batch));

    if (!batch)
        return NULL;
    batch->first = first;
    batch->packed = packed;
    batch->send = calloc(most, sizeof(*batch->send));
    batch->recv = calloc(most, sizeof(*batch->recv));
    if (batch->send && batch->recv)
        return batch;
    free_batch(batch);
    return NULL;
}

static bool is_done(const struct item *item)
{
    return item->done == item->op.count;
}

/* Takes the next part of an item, as much as fits. */
static void take(struct batch *batch, struct item *item, uint64_t room)
{
    uint64_t n = item->op.count - item->done;
    size_t at = item->done * lc_type_size(item->op.type);

    if (padded(n) > room - batch->length)
        n = (room - batch->length) / LK_PACK_ALIGN * LK_PACK_ALIGN;
    if (n == 0)
        return;
    batch->send[batch->n] = (struct lk_tensor){ (char *)item->op.send + at, n, batch->length };
    batch->recv[batch->n] = (struct lk_tensor){ (char *)item->op.recv + at, n, batch->length };
    batch->length += padded(n);
    batch->n++;
    item->done += n;
}

/* In call order everything of the first item's kind, as much as fits into `room` elements. */
static struct batch *collect(struct lc_gather *gather, size_t first, char *packed, uint64_t room)
{
    struct batch *batch = new_batch(&gather->items[first], gather->n - first, packed);

    for (size_t i = first; batch && i < gather->n; i++) {
        struct item *item = &gather->items[i];

        if (!is_done(item) && same_batch(item, batch->first))
            take(batch, item, room);
    }
    return batch;
}

static enum lk_type lk_type_of(ncclDataType_t type)
{
    switch (type) {
    case ncclBfloat16: return LK_BF16;
    case ncclFloat16: return LK_FP16;
    default: return LK_FP32;
    }
}

static int pack(const struct batch *batch)
{
    const struct item *first = batch->first;
    const struct lc_backend *backend = first->op.comm->reducer->backend;
    struct lk_scale scale = lc_scale_of(&first->redop, first->op.comm->facts.ranks);

    if (first->choice.path == LC_PATH_CAST)
        return backend->lk_cast_pack(batch->send, batch->n, batch->packed, &scale, LK_NEAREST, NULL,
                                     first->op.stream);
    return backend->lk_pack(batch->send, batch->n, batch->packed, lk_type_of(first->op.type),
                            first->op.stream);
}

static int unpack(const struct batch *batch)
{
    const struct item *first = batch->first;
    const struct lc_backend *backend = first->op.comm->reducer->backend;

    if (first->choice.path == LC_PATH_CAST)
        return backend->lk_cast_unpack(batch->recv, batch->n, batch->packed, first->op.stream);
    return backend->lk_unpack(batch->recv, batch->n, batch->packed, lk_type_of(first->op.type),
                              first->op.stream);
}

static ncclResult_t reduce(const struct batch *batch, const struct lc_real *real)
{
    const struct item *first = batch->first;
    bool cast = first->choice.path == LC_PATH_CAST;

    return real->ncclAllReduce(
        batch->packed, batch->packed, batch->length, cast ? ncclBfloat16 : first->op.type,
        cast ? ncclSum : first->op.redop, first->op.handle, first->op.stream);
}

/* Forwards an item as the program made it. */
static ncclResult_t forward(struct item *item, const struct lc_real *real)
{
    const struct lc_op *op = &item->op;
    bool was_made = op->redop >= ncclNumOps; /* only simulated; the handle may be gone */

    item->done = op->count;
    item->choice = (struct lc_choice){ LC_PATH_NCCL, LC_NCCL_NO_FASTER_PATH };
    return real->ncclAllReduce(op->send, op->recv, op->count, op->type,
                               was_made ? ncclSum : op->redop, op->handle, op->stream);
}

static size_t count_like(const struct lc_gather *gather, size_t first)
{
    size_t count = 0;

    for (size_t i = first; i < gather->n; i++)
        count += !is_done(&gather->items[i]) &&
                 same_batch(&gather->items[i], &gather->items[first]);
    return count;
}

static ncclResult_t cuda_failed(const struct batch *batch, int err)
{
    return failed(&batch->first->op, batch->first->op.comm->reducer->backend->lk_error_text(err));
}

/* Packs and makes the call; the results are unpacked when the call is known to be under way. */
static ncclResult_t start(const struct batch *batch, const struct lc_real *real)
{
    struct lc_span span;
    int err = lc_span_begin(batch->first->op.comm->reducer, batch->first->op.stream, &span);
    ncclResult_t result;

    if (err)
        return cuda_failed(batch, err);
    err = lc_span_wait(&span);
    if (!err)
        err = pack(batch);
    result = err ? cuda_failed(batch, err) : reduce(batch, real);
    lc_span_end(&span);
    return result;
}

/* Two streams of one group: the mark behind the later one stands for both. */
static int join_streams(struct lc_reducer *reducer, cudaStream_t stream)
{
    int err = 0;

    if (reducer->group_recorded && reducer->group_stream != stream) {
        err = reducer->backend->cudaEventRecord(reducer->join, reducer->group_stream);
        if (!err)
            err = reducer->backend->cudaStreamWaitEvent(stream, reducer->join, 0);
    }
    reducer->group_recorded = true;
    reducer->group_stream = stream;
    return err;
}

static ncclResult_t finish(const struct batch *batch)
{
    struct lc_reducer *reducer = batch->first->op.comm->reducer;
    struct lc_span span;
    int err = lc_span_begin(reducer, batch->first->op.stream, &span);

    if (err)
        return cuda_failed(batch, err);
    err = unpack(batch);
    if (!err)
        err = join_streams(reducer, batch->first->op.stream);
    if (!err)
        err = lc_span_record(&span);
    lc_span_end(&span);
    return err ? cuda_failed(batch, err) : ncclSuccess;
}

/* The batch of one item's kind in what is left of the scratch; NULL and ncclSuccess: nothing fits now. */
static ncclResult_t next_batch(struct lc_gather *gather, size_t first, struct batch **out)
{
    const struct item *item = &gather->items[first];
    struct lc_reducer *reducer = item->op.comm->reducer;
    uint64_t room = (reducer->bytes - reducer->group_bytes) / wire_size(item);

    *out = NULL;
    if (room < LK_PACK_ALIGN)
        return ncclSuccess;
    *out = collect(gather, first, reducer->scratch + reducer->group_bytes, room);
    if (!*out)
        return failed(&item->op, "out of memory");
    reducer->group_bytes += ((*out)->length * wire_size(item) + 255) / 256 * 256;
    if (reducer->group_bytes > reducer->bytes)
        reducer->group_bytes = reducer->bytes;
    return ncclSuccess;
}

/* Inside an open group: as many batches as the scratches hold, one call each. */
static ncclResult_t start_round(struct lc_gather *gather, const struct lc_real *real)
{
    struct batch **last = &gather->inside;
    ncclResult_t result = ncclSuccess;

    for (size_t i = 0; result == ncclSuccess && i < gather->n; i++) {
        struct item *item = &gather->items[i];
        struct batch *batch;

        if (is_done(item))
            continue;
        if (item->choice.path == LC_PATH_PACK && item->done == 0 &&
            count_like(gather, i) < LC_PACK_LEAST) {
            result = forward(item, real);
            continue;
        }
        result = next_batch(gather, i, &batch);
        if (!batch)
            continue;
        *last = batch;
        last = &batch->next;
        result = start(batch, real);
    }
    return result;
}

/* Behind the group. */
static ncclResult_t finish_round(struct lc_gather *gather, ncclResult_t result)
{
    struct batch *batch = gather->inside;

    gather->inside = NULL;
    while (batch) {
        struct batch *next = batch->next;

        if (result == ncclSuccess)
            result = finish(batch);
        free_batch(batch);
        batch = next;
    }
    for (size_t i = 0; i < gather->n; i++) {
        struct lc_reducer *reducer = gather->items[i].op.comm->reducer;

        reducer->group_bytes = 0;
        reducer->group_recorded = false;
    }
    return result;
}

static bool all_done(const struct lc_gather *gather)
{
    for (size_t i = 0; i < gather->n; i++) {
        if (!is_done(&gather->items[i]))
            return false;
    }
    return true;
}

ncclResult_t lc_gather_flush(const struct lc_real *real)
{
    return lc_thread.gather ? start_round(lc_thread.gather, real) : ncclSuccess;
}

/* A group of its own each: several communicators of one thread must go together. */
static ncclResult_t run_round(struct lc_gather *gather, const struct lc_real *real)
{
    ncclResult_t result = real->ncclGroupStart();
    ncclResult_t end;

    if (result != ncclSuccess)
        return result;
    result = start_round(gather, real);
    end = real->ncclGroupEnd();
    return finish_round(gather, result != ncclSuccess ? result : end);
}

static void count(const struct item *item)
{
    uint64_t bytes = lc_op_bytes(&item->op, item->op.comm->facts.ranks);

    lc_ledger_add(&item->op.comm->ledger, item->op.kind, item->choice.outcome, bytes,
                  item->choice.path == LC_PATH_CAST ? bytes / 2 : bytes);
}

static void clear(struct lc_gather *gather, bool counted)
{
    for (size_t i = 0; i < gather->n; i++) {
        if (counted)
            count(&gather->items[i]);
        lc_comm_put(gather->items[i].op.comm);
    }
    free(gather->items);
    free(gather);
}

ncclResult_t lc_gather_finish(const struct lc_real *real, ncclResult_t result)
{
    struct lc_gather *gather = lc_thread.gather;

    if (!gather)
        return result;
    lc_thread.gather = NULL;
    result = finish_round(gather, result);
    while (result == ncclSuccess && !all_done(gather))
        result = run_round(gather, real);
    clear(gather, result == ncclSuccess);
    return result;
}

ncclResult_t lc_gather_simulate(const struct lc_real *real)
{
    struct lc_gather *gather = lc_thread.gather;
    ncclResult_t result = ncclSuccess;

    if (!gather)
        return result;
    lc_thread.gather = NULL;
    for (size_t i = 0; result == ncclSuccess && i < gather->n; i++)
        result = forward(&gather->items[i], real);
    clear(gather, false);
    return result;
}

void lc_gather_forget(void)
{
    lc_thread.gather =
        NULL; /* leaked in the child: freeing would put pins that belong to the parent */
}
