/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_ERROR_FEEDBACK: what rounding to bf16 loses of a call is added to the next one of the same buffers.
 *
 * A buffer is known by address, count and kind of reduction: PyTorch's gradient buckets keep their addresses. Those of a list
 * are known together, in their order; another list of some of them owes nothing. The program may put other data there, and
 * nobody tells us. That does no harm, because of what the kernels do with residuals (lk_cast_feedback): at most as much as one
 * more rounding would. Everything here is a rank's own affair: what travels, and how, does not depend on it.
 *
 * Residuals lie in memory that set-up takes, all of it, LOONGCOMM_FEEDBACK_MAX bytes for a communicator. Buffers that find
 * no room go without, and are counted.
 */
#ifndef LC_INTERPOSE_FEEDBACK_H
#define LC_INTERPOSE_FEEDBACK_H

#include "interpose/ledger.h"
#include "interpose/op.h"
#include "interpose/redop.h"
#include "interpose/reduce.h"

/* Used by the thread that calls the communicator's operations, then by who frees it. */
struct lc_feedback;

/* Part of set-up; never under capture. Where there is no memory there is no feedback: said once. */
void lc_feedback_set_up(struct lc_reducer *reducer, cudaStream_t stream, struct lc_ledger *ledger);

/* Buffers that are reduced in one call. `layout`: where in the residuals whose lies; a call with another one owes nothing to
 * this one. */
struct lc_owing {
    const struct lk_buffers *list;
    size_t n;
    uint64_t parts; /* of list[i].count elements at list[i].in */
    enum lc_redop_kind redop;
    uint64_t layout;
    uint64_t elements; /* residuals */
};

/* Between lc_span_wait and lc_span_record: where they lie, aligned to 256 bytes, zero if the buffers are new. NULL: none. */
float *lc_feedback_of(const struct lc_span *span, const struct lc_owing *owing);

/* All-reduces of a group with bf16 on NCCL's wire, which have none. */
void lc_feedback_pass_group(struct lc_reducer *reducer, uint64_t calls);

/* The ledger is about to go. NULL is allowed, as below. */
void lc_feedback_detach(struct lc_feedback *feedback);

/* No work that uses it is in flight. Its memory goes to the pool. */
void lc_feedback_free(struct lc_feedback *feedback);

#endif
