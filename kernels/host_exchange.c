/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/exchange_internal.h"
#include "kernels/host_rings_internal.h"

#include <errno.h>
#include <stdlib.h>

/* The next tile of a unit. */
struct cursor {
    uint64_t tile; /* of the entry's message */
    uint16_t entry;
};

/* What is left of a channel, of one thread. */
struct lane {
    struct cursor sends[LK_RANKS_MAX];
    struct cursor takes[LK_RANKS_MAX];
};

/* A launch on its stream. */
struct exchange {
    struct lk_ring_head ring; /* only `rings`, for slots */
    struct lane
        *lanes; /* each channel's; written when an execution begins, then by its thread alone */
    struct lk_exchange_launch launch; /* only the entries in use */
};

/* One thread of an execution. */
struct worker {
    struct lk_cta cta;
    const struct exchange *job;
};

/* Bytes of a message or a copy. */
struct part {
    uint64_t address;
    uint64_t offset;
    uint32_t bytes;
};

static const struct lk_ring_shape *shape_of(const struct exchange *job)
{
    return &job->launch.head.rings.shape;
}

static struct part tile_of(const struct exchange *job, uint16_t entry, uint64_t tile)
{
    const struct lk_exchange_entry *e = &job->launch.entries[entry];
    uint32_t bytes = lk_message_granules(shape_of(job), e->bytes) * LK_GRANULE;
    uint64_t offset = tile * bytes, left = e->bytes - offset;

    return (struct part){ e->address + offset, offset, left < bytes ? (uint32_t)left : bytes };
}

static uint32_t first_tile(const struct worker *w, uint32_t channel, uint32_t peer)
{
    return lk_message_first(shape_of(w->job), w->cta.head->rings.rank, peer, channel);
}

/* Of the cursor's tile of a message from or to `peer`. */
static struct part next_part(const struct worker *w, const struct cursor *at, uint32_t channel,
                             uint32_t peer)
{
    const struct lk_ring_shape *shape = shape_of(w->job);
    uint64_t bytes = w->job->launch.entries[at->entry].bytes;
    uint64_t tile = at->tile;

    if (!lk_message_is_short(shape, bytes))
        tile = lk_message_place(shape, (uint32_t)lk_message_tiles(shape, bytes),
                                first_tile(w, channel, peer), (uint32_t)tile);
    return tile_of(w->job, at->entry, tile);
}

/* wire = the part as it arrives, padded with zeros to a pack. Dead rows are not touched. Returns the granules that a live
 * row has a byte in. */
static uint32_t read_rows(const struct lk_row_mask *mask, const struct part *part, uint8_t *wire)
{
    uint64_t begin = part->address - (uintptr_t)mask->base;
    uint32_t live = 0;

    for (uint32_t at = 0; at < part->bytes;) {
        uint64_t row = (begin + at) / mask->row_bytes;
        uint64_t left = (row + 1) * mask->row_bytes - (begin + at);
        uint32_t size = left < part->bytes - at ? (uint32_t)left : part->bytes - at;

        if (lk_is_live(mask->bits, row)) {
            memcpy(wire + at, (const void *)(uintptr_t)(part->address + at), size);
            for (uint32_t g = at / LK_GRANULE; g <= (at + size - 1) / LK_GRANULE; g++)
                live |= UINT32_C(1) << g;
        } else {
            memset(wire + at, 0, size);
        }
        at += size;
    }
    return live;
}

/* Fills cta->wire; returns the granules that have to travel. */
static uint32_t read_part(struct worker *w, const struct part *part, bool scan)
{
    const struct lk_row_mask *mask = &w->job->launch.head.mask;
    uint32_t granules = (part->bytes + LK_GRANULE - 1) / LK_GRANULE;
    uint32_t packed = (part->bytes + LK_PACK_BYTES - 1) / LK_PACK_BYTES * LK_PACK_BYTES;

    memset(w->cta.wire + part->bytes, 0, packed - part->bytes);
    if (lk_is_masked(mask, part->address))
        return read_rows(mask, part, w->cta.wire);
    memcpy(w->cta.wire, (const void *)(uintptr_t)part->address, part->bytes);
    return scan ? lk_slot_live(&w->cta, packed) : UINT32_MAX >> (LK_SLOT_GRANULES - granules);
}

/* Goes on to the first message that has such a tile. */
static void settle(const struct exchange *job, struct cursor *at, uint16_t end, uint32_t first)
{
    while (at->entry < end &&
           at->tile >= lk_message_tiles(shape_of(job), job->launch.entries[at->entry].bytes)) {
        at->entry++;
        at->tile = first;
    }
}

static bool is_short(const struct exchange *job, uint16_t entry)
{
    return lk_message_is_short(shape_of(job), job->launch.entries[entry].bytes);
}

static void send_in_slot(struct worker *w, uint32_t channel, uint32_t peer, uint32_t bytes,
                         uint32_t live)
{
    const struct lk_rings *rings = &w->cta.head->rings;
    uint64_t message = *lk_word_at(rings->state,
                                   lk_sent_offset(&rings->shape, LK_EXCHANGE, peer, channel)) +
                       1;

    if (lk_short_refresh(&rings->shape, message))
        lk_short_refresh_lines(&w->cta, peer, channel, message, 0);
    lk_slot_send(&w->cta, LK_EXCHANGE, peer, channel, bytes, live);
}

/* A tile to `peer`. False: there is none left, or no credit. */
static bool send_one(struct worker *w, uint32_t channel, uint32_t peer)
{
    const struct exchange *job = w->job;
    struct cursor *at = &job->lanes[channel].sends[peer];
    uint16_t end = job->launch.head.sends[peer + 1];
    struct part part;
    bool lines;

    if (at->entry == end)
        return false;
    lines = is_short(job, at->entry);
    if (!lk_exchange_credit(&w->cta, peer, channel, lines))
        return false;
    part = next_part(w, at, channel, peer);
    if (lines) {
        (void)read_part(w, &part, false);
        lk_short_send(&w->cta, peer, channel, part.bytes);
    } else {
        uint32_t live = read_part(w, &part, job->launch.entries[at->entry].other);

        send_in_slot(w, channel, peer, part.bytes, live);
    }
    at->tile += shape_of(job)->channels;
    settle(job, at, end, first_tile(w, channel, peer));
    return true;
}

/* A tile from `peer`. */
static bool take_one(struct worker *w, uint32_t channel, uint32_t peer)
{
    const struct exchange *job = w->job;
    struct cursor *at = &job->lanes[channel].takes[peer];
    uint16_t end = job->launch.head.takes[peer + 1];
    struct part part;
    uint64_t word;
    bool lines;

    if (at->entry == end)
        return false;
    lines = is_short(job, at->entry);
    part = next_part(w, at, channel, peer);
    if (lines ? !lk_short_arrived(&w->cta, peer, channel, part.bytes)
              : !lk_slot_arrived(&w->cta, LK_EXCHANGE, peer, channel, &word))
        return false;
    if (lines)
        lk_short_take(&w->cta, peer, channel, part.bytes);
    else
        lk_slot_take(&w->cta, LK_EXCHANGE, peer, channel, word, part.bytes);
    memcpy((void *)(uintptr_t)part.address, w->cta.in, part.bytes);
    at->tile += shape_of(job)->channels;
    settle(job, at, end, first_tile(w, channel, peer));
    return true;
}

/* Places a channel's cursors. */
static void begin(const struct worker *w, uint32_t channel)
{
    const struct lk_exchange_head *head = &w->job->launch.head;
    struct lane *lane = &w->job->lanes[channel];

    for (uint32_t peer = 0; peer < head->rings.shape.ranks; peer++) {
        uint32_t first = first_tile(w, channel, peer);

        lane->sends[peer] = (struct cursor){ first, head->sends[peer] };
        lane->takes[peer] = (struct cursor){ first, head->takes[peer] };
        if (peer == head->rings.rank) /* copies are no tiles of a ring */
            lane->sends[peer].entry = head->sends[peer + 1];
        settle(w->job, &lane->sends[peer], head->sends[peer + 1], first);
        settle(w->job, &lane->takes[peer], head->takes[peer + 1], first);
    }
}

/* Does what can be done in a channel. */
static void step(struct worker *w, uint32_t channel, bool *moved, bool *all)
{
    const struct lk_exchange_head *head = &w->job->launch.head;
    const struct lane *lane = &w->job->lanes[channel];
    uint32_t ranks = head->rings.shape.ranks;

    for (uint32_t i = 1; i < ranks; i++) {
        uint32_t peer = (head->rings.rank + i) % ranks;

        *moved |= take_one(w, channel, peer);
        *moved |= send_one(w, channel, peer);
        *all &= lane->takes[peer].entry == head->takes[peer + 1] &&
                lane->sends[peer].entry == head->sends[peer + 1];
    }
}

/* This thread's share of what the rank sends to itself. */
static void copy_own(struct worker *w)
{
    const struct lk_exchange_head *head = &w->job->launch.head;
    uint32_t me = head->rings.rank;

    for (uint16_t entry = head->sends[me]; entry < head->sends[me + 1]; entry++) {
        const struct lk_exchange_entry *e = &w->job->launch.entries[entry];
        uint64_t tiles = lk_message_tiles(&head->rings.shape, e->bytes);

        for (uint64_t tile = w->cta.cta; tile < tiles; tile += w->cta.ctas) {
            struct part part = tile_of(w->job, entry, tile);

            read_part(w, &part, false);
            memcpy((void *)(uintptr_t)(e->other + part.offset), w->cta.wire, part.bytes);
        }
    }
}

static void run_units(struct worker *w)
{
    uint32_t channels = shape_of(w->job)->channels;
    bool moved, all;

    for (uint32_t channel = w->cta.cta; channel < channels; channel += w->cta.ctas)
        begin(w, channel);
    do {
        uint32_t heard = lk_bell_heard(w->cta.head);

        moved = false;
        all = true;
        for (uint32_t channel = w->cta.cta; channel < channels; channel += w->cta.ctas)
            step(w, channel, &moved, &all);
        if (!all && !moved && !lk_bell_sleep(w->cta.head, heard))
            return;
    } while (!all && !lk_aborted(w->cta.head));
}

static void run_worker(void *arg, uint32_t number, uint32_t ctas)
{
    const struct exchange *job = arg;
    struct worker w = {
        .cta = {.head = &job->ring, .cta = number, .ctas = ctas},
        .job = job
    };

    copy_own(&w);
    run_units(&w);
    w.cta.counts.exchange_sent = w.cta.counts.bytes_sent;
    w.cta.counts.exchange_elided = w.cta.counts.bytes_elided;
    lk_cta_end(&w.cta);
}

static void declare_use(const struct lk_exchange_launch *launch)
{
    const struct lk_exchange_head *head = &launch->head;
    uint32_t me = head->rings.rank, ranks = head->rings.shape.ranks;

    if (head->mask.rows)
        lk_host_use((uintptr_t)head->mask.bits, (head->mask.rows + 31) / 32 * 4, false);
    for (uint16_t i = 0; i < head->takes[ranks]; i++) {
        const struct lk_exchange_entry *e = &launch->entries[i];

        lk_host_use(e->address, e->bytes, i >= head->takes[0]);
        if (i >= head->sends[me] && i < head->sends[me + 1])
            lk_host_use(e->other, e->bytes, true);
    }
}

static void run_exchange(void *arg)
{
    struct exchange *job = arg;

    declare_use(&job->launch);
    lk_use_units(&job->ring.rings, LK_EXCHANGE);
    lk_run_ctas(job, job->launch.head.ctas, run_worker);
}

static void free_exchange(void *arg)
{
    struct exchange *job = arg;

    free(job->lanes);
    free(job);
}

int lk_run_exchange(const struct lk_exchange_launch *launch, void *stream)
{
    const struct lk_exchange_head *head = &launch->head;
    size_t bytes = offsetof(struct lk_exchange_launch, entries) +
                   head->takes[head->rings.shape.ranks] * sizeof(struct lk_exchange_entry);
    struct exchange *job = malloc(offsetof(struct exchange, launch) + bytes);

    if (!job)
        return -ENOMEM;
    job->lanes = calloc(head->rings.shape.channels, sizeof(*job->lanes));
    if (!job->lanes) {
        free(job);
        return -ENOMEM;
    }
    job->ring = (struct lk_ring_head){ .rings = head->rings };
    memcpy(&job->launch, launch, bytes);
    return lk_host_enqueue(stream, "lk_rings_exchange", run_exchange, free_exchange, job);
}
