/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/pairs.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/control/control.h"

#include <stdlib.h>
#include <string.h>

struct pair {
    uint64_t count; /* messages so far */
    bool voted, committed;
};

struct lc_pairs {
    uint64_t own_from; /* messages to oneself are ours from this one on; 0: not decided */
    size_t ranks;
    struct pair pair[]; /* to each rank, then from each rank */
};

static size_t size_of(size_t ranks)
{
    return sizeof(struct lc_pairs) + 2 * ranks * sizeof(struct pair);
}

void lc_pairs_free(struct lc_pairs *pairs)
{
    free(pairs);
}

static struct pair *pair_of(struct lc_pairs *pairs, const struct lc_op *op)
{
    return &pairs->pair[(size_t)op->peer + (op->kind == LC_OP_RECV ? pairs->ranks : 0)];
}

/* Without memory the pairs never vote, which is all that the other ends have to know. */
static struct lc_pairs *pairs_of(struct lc_comm *comm)
{
    if (!comm->pairs && !comm->no_pairs) {
        comm->pairs = calloc(1, size_of((size_t)comm->facts.ranks));
        comm->no_pairs = !comm->pairs;
        if (comm->pairs)
            comm->pairs->ranks = (size_t)comm->facts.ranks;
    }
    return comm->pairs;
}

/* A rank agrees with itself at once, but its sends and receives are counted apart: from a number on that neither has
 * reached. */
static void decide_own(struct lc_pairs *pairs, int rank)
{
    uint64_t sent = pairs->pair[rank].count;
    uint64_t received = pairs->pair[(size_t)rank + pairs->ranks].count;

    pairs->own_from = (sent > received ? sent : received) + 1;
}

static bool is_committed_own(struct lc_pairs *pairs, const struct lc_op *op, uint64_t bytes,
                             bool ready)
{
    struct pair *pair = pair_of(pairs, op);

    if (!pairs->own_from && ready)
        decide_own(pairs, op->peer);
    pair->count += bytes > 0;
    return pairs->own_from && pair->count >= pairs->own_from;
}

ncclResult_t lc_pairs_next(const struct lc_op *op, uint64_t bytes, bool ready, bool *committed)
{
    struct lc_comm *comm = op->comm;
    struct lc_pairs *pairs = pairs_of(comm);
    ncclResult_t result = ncclSuccess;
    struct pair *pair;

    *committed = false;
    if (!pairs)
        return ncclSuccess;
    if (op->peer == comm->facts.rank) {
        *committed = is_committed_own(pairs, op, bytes, ready);
        return ncclSuccess;
    }
    pair = pair_of(pairs, op);
    pair->count += bytes > 0;
    if (bytes > 0 && !pair->committed && (pair->voted || ready) && lc_is_epoch(pair->count)) {
        pair->voted = true;
        result = lc_agree_pair(comm->agree, op->peer, op->kind == LC_OP_SEND, pair->count,
                               &pair->committed);
        if (pair->committed)
            lc_info("messages %s rank %d: through rings from number %llu on",
                    op->kind == LC_OP_SEND ? "to" : "from", op->peer,
                    (unsigned long long)pair->count);
    }
    *committed = pair->committed;
    return result;
}

void lc_pairs_refused(const struct lc_op *op)
{
    if (op->comm->pairs && op->count > 0)
        pair_of(op->comm->pairs, op)->count--;
}

bool lc_pairs_mark(const struct lc_comm *comm, struct lc_pairs **mark)
{
    *mark = NULL;
    if (!comm->pairs)
        return true;
    *mark = malloc(size_of(comm->pairs->ranks));
    if (*mark)
        memcpy(*mark, comm->pairs, size_of(comm->pairs->ranks));
    return *mark != NULL;
}

/* What has been voted stays voted: a pair that is asked again gets the same word. */
void lc_pairs_rewind(struct lc_comm *comm, const struct lc_pairs *mark)
{
    struct lc_pairs *pairs = comm->pairs;

    for (size_t i = 0; pairs && i < 2 * pairs->ranks; i++) {
        pairs->pair[i].count = mark ? mark->pair[i].count : 0;
        pairs->pair[i].committed = mark && mark->pair[i].committed;
    }
}

bool lc_pairs_all_committed(const struct lc_comm *comm)
{
    const struct lc_pairs *pairs = comm->pairs;

    for (size_t i = 0; pairs && i < pairs->ranks; i++) {
        if ((int)i != comm->facts.rank && !pairs->pair[i].committed)
            return false;
    }
    return pairs != NULL;
}
