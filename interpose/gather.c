/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/gather.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/feedback.h"
#include "interpose/messages.h"
#include "interpose/pairs.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/refusal.h"
#include "interpose/rings.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"

#include <stdlib.h>

struct item {
    struct lc_op op; /* its communicator is pinned */
    struct lc_choice choice;
    struct lc_redop redop;
    uint64_t done; /* elements that some batch has, or NCCL got; op.count: all */
};

/* A communicator with operations in the open group, whoever carries them out. Pinned. */
struct member {
    struct lc_comm *comm;
    struct lc_agree_mark before; /* as it was when the group began */
    struct lc_pairs *pairs_before;
    struct lc_extent sends; /* of all its sends and all-to-alls, whoever carries them out */
    struct lc_side *side;   /* what is ours of its messages has been put there; to be joined */
    cudaStream_t *streams;  /* all that the group names for it; ours runs on the first */
    size_t n, room;
    size_t used; /* bytes of scratch in this round */
    bool begun;  /* something of ours is on streams[0] */
    bool met;    /* peers may have got something of it: it cannot be undone any more */
    bool rings;  /* and some of it goes without NCCL, which then does not know of that stream */
};

/* A tensor, or a part of one, in a batch. */
struct part {
    const char *send;
    char *recv;
    uint64_t stride; /* bytes from one rank's part of `send` to the next; reduce-scatter only */
    uint64_t count, offset;
    struct item *item;
};

/* Parts of one kind. Through peers' memory they go as they are; else packed one behind the other: `length` elements with the gaps. A reduce-scatter packs as many such
 * stretches as there are ranks. `second` is where NCCL's result goes unless it replaces what was packed. */
struct batch {
    const struct item *first;
    struct member *member;
    struct part *parts;
    struct lc_check *checks; /* of the parts; NULL: none is verified */
    size_t n;
    uint64_t length;
    char *packed, *second;
    struct batch *next;
};

/* What one thread has gathered. Freed when the group ends. */
struct lc_gather {
    struct item *items;
    size_t n, room;
    struct member **members;
    size_t members_n, members_room;
    struct member *last;  /* of the call before: most groups have one */
    struct batch *inside; /* called in the open group, to be finished behind it */
    bool refused;         /* a call of the group has failed */
    ncclResult_t failure; /* of the call, where NCCL does not know of it */
};

static ncclResult_t failed(const struct lc_comm *comm, const char *what)
{
    lc_error("grouped reductions: %s", what);
    if (comm->agree)
        lc_agree_break(comm->agree, ncclSystemError);
    return ncclSystemError;
}

static ncclResult_t refuse(const struct lc_comm *comm, int err)
{
    const struct lc_backend *backend = comm->reducer->backend;

    lc_error("a group: a stream cannot take it (%s)", backend->lk_error_text(err));
    (void)backend->cudaGetLastError();
    return ncclUnhandledCudaError;
}

static ncclResult_t cuda_failed(const struct lc_comm *comm, int err)
{
    if (lc_is_void(err))
        return refuse(comm, err);
    return failed(comm, comm->reducer->backend->lk_error_text(err));
}

/* Makes room for one more. */
static bool grow(void **list, size_t n, size_t *room, size_t size)
{
    size_t more = *room ? 2 * *room : 8;
    void *grown;

    if (n < *room)
        return true;
    grown = realloc(*list, more * size);
    if (!grown)
        return false;
    *list = grown;
    *room = more;
    return true;
}

/* ---- what the group holds ---- */

static struct member *find_member(struct lc_gather *gather, const struct lc_comm *comm)
{
    if (gather->last && gather->last->comm == comm)
        return gather->last;
    for (size_t i = 0; i < gather->members_n; i++) {
        if (gather->members[i]->comm == comm)
            return gather->last = gather->members[i];
    }
    return NULL;
}

static struct member *add_member(struct lc_gather *gather, struct lc_comm *comm)
{
    struct member *member = calloc(1, sizeof(*member));

    if (!member || !grow((void **)&gather->members, gather->members_n, &gather->members_room,
                         sizeof(struct member *))) {
        free(member);
        return NULL;
    }
    if (!lc_pairs_mark(comm, &member->pairs_before)) {
        free(member);
        return NULL;
    }
    member->comm = lc_comm_pin(comm);
    member->before = lc_agree_mark(comm->agree);
    gather->members[gather->members_n++] = member;
    return gather->last = member;
}

static void note_sends(struct member *member, const struct lc_op *op)
{
    uintptr_t begin = (uintptr_t)op->send, end = begin + lc_op_bytes(op, op->comm->facts.ranks);
    struct lc_extent *sends = &member->sends;

    if ((op->kind != LC_OP_SEND && op->kind != LC_OP_ALL_TO_ALL) || !begin)
        return;
    op->comm->had_messages |= op->kind == LC_OP_SEND;
    if (!sends->end || begin < sends->begin)
        sends->begin = begin;
    if (end > sends->end)
        sends->end = end;
}

static bool note(const struct lc_op *op)
{
    struct member *member;

    if (!lc_thread.gather)
        lc_thread.gather = calloc(1, sizeof(*lc_thread.gather));
    if (!lc_thread.gather)
        return false;
    member = find_member(lc_thread.gather, op->comm);
    if (!member)
        member = add_member(lc_thread.gather, op->comm);
    if (!member)
        return false;
    note_sends(member, op);
    if (op->count == 0 && op->kind != LC_OP_SEND && op->kind != LC_OP_RECV)
        return true; /* NCCL forgets a collective of nothing, its stream too */
    for (size_t i = 0; i < member->n; i++) {
        if (member->streams[i] == op->stream)
            return true;
    }
    if (!grow((void **)&member->streams, member->n, &member->room, sizeof(cudaStream_t)))
        return false;
    member->streams[member->n++] = op->stream;
    return true;
}

ncclResult_t lc_gather_note(const struct lc_op *op)
{
    if (note(op) || lc_agree_withhold(op->comm->agree))
        return ncclSuccess;
    return failed(op->comm, "out of memory");
}

bool lc_gather_knows(const struct lc_comm *comm)
{
    return lc_thread.gather && find_member(lc_thread.gather, comm);
}

ncclResult_t lc_gather_add(struct lc_op *op, const struct lc_choice *choice,
                           const struct lc_redop *redop)
{
    struct lc_gather *gather = lc_thread.gather;

    if (!grow((void **)&gather->items, gather->n, &gather->room, sizeof(struct item)))
        return failed(op->comm, "out of memory");
    gather->items[gather->n++] = (struct item){ *op, *choice, *redop, 0 };
    return ncclSuccess;
}

static bool is_done(const struct item *item)
{
    return item->done == item->op.count;
}

/* By what the operation means: its handle may be destroyed and given to another one before the group ends. Calls with a
 * factor of the program's go one by one: their factors, and where these lie, may be alike at one rank only. */
static bool same_redop(const struct item *a, const struct item *b)
{
    if (a->choice.path == LC_PATH_PACK)
        return a->op.redop == b->op.redop;
    return a->redop.kind == b->redop.kind && a->redop.kind != LC_REDOP_PREMUL;
}

static bool same_batch(const struct item *a, const struct item *b)
{
    return a == b || (a->op.comm == b->op.comm && a->op.kind == b->op.kind &&
                      a->op.type == b->op.type && a->choice.outcome == b->choice.outcome &&
                      a->op.generation == b->op.generation && same_redop(a, b));
}

/* ---- batches ---- */

static bool is_cast(const struct batch *batch)
{
    return batch->first->choice.path == LC_PATH_CAST;
}

static bool is_rings(const struct batch *batch)
{
    return batch->first->choice.path == LC_PATH_RINGS;
}

static bool is_scatter(const struct batch *batch)
{
    return batch->first->op.kind == LC_OP_REDUCE_SCATTER;
}

static bool is_accurate(const struct batch *batch)
{
    return is_cast(batch) &&
           lc_wire_is_accurate(lc_process_config(), batch->first->op.comm->facts.ranks);
}

/* Two ranks: both get all that was packed, in order of rank, and add it up themselves (lc_reduce_cast). */
static bool is_pair(const struct batch *batch)
{
    return is_accurate(batch) && !is_scatter(batch) && batch->first->op.comm->facts.ranks == 2;
}

static uint64_t ranks_of(const struct batch *batch)
{
    return (uint64_t)batch->first->op.comm->facts.ranks;
}

static size_t wire_size(const struct batch *batch)
{
    return is_cast(batch) ? sizeof(uint16_t) : lc_type_size(batch->first->op.type);
}

static uint64_t padded(uint64_t count)
{
    return (count + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN * LK_PACK_ALIGN;
}

/* What one rank sums up of an accurate all-reduce. */
static uint64_t shard_of(const struct batch *batch)
{
    return padded((batch->length + ranks_of(batch) - 1) / ranks_of(batch));
}

/* Elements of both stretches of scratch that the batch needs. */
static uint64_t packed_length(const struct batch *batch)
{
    if (is_scatter(batch) || is_pair(batch))
        return ranks_of(batch) * batch->length;
    return is_accurate(batch) ? ranks_of(batch) * shard_of(batch) : batch->length;
}

static uint64_t second_length(const struct batch *batch)
{
    if (is_accurate(batch) && !is_pair(batch))
        return packed_length(batch);
    return is_scatter(batch) ? batch->length : 0;
}

/* The largest length with which a batch fits into `bytes`. */
static uint64_t longest(const struct batch *batch, size_t bytes)
{
    uint64_t ranks = ranks_of(batch), elements = bytes / wire_size(batch);
    uint64_t shares = (is_scatter(batch) ? ranks : 1) + (is_accurate(batch) ? ranks : 1);

    if (is_accurate(batch) && !is_scatter(batch)) {
        elements = elements / 2 / ranks / LK_PACK_ALIGN * LK_PACK_ALIGN;
        return elements * ranks;
    }
    return (is_scatter(batch) ? elements / shares : elements) / LK_PACK_ALIGN * LK_PACK_ALIGN;
}

static void free_batch(struct batch *batch)
{
    if (!batch)
        return;
    free(batch->parts);
    free(batch->checks);
    free(batch);
}

/* Takes the next part of an item, as much as fits. */
static void take(struct batch *batch, struct item *item, uint64_t most)
{
    uint64_t n = item->op.count - item->done;
    size_t size = lc_type_size(item->op.type);

    if (padded(n) > most - batch->length)
        n = most - batch->length;
    if (n == 0)
        return;
    batch->parts[batch->n++] = (struct part){ .send = (const char *)item->op.send +
                                                      item->done * size,
                                              .recv = (char *)item->op.recv + item->done * size,
                                              .stride = item->op.count * size,
                                              .count = n,
                                              .offset = batch->length,
                                              .item = item };
    batch->length += padded(n);
    item->done += n;
}

static void use_scratch(struct batch *batch, size_t bytes)
{
    struct member *member = batch->member;

    batch->second = batch->packed + packed_length(batch) * wire_size(batch);
    member->used += (packed_length(batch) + second_length(batch)) * wire_size(batch);
    member->used = (member->used + 255) / 256 * 256;
    if (member->used > bytes)
        member->used = bytes;
}

/* In call order everything of the first item's kind, as much as fits into what is left of the scratch. NULL: nothing,
 * or (result is not ncclSuccess) no memory. */
static struct batch *collect(struct lc_gather *gather, size_t first, ncclResult_t *result)
{
    struct item *item = &gather->items[first];
    struct member *member = find_member(gather, item->op.comm);
    struct lc_reducer *reducer = item->op.comm->reducer;
    struct batch *batch = calloc(1, sizeof(*batch));
    uint64_t most;

    *result = ncclSuccess;
    if (batch) {
        batch->first = item;
        batch->member = member;
        batch->packed = reducer->scratch + member->used;
        batch->parts = calloc(gather->n - first, sizeof(*batch->parts));
    }
    if (!batch || !batch->parts) {
        free_batch(batch);
        *result = failed(item->op.comm, "out of memory");
        return NULL;
    }
    most = is_rings(batch) ? UINT64_MAX : longest(batch, reducer->bytes - member->used);
    for (size_t i = first; most > 0 && i < gather->n; i++) {
        if (!is_done(&gather->items[i]) && same_batch(&gather->items[i], item))
            take(batch, &gather->items[i], most);
    }
    if (batch->n == 0) {
        free_batch(batch);
        return NULL;
    }
    if (!is_rings(batch))
        use_scratch(batch, reducer->bytes);
    return batch;
}

static cudaStream_t stream_of(const struct batch *batch)
{
    return batch->member->streams[0];
}

/* One stretch for each rank, or one. */
static int pack(const struct batch *batch)
{
    const struct item *first = batch->first;
    const struct lc_backend *backend = first->op.comm->reducer->backend;
    struct lk_scale scale = lc_scale_of(&first->redop, first->op.comm->facts.ranks);
    uint64_t stretches = is_scatter(batch) ? ranks_of(batch) : 1;
    struct lk_tensor *tensors = calloc(stretches * batch->n, sizeof(*tensors));
    uint64_t at = is_pair(batch) ? (uint64_t)first->op.comm->facts.rank * batch->length : 0;
    struct lk_rng rng = { 0 };
    size_t n = 0;
    int err;

    if (!tensors)
        return cudaErrorMemoryAllocation;
    for (uint64_t r = 0; r < stretches; r++) {
        for (size_t i = 0; i < batch->n; i++) {
            const struct part *part = &batch->parts[i];

            tensors[n++] = (struct lk_tensor){ (char *)part->send + r * part->stride, part->count,
                                               at + r * batch->length + part->offset };
        }
    }
    if (is_cast(batch))
        err = backend->lk_cast_pack(tensors, n, batch->packed, &scale,
                                    lc_rounding_of(first->op.comm->reducer, &rng), &rng,
                                    stream_of(batch));
    else
        err = backend->lk_pack(tensors, n, batch->packed, lc_lk_type(first->op.type),
                               stream_of(batch));
    free(tensors);
    return err || !is_cast(batch)
               ? err
               : lc_rounding_drawn(first->op.comm->reducer, packed_length(batch), stream_of(batch));
}

static int unpack(const struct batch *batch, const char *from)
{
    const struct lc_backend *backend = batch->first->op.comm->reducer->backend;
    struct lk_tensor *tensors = calloc(batch->n, sizeof(*tensors));
    int err;

    if (!tensors)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < batch->n; i++)
        tensors[i] = (struct lk_tensor){ batch->parts[i].recv, batch->parts[i].count,
                                         batch->parts[i].offset };
    err = is_cast(batch) ? backend->lk_cast_unpack(tensors, batch->n, from, stream_of(batch))
                         : backend->lk_unpack(tensors, batch->n, from,
                                              lc_lk_type(batch->first->op.type), stream_of(batch));
    free(tensors);
    return err;
}

/* All parts as they are, in one call. */
static int launch(const struct batch *batch, const struct lc_span *span)
{
    const struct item *first = batch->first;
    enum lc_outcome outcome = first->choice.outcome;
    struct lk_buffers *list = calloc(batch->n, sizeof(*list));
    int err;

    if (!list)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < batch->n; i++)
        list[i] = (struct lk_buffers){ batch->parts[i].send, batch->parts[i].recv,
                                       batch->parts[i].count };
    err = lc_rings_launch(&first->op, &first->redop, list, batch->n, span, &outcome);
    free(list);
    for (size_t i = 0; i < batch->n; i++)
        batch->parts[i].item->choice.outcome = outcome;
    return err;
}

/* The program's call, as it is made beside ours. */
static struct lc_op plain_op(const struct batch *batch, size_t part)
{
    struct lc_op op = batch->parts[part].item->op;

    op.stream = stream_of(batch);
    return op;
}

/* Those that go in one piece also go through NCCL. What takes rings begins at once, the group's calls at its end. */
static ncclResult_t verify(struct batch *batch, const struct lc_span *span,
                           const struct lc_real *real)
{
    struct lc_checked how = { .captured = span->capture != 0,
                              .grouped = true,
                              .first = is_rings(batch) };
    ncclResult_t result = ncclSuccess;

    if (!lc_verify_wants(span->reducer))
        return ncclSuccess;
    batch->checks = calloc(batch->n, sizeof(*batch->checks));
    if (!batch->checks)
        return failed(batch->first->op.comm, "out of memory");
    for (size_t i = 0; result == ncclSuccess && i < batch->n; i++) {
        struct lc_op op = plain_op(batch, i);

        if (batch->parts[i].count == op.count)
            result = lc_verify_plain(span->reducer, &op, &how, real, &batch->checks[i]);
        else if (batch->parts[i].send == op.send)
            lc_verify_pass(span->reducer);
    }
    return result;
}

static int compare(const struct batch *batch)
{
    for (size_t i = 0; i < batch->n; i++) {
        struct lc_op op = plain_op(batch, i);

        lc_verify_compare(op.comm->reducer, &batch->checks[i], &op,
                          batch->parts[i].item->choice.outcome);
    }
    return 0;
}

/* NCCL's call inside the group. */
static ncclResult_t call(const struct batch *batch, const struct lc_real *real)
{
    const struct item *first = batch->first;
    ncclDataType_t type = is_cast(batch) ? ncclBfloat16 : first->op.type;
    ncclRedOp_t redop = is_cast(batch) ? ncclSum : first->op.redop;
    uint64_t shard = is_scatter(batch) ? batch->length : shard_of(batch);

    if (is_pair(batch))
        return real->ncclAllGather(
            batch->packed + (uint64_t)first->op.comm->facts.rank * batch->length * wire_size(batch),
            batch->packed, batch->length, type, first->op.handle, stream_of(batch));
    if (is_accurate(batch))
        return lc_exchange(real, batch->packed, batch->second, shard, first->op.comm,
                           stream_of(batch));
    if (is_scatter(batch))
        return real->ncclReduceScatter(batch->packed, batch->second, batch->length, type, redop,
                                       first->op.handle, stream_of(batch));
    return real->ncclAllReduce(batch->packed, batch->packed, batch->length, type, redop,
                               first->op.handle, stream_of(batch));
}

/* The own shard of an accurate sum, rounded. */
static int add_up_shard(const struct batch *batch)
{
    const struct lc_comm *comm = batch->first->op.comm;
    uint64_t rank = (uint64_t)comm->facts.rank, shard = shard_of(batch);
    struct lk_rng rng = { 0 };
    int err = comm->reducer->backend->lk_sum_shards(
        batch->second, ranks_of(batch), shard, shard,
        batch->packed + rank * shard * wire_size(batch), LK_BF16, NULL,
        lc_rounding_of(comm->reducer, &rng) == LK_STOCHASTIC ? &rng : NULL, stream_of(batch));

    return err ? err : lc_rounding_drawn(comm->reducer, shard, stream_of(batch));
}

/* An accurate sum of what the exchange brought: into the own shard, or into the results. */
static int add_up(const struct batch *batch)
{
    const struct lc_backend *backend = batch->first->op.comm->reducer->backend;
    const char *from = is_pair(batch) ? batch->packed : batch->second;
    int err = 0;

    if (!is_scatter(batch) && !is_pair(batch))
        return add_up_shard(batch);
    for (size_t i = 0; !err && i < batch->n; i++)
        err = backend->lk_sum_shards(from + batch->parts[i].offset * wire_size(batch),
                                     ranks_of(batch), batch->length, batch->parts[i].count,
                                     batch->parts[i].recv, LK_FP32, NULL, NULL, stream_of(batch));
    return err;
}

static bool gathers_sums(const struct batch *batch)
{
    return is_accurate(batch) && !is_scatter(batch) && !is_pair(batch);
}

static ncclResult_t gather_sums(const struct batch *batch, const struct lc_real *real)
{
    uint64_t rank = (uint64_t)batch->first->op.comm->facts.rank, shard = shard_of(batch);

    return real->ncclAllGather(batch->packed + rank * shard * wire_size(batch), batch->packed,
                               shard, ncclBfloat16, batch->first->op.handle, stream_of(batch));
}

/* ---- streams ---- */

/* Every stream of a group waits for what was on all of them, and what comes behind the group on any waits for all of
 * it: so NCCL promises. Ours runs on the first; the others are joined to it by an event. */
static int join_before(const struct member *member)
{
    const struct lc_backend *backend = member->comm->reducer->backend;
    cudaEvent_t event = member->comm->reducer->join;
    int err = 0;

    for (size_t i = 1; !err && i < member->n; i++) {
        err = backend->cudaEventRecord(event, member->streams[i]);
        if (!err)
            err = backend->cudaStreamWaitEvent(member->streams[0], event, 0);
    }
    return err;
}

static int join_behind(const struct member *member)
{
    const struct lc_backend *backend = member->comm->reducer->backend;
    cudaEvent_t event = member->comm->reducer->join;
    int err = member->n > 1 ? (int)backend->cudaEventRecord(event, member->streams[0]) : 0;

    for (size_t i = 1; !err && i < member->n; i++)
        err = backend->cudaStreamWaitEvent(member->streams[i], event, 0);
    return err;
}

/* NCCL refuses a group whose streams are not all in one graph or in none, or in one that has become invalid. */
static ncclResult_t check_captures(const struct member *member)
{
    struct lc_span span;
    int err = lc_span_begin(member->comm->reducer, member->streams[0], &span);
    bool begun = !err, alike = true;

    for (size_t i = 1; !err && alike && i < member->n; i++) {
        unsigned long long other;

        err = lc_capture_id(span.reducer->backend, member->streams[i], &other);
        alike = err || other == span.capture;
    }
    if (begun)
        lc_span_end(&span);
    if (err)
        return lc_is_streams_fault(err) ? refuse(member->comm, err)
                                        : cuda_failed(member->comm, err);
    return alike ? ncclSuccess : ncclInvalidUsage;
}

/* Of all communicators that something of ours is for, before any of it: NCCL does nothing of a group that it refuses. */
static ncclResult_t check_all_captures(struct lc_gather *gather)
{
    ncclResult_t result = ncclSuccess;
    const struct lc_comm *last = NULL;

    for (size_t i = 0; result == ncclSuccess && i < gather->n; i++) {
        const struct lc_comm *comm = gather->items[i].op.comm;

        if (comm != last && comm->reducer)
            result = check_captures(find_member(gather, comm));
        last = comm;
    }
    return result;
}

/* The member's streams are in a capture that has become invalid: nothing of ours on them will ever run. */
static bool is_void(const struct member *member)
{
    struct lc_span span;
    int err = lc_span_begin(member->comm->reducer, member->streams[0], &span);

    if (!err)
        lc_span_end(&span);
    return lc_is_void(err);
}

/* Before the first work of ours in the group. */
static ncclResult_t begin(struct member *member, struct lc_span *span)
{
    int err = 0;

    if (member->begun)
        return ncclSuccess;
    member->begun = true;
    err = join_before(member);
    if (!err && member->rings)
        err = join_behind(member); /* what NCCL does in the group waits for all streams, too */
    if (!err)
        err = lc_span_wait(span);
    return err ? cuda_failed(member->comm, err) : ncclSuccess;
}

/* Behind the last, also where the group failed: what did get on the stream must stay in order. */
static ncclResult_t leave(const struct member *member)
{
    struct lc_span span;
    int err;

    if (!member->begun && !member->side)
        return ncclSuccess;
    err = lc_span_begin(member->comm->reducer, member->streams[0], &span);
    if (err)
        return cuda_failed(member->comm, err);
    if (member->side)
        err = (int)span.reducer->backend->cudaStreamWaitEvent(member->streams[0],
                                                              member->side->done, 0);
    if (!err && member->rings)
        err = join_before(member);
    if (!err)
        err = lc_span_record(&span);
    if (!err)
        err = join_behind(member);
    lc_span_end(&span);
    return err ? cuda_failed(member->comm, err) : ncclSuccess;
}

/* ---- messages ---- */

/* Whatever is ours of a communicator's messages in the group. Marks them as done. */
static bool collect_messages(struct lc_gather *gather, const struct lc_comm *comm,
                             struct lc_messages *list)
{
    for (size_t i = 0; i < gather->n; i++) {
        struct item *item = &gather->items[i];

        if (item->op.comm != comm || item->choice.path != LC_PATH_EXCHANGE)
            continue;
        if (!lc_messages_add(list, &item->op))
            return false;
        item->done = item->op.count;
    }
    return true;
}

/* Nothing else in the group has a launch of its own, or waits for one. */
static bool is_alone(const struct lc_gather *gather)
{
    bool alone = gather->members_n == 1 && lc_thread.forwarded == 0;

    for (size_t i = 0; alone && i < gather->n; i++)
        alone = gather->items[i].choice.path == LC_PATH_EXCHANGE;
    return alone;
}

/* Where the messages go: a stream of ours behind all of the group's, or the first one of those. */
static int fork_side(struct member *member, struct lc_span *span, bool alone)
{
    const struct lc_backend *backend = span->reducer->backend;
    struct lc_side *side = alone ? NULL : lc_sides_take(member->comm->sides, span->capture);
    int err;

    if (!side) {
        member->begun = true;
        return 0;
    }
    err = (int)backend->cudaEventRecord(side->fork, member->streams[0]);
    if (!err)
        err = (int)backend->cudaStreamWaitEvent(side->stream, side->fork, 0);
    if (err)
        return err;
    member->side = side;
    span->stream = side->stream;
    return 0;
}

static int launch_messages(struct member *member, const struct lc_messages *list, bool alone)
{
    struct lk_row_mask mask = { 0 };
    struct lc_span span;
    int err = lc_span_begin(member->comm->reducer, member->streams[0], &span);

    if (err)
        return err;
    member->rings = true;
    err = join_before(member);
    if (!err)
        err = join_behind(member); /* what NCCL does in the group waits for all streams, too */
    if (!err)
        err = fork_side(member, &span, alone);
    if (!err)
        err = lc_span_wait(&span);
    if (!err && list->n_sends > 0)
        err = lc_mask_take(member->comm, &member->sends, span.stream, span.capture, &mask);
    member->met |= !err;
    if (!err)
        err = lc_messages_launch(member->comm, list, &mask, &span);
    if (member->side) { /* also behind a part of the work */
        int marked = (int)span.reducer->backend->cudaEventRecord(member->side->done, span.stream);

        err = err ? err : marked;
    }
    lc_span_end(&span);
    return err;
}

/* Before everything else of ours, so that it waits for nothing of the group; no wait for it before NCCL has got its part:
 * either of the two may not end before the other one has begun, here or at a peer. */
static ncclResult_t start_messages(struct lc_gather *gather)
{
    ncclResult_t result = ncclSuccess;
    bool alone = is_alone(gather);

    for (size_t i = 0; result == ncclSuccess && i < gather->members_n; i++) {
        struct member *member = gather->members[i];
        struct lc_messages list = { 0 };

        if (!collect_messages(gather, member->comm, &list))
            result = failed(member->comm, "out of memory");
        if (result == ncclSuccess && list.n_sends + list.n_recvs > 0) {
            result = lc_agree_error(member->comm->agree);
            if (result == ncclSuccess && !lc_messages_are_whole(&list, member->comm->facts.rank)) {
                lc_error("a group has unequal sends of a rank to itself and receives from itself");
                result = ncclInvalidUsage;
            }
            if (result == ncclSuccess) {
                int err = launch_messages(member, &list, alone);

                result = err ? cuda_failed(member->comm, err) : ncclSuccess;
            }
        }
        if (result == ncclSuccess && member->sends.end)
            lc_mask_miss(member->comm); /* if nobody has taken it */
        lc_messages_free(&list);
    }
    return result;
}

/* ---- a round: as many batches as the scratches hold ---- */

static ncclResult_t start(struct batch *batch, const struct lc_real *real)
{
    struct lc_span span;
    int err = lc_span_begin(batch->first->op.comm->reducer, stream_of(batch), &span);
    ncclResult_t result;

    if (err)
        return cuda_failed(batch->first->op.comm, err);
    batch->member->rings |= is_rings(batch);
    result = begin(batch->member, &span);
    if (result == ncclSuccess)
        result = verify(batch, &span, real);
    if (is_cast(batch)) {
        lc_add(&batch->first->op.comm->ledger.drawn, span.reducer->stochastic ? batch->n : 0);
        if (!is_scatter(batch))
            lc_feedback_pass_group(span.reducer, batch->n);
    }
    if (result == ncclSuccess) {
        batch->member->met |= is_rings(batch);
        err = is_rings(batch) ? launch(batch, &span) : pack(batch);
        result = err               ? cuda_failed(batch->first->op.comm, err)
                 : is_rings(batch) ? ncclSuccess
                                   : call(batch, real);
    }
    lc_span_end(&span);
    return result;
}

/* One of the steps behind NCCL's calls. */
static ncclResult_t step(const struct batch *batch, int (*run)(const struct batch *))
{
    const struct lc_comm *comm = batch->first->op.comm;
    struct lc_span span;
    int err = lc_span_begin(comm->reducer, stream_of(batch), &span);

    if (err)
        return cuda_failed(comm, err);
    err = run(batch);
    lc_span_end(&span);
    return err ? cuda_failed(comm, err) : ncclSuccess;
}

static int take_sums(const struct batch *batch)
{
    if (is_accurate(batch))
        return add_up(batch);
    return unpack(batch, is_scatter(batch) ? batch->second : batch->packed);
}

static int unpack_sums(const struct batch *batch)
{
    return unpack(batch, batch->packed);
}

/* Several communicators of one thread must go together. */
static ncclResult_t finish_batches(const struct batch *list, const struct lc_real *real)
{
    ncclResult_t result = ncclSuccess, end;
    bool more = false;

    for (const struct batch *b = list; b && result == ncclSuccess; b = b->next) {
        result = is_rings(b) ? ncclSuccess : step(b, take_sums);
        more |= gathers_sums(b);
    }
    if (result != ncclSuccess || !more)
        return result;
    result = real->ncclGroupStart();
    if (result != ncclSuccess)
        return result;
    for (const struct batch *b = list; b && result == ncclSuccess; b = b->next)
        result = gathers_sums(b) ? gather_sums(b, real) : ncclSuccess;
    end = real->ncclGroupEnd();
    result = result != ncclSuccess ? result : end;
    for (const struct batch *b = list; b && result == ncclSuccess; b = b->next)
        result = gathers_sums(b) ? step(b, unpack_sums) : ncclSuccess;
    return result;
}

/* Forwards an item as the program made it. */
static ncclResult_t forward(struct item *item, cudaStream_t stream, const struct lc_real *real)
{
    const struct lc_op *op = &item->op;

    item->done = op->count;
    item->choice = (struct lc_choice){ LC_PATH_NCCL, LC_NCCL_NO_FASTER_PATH };
    return real->ncclAllReduce(op->send, op->recv, op->count, op->type, op->redop, op->handle,
                               stream);
}

static size_t count_like(const struct lc_gather *gather, size_t first)
{
    size_t count = 0;

    for (size_t i = first; i < gather->n; i++)
        count += !is_done(&gather->items[i]) &&
                 same_batch(&gather->items[i], &gather->items[first]);
    return count;
}

/* The next one that goes without NCCL, or NULL. Those of several communicators may share a stream, where each waits for
 * the one before: they go in an order that all ranks have, whatever that of the calls was. */
static const struct item *next_through_rings(const struct lc_gather *gather)
{
    const struct item *next = NULL;

    for (size_t i = 0; i < gather->n; i++) {
        const struct item *item = &gather->items[i];

        if (item->choice.path == LC_PATH_RINGS && !is_done(item) &&
            (!next || item->op.comm->id < next->op.comm->id))
            next = item;
    }
    return next;
}

static ncclResult_t start_rings(struct lc_gather *gather, struct batch ***last,
                                const struct lc_real *real)
{
    ncclResult_t result = ncclSuccess;
    const struct item *next;

    while (result == ncclSuccess && (next = next_through_rings(gather))) {
        result = lc_agree_error(next->op.comm->agree);
        if (result == ncclSuccess)
            **last = collect(gather, (size_t)(next - gather->items), &result);
        if (result != ncclSuccess || !**last)
            break;
        result = start(**last, real);
        *last = &(**last)->next;
    }
    return result;
}

/* Inside an open group. */
static ncclResult_t start_round(struct lc_gather *gather, const struct lc_real *real)
{
    struct batch **last = &gather->inside;
    ncclResult_t result = start_rings(gather, &last, real);

    for (size_t i = 0; result == ncclSuccess && i < gather->n; i++) {
        struct item *item = &gather->items[i];
        const struct member *member = find_member(gather, item->op.comm);

        if (is_done(item))
            continue;
        result = lc_agree_error(item->op.comm->agree); /* some call of the group has failed */
        if (result != ncclSuccess)
            break;
        if (item->choice.path == LC_PATH_PACK && item->done == 0 &&
            count_like(gather, i) < LC_PACK_LEAST) {
            /* Not before ours if a round has gone by: its streams are joined behind ours only. */
            result = forward(item, member->begun ? member->streams[0] : item->op.stream, real);
            continue;
        }
        *last = collect(gather, i, &result);
        if (!*last)
            continue;
        result = start(*last, real);
        last = &(*last)->next;
    }
    return result;
}

/* Behind the group. */
static ncclResult_t finish_round(struct lc_gather *gather, ncclResult_t result,
                                 const struct lc_real *real)
{
    struct batch *batch = gather->inside;

    if (result == ncclSuccess)
        result = finish_batches(batch, real);
    for (const struct batch *b = batch; b && result == ncclSuccess; b = b->next)
        result = b->checks ? step(b, compare) : ncclSuccess;
    gather->inside = NULL;
    while (batch) {
        struct batch *next = batch->next;

        free_batch(batch);
        batch = next;
    }
    for (size_t i = 0; i < gather->members_n; i++) {
        struct lc_reducer *reducer = gather->members[i]->comm->reducer;

        gather->members[i]->used = 0;
        if (reducer)
            lc_verify_reuse(reducer);
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

void lc_gather_refuse(ncclResult_t failure)
{
    struct lc_gather *gather = lc_thread.gather;

    if (!gather)
        return;
    gather->refused = true;
    if (gather->failure == ncclSuccess)
        gather->failure = failure;
}

/* By another thread, after calls of the group. */
static bool has_aborted(const struct lc_gather *gather)
{
    for (size_t i = 0; i < gather->members_n; i++) {
        if (lc_comm_is_aborted(gather->members[i]->comm))
            return true;
    }
    return false;
}

static ncclResult_t flush(struct lc_gather *gather, const struct lc_real *real)
{
    ncclResult_t result = gather->failure;

    if (gather->refused)
        return result;
    result = has_aborted(gather) ? ncclInvalidUsage : check_all_captures(gather);
    if (result == ncclSuccess)
        result = start_messages(gather);
    return result == ncclSuccess ? start_round(gather, real) : result;
}

/* Of a communicator of the group that NCCL still knows, or NULL. */
static ncclComm_t open_handle(const struct lc_gather *gather)
{
    for (size_t i = 0; i < gather->members_n; i++) {
        const struct lc_comm *comm = gather->members[i]->comm;

        if (!atomic_load_explicit(&comm->closed, memory_order_relaxed))
            return (ncclComm_t)atomic_load_explicit(&comm->handle, memory_order_relaxed);
    }
    return NULL;
}

/* NCCL launches nothing of a group in which a call has failed, so one is made that does: of no type. */
static void spoil_group(const struct lc_gather *gather, const struct lc_real *real)
{
    ncclComm_t handle = open_handle(gather);

    lc_error(
        "a group has failed: NCCL is given a call without a type, so that it does nothing of it either");
    (void)real->ncclAllReduce(NULL, NULL, 0, (ncclDataType_t)-1, ncclSum, handle, NULL);
}

ncclResult_t lc_gather_flush(const struct lc_real *real)
{
    ncclResult_t result = lc_thread.gather ? flush(lc_thread.gather, real) : ncclSuccess;

    if (result != ncclSuccess)
        spoil_group(lc_thread.gather, real);
    return result;
}

/* What the group's own end had no room for. */
static ncclResult_t run_round(struct lc_gather *gather, const struct lc_real *real)
{
    ncclResult_t result = real->ncclGroupStart();
    ncclResult_t end;

    if (result != ncclSuccess)
        return result;
    result = start_round(gather, real);
    end = real->ncclGroupEnd();
    return finish_round(gather, result != ncclSuccess ? result : end, real);
}

static void count(const struct item *item)
{
    uint64_t bytes = lc_op_bytes(&item->op, item->op.comm->facts.ranks);

    lc_ledger_add(&item->op.comm->ledger, item->op.kind, item->choice.outcome, bytes,
                  lc_outcome_sent(item->choice.outcome, bytes));
}

/* NCCL has launched its part. */
static void note_end(struct lc_gather *gather)
{
    for (size_t i = 0; i < gather->n; i++)
        find_member(gather, gather->items[i].op.comm)->met = true;
}

/* The program may make a group that has failed again, but not what peers have got of it. */
static void break_met(const struct lc_gather *gather, ncclResult_t error)
{
    for (size_t i = 0; i < gather->members_n; i++) {
        const struct member *member = gather->members[i];

        if (!member->met || is_void(member) ||
            lc_agree_own_error(member->comm->agree) != ncclSuccess)
            continue;
        lc_error(
            "a group has failed behind what peers have got of it: further calls on communicator %lld fail, too",
            (long long)member->comm->number);
        lc_agree_break(member->comm->agree, error);
    }
}

/* What one failure of ours has kept from being made, on whatever communicator, has no match at the peers. Of one that has
 * been revoked nothing is made at any rank, and the others of its group need not end for it. */
static void break_all(const struct lc_gather *gather)
{
    ncclResult_t error = ncclSuccess;

    for (size_t i = 0; error == ncclSuccess && i < gather->members_n; i++) {
        if (!lc_comm_is_aborted(gather->members[i]->comm))
            error = lc_agree_error(gather->members[i]->comm->agree);
    }
    for (size_t i = 0; error != ncclSuccess && i < gather->n; i++)
        lc_agree_break(gather->items[i].op.comm->agree, error);
}

/* `happened`: at NCCL; else the group's operations are no operations of the agreement. `done`: ours, too; else they are
 * none in the ledger. */
static void clear(struct lc_gather *gather, bool happened, bool done)
{
    for (size_t i = 0; i < gather->n; i++) {
        if (done)
            count(&gather->items[i]);
        lc_comm_put(gather->items[i].op.comm);
    }
    for (size_t i = 0; i < gather->members_n; i++) {
        struct member *member = gather->members[i];

        if (!happened) {
            lc_agree_rewind(member->comm->agree, member->before);
            lc_pairs_rewind(member->comm, member->pairs_before);
        }
        lc_pairs_free(member->pairs_before);
        lc_comm_put(member->comm);
        free(member->streams);
        free(member);
    }
    free(gather->members);
    free(gather->items);
    free(gather);
}

ncclResult_t lc_gather_finish(const struct lc_real *real, ncclResult_t result)
{
    struct lc_gather *gather = lc_thread.gather;
    bool happened = result == ncclSuccess;

    if (!gather)
        return result;
    lc_thread.gather = NULL;
    if (happened)
        note_end(gather);
    result = finish_round(gather, result, real);
    while (result == ncclSuccess && !all_done(gather))
        result = run_round(gather, real);
    if (result != ncclSuccess) {
        break_all(gather);
        break_met(gather, result);
    }
    for (size_t i = 0; i < gather->members_n; i++) {
        ncclResult_t left = leave(gather->members[i]);

        if (result == ncclSuccess)
            result = left;
    }
    clear(gather, happened, result == ncclSuccess);
    return result;
}

static ncclResult_t simulate(const struct lc_op *op, const struct lc_real *real)
{
    switch (op->kind) {
    case LC_OP_REDUCE_SCATTER:
        return real->ncclReduceScatter(op->send, op->recv, op->count, op->type, op->redop,
                                       op->handle, op->stream);
    case LC_OP_ALL_TO_ALL:
        return real->ncclAlltoAll(op->send, op->recv, op->count, op->type, op->handle, op->stream);
    case LC_OP_SEND:
        return real->ncclSend(op->send, op->count, op->type, op->peer, op->handle, op->stream);
    case LC_OP_RECV:
        return real->ncclRecv(op->recv, op->count, op->type, op->peer, op->handle, op->stream);
    default:
        return real->ncclAllReduce(op->send, op->recv, op->count, op->type, op->redop, op->handle,
                                   op->stream);
    }
}

ncclResult_t lc_gather_simulate(const struct lc_real *real)
{
    struct lc_gather *gather = lc_thread.gather;
    ncclResult_t result = ncclSuccess;

    if (!gather)
        return result;
    lc_thread.gather = NULL;
    for (size_t i = 0; result == ncclSuccess && i < gather->n; i++) {
        struct lc_op *op = &gather->items[i].op;

        if (op->redop >= ncclNumOps) /* its handle may be gone; only the time is asked for */
            op->redop = ncclSum;
        result = simulate(op, real);
    }
    clear(gather, false, false);
    return result;
}

void lc_gather_forget(void)
{
    lc_thread.gather =
        NULL; /* leaked in the child: freeing would put pins that belong to the parent */
}
