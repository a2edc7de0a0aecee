/* SPDX-License-Identifier: Apache-2.0
 *
 * The agreement of the two ranks of each directed pair: from which of its messages on they go through rings. Messages of
 * at least one byte are counted, at both ends alike; at the 1st, 2nd, 4th, 8th ... whoever comes first decides, as for
 * collectives (control.h). Whether a message is ours follows from that and from its own bytes: nothing else of a group
 * is known to both ends.
 */
#ifndef LC_INTERPOSE_PAIRS_H
#define LC_INTERPOSE_PAIRS_H

#include "interpose/op.h"

/* Of one communicator, used by the thread that calls its operations. */
struct lc_pairs;
struct lc_comm;

void lc_pairs_free(struct lc_pairs *pairs);

/* Before each send or receive with a peer of the communicator: counts it. `ready`: this rank may vote. Writes whether
 * this message is committed; one without bytes is if the one before it was. */
ncclResult_t lc_pairs_next(const struct lc_op *op, uint64_t bytes, bool ready, bool *committed);

/* NCCL has refused the call that was counted last. */
void lc_pairs_refused(const struct lc_op *op);

/* Where all pairs stand, to return there when a group was only simulated or refused; NULL: at the beginning. Freed by
 * lc_pairs_free. False: out of memory. */
bool lc_pairs_mark(const struct lc_comm *comm, struct lc_pairs **mark);
void lc_pairs_rewind(struct lc_comm *comm, const struct lc_pairs *mark);

/* All messages to other ranks are ours from now on, if they are large enough. */
bool lc_pairs_all_committed(const struct lc_comm *comm);

#endif
