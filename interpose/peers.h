/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings between the ranks of one communicator: memory that each maps from the others (kernels/rings.h).
 *
 * Set up before the vote, at intercepted calls, by the thread that calls the communicator's operations; never under
 * capture, never waiting: what is not there yet is looked for at the next call. Each rank
 *   allocates and zeroes its segment, offers its descriptor and says how large it is and which number it will write,
 *   maps everybody's, and writes its number into each: equal host names do not prove one machine,
 *   says that it has written; when all have, looks whether all numbers have come to its own segment,
 *   says whether all is well. Who fails says so at once, whatever he has done.
 * A rank is through when one has failed, or when all have said that all is well: then all know the same, and vote.
 *
 * Further generations, with other numbers of slots, are set up the same way while the ones before are in use. They take
 * only what can be had beside running kernels, which may wait for a peer that waits for this rank: memory is created,
 * mapped and filled, by calls that do not wait for the device (programs make them all the time, as their allocators
 * grow; and a rank that did wait there would wait for collectives that it has launched, which need nothing more of it);
 * what such calls do not give, private state and pinned words, is there from the beginning. Nothing of a
 * generation is given back before the communicator ends, since unmapping may wait for the device: not what has failed,
 * nor what is not used any more, which graphs may use for ever.
 */
#ifndef LC_INTERPOSE_PEERS_H
#define LC_INTERPOSE_PEERS_H

#include "interpose/backend.h"
#include "interpose/budget.h"
#include "interpose/ledger.h"

struct lc_peers;
struct lc_room;

/* What they are made for; all but the device, `ctas` and `beside` equal on all ranks. */
struct lc_peers_facts {
    int device, rank, ranks;
    size_t cap;   /* bytes that this process may use of a GPU for segments, of all communicators */
    size_t start; /* of a pair's rings at the beginning */
    size_t short_bytes; /* of messages that travel in lines, at most */
    uint32_t kernels;   /* of the communicator that may run at a time */
    uint32_t ctas;      /* of one, at most; may differ between ranks. 0: as is usual */
    uint32_t
        most; /* the same where the job says it of ours alone (LOONGCOMM_MAX_CTAS), which wins. 0: it does not */
    uint32_t beside; /* of one of NCCL's, at most; may differ between ranks. 0: not known */
};

#define LC_GENERATIONS 6u /* different ones of a communicator, at most */
#define LC_CHANGES     8u /* from one to another, at most */

/* Rings make sense: all ranks are on one host, and they are not too many. Equal on all ranks once the room is
 * complete. */
bool lc_peers_possible(struct lc_room *room, int ranks);

/* NULL: out of memory. `ledger` gets what lc_peers_count finds. */
struct lc_peers *lc_peers_new(const struct lc_backend *backend, struct lc_room *room,
                              const struct lc_peers_facts *facts, struct lc_ledger *ledger);

/* Goes on as far as possible. True: through, rings or not. The device is current, our calls are legal. */
bool lc_peers_step(struct lc_peers *peers);

/* ---- later generations, each known by the change (lc_agree_vote_change) that puts it to use, 1 .. LC_CHANGES ----
 * By the thread that calls operations, as lc_peers_step. */

/* Rings with `slots` slots for `change`, the next number: some that are there, or new ones. NULL: memory has run out, or
 * there have been too many; the others are told. */
struct lc_peers *lc_peers_change(struct lc_peers *peers, uint32_t change, uint32_t slots);

/* The same afterwards. */
struct lc_peers *lc_peers_of(struct lc_peers *peers, uint32_t change);

/* After lc_peers_step of what lc_peers_change gave: all ranks have them. Known alike by all. */
bool lc_peers_are_ready(const struct lc_peers *peers);

/* There are some with so many slots; new ones would stay below the limits of this rank. */
bool lc_peers_has(struct lc_peers *peers, uint32_t slots);
bool lc_peers_fit(const struct lc_peers *peers, uint32_t slots);

/* The most slots below `slots` of generations that are there; 0: none. */
uint32_t lc_peers_smaller(const struct lc_peers *peers, uint32_t slots);

/* A call on them has waited for slots since this was asked last. */
bool lc_peers_had_too_few(struct lc_peers *peers, uint32_t generation);

/* A word of this rank's about a change, for the others: once each. 0 or -errno, -EAGAIN: not said yet. */
enum lc_peers_word {
    LC_PEERS_WISH,  /* slots that it would like to have */
    LC_PEERS_ORDER, /* slots that all are to have; rank 0's */
    LC_PEERS_ABLE,  /* 1: it can take part in changes, from the first on; 2: it cannot */
};
int lc_peers_say(struct lc_peers *peers, uint32_t change, enum lc_peers_word word, uint32_t slots);
int lc_peers_hear(struct lc_peers *peers, uint32_t rank, uint32_t change, enum lc_peers_word word,
                  uint32_t *slots);

/* Bytes of the segments of one generation, and of all that there are. */
size_t lc_peers_bytes(const struct lc_peers *peers, uint32_t generation);
size_t lc_peers_all_bytes(const struct lc_peers *peers);

/* This rank cannot take part in anything: the others need not wait. */
void lc_peers_refuse(struct lc_room *room);

/* NULL: there are none. Constant once lc_peers_step has been true. `generation` is a collective's (struct lc_op);
 * messages of directed pairs, whose order beside collectives may differ between ranks, all go through generation 0.
 * `ctas`: size of a grid, less where more communicators have rings: kernels of all ranks of a GPU, of all communicators, have
 * to be resident together, and some of the device is left for NCCL's. It may differ between ranks and calls. `slots`: of
 * the rings that the call goes through. */
const struct lk_rings *lc_peers_rings(const struct lc_peers *peers, uint32_t generation);
uint32_t lc_peers_ctas(const struct lc_peers *peers, uint32_t slots);
uint32_t lc_peers_exchange_ctas(const struct lc_peers *peers);

/* A grid of `ctas`, which is what one of the two above has said or less, is about to be launched: how many it gets. A captured
 * one stays of that size when communicators are added. Where the job has said more than is usual, any grid does: what this
 * gives is never more than what no other communicator has, whatever has been added since the two above were asked. By the
 * thread that calls the communicator's operations. */
uint32_t lc_peers_take(struct lc_peers *peers, enum lc_grid grid, uint32_t ctas, bool captured);

/* A call has ended early, since a rank has aborted or is gone: its results are none. Any thread, after the vote. */
bool lc_peers_were_cut(const struct lc_peers *peers);

/* What the device has counted by itself, graphs' calls included, goes to the ledger: work of the communicator is over. Waits
 * for a copy, bounded; the device is current. NULL is allowed, as below. */
void lc_peers_count(struct lc_peers *peers);

/* The room is about to be released, and work may go on. Not freed by it. Any thread that alone has them, as below. */
void lc_peers_detach(struct lc_peers *peers);

/* No call that uses them is in flight; the device is current. Does not wait: memory goes to the pool, segments are unmapped.
 * False: the device is still at the set-up; nothing has been freed. */
bool lc_peers_free(struct lc_peers *peers);

#endif
