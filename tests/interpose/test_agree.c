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

/* ---- later changes ---- */

#define INDICES 1200
#define CHANGES 6

/* What every rank went by at each collective behind the commit. */
static struct went {
    uint32_t generation[INDICES];
    uint32_t voted; /* the last change that it has voted for */
    uint64_t count;
} went[RANKS];

/* A vote for the next change, if the last one that it voted for is behind it. */
static void vote(int rank)
{
    struct went *me = &went[rank];

    if (me->voted == lc_agree_generation(agree[rank]) && me->voted < CHANGES)
        CHECK(lc_agree_vote_change(agree[rank], ++me->voted));
}

static void go_on(int rank)
{
    bool committed;

    CHECK(lc_agree_next(agree[rank], true, &committed) == ncclSuccess && committed);
    went[rank].generation[went[rank].count++] = lc_agree_generation(agree[rank]);
}

/* Now one rank is ahead, now the other; each votes when it likes. */
static void ranks_change_at_the_same_collective(void)
{
    uint32_t changes = 0;

    for (uint64_t seed = 1; seed < 200; seed++) {
        uint64_t x = seed * 0x9e3779b97f4a7c15u;
        uint32_t last = 0;

        memset(went, 0, sizeof(went));
        make();
        commit();
        while (went[0].count < INDICES || went[1].count < INDICES) {
            int rank;

            x = x * 6364136223846793005u + 1442695040888963407u;
            rank = (int)(x >> 40 & 1);
            for (uint64_t n = (x >> 50) % (seed % 90 + 2); n && went[rank].count < INDICES; n--)
                go_on(rank);
            if (x >> 41 & 1)
                vote(rank);
            if (went[rank].count == INDICES)
                while (went[1 - rank].count < INDICES)
                    go_on(1 - rank);
        }
        for (int i = 0; i < INDICES; i++) {
            CHECK(went[0].generation[i] == went[1].generation[i]);
            CHECK(went[0].generation[i] == last || went[0].generation[i] == last + 1);
            last = went[0].generation[i];
        }
        changes += last;
        for (int r = 0; r < RANKS; r++)
            lc_agree_free(agree[r]);
    }
    CHECK(changes > 200);
}

/* A change that one rank has given up is never agreed on; the next one is, by those who voted for it. */
static void a_change_that_is_given_up_stays_out(void)
{
    memset(went, 0, sizeof(went));
    make();
    commit();
    CHECK(lc_agree_vote_change(agree[0], 1));
    for (int i = 0; i < 70; i++) {
        go_on(0);
        go_on(1);
    }
    CHECK(lc_agree_generation(agree[0]) == 0);
    CHECK(lc_agree_vote_change(agree[1], 2)); /* the first knows nothing of that one */
    for (int i = 0; i < 70; i++) {
        go_on(1);
        go_on(0);
    }
    CHECK(lc_agree_generation(agree[0]) == 0 && lc_agree_generation(agree[1]) == 0);
    CHECK(lc_agree_vote_change(agree[0], 2) && !lc_agree_vote_change(agree[0], 1));
    for (int i = 0; i < 400; i++) {
        go_on(1);
        go_on(0);
    }
    CHECK(lc_agree_generation(agree[0]) == 2 && lc_agree_generation(agree[1]) == 2);
    for (int r = 0; r < RANKS; r++)
        lc_agree_free(agree[r]);
}

/* A group that comes to nothing takes back what was agreed on in it, until its collectives are called once more. */
static void what_a_group_agreed_on_is_agreed_on_again(void)
{
    memset(went, 0, sizeof(went));
    make();
    commit();
    for (int r = 0; r < RANKS; r++)
        CHECK(lc_agree_vote_change(agree[r], 1));
    while (lc_agree_generation(agree[0]) == 0) {
        struct lc_agree_mark mark = lc_agree_mark(agree[0]);

        go_on(0);
        lc_agree_rewind(agree[0], mark);
        CHECK(lc_agree_generation(agree[0]) == 0);
        go_on(1);
        go_on(0);
        CHECK(lc_agree_generation(agree[0]) == lc_agree_generation(agree[1]));
    }
    for (int r = 0; r < RANKS; r++)
        lc_agree_free(agree[r]);
}

int main(void)
{
    lc_process_begin();
    abort_does_not_change_the_path();
    no_vote_after_an_abort();
    ranks_change_at_the_same_collective();
    a_change_that_is_given_up_stays_out();
    what_a_group_agreed_on_is_agreed_on_again();
    return 0;
}
