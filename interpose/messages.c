/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/messages.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/machine.h"
#include "interpose/peers.h"
#include "interpose/policy.h"
#include "interpose/reduce.h"
#include "interpose/refusal.h"

#include <stdlib.h>
#include <string.h>

/* Makes room for n more. */
static bool grow(struct lk_message **list, size_t used, size_t n, size_t *room)
{
    size_t more = *room ? *room : 16;
    struct lk_message *grown;

    while (more < used + n)
        more *= 2;
    if (more == *room)
        return true;
    grown = realloc(*list, more * sizeof(**list));
    if (!grown)
        return false;
    *list = grown;
    *room = more;
    return true;
}

static void add(struct lk_message *list, size_t *n, uintptr_t address, uint64_t bytes, int peer)
{
    list[(*n)++] = (struct lk_message){ .address = (void *)address,
                                        .bytes = bytes,
                                        .peer = (uint32_t)peer,
                                        .scan = lc_policy_scans(bytes) };
}

bool lc_messages_add(struct lc_messages *list, const struct lc_op *op)
{
    uint64_t bytes = (uint64_t)op->count * lc_type_size(op->type);
    bool all = op->kind == LC_OP_ALL_TO_ALL;
    bool sends = op->kind != LC_OP_RECV, recvs = op->kind != LC_OP_SEND; /* also from NULL */
    int first = all ? 0 : op->peer, n = all ? op->comm->facts.ranks : 1;

    if ((sends && !grow(&list->sends, list->n_sends, (size_t)n, &list->room_sends)) ||
        (recvs && !grow(&list->recvs, list->n_recvs, (size_t)n, &list->room_recvs)))
        return false;
    for (int i = 0; i < n; i++) {
        if (sends)
            add(list->sends, &list->n_sends, (uintptr_t)op->send + (uint64_t)i * bytes, bytes,
                first + i);
        if (recvs)
            add(list->recvs, &list->n_recvs, (uintptr_t)op->recv + (uint64_t)i * bytes, bytes,
                first + i);
    }
    return true;
}

static size_t next_own(const struct lk_message *list, size_t n, size_t i, int rank)
{
    while (i < n && list[i].peer != (uint32_t)rank)
        i++;
    return i;
}

bool lc_messages_are_whole(const struct lc_messages *list, int rank)
{
    size_t s = next_own(list->sends, list->n_sends, 0, rank);
    size_t r = next_own(list->recvs, list->n_recvs, 0, rank);

    while (s < list->n_sends && r < list->n_recvs && list->sends[s].bytes == list->recvs[r].bytes) {
        s = next_own(list->sends, list->n_sends, s + 1, rank);
        r = next_own(list->recvs, list->n_recvs, r + 1, rank);
    }
    return s == list->n_sends && r == list->n_recvs;
}

void lc_messages_free(struct lc_messages *list)
{
    free(list->sends);
    free(list->recvs);
}

static uint64_t bytes_of(const struct lk_message *list, size_t n)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < n; i++)
        bytes += list[i].bytes;
    return bytes;
}

int lc_messages_launch(const struct lc_comm *comm, const struct lc_messages *list,
                       const struct lk_row_mask *mask, const struct lc_span *span)
{
    const struct lc_reducer *reducer = comm->reducer;
    const struct lk_rings *rings = lc_peers_rings(reducer->peers, 0);
    struct lc_situation now = { .ranks = comm->facts.ranks, .profile = lc_machine_profile() };
    struct lc_op op = { .kind = LC_OP_ALL_TO_ALL };
    uint64_t sent = bytes_of(list->sends, list->n_sends);
    uint64_t taken = bytes_of(list->recvs, list->n_recvs);
    uint32_t ctas = lc_policy_ctas(&op, &now, false, sent > taken ? sent : taken,
                                   lc_peers_exchange_ctas(reducer->peers));

    ctas = lc_peers_take(reducer->peers, LC_GRID_EXCHANGES, ctas, span->capture != 0);
    return reducer->backend->lk_rings_exchange(rings, list->sends, list->n_sends, list->recvs,
                                               list->n_recvs, mask, ctas, span->stream);
}

/* A failure of ours after commit is an error at every rank: never a silent way around it. */
static ncclResult_t failed(const struct lc_op *op, const char *what)
{
    lc_error("%s of %zu elements in peers' memory: %s", lc_op_name(op->kind), op->count, what);
    lc_agree_break(op->comm->agree, ncclUnhandledCudaError);
    return ncclUnhandledCudaError;
}

static ncclResult_t cuda_failed(const struct lc_op *op, int err)
{
    if (lc_is_void(err))
        return lc_refuse(op, err);
    return failed(op, op->comm->reducer->backend->lk_error_text(err));
}

static int take_mask(const struct lc_op *op, unsigned long long capture, struct lk_row_mask *out)
{
    uintptr_t begin = (uintptr_t)op->send;
    struct lc_extent sends = { begin, begin + lc_op_bytes(op, op->comm->facts.ranks) };

    return lc_mask_take(op->comm, &sends, op->stream, capture, out);
}

ncclResult_t lc_messages_now(const struct lc_op *op)
{
    struct lc_reducer *reducer = op->comm->reducer;
    struct lc_messages list = { 0 };
    struct lk_row_mask mask = { 0 };
    struct lc_span span;
    int err, recorded;
    bool refused;

    if (!lc_messages_add(&list, op)) {
        lc_messages_free(&list);
        return failed(op, "out of memory");
    }
    err = lc_span_begin(reducer, op->stream, &span);
    refused = lc_is_streams_fault(err);
    if (!err) {
        err = lc_span_wait(&span);
        if (!err && op->kind == LC_OP_ALL_TO_ALL)
            err = take_mask(op, span.capture, &mask);
        if (!err)
            err = lc_messages_launch(op->comm, &list, &mask, &span);
        recorded = lc_span_record(&span); /* also behind a part of the work */
        err = err ? err : recorded;
        lc_span_end(&span);
    }
    lc_messages_free(&list);
    if (refused)
        return lc_refuse(op, err);
    return err ? cuda_failed(op, err) : ncclSuccess;
}

/* ---- side streams ---- */

static bool launches_block(void)
{
    const char *value = lc_environment_get("CUDA_LAUNCH_BLOCKING");

    return value && strcmp(value, "0") != 0;
}

struct lc_sides *lc_sides_new(const struct lc_backend *backend, cudaStream_t like)
{
    struct lc_sides *sides = calloc(1, sizeof(*sides));
    int priority = 0, err;

    if (!sides)
        return NULL;
    sides->backend = backend;
    sides->blocking = launches_block();
    err = (int)backend->cudaStreamGetPriority(like, &priority);
    if (!err)
        err = (int)backend->cudaEventCreateWithFlags(&sides->masked, cudaEventDisableTiming);
    for (int i = 0; !err && i < LC_SIDES; i++) {
        struct lc_side *side = &sides->side[i];

        err = (int)backend->cudaStreamCreateWithPriority(&side->stream, cudaStreamNonBlocking,
                                                         priority);
        if (!err)
            err = (int)backend->cudaEventCreateWithFlags(&side->fork, cudaEventDisableTiming);
        if (!err)
            err = (int)backend->cudaEventCreateWithFlags(&side->done, cudaEventDisableTiming);
    }
    if (!err)
        return sides;
    (void)backend->cudaGetLastError(); /* not the program's error */
    lc_sides_free(sides);
    return NULL;
}

void lc_sides_free(struct lc_sides *sides)
{
    if (!sides)
        return;
    for (int i = 0; i < LC_SIDES; i++) {
        struct lc_side *side = &sides->side[i];

        if (side->stream)
            (void)sides->backend->cudaStreamDestroy(side->stream);
        if (side->fork)
            (void)sides->backend->cudaEventDestroy(side->fork);
        if (side->done)
            (void)sides->backend->cudaEventDestroy(side->done);
    }
    if (sides->masked)
        (void)sides->backend->cudaEventDestroy(sides->masked);
    free(sides);
}

static bool is_capturing(const struct lc_sides *sides, const struct lc_side *side)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;

    if (sides->backend->cudaStreamIsCapturing(side->stream, &status) != cudaSuccess)
        (void)sides->backend->cudaGetLastError(); /* not the program's error */
    return status != cudaStreamCaptureStatusNone;
}

struct lc_side *lc_sides_take(struct lc_sides *sides, unsigned long long capture)
{
    struct lc_side *spare = NULL;

    if (!capture)
        return &sides->side[0];
    for (int i = 1; i < LC_SIDES; i++) {
        struct lc_side *side = &sides->side[i];

        if (side->capture == capture)
            return side;
        if (!spare && !is_capturing(sides, side))
            spare = side;
    }
    if (spare)
        spare->capture = capture;
    return spare;
}
