/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/progress.h"

#include <stddef.h>

_Static_assert(offsetof(struct lc_note, path) - offsetof(struct lc_note, kind) == 3 &&
                   sizeof(struct lc_note) - offsetof(struct lc_note, kind) == sizeof(uint64_t),
               "the rest of a note is one word");

void lc_progress_clear(struct lc_progress *progress)
{
    atomic_store_explicit(&progress->at_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->collectives, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->messages, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->returned, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->stream, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->message.seq, 0, memory_order_relaxed);
    for (int i = 0; i < LC_RECENT; i++)
        atomic_store_explicit(&progress->recent[i].seq, 0, memory_order_relaxed);
}

static bool read_slot(struct lc_slot *slot, struct lc_note *out)
{
    uint64_t seq = atomic_load_explicit(&slot->seq, memory_order_acquire);
    uint64_t count = atomic_load_explicit(&slot->count, memory_order_acquire);
    uint64_t what = atomic_load_explicit(&slot->what, memory_order_acquire);

    *out = (struct lc_note){ .seq = seq, .count = count };
    memcpy(&out->kind, &what, sizeof(what));
    return seq != 0 && LC_RELAXED(slot->seq) == seq;
}

void lc_progress_read(struct lc_progress *progress, struct lc_progress_copy *out)
{
    uint64_t last = atomic_load_explicit(&progress->collectives, memory_order_acquire);

    *out = (struct lc_progress_copy){ .collectives = last,
                                      .messages = LC_RELAXED(progress->messages),
                                      .returned = LC_RELAXED(progress->returned),
                                      .at_ns = LC_RELAXED(progress->at_ns),
                                      .stream = LC_RELAXED(progress->stream) };
    for (uint64_t seq = last > LC_RECENT ? last - LC_RECENT + 1 : 1; seq <= last; seq++) {
        if (read_slot(&progress->recent[seq % LC_RECENT], &out->recent[out->n]) &&
            out->recent[out->n].seq == seq)
            out->n++;
    }
    if (!read_slot(&progress->message, &out->message))
        out->message = (struct lc_note){ 0 };
}

bool lc_note_same(const struct lc_note *a, const struct lc_note *b)
{
    return a->kind == b->kind && a->type == b->type && a->count == b->count && a->peer == b->peer &&
           (a->redop == b->redop || a->redop == LC_NOTE_REDOP || b->redop == LC_NOTE_REDOP);
}
