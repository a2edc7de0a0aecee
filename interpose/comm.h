/* SPDX-License-Identifier: Apache-2.0
 *
 * The communicators of this process, by NCCL's handle.
 *
 * An entry is made by the hook that creates a communicator, or at its first use if we missed that (made by
 * a background thread, or by a function we do not replace). It is taken out before NCCL frees the handle,
 * since the next communicator may get the same one. Looking one up takes no lock: entries live in memory
 * that is only ever used for entries, and a reference count says whether one is in use. */
#ifndef LC_INTERPOSE_COMM_H
#define LC_INTERPOSE_COMM_H

#include "interpose/agree.h"
#include "interpose/control/progress.h"
#include "interpose/ledger.h"
#include "interpose/mask.h"
#include "interpose/real.h"
#include "interpose/redop.h"

#include <stdbool.h>

#define LC_COMM_MAX       4096 /* at a time; more pass through uncounted, with one warning */
#define LC_COMM_KEPT      64   /* closed ones that stay apart in the report; more are added up */
#define LC_COMM_NAME      32
#define LC_DEVICE_UNKNOWN (-1)
#define LC_DEVICE_UNASKED (-2)
#define LC_COMM_NO_PARENT (-1)

enum lc_comm_origin {
    LC_COMM_INIT,
    LC_COMM_SPLIT,
    LC_COMM_SHRINK,
    LC_COMM_ADOPTED, /* first seen in use */
};

struct lc_comm_facts {
    int ranks;
    int rank;
    int device;     /* CUDA number, or one of LC_DEVICE_* */
    int64_t parent; /* number of the entry it was split from, or LC_COMM_NO_PARENT */
    enum lc_comm_origin origin;
    char name[LC_COMM_NAME]; /* from ncclConfig_t, or empty */
    uint32_t ctas; /* that a call of NCCL's may take, where the job says so; 0: it does not */
};

struct lc_reducer;
struct lc_pairs;
struct lc_sides;

struct lc_comm {
    /* One for the table, one for each call under way; 0: unused. A call may take one only while it is not 0.
     * Taken with acquire, dropped with release. */
    _Atomic uint32_t refs;
    uint32_t index;             /* place in the memory of entries, written once */
    _Atomic uint32_t next_free; /* index + 1 of the next unused entry; used while unused */
    _Atomic uintptr_t
        handle;     /* NCCL's; written before refs becomes 1, read to see which one was pinned */
    int64_t number; /* counts the entries of the process from 0 */
    struct lc_comm_facts facts; /* all but device: written before refs becomes 1 */
    _Atomic int device;         /* in place of facts.device: learnt at the first operation */
    _Atomic bool closed;        /* NCCL has freed the handle */
    _Atomic uint32_t windows;   /* attempts to register memory windows on it */
    _Atomic bool aborted;       /* by the program; set before NCCL is told, relaxed */

    /* Made by the thread that makes the communicator, before refs becomes 1; NULL: nothing is agreed on. Freed with the
     * last reference. */
    struct lc_agree *agree;

    /* NULL until set up by the thread that calls operations (release); read by any thread that has pinned the entry;
     * freed with the last reference. */
    _Atomic(struct lc_reducer *) reducer;

    /* Used by the thread that calls the communicator's operations, one at a time; freed with the last reference. */
    bool no_setup;          /* set-up failed, or cannot be */
    bool set_up;            /* all of it is done, with or without rings */
    bool no_pairs;          /* there was no memory for them */
    struct lc_pairs *pairs; /* NULL before the first message */
    struct lc_mask mask;    /* for the next all-to-all */
    bool had_all_to_alls;   /* the forms of what a mask may be meant for */
    bool had_messages;
    struct lc_sides *sides; /* NULL: no rings, or no message may go through them */
    struct lc_redops redops;
    struct lc_ledger ledger;

    struct lc_comm *next_ended; /* used by the thread that has destroyed it in a group */

    struct lc_progress progress; /* rules there */
    uint64_t
        id; /* the same at every rank; 0: nothing is agreed on; written before refs becomes 1 */
};

/* A communicator that has just been made; takes over the agreement, which may be NULL. Replaces an entry of the same
 * handle, which must be stale. NULL handles are ignored. */
void lc_comm_add(ncclComm_t handle, const struct lc_comm_facts *facts, struct lc_agree *agree);

/* Pinned, or NULL if there is no entry. Never waits. */
struct lc_comm *lc_comm_get(ncclComm_t handle);

/* The same, but makes an entry from what NCCL says about the handle, if it says anything. To be called with
 * lc_thread.inside set. */
struct lc_comm *lc_comm_get_or_adopt(ncclComm_t handle, const struct lc_real *real);

/* Never waits for the device, whatever this ends. NULL is allowed. */
void lc_comm_put(struct lc_comm *comm);

/* By the thread that has destroyed it in order, with NCCL's part done. Waits for what it has under way itself, bounded, and
 * for nothing of others unless it was the last communicator of its device. NULL is allowed. */
void lc_comm_end(struct lc_comm *comm);

/* By the thread that has aborted it. Waits for nothing. NULL is allowed. */
void lc_comm_end_aborted(struct lc_comm *comm);

/* The same once the open group of this thread has ended: NCCL destroys its communicator only then, and until its work is
 * over a peer may end without goodbye and what waits for it must hear of that. */
void lc_comm_end_behind_group(struct lc_comm *comm);

/* The outermost group of this thread has ended. */
void lc_comm_end_group(void);

/* The program has aborted or revoked it: nothing of it is ours any more, and its errors are NCCL's. */
static inline bool lc_comm_is_aborted(const struct lc_comm *comm)
{
    return atomic_load_explicit(&comm->aborted, memory_order_relaxed);
}

/* Once more, of one that is pinned. */
struct lc_comm *lc_comm_pin(struct lc_comm *comm);

/* NCCL is about to free the handle. No entry: nothing happens. */
void lc_comm_remove(ncclComm_t handle);

/* Calls fn for each open entry, pinned, then for each closed one that was kept. */
void lc_comm_each(void (*fn)(const struct lc_comm *comm, void *arg), void *arg);

/* Counters of the closed ones that were not kept, and how many there were. */
const struct lc_ledger *lc_comm_others(uint64_t *communicators);

/* In the child: threads that were changing the table do not exist any more. */
void lc_comm_after_fork(void);

#endif
