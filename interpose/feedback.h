/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_ERROR_FEEDBACK: what rounding to bf16 loses of an all-reduce is added to the next one of the same buffer.
 *
 * A buffer is known by address, count and kind of reduction: PyTorch's gradient buckets keep their addresses. The program
 * may put other data there, and nobody tells us. That does no harm, because of what the kernel does with residuals
 * (lk_cast_feedback): at most as much as one more rounding would. Everything here is a rank's own affair: what travels, and
 * how, does not depend on it.
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

/* Between lc_span_wait and lc_span_record: where `elements` residuals for op's buffer lie, aligned to 256 bytes, zero if it
 * is a new one. NULL: none. */
float *lc_feedback_of(const struct lc_span *span, const struct lc_op *op,
                      const struct lc_redop *redop, uint64_t elements);

/* All-reduces with bf16 on the wire that have no feedback where they go: in groups, and through peers' memory. */
void lc_feedback_pass_group(struct lc_reducer *reducer, uint64_t calls);
void lc_feedback_pass_rings(struct lc_reducer *reducer);

/* The ledger is about to go. NULL is allowed, as below. */
void lc_feedback_detach(struct lc_feedback *feedback);

/* No work that uses it is in flight; the device is current. */
void lc_feedback_free(struct lc_feedback *feedback);

#endif
