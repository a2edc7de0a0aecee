/* SPDX-License-Identifier: Apache-2.0
 *
 * Making and ending communicators, and what belongs to one. */
#include "interpose/call.h"
#include "interpose/comm.h"
#include "interpose/control/control.h"
#include "interpose/create.h"
#include "interpose/peers.h"
#include "interpose/reduce.h"
#include "interpose/tuner.h"

LC_EXPORT ncclResult_t ncclGetVersion(int *version)
{
    LC_REAL(ncclGetVersion);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclGetVersion(version);

    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    LC_REAL(ncclGetUniqueId);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclGetUniqueId(uniqueId);

    /* NCCL_COMM_ID makes every rank compute the same id by itself: it has no maker that could host the agreement. */
    if (own && result == ncclSuccess && lc_enabled && !lc_environment_has("NCCL_COMM_ID"))
        (void)lc_control_stamp(uniqueId->internal);
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)
{
    LC_REAL(ncclCommInitRank);
    bool own = lc_call_enter_other();
    ncclResult_t result;

    lc_tuner_open(own);
    result = real->ncclCommInitRank(comm, nranks, commId, rank);

    if (own && lc_accepted(result))
        lc_create_init(comm, nranks, rank, LC_DEVICE_UNASKED, NULL,
                       result == ncclSuccess
                           ? lc_create_agree(&commId, nranks, rank, LC_DEVICE_UNASKED, NULL)
                           : NULL);
    lc_tuner_close();
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId,
                                              int rank, ncclConfig_t *config)
{
    LC_REAL(ncclCommInitRankConfig);
    bool own = lc_call_enter_other();
    ncclResult_t result;

    lc_tuner_open(own);
    result = real->ncclCommInitRankConfig(comm, nranks, commId, rank, config);

    if (own && lc_accepted(result))
        lc_create_init(comm, nranks, rank, LC_DEVICE_UNASKED, config,
                       result == ncclSuccess
                           ? lc_create_agree(&commId, nranks, rank, LC_DEVICE_UNASKED, config)
                           : NULL);
    lc_tuner_close();
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank,
                                                int nId, ncclUniqueId *commIds,
                                                ncclConfig_t *config)
{
    LC_REAL(ncclCommInitRankScalable);
    bool own = lc_call_enter_other();
    ncclResult_t result;

    lc_tuner_open(own);
    result = real->ncclCommInitRankScalable(newcomm, nranks, myrank, nId, commIds, config);

    if (own && lc_accepted(result))
        lc_create_init(newcomm, nranks, myrank, LC_DEVICE_UNASKED, config,
                       result == ncclSuccess
                           ? lc_create_agree(commIds, nranks, myrank, LC_DEVICE_UNASKED, config)
                           : NULL);
    lc_tuner_close();
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist)
{
    LC_REAL(ncclCommInitAll);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclCommInitAll(comm, ndev, devlist);
    ncclUniqueId id = {
        { 0 }
    }; /* NCCL keeps its own: this one only carries a ticket from here to here */

    if (own && result == ncclSuccess && lc_enabled)
        (void)lc_control_stamp(id.internal);
    for (int i = 0; own && lc_accepted(result) && i < ndev; i++)
        lc_create_init(&comm[i], ndev, i, devlist ? devlist[i] : i, NULL,
                       lc_create_agree(&id, ndev, i, devlist ? devlist[i] : i, NULL));
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                     ncclConfig_t *config)
{
    LC_REAL(ncclCommSplit);
    bool own = lc_call_enter_other();
    struct lc_pending child = lc_create_prepare_child(comm, newcomm, config, color, NULL);
    ncclResult_t result;

    lc_tuner_open(own);
    result = real->ncclCommSplit(comm, color, key, newcomm, config);

    if (own)
        lc_create_child(&child, result, real);
    lc_tuner_close();
    lc_call_leave_other(own);
    return result;
}

/* At once, also inside a group: peers that wait for us must not wait for NCCL's abort. */
static void tell_abort(struct lc_comm *entry)
{
    if (!entry)
        return;
    atomic_store_explicit(&entry->aborted, true, memory_order_relaxed);
    if (entry->agree)
        lc_agree_abort(entry->agree);
}

/* NCCL then ends what is under way on the parent, unless it refuses an argument. */
static bool ends_parent(const struct lc_comm *parent, const struct lc_excluded *excluded,
                        const ncclComm_t *newcomm, int flags)
{
    bool good = parent && newcomm && excluded->ranks && excluded->count > 0 &&
                excluded->count < parent->facts.ranks;

    for (int i = 0; good && i < excluded->count; i++)
        good = excluded->ranks[i] >= 0 && excluded->ranks[i] < parent->facts.ranks &&
               excluded->ranks[i] != parent->facts.rank;
    return good && flags & NCCL_SHRINK_ABORT;
}

LC_EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                                      ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags)
{
    LC_REAL(ncclCommShrink);
    bool own = lc_call_enter_other();
    struct lc_excluded excluded = { excludeRanksList, excludeRanksCount };
    struct lc_pending child = lc_create_prepare_child(comm, newcomm, config, 0, &excluded);
    struct lc_comm *parent = lc_comm_get(comm);
    ncclResult_t result;

    if (ends_parent(parent, &excluded, newcomm, shrinkFlags))
        tell_abort(parent);
    lc_comm_put(parent);
    lc_tuner_open(own);
    result = real->ncclCommShrink(comm, excludeRanksList, excludeRanksCount, newcomm, config,
                                  shrinkFlags);

    if (own)
        lc_create_child(&child, result, real);
    lc_tuner_close();
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    LC_REAL(ncclCommFinalize);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclCommFinalize(comm); /* the handle stays valid */

    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    LC_REAL(ncclCommDestroy);
    bool own = lc_call_enter_other();
    struct lc_comm *entry = lc_comm_get(comm);
    ncclResult_t result;

    lc_comm_remove(comm);
    result = real->ncclCommDestroy(comm); /* waits for the work that uses our memory */
    if (lc_thread.depth > 0)
        lc_comm_end_behind_group(entry);
    else
        lc_comm_end(entry);
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    LC_REAL(ncclCommAbort);
    bool own = lc_call_enter_other();
    struct lc_comm *entry = lc_comm_get(comm);
    ncclResult_t result;

    tell_abort(entry);
    lc_comm_remove(comm);
    result = real->ncclCommAbort(comm);
    lc_comm_end_aborted(entry);
    lc_call_leave_other(own);
    return result;
}

#if NCCL_VERSION_CODE >= 22807
LC_EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags)
{
    LC_REAL(ncclCommRevoke);
    bool own = lc_call_enter_other();
    struct lc_comm *entry = lc_comm_get(comm);
    ncclResult_t result;

    if (revokeFlags == 0) /* else NCCL may refuse, and the communicator goes on */
        tell_abort(entry);
    result = real->ncclCommRevoke(comm, revokeFlags);
    if (lc_accepted(result))
        tell_abort(entry);
    lc_comm_put(entry);
    lc_call_leave_other(own);
    return result;
}
#endif

/* A peer that has gone matters to those who wait for it. Programs end without destroying their communicators, or
 * abort them one rank after the other, and the last ones must not take that for a failure: they get the error with the
 * next call, if they make one. */
#define LOST_MS 500 /* what a rank has sent before its end may still be on its way */

static ncclResult_t our_error(struct lc_comm *entry)
{
    struct lc_reducer *reducer = atomic_load_explicit(&entry->reducer, memory_order_acquire);
    ncclResult_t error = lc_agree_state(entry->agree);

    if (error == ncclSuccess || lc_agree_own_error(entry->agree) != ncclSuccess)
        return error;
    if (reducer && lc_peers_were_cut(reducer->peers))
        return lc_agree_error(entry->agree);
    if (!reducer || !lc_reducer_busy(reducer))
        return ncclSuccess;
    return lc_agree_lost_for_ms(entry->agree) >= LOST_MS ? lc_agree_error(entry->agree)
                                                         : ncclSuccess;
}

/* Polled by watchdogs that end the job if it blocks: nothing here may wait. */
LC_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    LC_REAL(ncclCommGetAsyncError);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclCommGetAsyncError(comm, asyncError);

    if (own && result == ncclSuccess && *asyncError == ncclSuccess) {
        struct lc_comm *entry = lc_comm_get(comm);

        if (entry && entry->agree && !lc_comm_is_aborted(entry))
            *asyncError = our_error(entry);
        lc_comm_put(entry);
    }
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size,
                                              ncclWindow_t *win, int winFlags)
{
    LC_REAL(ncclCommWindowRegister);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclCommWindowRegister(comm, buff, size, win, winFlags);
    struct lc_comm *entry = own ? lc_comm_get(comm) : NULL;

    /* Whatever the result, which may differ between ranks: paths depend on the count. */
    if (entry)
        atomic_fetch_add_explicit(&entry->windows, 1, memory_order_relaxed);
    lc_comm_put(entry);
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar,
                                                ncclDataType_t datatype,
                                                ncclScalarResidence_t residence, ncclComm_t comm)
{
    LC_REAL(ncclRedOpCreatePreMulSum);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclRedOpCreatePreMulSum(op, scalar, datatype, residence, comm);
    struct lc_comm *entry = own && result == ncclSuccess ? lc_comm_get(comm) : NULL;

    if (entry && lc_redop_remember(&entry->redops, *op, scalar, datatype, residence) != 0 &&
        entry->agree && !lc_agree_withhold(entry->agree))
        lc_agree_break(entry->agree, ncclSystemError);
    lc_comm_put(entry);
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    LC_REAL(ncclRedOpDestroy);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclRedOpDestroy(op, comm);
    struct lc_comm *entry = own ? lc_comm_get(comm) : NULL;

    if (entry)
        lc_redop_forget(&entry->redops, op);
    lc_comm_put(entry);
    lc_call_leave_other(own);
    return result;
}
