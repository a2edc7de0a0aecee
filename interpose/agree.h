/* SPDX-License-Identifier: Apache-2.0
 *
 * The agreement of one communicator: from which of its collectives on the ranks use something of ours.
 *
 * Made when the communicator is made from an id that carries a ticket, or split off such a one; freed with the last
 * reference of its entry. Everything but lc_agree_abort, lc_agree_error and lc_agree_free is called by the thread that
 * calls the communicator's operations, one at a time, as NCCL demands.
 */
#ifndef LC_INTERPOSE_AGREE_H
#define LC_INTERPOSE_AGREE_H

#include <nccl.h>
#include <stdbool.h>
#include <stdint.h>

struct lc_agree;
struct lc_room;
struct lc_progress;

/* Where its ranks meet, for what set-up exchanges. Valid as long as the agreement. */
struct lc_room *lc_agree_room(const struct lc_agree *agree);

/* What is agreed: bits of a record's capabilities, common to all ranks once committed. */
#define LC_CAN_CAST 1u /* pack and unpack kernels are loaded */
#define LC_CAN_TUNE \
    2u /* NCCL has loaded our tuner plugin for this communicator, with the profile of the settings */

/* The room of a new communicator, or NULL: no ticket, or nothing to agree on. Never waits. */
struct lc_agree *lc_agree_init(const ncclUniqueId *id, int ranks, int rank, int device);
struct lc_agree *lc_agree_child(struct lc_agree *parent, uint64_t creation, int colour, int ranks,
                                int rank, int device);

/* What children of the parent are counted by: 0 for splits, and for shrinks what they exclude (in any order; excluded
 * ranks do not make the call). */
uint64_t lc_agree_set(const int *excluded, int count);

/* Counts one split or shrink that NCCL has accepted: `creation` of its child, equal on all members and never used again.
 * 0: the child has no agreement. NULL is allowed. */
uint64_t lc_agree_count_child(struct lc_agree *parent, uint64_t set);

/* The one counted last was only simulated: it never took place. */
void lc_agree_uncount_child(struct lc_agree *parent, uint64_t set);

/* One has failed when it was under way, and may have been made at other ranks: no later one has an agreement at this
 * rank, which might take it for another one of theirs. */
void lc_agree_child_failed(struct lc_agree *parent, uint64_t set);

/* Before each collective of the communicator: counts it; votes when `ready` has come true; decides at epochs. Writes
 * whether this collective is committed. ncclSuccess, or what lc_agree_error says. */
ncclResult_t lc_agree_next(struct lc_agree *agree, bool ready, bool *committed);

/* Which of the later changes the collective that was counted last is behind: 0, before all. Equal at all ranks. */
uint32_t lc_agree_generation(const struct lc_agree *agree);

/* This rank may vote for later changes at all; known when it has voted, and constant. */
bool lc_agree_can_change(const struct lc_agree *agree);

/* This rank is ready for a later change (control.h): a vote, given between two collectives, and outside of groups or
 * before the communicator's first operation in one, for what a group has agreed on may be undone with it. False: it
 * cannot be given, now or ever. */
bool lc_agree_vote_change(struct lc_agree *agree, uint32_t change);

/* The last collective was committed; false without an agreement. */
bool lc_agree_is_committed(const struct lc_agree *agree);

/* Decides for the messages to `peer`, or from it, at epoch `index` of them; the first time that is this rank's vote for
 * the pair. Unlike lc_agree_next it must not be called before the vote is meant. ncclSuccess, or a failure that is final
 * for the communicator. */
ncclResult_t lc_agree_pair(struct lc_agree *agree, int peer, bool send, uint64_t index,
                           bool *committed);

/* NCCL has refused the call that was counted last: it never took place, and the next one gets its number. */
void lc_agree_refused(struct lc_agree *agree);

/* Where the communicator stands, to return there when a group was only simulated or refused. Deciding an epoch again
 * gives the same word. */
struct lc_agree_mark {
    uint64_t count;
    bool committed;
    uint32_t generation;
};
struct lc_agree_mark lc_agree_mark(const struct lc_agree *agree);
void lc_agree_rewind(struct lc_agree *agree, struct lc_agree_mark mark);

/* The tuner plugin waits for an agreement of all ranks. */
bool lc_agree_is_tuned(const struct lc_agree *agree);

/* Set-up may begin: all ranks are here, none has voted for us yet. One atomic load. */
bool lc_agree_wants_setup(const struct lc_agree *agree);

/* This rank lacks something. True if it has not voted, and now never will; else it is a failure (lc_agree_break). */
bool lc_agree_withhold(struct lc_agree *agree);

/* A failure of ours after commit: peers are told, later calls return `error`. Any thread. */
void lc_agree_break(struct lc_agree *agree, ncclResult_t error);

/* The program aborts the communicator. Any thread, at once. */
void lc_agree_abort(struct lc_agree *agree);

/* ncclSuccess, or what further calls return: an error of ours here, or ncclRemoteError once a rank has ended without
 * goodbye, aborted or failed (only after our own vote: before it nothing of ours can be waiting). Any thread; atomic
 * loads. The first is about this rank alone; the last is for those who tell the program, and says, once, who is gone. */
ncclResult_t lc_agree_own_error(const struct lc_agree *agree);
ncclResult_t lc_agree_state(const struct lc_agree *agree);
ncclResult_t lc_agree_error(struct lc_agree *agree);

/* Lets the watchdog see how far this rank is; `progress` stays readable until lc_agree_free. Returns a number that is
 * the same at every rank of the communicator. NULL is allowed: 0. */
uint64_t lc_agree_watch(struct lc_agree *agree, struct lc_progress *progress);

/* Milliseconds since the first call of this function, which is made when a peer is seen to be gone. Any thread. */
int64_t lc_agree_lost_for_ms(struct lc_agree *agree);

void lc_agree_free(struct lc_agree *agree);

#endif
