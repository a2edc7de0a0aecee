/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/rings.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/feedback.h"
#include "interpose/machine.h"
#include "interpose/peers.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/refusal.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"

#include <errno.h>

/* Where the factor of an average or a sum with one belongs. Of fp32 and bf16, which have room for small numbers, before
 * the sum, as in NCCL: sums of large ones then stay in range. Behind it where it would cost bits of what travels. */
static void place_factor(const struct lc_op *op, const struct lc_redop *redop, int ranks,
                         struct lk_scale *pre, float *post)
{
    bool exact = (ranks & (ranks - 1)) == 0;

    *pre = lc_scale_of(redop, ranks);
    *post = 1.0f;
    if (redop->kind != LC_REDOP_AVG || op->type == ncclFloat32 ||
        (op->type == ncclBfloat16 && exact))
        return;
    *post = pre->value;
    pre->value = 1.0f;
}

/* As lc_op_bytes counts them, of all calls together. */
static size_t data_bytes(const struct lc_op *op, const struct lk_buffers *list, size_t n, int ranks)
{
    struct lc_op all = *op;

    all.count = 0;
    for (size_t i = 0; i < n; i++)
        all.count += list[i].count;
    return lc_op_bytes(&all, ranks);
}

/* A call of its own stays exact where one step is better, also in a group and where the lines have no room for it. */
static bool is_exact(const struct lc_situation *now, size_t bytes, size_t n,
                     enum lc_outcome outcome)
{
    return outcome != LC_RINGS_BF16 ||
           (n == 1 && lc_policy_one_shot(now, bytes, lc_process_config()));
}

/* As it is in the list: the wire's type is the data's. */
static bool is_one_shot(const struct lc_op *op, const struct lc_situation *now,
                        const struct lk_rings *rings, const struct lk_reduction *how,
                        const struct lk_buffers *list, size_t n)
{
    size_t bytes = data_bytes(op, list, n, now->ranks);

    return op->kind == LC_OP_ALL_REDUCE && lc_policy_one_shot(now, bytes, lc_process_config()) &&
           op->comm->reducer->backend->lk_lines_bytes(how, list, n) <= rings->shape.line_bytes;
}

/* A launch's constants. */
struct launch {
    const struct lc_op *op;
    const struct lc_redop *redop;
    const struct lk_rings *rings;
    const struct lk_buffers *list;
    size_t n;
    const struct lc_span *span;
    struct lk_reduction how;
    struct lk_rng rng;
};

static uint64_t parts_of(const struct launch *l)
{
    return l->op->kind == LC_OP_REDUCE_SCATTER ? l->rings->shape.ranks : 1;
}

/* Tiles of other rings have other owners, where channels are not as many, and so have parts of a reduce-scatter. */
static void narrow(struct launch *l, uint64_t elements)
{
    struct lc_reducer *reducer = l->op->comm->reducer;
    struct lc_owing owing = { l->list,
                              l->n,
                              parts_of(l),
                              l->redop->kind,
                              2 * (1 + (uint64_t)l->rings->shape.channels) + (parts_of(l) > 1),
                              parts_of(l) * elements };

    l->how.rounding = lc_rounding_of(reducer, &l->rng);
    l->how.rng = &l->rng;
    lc_add(&l->op->comm->ledger.drawn, l->how.rounding == LK_STOCHASTIC ? l->n : 0);
    l->how.residual = lc_feedback_of(l->span, &owing);
}

static int run(struct launch *l, uint32_t ctas)
{
    struct lc_reducer *reducer = l->op->comm->reducer;
    const struct lc_backend *backend = reducer->backend;
    __typeof__(lk_rings_all_reduce) *call = l->op->kind == LC_OP_REDUCE_SCATTER
                                                ? backend->lk_rings_reduce_scatter
                                                : backend->lk_rings_all_reduce;
    uint64_t elements = 0;
    int err;

    if (l->how.wire != l->how.type) {
        elements = backend->lk_rings_elements(&l->how, l->list, l->n);
        narrow(l, elements);
    }
    err = call(l->rings, &l->how, l->list, l->n, ctas, l->span->stream);
    return err || !elements ? err : lc_rounding_drawn(reducer, elements, l->span->stream);
}

int lc_rings_launch(const struct lc_op *op, const struct lc_redop *redop,
                    const struct lk_buffers *list, size_t n, const struct lc_span *span,
                    enum lc_outcome *outcome)
{
    const struct lc_comm *comm = op->comm;
    struct lc_reducer *reducer = comm->reducer;
    const struct lk_rings *rings = lc_peers_rings(reducer->peers, op->generation);
    struct lc_situation now = { .ranks = comm->facts.ranks, .profile = lc_machine_profile() };
    struct launch l = { op, redop, rings, list, n, span, .how = { .type = lc_lk_type(op->type) } };
    size_t bytes = data_bytes(op, list, n, comm->facts.ranks);
    struct lk_scale pre;
    uint32_t ctas;
    bool one_shot;

    l.how.wire = l.how.type;
    place_factor(op, redop, comm->facts.ranks, &pre, &l.how.post);
    l.how.pre = &pre;
    one_shot = is_one_shot(op, &now, rings, &l.how, list, n);
    if (one_shot)
        *outcome = LC_RINGS_LINES;
    else if (op->kind == LC_OP_ALL_REDUCE && is_exact(&now, bytes, n, *outcome))
        *outcome = LC_RINGS;
    else if (*outcome == LC_RINGS_BF16)
        l.how.wire = LK_BF16;
    ctas = lc_policy_ctas(op, &now, l.how.wire != l.how.type, bytes,
                          lc_peers_ctas(reducer->peers, rings->shape.slots));
    ctas = lc_peers_take(reducer->peers, LC_GRID_SUMS, ctas, span->capture != 0);
    if (one_shot)
        return reducer->backend->lk_lines_all_reduce(rings, &l.how, list, n, ctas, span->stream);
    lc_sizing_note(&reducer->sizing,
                   bytes / (l.how.wire == l.how.type ? 1 : 2) / rings->shape.ranks);
    return run(&l, ctas);
}

/* A failure of ours after commit is an error at every rank: never a silent way around it. */
static ncclResult_t failed(const struct lc_op *op, int err)
{
    ncclResult_t result = err == -EINVAL ? ncclInvalidArgument : ncclUnhandledCudaError;

    if (lc_is_void(err))
        return lc_refuse(op, err);
    lc_error("%s of %zu elements in peers' memory: %s", lc_op_name(op->kind), op->count,
             op->comm->reducer->backend->lk_error_text(err));
    lc_agree_break(op->comm->agree, result);
    return result;
}

ncclResult_t lc_reduce_rings(struct lc_op *op, const struct lc_redop *redop,
                             const struct lc_choice *choice, const struct lc_real *real)
{
    struct lc_reducer *reducer = op->comm->reducer;
    struct lk_buffers buffers = { op->send, op->recv, op->count };
    enum lc_outcome outcome = choice->outcome;
    ncclResult_t result = ncclSuccess;
    struct lc_check check = { 0 };
    struct lc_span span;
    int err = lc_span_begin(reducer, op->stream, &span);
    int recorded;

    if (err)
        return lc_is_streams_fault(err) ? lc_refuse(op, err) : failed(op, err);
    err = lc_span_wait(&span);
    if (!err)
        result = lc_verify_plain(reducer, op, &(struct lc_checked){ .captured = span.capture != 0 },
                                 real, &check);
    if (!err && result == ncclSuccess)
        err = lc_rings_launch(op, redop, &buffers, 1, &span, &outcome);
    if (!err && result == ncclSuccess)
        lc_verify_compare(reducer, &check, op, outcome);
    recorded = lc_span_record(&span);
    lc_span_end(&span);
    op->outcome = (int)outcome;
    err = err ? err : recorded;
    return err ? failed(op, err) : result;
}
