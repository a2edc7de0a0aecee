/* SPDX-License-Identifier: Apache-2.0
 *
 * What was asked of us and what became of it. Counters only: no clock, no lock, no allocation. */
#ifndef LC_INTERPOSE_LEDGER_H
#define LC_INTERPOSE_LEDGER_H

#include "interpose/op.h"

/* The path a call took and why not a better one. Reasons are worded for users: see lc_outcome_reason. */
enum lc_outcome {
    LC_NCCL_NO_FASTER_PATH,
    LC_NCCL_NOT_COMMITTED,
    LC_NCCL_SMALL,
    LC_NCCL_OPERATION,
    LC_NCCL_NO_PEER_MEMORY, /* it could not be set up on some rank */
    LC_CAST_BF16,
    LC_PACKED,
    LC_RINGS,
    LC_RINGS_BF16,
    LC_RINGS_LINES,
    LC_RINGS_EXCHANGE,
    LC_OUTCOMES,
};

const char *lc_outcome_path(enum lc_outcome outcome);
const char *lc_outcome_reason(enum lc_outcome outcome);

/* Bytes of send buffer that are handed on, of so many that were asked. */
uint64_t lc_outcome_sent(enum lc_outcome outcome, uint64_t asked);

/* Bucket 0 counts the value 0, bucket i the values 2^(i-1) .. 2^i - 1, the last one all larger ones. */
#define LC_BUCKETS 42

/* Written by any thread with relaxed additions and read with relaxed loads: a reader sees each counter
 * at some recent moment, not all of them at the same one. */
struct lc_tally {
    uint64_t calls;
    uint64_t asked; /* bytes, see lc_op_bytes */
    uint64_t
        sent; /* bytes of send buffer that the path handed on; NCCL's own path: what was asked */
};

struct lc_ledger_op {
    struct lc_tally by[LC_OUTCOMES];
    uint64_t sizes[LC_BUCKETS]; /* calls by bytes asked */
};

struct lc_ledger {
    struct lc_ledger_op op[LC_OP_KINDS];

    /* Counted by the device, so that replays of graphs count, too; known when the communicator has ended in order. */
    uint64_t ring_sent;                      /* bytes written to peers */
    uint64_t ring_elided;                    /* bytes not written because they were zero */
    uint64_t exchange_sent, exchange_elided; /* of both, those of all-to-alls and messages */

    /* Not additions but what there is: memory of this rank for others to write to, all of it and what is in use. */
    uint64_t ring_bytes;
    uint64_t ring_used;
    uint64_t ring_changes; /* of its size */

    uint64_t drawn; /* calls with bf16 on the wire that were rounded stochastically */

    /* Calls with bf16 on the wire, where error feedback is wanted (feedback.h). */
    uint64_t fed;
    uint64_t unfed;          /* went without */
    uint64_t feedback_bytes; /* of device memory that residuals have used */

    /* Calls beside which NCCL's own were made (verify.h). */
    uint64_t verify_begun;  /* comparisons launched */
    uint64_t verified;      /* of them, looked at */
    uint64_t verify_unlike; /* of those, more apart than rounding explains */
    uint64_t verify_passed; /* calls that could not be compared */

    /* The last LC_LARGEST words: of two the larger one is kept, not the sum. */
    uint64_t
        ring_ctas_allowed; /* of a call, by LOONGCOMM_MAX_CTAS; 0: it says nothing, or there are no rings */
    uint64_t ring_ctas;    /* that the largest has taken, where it says something */
    uint64_t verify_worst; /* largest relative error in units of 1e-9 */
};
#define LC_LARGEST 3

static inline unsigned lc_bucket(uint64_t value)
{
    unsigned bits = value ? 64 - (unsigned)__builtin_clzll(value) : 0;

    return bits < LC_BUCKETS ? bits : LC_BUCKETS - 1;
}

static inline void lc_add(uint64_t *counter, uint64_t value)
{
    __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
}

static inline void lc_ledger_add(struct lc_ledger *ledger, enum lc_op_kind kind,
                                 enum lc_outcome outcome, uint64_t asked, uint64_t sent)
{
    struct lc_ledger_op *op = &ledger->op[kind];

    lc_add(&op->by[outcome].calls, 1);
    lc_add(&op->by[outcome].asked, asked);
    lc_add(&op->by[outcome].sent, sent);
    lc_add(&op->sizes[lc_bucket(asked)], 1);
}

/* Adds what `from` holds now to `into`; both may be in use. */
void lc_ledger_merge(struct lc_ledger *into, const struct lc_ledger *from);

/* For one of the last words. */
void lc_ledger_larger(uint64_t *word, uint64_t value);

/* Nobody else may use it. */
void lc_ledger_clear(struct lc_ledger *ledger);

uint64_t lc_ledger_calls(const struct lc_ledger *ledger);

/* Operations per outermost group of the whole process, by bucket. Empty groups count in bucket 0. */
struct lc_groups {
    uint64_t sizes[LC_BUCKETS];
};
extern struct lc_groups lc_groups; /* as struct lc_tally */

#endif
