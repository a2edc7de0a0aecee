/* SPDX-License-Identifier: Apache-2.0
 *
 * Takes one call of a communicator that has an agreement to its path. */
#ifndef LC_INTERPOSE_ROUTE_H
#define LC_INTERPOSE_ROUTE_H

#include "interpose/backend.h"
#include "interpose/op.h"
#include "interpose/real.h"

/* Counts the collective, sets up and votes where it is time to, decides at epochs. If the call is ours it is carried
 * out or gathered, and op->settled says that NCCL is not to be called for it any more. */
void lc_route(struct lc_op *op, const struct lc_real *real);

/* The stream is part of a capture, or that cannot be known: the legacy stream while another thread captures one that waits
 * for it. */
bool lc_route_is_captured(const struct lc_backend *backend, int device, cudaStream_t stream);

/* NCCL has refused it: it is counted no longer. */
void lc_route_refused(struct lc_op *op);

#endif
