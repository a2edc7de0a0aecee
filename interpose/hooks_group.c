/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups. Calls inside one are passed on and counted when they are made; the end is where communicators
 * that were split off inside the group come into being. */
#include "interpose/call.h"
#include "interpose/comm.h"
#include "interpose/create.h"
#include "interpose/gather.h"

/* nccl.h declares these two without a prototype. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

LC_EXPORT ncclResult_t ncclGroupStart(void)
{
    LC_REAL(ncclGroupStart);
    bool own = lc_call_enter_other();
    ncclResult_t result = real->ncclGroupStart();

    lc_call_leave_other(own);
    if (own && result == ncclSuccess && lc_thread.depth++ == 0)
        lc_thread.ops = lc_thread.forwarded = 0;
    return result;
}

/* The group's depth falls whatever the result: NCCL counts it down before it can fail. */
static void ended(bool own, ncclResult_t result, bool simulated, const struct lc_real *real)
{
    if (!own || lc_thread.depth == 0 || --lc_thread.depth > 0)
        return;
    lc_comm_end_group();
    lc_create_pending(result, simulated, real);
    if (lc_enabled && !simulated)
        lc_add(&lc_groups.sizes[lc_bucket(lc_thread.ops)], 1);
}

LC_EXPORT ncclResult_t ncclGroupEnd(void)
{
    LC_REAL(ncclGroupEnd);
    bool own = lc_call_enter_other();
    bool outermost = own && lc_thread.depth == 1;
    ncclResult_t ours = outermost ? lc_gather_flush(real) : ncclSuccess;
    ncclResult_t result =
        real->ncclGroupEnd(); /* also after a failure of ours: NCCL's group must not stay open */

    if (outermost)
        result = lc_gather_finish(real, ours != ncclSuccess ? ours : result);
    ended(own, result, false, real);
    lc_call_leave_other(own);
    return result;
}

LC_EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo)
{
    LC_REAL(ncclGroupSimulateEnd);
    bool own = lc_call_enter_other();
    ncclResult_t result;

    if (own && lc_thread.depth == 1)
        (void)lc_gather_simulate(real); /* a failing call fails the real end too */
    result = real->ncclGroupSimulateEnd(simInfo);
    ended(own, result, true, real);
    lc_call_leave_other(own);
    return result;
}
