/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/peers_internal.h"

#include "interpose/control/control.h"

#include <errno.h>
#include <stdlib.h>

size_t lc_peers_state_bytes(const struct lc_peers *peers)
{
    return (peers->backend->lk_ring_state_bytes(&peers->rings.shape) + 255) / 256 * 256;
}

void lc_peers_free_changes(struct lc_peers *peers)
{
    for (uint32_t c = LC_CHANGES; c >= 1; c--) {
        struct lc_peers *later = peers->by_change[c];

        if (!later || later->change != c)
            continue; /* none, or a way back to an earlier one's */
        lc_peers_close(later);
        lc_peers_unmap(later);
        free(later);
    }
}

static void borrow(struct lc_peers *peers)
{
    const struct lc_peers *first = peers->first;
    uint32_t number = first->made;

    peers->stream = first->stream;
    peers->event = first->event;
    peers->shared = first->shared;
    peers->rings.abort = first->rings.abort;
    peers->rings.too_few = &first->shared->too_few[number];
    peers->rings.state = (char *)first->rings.state + number * lc_peers_state_bytes(first);
}

static const struct lc_peers *of_change(const struct lc_peers *peers, uint32_t change)
{
    return change == 0 ? peers : change <= LC_CHANGES ? peers->by_change[change] : NULL;
}

static struct lc_peers *with_slots(struct lc_peers *peers, uint32_t slots)
{
    struct lc_peers *found = peers->rings.shape.slots == slots ? peers : NULL;

    for (uint32_t c = 1; !found && c <= LC_CHANGES; c++) {
        if (peers->by_change[c] && peers->by_change[c]->rings.shape.slots == slots)
            found = peers->by_change[c];
    }
    return found;
}

/* Messages go through the first generation's memory alone, so others have no lines for short ones. */
static struct lk_ring_shape later_shape(const struct lc_peers *peers, uint32_t slots)
{
    struct lk_ring_shape shape = peers->rings.shape;

    shape.slots = slots;
    shape.short_bytes = 0;
    return shape;
}

struct lc_peers *lc_peers_change(struct lc_peers *peers, uint32_t change, uint32_t slots)
{
    uint32_t not_well = 0;
    struct lc_peers *later = with_slots(peers, slots);

    if (later)
        return peers->by_change[change] = later;
    later = peers->made + 1 < LC_GENERATIONS ? calloc(1, sizeof(*later)) : NULL;
    if (!later) {
        (void)lc_room_post(peers->room, peers_key(change, KEY_RESULT), &not_well, sizeof(not_well));
        return NULL;
    }
    *later = (struct lc_peers){ .first = peers,
                                .change = change,
                                .backend = peers->backend,
                                .room = peers->room,
                                .facts = peers->facts,
                                .fd = -1 };
    later->rings.shape = later_shape(peers, slots);
    peers->made++;
    borrow(later);
    return peers->by_change[change] = later;
}

bool lc_peers_are_ready(const struct lc_peers *peers)
{
    return peers->stage == READY;
}

struct lc_peers *lc_peers_of(struct lc_peers *peers, uint32_t change)
{
    return change ? peers->by_change[change] : peers;
}

bool lc_peers_has(struct lc_peers *peers, uint32_t slots)
{
    return with_slots(peers, slots) != NULL;
}

bool lc_peers_fit(const struct lc_peers *peers, uint32_t slots)
{
    struct lk_ring_shape shape = later_shape(peers, slots);

    return peers->made + 1 < LC_GENERATIONS &&
           lc_peers_reserved(peers->facts.device) + peers->backend->lk_ring_bytes(&shape) <=
               peers->facts.cap;
}

uint32_t lc_peers_smaller(const struct lc_peers *peers, uint32_t slots)
{
    uint32_t found = peers->rings.shape.slots < slots ? peers->rings.shape.slots : 0;

    for (uint32_t c = 1; c <= LC_CHANGES; c++) {
        const struct lc_peers *other = peers->by_change[c];
        uint32_t has = other && other->stage == READY ? other->rings.shape.slots : 0;

        if (has < slots && has > found)
            found = has;
    }
    return found;
}

bool lc_peers_had_too_few(struct lc_peers *peers, uint32_t generation)
{
    uint32_t *word = of_change(peers, generation)->rings.too_few;

    if (!__atomic_load_n(word, __ATOMIC_RELAXED))
        return false;
    __atomic_store_n(word, 0, __ATOMIC_RELAXED);
    return true;
}

static uint32_t word_key(uint32_t change, enum lc_peers_word word)
{
    static const uint32_t keys[] = { [LC_PEERS_WISH] = KEY_WISH,
                                     [LC_PEERS_ORDER] = KEY_ORDER,
                                     [LC_PEERS_ABLE] = KEY_ABLE };

    return peers_key(change, keys[word]);
}

int lc_peers_say(struct lc_peers *peers, uint32_t change, enum lc_peers_word word, uint32_t slots)
{
    return lc_room_post(peers->room, word_key(change, word), &slots, sizeof(slots));
}

int lc_peers_hear(struct lc_peers *peers, uint32_t rank, uint32_t change, enum lc_peers_word word,
                  uint32_t *slots)
{
    uint32_t said = 0;
    size_t size = 0;
    int err = lc_room_look(peers->room, rank, word_key(change, word), &said, sizeof(said), &size);

    if (err)
        return err;
    if (size != sizeof(said) || said < 1 || said > LK_SLOTS_MAX)
        return -EPROTO;
    *slots = said;
    return 0;
}

size_t lc_peers_bytes(const struct lc_peers *peers, uint32_t generation)
{
    return of_change(peers, generation)->bytes;
}

size_t lc_peers_all_bytes(const struct lc_peers *peers)
{
    size_t bytes = peers->bytes;

    for (uint32_t c = 1; c <= LC_CHANGES; c++) {
        if (peers->by_change[c] && peers->by_change[c]->change == c &&
            peers->by_change[c]->reserved)
            bytes += peers->by_change[c]->bytes;
    }
    return bytes;
}

const struct lk_rings *lc_peers_rings(const struct lc_peers *peers, uint32_t generation)
{
    const struct lc_peers *later = peers ? of_change(peers, generation) : NULL;

    return later && later->stage == READY ? &later->rings : NULL;
}
