/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/call.h"

#include "interpose/comm.h"
#include "interpose/gather.h"
#include "interpose/loongcomm.h"
#include "interpose/route.h"

ncclResult_t lc_call_missing(const struct lc_real *real, const char *name, unsigned char *said)
{
    if (__atomic_exchange_n(said, 1, __ATOMIC_RELAXED))
        return ncclSystemError;
    if (real->path)
        lc_error("%s was called, but NCCL %d in %s has no such function", name, real->version,
                 real->path);
    else
        lc_error("%s was called, but no NCCL is loaded in this process", name);
    return ncclSystemError;
}

static bool is_collective(enum lc_op_kind kind)
{
    return kind != LC_OP_SEND && kind != LC_OP_RECV;
}

/* Before anything that may wait. */
static void note(const struct lc_op *op)
{
    struct lc_note call = { .count = op->count,
                            .kind = (uint8_t)op->kind,
                            .type = (uint8_t)op->type,
                            .redop = (unsigned)op->redop < ncclNumOps ? (uint8_t)op->redop
                                                                      : LC_NOTE_REDOP,
                            .path = LC_NCCL_NO_FASTER_PATH,
                            .peer = op->peer };

    lc_progress_call(&op->comm->progress, &call, is_collective(op->kind), (uintptr_t)op->stream);
}

bool lc_call_enter(struct lc_op *op, const struct lc_real *real)
{
    if (lc_thread.inside)
        return false;
    if (__builtin_expect(!lc_enabled, 0)) {
        lc_add(&lc_other_calls, 1);
        return false;
    }
    lc_thread.inside = true;
    op->comm = lc_comm_get_or_adopt(op->handle, real);
    lc_thread.ops++;
    if (op->comm) {
        note(op);
        if (op->comm->agree && !lc_comm_is_aborted(op->comm)) /* else NCCL says what it thinks */
            lc_route(op, real);
    }
    lc_thread.forwarded += !op->settled;
    return true;
}

ncclResult_t lc_call_leave(struct lc_op *op, ncclResult_t result)
{
    struct lc_comm *comm = op->comm;

    lc_thread.inside = false;
    if (!lc_accepted(result))
        lc_gather_refuse(op->settled ? result : ncclSuccess);
    if (comm)
        lc_progress_return(&comm->progress);
    if (!comm || op->gathered)
        return result;
    if (lc_accepted(result)) {
        uint64_t bytes = lc_op_bytes(op, comm->facts.ranks);

        lc_ledger_add(&comm->ledger, op->kind, (enum lc_outcome)op->outcome, bytes,
                      lc_outcome_sent((enum lc_outcome)op->outcome, bytes));
        lc_trace("%s of %zu elements on communicator %lld", lc_op_name(op->kind), op->count,
                 (long long)comm->number);
    } else if (op->counted) {
        lc_route_refused(op);
    }
    lc_comm_put(comm);
    return result;
}

static void add_calls(const struct lc_comm *comm, void *arg)
{
    *(unsigned long long *)arg += lc_ledger_calls(&comm->ledger);
}

LC_EXPORT unsigned long long loongcommCallsSeen(void)
{
    unsigned long long calls = __atomic_load_n(&lc_other_calls, __ATOMIC_RELAXED);
    uint64_t communicators;

    lc_comm_each(add_calls, &calls);
    return calls + lc_ledger_calls(lc_comm_others(&communicators));
}

LC_EXPORT const char *loongcommVersion(void)
{
    return LC_VERSION;
}

LC_EXPORT const char *loongcommNcclPath(void)
{
    return lc_real()->path;
}
