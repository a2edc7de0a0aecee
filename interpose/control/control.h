/* SPDX-License-Identifier: Apache-2.0
 *
 * The control plane: how the ranks of a communicator agree, out of band, from which operation on something of ours
 * is used. Pure host code: no CUDA, no NCCL, no hook; libc only.
 *
 *  - A ticket (endpoint and token) travels in the unused tail of NCCL's 128-byte unique id. A rank without the
 *    library never sees it and is never waited for.
 *  - The arbiter is hosted by the process that made the id, on that process's one control thread. It listens on TCP
 *    (the address NCCL itself put into the id) and on an abstract Unix socket (same host, same user).
 *  - A room is one communicator. Its words lie in a memory file of the arbiter; members that came by the Unix socket
 *    map it and act on it directly, others ask the arbiter, which acts on it for them.
 *  - A vote says "all my set-up is done; count me from operation index `from` on", where `from` is the next epoch
 *    that the rank has not passed. An epoch is an operation index 1, 2, 4, 8 ...: the count of collectives of the
 *    communicator, or of messages of one directed pair; both equal at all who share them. A rank that has not voted
 *    passes an epoch without asking; that is why `from` is needed. A rank that has voted decides or obeys the
 *    epoch's write-once word. Model: tests/model/commit.pml.
 *
 * Threads. lc_room_* may be called by any application thread; calls for one room are serialised by the caller
 * (NCCL demands the same of its users), except lc_room_abort, lc_room_error and lc_room_release, which may come from
 * any thread at any time. The control thread owns all sockets.
 */
#ifndef LC_INTERPOSE_CONTROL_H
#define LC_INTERPOSE_CONTROL_H

#include "interpose/control/progress.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LC_ID_BYTES 128 /* NCCL_UNIQUE_ID_BYTES */

/* What a rank says about itself when it joins. Strings are cut, never unterminated. */
struct lc_record {
    uint32_t version; /* of the protocol and of what a vote means */
    uint32_t rank;
    uint32_t pid;
    int32_t device;         /* CUDA ordinal, for messages only */
    uint64_t settings_hash; /* of every setting that must be equal on all ranks */
    uint64_t capabilities;  /* bits; the room's common ones are their AND */
    char host[64]; /* LOONGCOMM_HOSTID, else NCCL_HOSTID, else the machine's boot id and name */
    unsigned char gpu[16]; /* UUID, zero if unknown */
};

enum lc_verdict {
    LC_VERDICT_SKIP,   /* this epoch and all operations up to the next one go to NCCL */
    LC_VERDICT_COMMIT, /* from this operation on, ours */
};

/* True for 1, 2, 4, 8 ... */
static inline bool lc_is_epoch(uint64_t index)
{
    return index && !(index & (index - 1));
}

/* The first epoch after `index` completed operations. */
static inline uint64_t lc_next_epoch(uint64_t index)
{
    return index ? (uint64_t)1 << (64 - __builtin_clzll(index)) : 1;
}

struct lc_room;

/* Makes `id` (fresh from the real ncclGetUniqueId) carry a ticket: starts the control thread if needed, opens a room
 * key of `id`, writes the tail. The first 48 bytes are only read. On failure the id stays as it is, the cause is
 * logged once, and the communicator will stay with NCCL. 0 or -errno. */
int lc_control_stamp(char id[LC_ID_BYTES]);

/* Takes a seat in the room of `id`. Never waits: the connection is made by the control thread. -ENOENT: the id has no
 * ticket (made without the library). The room is freed by lc_room_release. */
int lc_room_join(const char id[LC_ID_BYTES], uint32_t nranks, const struct lc_record *mine,
                 struct lc_room **out);

/* Child of a split or shrink: the same arbiter, key from (parent's key, creation counter of the parent, colour). All
 * members of the child call it with equal arguments but for `mine`. */
int lc_room_join_child(struct lc_room *parent, uint64_t creation, uint32_t colour, uint32_t nranks,
                       const struct lc_record *mine, struct lc_room **out);

/* True when all nranks records are here, of one version and one settings hash: set-up may begin. Never waits. When it
 * can never become true (a rank with other settings, another version, or some seconds later a rank that has not come),
 * one line of the arbiter's process names the rank and the difference. */
bool lc_room_complete(struct lc_room *room);

/* Record of a member, valid while the room is held; NULL before lc_room_complete. */
const struct lc_record *lc_room_record(struct lc_room *room, uint32_t rank);
uint64_t lc_room_capabilities(struct lc_room *room);

/* Votes once; `from` as above. Later calls are -EALREADY. */
int lc_room_vote(struct lc_room *room, uint64_t from);

/* This rank will never vote, nor for a pair, which it has not done yet: the others need not ask. */
void lc_room_withhold(struct lc_room *room);

/* At epoch `index`, only after the own vote with from <= index: decides or obeys. *out is valid on 0. Any failure
 * (arbiter gone, deadline passed) is final for the communicator: the caller reports a communicator error and must
 * not fall back, since others may have committed. */
int lc_room_decide(struct lc_room *room, uint64_t index, enum lc_verdict *out);

/* Of the room once it is complete: this rank has the words at hand, which changes need. */
bool lc_room_can_change(const struct lc_room *room);

/* A later change of what is committed, number 1, 2 ..., at an epoch behind the first commit: the same once more. A rank
 * votes for one when the ones before are committed, or given up by all. Only where the words are at hand, which they are
 * on the arbiter's host: -ENOTSUP elsewhere. Deciding then asks nobody and cannot fail. */
int lc_room_vote_change(struct lc_room *room, uint32_t change, uint64_t from);
enum lc_verdict lc_room_decide_change(struct lc_room *room, uint32_t change, uint64_t index);

/* The same for the messages from rank `src` to rank `dst`, one of which is this rank. The vote for a pair is given by
 * the first decide call that its end makes. */
int lc_room_decide_pair(struct lc_room *room, uint32_t src, uint32_t dst, uint64_t index,
                        enum lc_verdict *out);

/* Data that set-up exchanges between members (handles, nonces): each rank posts blobs of at most 64 KiB under a small
 * key once; others look, without waiting. -EAGAIN: not there yet. */
int lc_room_post(struct lc_room *room, uint32_t key, const void *data, size_t size);
int lc_room_look(struct lc_room *room, uint32_t rank, uint32_t key, void *data, size_t max,
                 size_t *size);

/* A descriptor for the other members of this host, each of which may fetch it. Offering takes it over (on success only);
 * one at a time, given back by withdrawing or with the room. -EALREADY: one is offered. */
int lc_room_offer_fd(struct lc_room *room, int fd);
void lc_room_withdraw_fd(struct lc_room *room);

/* What rank `rank` offers: a new descriptor, close-on-exec, the caller's. Never waits. -EAGAIN: not there yet. Any other
 * error is final; whoever answered was a process of the same user, and what the descriptor is has to be checked. */
int lc_room_fetch_fd(struct lc_room *room, uint32_t rank, int *out);

/* A word that turns from 0 to 1, too, when the room's abort word does: for waits that cannot read that one. At once with
 * lc_room_abort; half a second later for what befalls another rank, which may have ended with all its work done. It stays
 * the caller's, who takes it back (NULL) before he frees it, while no lc_room_abort of another thread is under way. */
void lc_room_echo_abort(struct lc_room *room, uint32_t *word);

/* Tells every member that this rank gives up, at once; async-signal-unsafe, lock-free for the caller. Their abort
 * words are set. */
void lc_room_abort(struct lc_room *room, int reason);

/* 0, or why the room is broken: -ECONNRESET (a member's connection closed without goodbye, *rank says which),
 * -ECANCELED (a member aborted), -EPIPE (after our vote the process that hosts the room has ended, and with it a rank of
 * the room; or a question to it had no answer). One atomic load. */
int lc_room_error(struct lc_room *room, uint32_t *rank);

/* Word that becomes non-zero with lc_room_error, for waits of our kernels' host side to poll. Valid while the room is
 * held. */
const uint32_t *lc_room_abort_word(struct lc_room *room);

/* Says goodbye (orderly end) and frees. After lc_room_abort no goodbye is said. */
void lc_room_release(struct lc_room *room);

/* ---- the watchdog ----
 *
 * Whether NCCL has finished a call cannot be known without giving the GPU work, and no such work is given. What is
 * known is how many collectives each rank has called. When nothing of a room has moved at one of its ranks for the
 * time-out, that rank tells the arbiter; the arbiter asks all ranks how far they are and sends everybody the finding:
 * ranks that are behind have not arrived. Nothing is ever ended because of it. */

enum lc_presence {
    LC_HERE,    /* it has answered */
    LC_SILENT,  /* it has not: stopped, or its machine is gone */
    LC_LEFT,    /* it has ended the communicator, or its process, in order */
    LC_LOST,    /* its connection closed without goodbye */
    LC_GAVE_UP, /* it has aborted the communicator */
    LC_ABSENT,  /* it never came, or left before it had joined: nothing is known of it */
};

/* A rank that has not arrived. */
struct lc_missing {
    uint32_t rank;
    uint32_t presence; /* enum lc_presence */
    uint32_t pid;
    uint32_t pad;
    uint64_t collectives; /* it has called so many; LC_HERE and LC_LEFT only */
    uint64_t age_ms;      /* since its last call; LC_HERE only */
};
#define LC_MISSING_MAX 32u /* named; more are counted */

struct lc_finding {
    uint32_t n_missing; /* 0 and n_differ 0: all are at the same number, idle or inside it */
    uint32_t n_listed;
    uint32_t n_absent;
    uint32_t n_differ; /* ranks that called something else than rank_a at a.seq; 0: none known */
    uint64_t top;      /* the most collectives that a rank has called */
    uint32_t rank_a, rank_b;
    uint64_t at;            /* the first collective that one of the missing has not called */
    struct lc_note awaited; /* what the others called there; seq 0: too long ago to know */
    struct lc_note a, b;
};

enum lc_hang_kind {
    LC_HANG_FOUND, /* `finding` is the arbiter's */
    LC_HANG_ALONE, /* the arbiter is gone or does not answer: only this rank's own state is known */
    LC_HANG_OVER,  /* after one of those that blamed somebody: a call was made again */
};

/* What one rank reports. */
struct lc_hang {
    struct lc_hang *next;
    enum lc_hang_kind kind;
    uint64_t id; /* lc_room_id */
    uint32_t rank, nranks;
    struct lc_progress_copy mine;
    uint64_t age_ms;    /* since this rank's last call on the communicator */
    bool arbiter_lost;  /* LC_HANG_ALONE: its connection closed without goodbye */
    bool process_quiet; /* no other communicator of the process has moved either */
    struct lc_finding finding;
    struct lc_missing missing[LC_MISSING_MAX];
};

/* Somebody is to blame; else the rank may just as well be idle. */
static inline bool lc_hang_blames(const struct lc_hang *hang)
{
    return hang->kind == LC_HANG_FOUND ? hang->finding.n_missing || hang->finding.n_differ
                                       : hang->arbiter_lost;
}

/* Before the first room: `report` is called for each hang, on a thread of its own without any lock. 0: no watchdog. */
void lc_control_watch(unsigned timeout_s, void (*report)(const struct lc_hang *hang));

/* The progress to watch; must stay readable until the room is released. */
void lc_room_watch(struct lc_room *room, struct lc_progress *progress);

/* The same number at every rank of the communicator; says nothing about the token. */
uint64_t lc_room_id(const struct lc_room *room);

/* At process exit: goodbye for every room still held, bounded by 200 ms. In a forked child: forgets everything. */
void lc_control_fini(void);

#endif
