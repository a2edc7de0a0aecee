/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/mask.h"

#include "common/log.h"
#include "interpose/call.h"
#include "interpose/comm.h"
#include "interpose/loongcomm.h"
#include "interpose/machine.h"
#include "interpose/messages.h"
#include "interpose/pairs.h"
#include "interpose/policy.h"
#include "interpose/reduce.h"

#include <errno.h>

int lc_mask_take(struct lc_comm *comm, const struct lc_extent *sends, cudaStream_t stream,
                 unsigned long long capture, struct lk_row_mask *out)
{
    struct lc_mask mask = comm->mask;

    *out = (struct lk_row_mask){ 0 };
    comm->mask.bits = NULL;
    if (!mask.bits)
        return 0;
    if (sends->end - sends->begin != mask.rows * mask.row_bytes ||
        (mask.capture && mask.capture != capture)) {
        lc_warn_once(
            "loongcommSetMask told of %llu rows of %llu bytes%s, and the next all-to-all sends %llu bytes: all rows travel",
            (unsigned long long)mask.rows, (unsigned long long)mask.row_bytes,
            mask.capture != capture ? " in another graph" : "",
            (unsigned long long)(sends->end - sends->begin));
        return 0;
    }
    *out = (struct lk_row_mask){ (const void *)sends->begin, mask.bits, mask.rows, mask.row_bytes };
    /* What was set outside of a graph is no part of it: its bits have to be there when it is launched. */
    return mask.capture == capture
               ? (int)comm->sides->backend->cudaStreamWaitEvent(stream, comm->sides->masked, 0)
               : 0;
}

void lc_mask_miss(struct lc_comm *comm)
{
    if (!comm->mask.bits)
        return;
    comm->mask.bits = NULL;
    lc_warn_once(
        "the all-to-all behind loongcommSetMask goes through NCCL: its dead rows arrive as they are");
}

static bool takes_all_to_all(const struct lc_comm *comm, uint64_t bytes)
{
    struct lc_situation now = { .ranks = comm->facts.ranks,
                                .committed = true,
                                .rings = true,
                                .profile = lc_machine_profile() };
    struct lc_op op = { .kind = LC_OP_ALL_TO_ALL, .count = bytes, .type = ncclInt8 };

    return lc_agree_is_committed(comm->agree) &&
           atomic_load_explicit(&comm->windows, memory_order_relaxed) == 0 &&
           lc_policy(&op, &now, lc_process_config()).path == LC_PATH_EXCHANGE;
}

static bool takes_messages(const struct lc_comm *comm, uint64_t bytes)
{
    struct lc_situation now = { .ranks = comm->facts.ranks,
                                .rings = true,
                                .profile = lc_machine_profile() };

    return lc_pairs_all_committed(comm) &&
           lc_policy_takes_message(&now, bytes, lc_process_config());
}

/* Of what the program has called before, whatever will be next is not left to NCCL. */
static bool is_ours(const struct lc_comm *comm, uint64_t bytes)
{
    uint64_t message = bytes / (uint64_t)comm->facts.ranks;

    return comm->sides && (comm->had_all_to_alls || comm->had_messages) &&
           (!comm->had_all_to_alls || takes_all_to_all(comm, message)) &&
           (!comm->had_messages || takes_messages(comm, message));
}

static int set(struct lc_comm *comm, const struct lc_mask *mask, cudaStream_t stream)
{
    struct lc_span span;
    int err = lc_span_begin(comm->reducer, stream, &span);

    if (!err) {
        comm->mask = *mask;
        comm->mask.capture = span.capture;
        err = (int)span.reducer->backend->cudaEventRecord(comm->sides->masked, stream);
        lc_span_end(&span);
    }
    if (!err)
        return 0;
    lc_warn_once("loongcommSetMask: %s", comm->sides->backend->lk_error_text(err));
    comm->mask.bits = NULL;
    return -EIO;
}

LC_EXPORT int loongcommSetMask(ncclComm_t handle, const uint32_t *bits, size_t rows,
                               size_t row_bytes, cudaStream_t stream)
{
    struct lc_mask mask = { .bits = bits, .rows = rows, .row_bytes = row_bytes };
    struct lc_comm *comm;
    uint64_t bytes;
    int result = 1;

    if (!bits || ((uintptr_t)bits & 3) || !rows || !row_bytes ||
        __builtin_mul_overflow(mask.rows, mask.row_bytes, &bytes))
        return -EINVAL;
    comm = lc_comm_get(handle);
    if (comm)
        comm->mask.bits = NULL;
    if (comm && is_ours(comm, bytes))
        result = set(comm, &mask, stream);
    lc_comm_put(comm);
    return result;
}
