/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_VERIFY=N: the first N reductions of a communicator that a path of ours takes also go through NCCL as the
 * program made them, into memory of ours, and the device compares the two results. The program's result stays ours, or
 * an error of NCCL's, and nothing is waited for: what the comparisons have found is looked at when they are done, at
 * later calls and at the end of the communicator.
 *
 * Since all ranks must make the plain calls together, which ones are made follows from the calls and from what all ranks
 * share alone. As everywhere, ranks either all capture a call into a graph or none does; captured calls are not compared.
 */
#ifndef LC_INTERPOSE_VERIFY_H
#define LC_INTERPOSE_VERIFY_H

#include "interpose/ledger.h"
#include "interpose/reduce.h"

/* Used by the thread that calls the communicator's operations, then by who frees it. */
struct lc_verify;

/* One call that is being checked; `want` NULL: none. */
struct lc_check {
    const void *want; /* NCCL's result */
    uint64_t number;  /* of the plain calls of the communicator, from 1 */
};

/* How the call stands: equal on all ranks. */
struct lc_checked {
    bool captured;
    bool
        grouped; /* the plain call takes place at the end of the group, behind what is on the stream by then */
    bool first; /* ours begins before: NCCL reads a copy of the input, which ours may overwrite */
};

/* Part of set-up, for the reducer of a communicator whose counters `ledger` holds; never under capture. False: it
 * cannot be; said once. True also where nothing is to be verified. */
bool lc_verify_set_up(struct lc_reducer *reducer, cudaStream_t stream, struct lc_ledger *ledger,
                      int rank, int ranks);

/* Some calls are still to be checked. */
bool lc_verify_wants(const struct lc_reducer *reducer);

/* Before ours of `op`, on op->stream, between lc_span_wait and lc_span_record. An error is NCCL's. */
ncclResult_t lc_verify_plain(struct lc_reducer *reducer, const struct lc_op *op,
                             const struct lc_checked *how, const struct lc_real *real,
                             struct lc_check *check);

/* A call of ours that cannot be checked, while some are still to be. */
void lc_verify_pass(struct lc_reducer *reducer);

/* Behind both; what the ledger says about `op` is its path. */
void lc_verify_compare(struct lc_reducer *reducer, const struct lc_check *check,
                       const struct lc_op *op, enum lc_outcome outcome);

/* The calls of a group that were to be compared have been: their memory is used again, behind that. */
void lc_verify_reuse(struct lc_reducer *reducer);

/* The ledger is about to go: looks at what is done by now. NULL is allowed, as below. */
void lc_verify_detach(struct lc_verify *verify);

/* Nothing of it is in flight. Its memory goes to the pool. */
void lc_verify_free(struct lc_verify *verify);

#endif
