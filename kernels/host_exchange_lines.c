/* SPDX-License-Identifier: Apache-2.0
 *
 * Short messages of exchanges, in lines (ring_layout.h). What a thread writes it writes whole before it looks for anything. */
#include "kernels/host_rings_internal.h"

#define PACK_LINES (LK_PACK_BYTES / 4)

static const struct lk_ring_shape *shape_of(const struct lk_cta *cta)
{
    return &cta->head->rings.shape;
}

static void *mine(const struct lk_cta *cta)
{
    return cta->head->rings.segments[cta->head->rings.rank];
}

/* Tiles of a unit that this rank has sent, and taken out; its thread's alone. */
static uint64_t *sent(const struct lk_cta *cta, uint32_t dst, uint32_t channel)
{
    return lk_word_at(cta->head->rings.state,
                      lk_sent_offset(shape_of(cta), LK_EXCHANGE, dst, channel));
}

static uint64_t *taken(const struct lk_cta *cta, uint32_t src, uint32_t channel)
{
    return lk_word_at(cta->head->rings.state,
                      lk_taken_offset(shape_of(cta), LK_EXCHANGE, src, channel));
}

/* The line of a tile's i-th 4 bytes, of tile `message` from src in somebody's segment. */
static uint64_t *line_of(const struct lk_cta *cta, const void *segment, uint32_t src,
                         uint32_t channel, uint64_t message, uint32_t i)
{
    size_t slot = lk_short_offset(shape_of(cta), src, channel,
                                  lk_short_slot(shape_of(cta), message));

    return lk_word_at(segment, slot + lk_short_line(i / PACK_LINES, i % PACK_LINES));
}

static uint32_t lines_of(uint32_t bytes)
{
    return (bytes + LK_PACK_BYTES - 1) / LK_PACK_BYTES * PACK_LINES;
}

bool lk_exchange_credit(const struct lk_cta *cta, uint32_t dst, uint32_t channel, bool is_short)
{
    uint64_t before = *sent(cta, dst, channel);
    const uint64_t *credit = lk_word_at(mine(cta),
                                        lk_credit_offset(shape_of(cta), LK_EXCHANGE, dst, channel));

    return before - lk_word_load(credit) < lk_exchange_slots(shape_of(cta), is_short, before + 1);
}

void lk_short_refresh_lines(const struct lk_cta *cta, uint32_t dst, uint32_t channel,
                            uint64_t message, uint32_t but)
{
    const void *theirs = cta->head->rings.segments[dst];

    for (uint32_t line = but; line < LK_SHORT_PACKS * PACK_LINES; line++)
        lk_word_store(line_of(cta, theirs, cta->head->rings.rank, channel, message, line),
                      (uint64_t)lk_short_flag(message) << 32);
}

static void refresh_word(const struct lk_cta *cta, uint32_t dst, uint32_t channel, uint64_t message)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t *words = lk_word_at(
        cta->head->rings.segments[dst],
        lk_words_offset(shape, LK_EXCHANGE, cta->head->rings.rank, channel));

    lk_word_store(words + (message - 1) % lk_leg_slots(shape, LK_EXCHANGE),
                  lk_slot_word(message, 0));
}

void lk_short_send(struct lk_cta *cta, uint32_t dst, uint32_t channel, uint32_t bytes)
{
    uint64_t message = ++*sent(cta, dst, channel);
    const void *theirs = cta->head->rings.segments[dst];
    uint32_t count = lines_of(bytes);

    for (uint32_t line = 0; line < count; line++) {
        uint32_t value;

        memcpy(&value, cta->wire + (size_t)line * 4, sizeof(value));
        lk_word_store(line_of(cta, theirs, cta->head->rings.rank, channel, message, line),
                      (uint64_t)lk_short_flag(message) << 32 | value);
    }
    cta->counts.bytes_sent += count * sizeof(uint64_t);
    if (lk_short_refresh(shape_of(cta), message)) {
        lk_short_refresh_lines(cta, dst, channel, message, count);
        refresh_word(cta, dst, channel, message);
    }
    lk_bell_ring(cta->head, dst);
}

bool lk_short_arrived(const struct lk_cta *cta, uint32_t src, uint32_t channel, uint32_t bytes)
{
    uint64_t message = *taken(cta, src, channel) + 1;

    for (uint32_t line = 0; line < lines_of(bytes); line++) {
        uint64_t here = lk_word_load(line_of(cta, mine(cta), src, channel, message, line));

        if (here >> 32 != lk_short_flag(message))
            return false;
    }
    return true;
}

void lk_short_take(struct lk_cta *cta, uint32_t src, uint32_t channel, uint32_t bytes)
{
    uint64_t message = ++*taken(cta, src, channel);
    uint64_t *credit = lk_word_at(
        cta->head->rings.segments[src],
        lk_credit_offset(shape_of(cta), LK_EXCHANGE, cta->head->rings.rank, channel));

    for (uint32_t line = 0; line < lines_of(bytes); line++) {
        uint32_t value = (uint32_t)lk_word_load(
            line_of(cta, mine(cta), src, channel, message, line));

        memcpy(cta->in + (size_t)line * 4, &value, sizeof(value));
    }
    lk_word_store(credit, message);
    cta->counts.bytes_sent += sizeof(*credit);
    lk_bell_ring(cta->head, src);
}
