/* SPDX-License-Identifier: Apache-2.0
 *
 * The agreement of one communicator, both of its ranks in this process. */
#include "common/deadline.h"
#include "interpose/agree.h"
#include "interpose/control/control.h"
#include "interpose/process.h"
#include "tests/check.h"

#include <poll.h>
#include <string.h>

#define RANKS 2

static struct lc_agree *agree[RANKS];

static void make(void)
{
    ncclUniqueId id;

    memset(&id, 0, sizeof(id));
    CHECK(lc_control_stamp(id.internal) == 0);
    for (int r = 0; r < RANKS; r++)
        CHECK((agree[r] = lc_agree_init(&id, RANKS, r, 0)) != NULL);
}

/* Collectives with both ranks set up until one is committed. */
static void commit(void)
{
    struct lc_deadline until = lc_deadline_in_ms(20000);
    bool committed[RANKS] = { false, false };

    while (!committed[0]) {
        CHECK(!lc_deadline_passed(until));
        for (int r = 0; r < RANKS; r++)
            CHECK(lc_agree_next(agree[r], lc_agree_wants_setup(agree[r]), &committed[r]) ==
                  ncclSuccess);
        CHECK(committed[0] == committed[1]);
        (void)poll(NULL, 0, 1);
    }
}

/* Another thread aborts or revokes while this one makes a call that NCCL still takes: the peer, which knows nothing yet,
 * makes it on the path that was agreed. */
static void abort_does_not_change_the_path(void)
{
    bool committed = false;

    make();
    commit();
    lc_agree_abort(agree[0]);
    CHECK(lc_agree_next(agree[0], true, &committed) == ncclSuccess && committed);
    for (int r = 0; r < RANKS; r++)
        lc_agree_free(agree[r]);
}

static void no_vote_after_an_abort(void)
{
    struct lc_deadline until = lc_deadline_in_ms(20000);
    bool committed = true;

    make();
    while (!lc_agree_wants_setup(agree[0]) || !lc_agree_wants_setup(agree[1])) {
        CHECK(!lc_deadline_passed(until));
        (void)poll(NULL, 0, 1);
    }
    lc_agree_abort(agree[0]);
    CHECK(lc_agree_next(agree[0], true, &committed) == ncclSuccess && !committed);
    for (int i = 0; i < 20; i++) {
        ncclResult_t result = lc_agree_next(agree[1], true, &committed);

        CHECK(!committed && (result == ncclSuccess || result == ncclRemoteError));
    }
    for (int r = 0; r < RANKS; r++)
        lc_agree_free(agree[r]);
}

int main(void)
{
    lc_process_begin();
    abort_does_not_change_the_path();
    no_vote_after_an_abort();
    return 0;
}
