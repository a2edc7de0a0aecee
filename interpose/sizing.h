/* SPDX-License-Identifier: Apache-2.0
 *
 * How many slots the rings of a communicator have: few at first, more where calls have had to wait for them.
 *
 * A rank whose calls had too few (lk_rings.too_few) wishes for more; rank 0 hears wishes and orders one change after the
 * other; all set it up while the rings before are in use, each at its own calls (peers.h), and vote; it takes place at an
 * epoch of the communicator's collectives (lc_agree_vote_change). Once a rank has failed nobody changes any more.
 *
 * Only the number of slots changes, so that results do not: which rank owns and rounds an element follows from the number
 * of channels. A change doubles it, for what it replaces stays allocated (peers.h): all together never take more than
 * twice the last. After long calm rings of before are gone back to; smaller ones fit better into caches.
 */
#ifndef LC_INTERPOSE_SIZING_H
#define LC_INTERPOSE_SIZING_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct lc_comm;

/* Of one set of rings. Used by the thread that calls the communicator's operations; begins zeroed. */
struct lc_sizing {
    enum lc_sizing_stage {
        LC_SIZING_IDLE,
        LC_SIZING_UNDER_WAY, /* `change` is being set up */
        LC_SIZING_VOTED,     /* it waits for an epoch */
        LC_SIZING_ENDED,     /* for good */
    } stage;
    uint32_t change;  /* the last that was ordered */
    uint32_t slots;   /* of it */
    uint64_t steps;   /* while idle */
    uint64_t calls;   /* through rings with slots */
    uint64_t calm;    /* of them since the last one that had too few slots, or the last change */
    size_t largest;   /* bytes that one has sent to one rank */
    bool wished;      /* for the next change */
    bool asked;       /* rank 0: all can change; others: it knows what this rank can */
    bool said_enough; /* there cannot be more, and the log knows */
};

/* A call is about to go through rings with `bytes` for each other rank. */
void lc_sizing_note(struct lc_sizing *sizing, size_t bytes);

/* Before a collective is counted: goes on as far as possible. Nothing of the communicator is open in a group, `stream` is
 * the call's. */
void lc_sizing_step(struct lc_comm *comm, cudaStream_t stream);

/* Slots to have in place of `slots`: at least `grow` percent more, twice as many if there may be, no more than the `most`
 * that serve a purpose; 0: there is no such number. */
uint32_t lc_sizing_more(uint32_t slots, uint32_t most, size_t grow);

#endif
