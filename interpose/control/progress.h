/* SPDX-License-Identifier: Apache-2.0
 *
 * How far one rank has come on one communicator: what the watchdog of the control plane compares between ranks.
 *
 * Written by the thread that calls the communicator's operations, one at a time, as NCCL demands; read by the control
 * thread and at exit at any moment. No lock, no system call and no GPU work: a handful of relaxed stores and the coarse
 * clock, which is read from a page that the kernel shares.
 */
#ifndef LC_INTERPOSE_PROGRESS_H
#define LC_INTERPOSE_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LC_RECENT 16 /* collectives remembered; a power of two */

/* One call as the program made it. Also part of frames: fixed size, no padding. */
struct lc_note {
    uint64_t seq;   /* of the communicator's collectives, or of its messages, from 1; 0: none */
    uint64_t count; /* elements, as the call's argument says */
    uint8_t kind;   /* enum lc_op_kind */
    uint8_t type;   /* ncclDataType_t */
    uint8_t redop;  /* ncclRedOp_t if built in, else the value below */
    uint8_t path;   /* enum lc_outcome: NCCL's until a better one is chosen */
    int32_t peer;   /* root or other end, or -1 */
};
#define LC_NOTE_REDOP 255u /* an operation of the program's own: never compared */

_Static_assert(sizeof(struct lc_note) == 24, "no padding on the wire");

/* `seq` is 0 while the rest is written: a reader that finds the same seq before and after has a whole note. */
struct lc_slot {
    _Atomic uint64_t seq;
    _Atomic uint64_t count;
    _Atomic uint64_t what; /* the last 8 bytes of a note */
};

struct lc_progress {
    _Atomic uint64_t collectives; /* called so far, refused ones included */
    _Atomic uint64_t messages;    /* sends and receives called so far */
    _Atomic uint64_t returned;    /* both kinds: calls that have come back to the program */
    _Atomic int64_t at_ns;    /* when the last call was made; CLOCK_MONOTONIC_COARSE; 0: never */
    _Atomic uintptr_t stream; /* of the last call, for the report only */
    struct lc_slot recent[LC_RECENT]; /* collective n is at n % LC_RECENT */
    struct lc_slot message;           /* the last one */
};

/* What a reader gets. */
struct lc_progress_copy {
    uint64_t collectives, messages, returned;
    int64_t at_ns;
    uint64_t stream;
    uint32_t n; /* notes below, in order; what was being written is left out */
    struct lc_note recent[LC_RECENT];
    struct lc_note message; /* seq 0: none */
};

#define LC_RELAXED(field) atomic_load_explicit(&(field), memory_order_relaxed)

static inline void lc_slot_write(struct lc_slot *slot, const struct lc_note *note)
{
    uint64_t what;

    memcpy(&what, &note->kind, sizeof(what));
    atomic_store_explicit(&slot->seq, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->count, note->count, memory_order_release); /* behind the 0 */
    atomic_store_explicit(&slot->what, what, memory_order_release);
    atomic_store_explicit(&slot->seq, note->seq, memory_order_release);
}

/* The call is about to go to NCCL, or into something of ours. */
static inline void lc_progress_call(struct lc_progress *progress, struct lc_note *note,
                                    bool is_collective, uintptr_t stream)
{
    _Atomic uint64_t *counter = is_collective ? &progress->collectives : &progress->messages;
    struct timespec now;

    note->seq = atomic_load_explicit(counter, memory_order_relaxed) + 1;
    lc_slot_write(is_collective ? &progress->recent[note->seq % LC_RECENT] : &progress->message,
                  note);
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    atomic_store_explicit(&progress->stream, stream, memory_order_relaxed);
    atomic_store_explicit(&progress->at_ns, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec,
                          memory_order_relaxed);
    atomic_store_explicit(counter, note->seq, memory_order_release);
}

/* The last collective, or the last message, takes another path than NCCL's. */
static inline void lc_progress_path(struct lc_progress *progress, bool is_collective, uint8_t path)
{
    uint64_t seq = LC_RELAXED(progress->collectives);
    struct lc_slot *slot = is_collective ? &progress->recent[seq % LC_RECENT] : &progress->message;
    uint64_t what = LC_RELAXED(slot->what);
    unsigned char bytes[sizeof(what)];

    memcpy(bytes, &what, sizeof(what));
    bytes[3] = path;
    memcpy(&what, bytes, sizeof(what));
    atomic_store_explicit(&slot->what, what,
                          memory_order_release); /* one word: never half written */
}

/* Calls that were refused, or only simulated, never took place: so many have. By the same thread. */
static inline void lc_progress_rewind(struct lc_progress *progress, uint64_t collectives)
{
    atomic_store_explicit(&progress->collectives, collectives, memory_order_release);
}

static inline void lc_progress_return(struct lc_progress *progress)
{
    atomic_store_explicit(&progress->returned, LC_RELAXED(progress->returned) + 1,
                          memory_order_relaxed);
}

void lc_progress_clear(struct lc_progress *progress);
void lc_progress_read(struct lc_progress *progress, struct lc_progress_copy *out);

/* The program called the same thing at both ranks, as far as can be told. */
bool lc_note_same(const struct lc_note *a, const struct lc_note *b);

#endif
