/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions that the program puts into one group: those of one communicator, kind, operation and type travel as one
 * call of NCCL's on a packed buffer. The packed calls are made inside the program's own group, just before it ends, so
 * that everything in the group still runs together; what does not fit the scratch follows behind the group. Which calls
 * share one, and in which order, follows from the calls alone. Per thread, as groups are.
 */
#ifndef LC_INTERPOSE_GATHER_H
#define LC_INTERPOSE_GATHER_H

#include "interpose/policy.h"
#include "interpose/real.h"

/* Before any operation inside a group on a communicator that has an agreement. A failure is final for the
 * communicator. */
ncclResult_t lc_gather_note(const struct lc_op *op);

/* This thread's open group holds an operation of the communicator. */
bool lc_gather_knows(const struct lc_comm *comm);

/* Takes over the operation and its pin on the communicator. A failure is final for the communicator. */
ncclResult_t lc_gather_add(struct lc_op *op, const struct lc_choice *choice,
                           const struct lc_redop *redop);

/* A call has been refused: the group is going to fail, and nothing that was gathered may touch a buffer. `failure`: of
 * ours, which NCCL does not know of; ncclSuccess where it was NCCL that refused. */
void lc_gather_refuse(ncclResult_t failure);

/* Before the real end of the outermost group: packs, makes the calls. On failure NCCL's group will fail, too. */
ncclResult_t lc_gather_flush(const struct lc_real *real);

/* After it. `result`: of the flush or the real end; on failure everything gathered is dropped, and the group never was,
 * but for communicators of which peers have got something: a failure is final for those. Returns it, or what went
 * wrong. */
ncclResult_t lc_gather_finish(const struct lc_real *real, ncclResult_t result);

/* For a group that is only simulated: hands the calls to NCCL as the program made them. None of the group's operations
 * counts for the agreement: other ranks need not simulate. */
ncclResult_t lc_gather_simulate(const struct lc_real *real);

/* In a forked child: what the parent gathered is the parent's. */
void lc_gather_forget(void);

#endif
