/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/verify.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/pool.h"
#include "interpose/process.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define RESULTS 128 /* that have not been looked at */

/* A comparison on its way, or done. */
struct compared {
    uint64_t number;
    enum lc_op_kind kind;
    enum lc_outcome outcome;
    ncclDataType_t type;
    size_t count;
};

struct lc_verify {
    const struct lc_backend *backend;
    struct lc_ledger *ledger; /* NULL: no communicator has it */
    int rank, ranks;
    uint64_t made;             /* plain calls */
    uint64_t compared, looked; /* comparisons launched, and looked at */
    char *memory;              /* NCCL's results and copies of inputs */
    size_t bytes, used;
    void *work;                  /* of the comparisons */
    struct lk_difference *found; /* RESULTS of them, pinned: the device writes, `done` says when */
    struct compared what[RESULTS];
};

/* ---- what has been found ---- */

/* Newton's; the library does without libm. */
static double square_root(double x)
{
    double y = x > 1 ? x : 1;

    for (int i = 0; i < 40; i++)
        y = (y + x / y) / 2;
    return y;
}

static bool is_narrow(const struct compared *what)
{
    return what->outcome == LC_RINGS_BF16 || what->outcome == LC_CAST_BF16;
}

/* Of the roundings to bf16 of a call: NCCL rounds at each of its hops. */
static double bound_of_narrow(const struct compared *what, int ranks)
{
    const struct lc_config *config = lc_process_config();
    double hops = square_root(ranks);

    if (what->outcome == LC_CAST_BF16 && config->error_feedback)
        return 8e-3 + 4e-3 * hops;
    return what->outcome == LC_RINGS_BF16 || lc_wire_is_accurate(config, ranks) ? 8e-3
                                                                                : 4e-3 * (1 + hops);
}

/* Stochastic rounding is off by no more in the mean of squares, by twice as much at the worst. */
static double factor_of_drawing(const struct compared *what)
{
    if (lc_process_config()->rounding != LC_ROUNDING_STOCHASTIC)
        return 1;
    return what->count < 1000 ? 2 : 1.25;
}

/* What rounding explains of a relative L2 error, in either of the results, where terms do not cancel out. A rounding to
 * bf16 is off by 2^-8 at most, to fp16 by 2^-11. With error feedback there is what earlier calls have lost, as much again. */
static double bound_of(const struct compared *what, int ranks)
{
    const struct lc_config *config = lc_process_config();
    double hops = square_root(ranks);

    if (is_narrow(what))
        return bound_of_narrow(what, ranks) * factor_of_drawing(what) *
               (config->error_feedback ? 2 : 1);
    if (what->type == ncclFloat32)
        return 1e-6 * hops;
    return (what->type == ncclFloat16 ? 5e-4 : 4e-3) * (1 + hops);
}

static void keep_worst(struct lc_ledger *ledger, double relative)
{
    lc_ledger_larger(&ledger->verify_worst,
                     relative < 1e9 ? (uint64_t)(relative * 1e9) : (uint64_t)1e18);
}

static void tell(struct lc_verify *verify, const struct compared *what,
                 const struct lk_difference *found)
{
    double bound = bound_of(what, verify->ranks);
    bool unlike = !(found->relative <= bound) || found->strange;

    if (verify->ledger) {
        lc_add(&verify->ledger->verified, 1);
        lc_add(&verify->ledger->verify_unlike, unlike);
        keep_worst(verify->ledger, found->relative);
    }
    LC_LOG(unlike ? LC_LOG_WARN : LC_LOG_INFO,
           "rank %d of %d: verified call %" PRIu64
           " %s NCCL: %s of %zu %s by %s (%s), relative error "
           "%.2e where rounding explains %.1e, largest difference %.2e, %" PRIu64
           " elements with an infinity or NaN in one of them only",
           verify->rank, verify->ranks, what->number, unlike ? "differs from" : "agrees with",
           lc_op_name(what->kind), what->count, lc_type_name((unsigned)what->type),
           lc_outcome_path(what->outcome), lc_outcome_reason(what->outcome), found->relative, bound,
           found->most, found->strange);
}

/* In the order of the calls. */
static void look(struct lc_verify *verify)
{
    while (verify->looked != verify->compared) {
        uint64_t slot = verify->looked % RESULTS;

        if (!__atomic_load_n(&verify->found[slot].done, __ATOMIC_ACQUIRE))
            return;
        tell(verify, &verify->what[slot], &verify->found[slot]);
        verify->looked++;
    }
}

/* ---- set-up and end ---- */

static int allocate(struct lc_verify *verify, int device, cudaStream_t stream)
{
    const struct lc_backend *backend = verify->backend;
    int err = lc_pool_take(backend, LC_MEMORY_DEVICE, device, verify->bytes,
                           (void **)&verify->memory);
    if (!err)
        err = lc_pool_take(backend, LC_MEMORY_DEVICE, device, LK_COMPARE_BYTES, &verify->work);
    if (!err)
        err = lc_pool_take(backend, LC_MEMORY_PINNED, device, RESULTS * sizeof(*verify->found),
                           (void **)&verify->found);
    return err ? err : (int)backend->cudaMemsetAsync(verify->work, 0, LK_COMPARE_BYTES, stream);
}

static bool complete(struct lc_verify *verify, struct lc_reducer *reducer, cudaStream_t stream)
{
    const struct lc_backend *backend = reducer->backend;
    struct lc_guard guard;
    int err;

    if (!lc_guard_begin(backend, reducer->device, &guard))
        return false;
    err = allocate(verify, reducer->device, stream);
    if (!err) /* the first use of the memory comes behind it, on whatever stream */
        err = backend->cudaEventRecord(reducer->serial, stream);
    if (err) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        lc_warn_once(
            "device %d: no memory of %zu MB to verify results in (%s): reductions stay with NCCL on all ranks",
            reducer->device, reducer->bytes >> 20, backend->lk_error_text(err));
    }
    lc_guard_end(backend, reducer->device, &guard);
    return err == 0;
}

bool lc_verify_set_up(struct lc_reducer *reducer, cudaStream_t stream, struct lc_ledger *ledger,
                      int rank, int ranks)
{
    struct lc_verify *verify;

    if (lc_process_config()->verify == 0)
        return true;
    verify = reducer->verify = calloc(1, sizeof(*verify));
    if (!verify)
        return false;
    verify->backend = reducer->backend;
    verify->bytes = reducer->bytes;
    verify->ledger = ledger;
    verify->rank = rank;
    verify->ranks = ranks;
    return complete(verify, reducer, stream);
}

void lc_verify_detach(struct lc_verify *verify)
{
    if (!verify)
        return;
    if (verify->ledger)
        look(verify);
    verify->ledger = NULL;
}

void lc_verify_free(struct lc_verify *verify)
{
    if (!verify)
        return;
    lc_verify_detach(verify);
    lc_pool_give(verify->memory);
    lc_pool_give(verify->work);
    lc_pool_give(verify->found);
    free(verify);
}

/* ---- calls ---- */

bool lc_verify_wants(const struct lc_reducer *reducer)
{
    const struct lc_verify *verify = reducer->verify;

    return verify && verify->made < lc_process_config()->verify;
}

void lc_verify_pass(struct lc_reducer *reducer)
{
    if (lc_verify_wants(reducer) && reducer->verify->ledger)
        lc_add(&reducer->verify->ledger->verify_passed, 1);
}

void lc_verify_reuse(struct lc_reducer *reducer)
{
    if (reducer->verify)
        reducer->verify->used = 0;
}

/* NULL: no room. */
static void *take(struct lc_verify *verify, uint64_t bytes)
{
    uint64_t whole = (bytes + 255) / 256 * 256;
    char *at = verify->memory + verify->used;

    if (bytes > verify->bytes || whole > verify->bytes - verify->used)
        return NULL;
    verify->used += whole;
    return at;
}

static ncclResult_t call(const struct lc_op *op, const void *from, void *to,
                         const struct lc_real *real)
{
    if (op->kind == LC_OP_REDUCE_SCATTER)
        return real->ncclReduceScatter(from, to, op->count, op->type, op->redop, op->handle,
                                       op->stream);
    return real->ncclAllReduce(from, to, op->count, op->type, op->redop, op->handle, op->stream);
}

/* A group's end may find an operation of the program's destroyed, and its handle given to another one. */
static bool may_be_checked(const struct lc_op *op, const struct lc_checked *how)
{
    return !how->captured && op->count > 0 && !(how->grouped && op->redop >= ncclNumOps);
}

ncclResult_t lc_verify_plain(struct lc_reducer *reducer, const struct lc_op *op,
                             const struct lc_checked *how, const struct lc_real *real,
                             struct lc_check *check)
{
    struct lc_verify *verify = reducer->verify;
    const void *from = op->send;
    uint64_t in, out;
    void *want, *copy = NULL;
    int err = 0;

    *check = (struct lc_check){ 0 };
    if (!verify)
        return ncclSuccess;
    look(verify);
    if (!how->grouped)
        verify->used = 0;
    if (!lc_verify_wants(reducer))
        return ncclSuccess;
    in = lc_op_bytes(op, verify->ranks);
    out = (uint64_t)op->count * lc_type_size(op->type);
    want = may_be_checked(op, how) ? take(verify, out) : NULL;
    if (want && how->first)
        copy = take(verify, in);
    if (!want || (how->first && !copy)) {
        lc_verify_pass(reducer);
        return ncclSuccess;
    }
    verify->made++;
    if (copy) {
        err = verify->backend->cudaMemcpyAsync(copy, op->send, in, cudaMemcpyDefault, op->stream);
        from = copy;
    }
    if (err) /* on this rank alone: the others make the plain call, so it does as well */
        (void)verify->backend->cudaGetLastError();
    *check = (struct lc_check){ err ? NULL : want, verify->made };
    return call(op, from, want, real);
}

void lc_verify_compare(struct lc_reducer *reducer, const struct lc_check *check,
                       const struct lc_op *op, enum lc_outcome outcome)
{
    struct lc_verify *verify = reducer->verify;
    uint64_t slot;

    if (!check->want)
        return;
    look(verify);
    slot = verify->compared % RESULTS;
    if (verify->compared - verify->looked < RESULTS) {
        verify->found[slot].done = 0;
        verify->what[slot] = (struct compared){ check->number, op->kind, outcome, op->type,
                                                op->count };
        if (verify->backend->lk_compare(op->recv, check->want, op->count, lc_lk_type(op->type),
                                        verify->work, &verify->found[slot], op->stream) == 0) {
            verify->compared++;
            if (verify->ledger)
                lc_add(&verify->ledger->verify_begun, 1);
            return;
        }
        (void)verify->backend->cudaGetLastError(); /* not the program's error */
    }
    if (verify->ledger)
        lc_add(&verify->ledger->verify_passed, 1);
}
