/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by peers.c, which sets up one generation of rings, and generation.c, which knows all of a communicator. */
#ifndef LC_INTERPOSE_PEERS_INTERNAL_H
#define LC_INTERPOSE_PEERS_INTERNAL_H

#include "interpose/peers.h"

/* Blobs of the room, for each change once more, KEYS further on. */
enum {
    KEY_OFFER = 1, /* struct offer */
    KEY_WRITTEN,   /* empty: the number is in everybody's segment */
    KEY_RESULT,    /* uint32_t: 1, all is well, or 0 */
    KEY_WISH,      /* uint32_t: slots; as the next one */
    KEY_ORDER,
    KEY_ABLE, /* uint32_t, as lc_peers_word says; of the first change only */
    KEYS = 16,
};

#define BUS_ID 16 /* of a device, with the 0 behind it */

struct offer {
    struct lk_ring_shape shape;
    uint32_t pad;
    uint64_t bytes; /* of the segment */
    uint64_t number;
    char gpu[BUS_ID];
};
_Static_assert(sizeof(struct offer) == 56, "no padding in a blob");

enum stage {
    START,
    ZEROING,  /* on the device */
    OFFERED,  /* peers are being mapped */
    WRITING,  /* on the device */
    TOLD,     /* not all others have written */
    CHECKING, /* on the device */
    SAID,     /* not all others have said whether all is well */
    CLEARING, /* failed; the device may still use what is to be freed */
    READY,
    WITHOUT,
};

/* Pinned memory that the device reads and writes. */
struct shared {
    uint32_t abort; /* as lk_rings.abort: atomic, any thread and the kernels */
    uint32_t pad[31];
    uint32_t too_few[LC_GENERATIONS]; /* as lk_rings.too_few: atomic, reset by the thread below */
    uint32_t pad_too[32 - LC_GENERATIONS];
    uint64_t number;
    uint64_t seen[LK_RANKS_MAX];
    struct lk_ring_counts counts[LC_GENERATIONS];
};

/* One generation. Used by the thread that calls the communicator's operations, then by who frees it. */
struct lc_peers {
    struct lc_peers *first; /* NULL: this is it; else stream, event and shared are borrowed of it */
    struct lc_peers *by_change[LC_CHANGES + 1]; /* of the first; [0] unused, NULL: none */
    uint32_t made;                              /* by the first: generations, itself not counted */
    uint32_t change;                            /* that they were made for; 0: the first commit */
    const struct lc_backend *backend;
    struct lc_room *room; /* NULL once detached */
    struct lc_ledger *ledger;
    struct lc_peers_facts facts;
    enum stage stage;
    struct lk_rings rings; /* segments of others: NULL until mapped */
    size_t bytes;
    uint32_t sharers;         /* ranks of the communicator on this GPU */
    uint32_t multiprocessors; /* of it */
    struct lc_share share;    /* of the device; the first's alone */
    struct shared *shared;
    cudaStream_t stream; /* of set-up */
    cudaEvent_t event;   /* behind the last work on it */
    struct offer offers[LK_RANKS_MAX];
    bool offered[LK_RANKS_MAX];
    int fd; /* of the own segment, until it is offered */
    bool reserved;
};

static inline uint32_t peers_key(uint32_t change, uint32_t which)
{
    return change * KEYS + which;
}

/* ---- peers.c ---- */

/* Counts the communicator among those that have rings on its device, once all offers are known. False: the kernels of all of
 * them and of all ranks that share the GPU would not be resident together, even with one CTA each. */
bool lc_peers_take_room(struct lc_peers *peers);

/* What all communicators of the process have of a device. */
size_t lc_peers_reserved(int device);

/* All segments of a generation, and its descriptor if it has not been offered. */
void lc_peers_unmap(struct lc_peers *peers);
void lc_peers_close(struct lc_peers *peers);

/* ---- generation.c ---- */

/* Of one generation; the number of slots does not matter. */
size_t lc_peers_state_bytes(const struct lc_peers *peers);

/* Everything that was made after the first commit; of the first, when the device is idle. */
void lc_peers_free_changes(struct lc_peers *peers);

#endif
