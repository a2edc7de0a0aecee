/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions through rings in peers' memory: the path that does without NCCL. */
#ifndef LC_INTERPOSE_RINGS_H
#define LC_INTERPOSE_RINGS_H

#include "interpose/op.h"
#include "interpose/policy.h"
#include "interpose/real.h"

#include "kernels/rings.h"

struct lc_comm;
struct lc_span;

/* Calls like `op` on a list of buffers, as one, on the span's stream; choice LC_PATH_RINGS. *outcome says at the end how they
 * really went. 0 or a result of the kernels library. */
int lc_rings_launch(const struct lc_op *op, const struct lc_redop *redop,
                    const struct lk_buffers *list, size_t n, const struct lc_span *span,
                    enum lc_outcome *outcome);

/* One all-reduce or reduce-scatter outside of a group. */
ncclResult_t lc_reduce_rings(struct lc_op *op, const struct lc_redop *redop,
                             const struct lc_choice *choice, const struct lc_real *real);

#endif
