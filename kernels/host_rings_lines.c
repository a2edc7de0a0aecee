/* SPDX-License-Identifier: Apache-2.0
 *
 * One-shot calls. A thread sends its share of the packs to everybody before it waits for anything, so no two ranks can
 * wait for each other. */
#include "kernels/host_rings_internal.h"

#define PACK_LINES (LK_PACK_BYTES / 4)

/* Lines of a call that src sends into `segment`. */
static uint64_t *lines_at(const struct lk_cta *cta, const void *segment, uint64_t number,
                          uint32_t src)
{
    return lk_word_at(segment,
                      lk_lines_offset(&cta->head->rings.shape, (uint32_t)(number & 1), src));
}

/* Of a span: line i has word i of its data. */
static uint64_t *line_of(uint64_t *lines, struct lk_span span, uint32_t i)
{
    return lines + lk_short_line(span.first + i / PACK_LINES, i % PACK_LINES) / sizeof(*lines);
}

/* Sends what is in cta->wire, or (data NULL) lines that only carry the flag. */
static void send_lines(struct lk_cta *cta, struct lk_span span, uint64_t number,
                       const uint8_t *data)
{
    const struct lk_rings *rings = &cta->head->rings;
    uint32_t count = span.packs * PACK_LINES;

    for (uint32_t i = 1; i < rings->shape.ranks; i++) {
        uint32_t peer = (rings->rank + i) % rings->shape.ranks;
        uint64_t *lines = lines_at(cta, rings->segments[peer], number, rings->rank);

        for (uint32_t line = 0; line < count; line++) {
            uint32_t value = 0;

            if (data)
                memcpy(&value, data + (size_t)line * 4, sizeof(value));
            lk_word_store(line_of(lines, span, line), (uint64_t)(uint32_t)number << 32 | value);
        }
        cta->counts.bytes_sent += count * sizeof(*lines);
        lk_bell_ring(cta->head, peer);
    }
}

/* Waits for one line of this call. False: aborted. */
static bool wait_line(const struct lk_cta *cta, const uint64_t *line, uint64_t number,
                      uint32_t *out)
{
    uint64_t word = lk_word_load(line);

    while (word >> 32 != (uint32_t)number) {
        uint32_t heard = lk_bell_heard(cta->head);

        word = lk_word_load(line);
        if (word >> 32 == (uint32_t)number)
            break;
        if (!lk_bell_sleep(cta->head, heard))
            return false;
        word = lk_word_load(line);
    }
    *out = (uint32_t)word;
    return true;
}

/* Everybody's contribution to a span, added in the order of the ranks, one's own as the others get it. */
static bool add_lines(struct lk_cta *cta, struct lk_span span, uint64_t number)
{
    const struct lk_rings *rings = &cta->head->rings;

    lk_span_round(cta, span, 0);
    for (uint32_t rank = 0; rank < rings->shape.ranks; rank++) {
        uint64_t *lines = lines_at(cta, rings->segments[rings->rank], number, rank);

        if (rank == rings->rank) {
            lk_span_add(cta, span, cta->wire, rank > 0);
            continue;
        }
        for (uint32_t line = 0; line < span.packs * PACK_LINES; line++) {
            uint32_t value;

            if (!wait_line(cta, line_of(lines, span, line), number, &value))
                return false;
            memcpy(cta->in + (size_t)line * 4, &value, sizeof(value));
        }
        lk_span_add(cta, span, cta->in, rank > 0);
    }
    lk_span_result(cta, span, 0);
    lk_span_store(cta, span, cta->wire);
    return true;
}

/* This thread's share of `packs` that follow `first`. */
static struct lk_span share(const struct lk_cta *cta, uint32_t first, uint32_t packs)
{
    uint32_t begin = (uint32_t)((uint64_t)packs * cta->cta / cta->ctas);
    uint32_t end = (uint32_t)((uint64_t)packs * (cta->cta + 1) / cta->ctas);

    return (struct lk_span){ .first = first + begin, .packs = end - begin };
}

/* The next tile's worth of a share, which shrinks. */
static struct lk_span cut(struct lk_span *left)
{
    struct lk_span span = {
        .first = left->first,
        .packs = left->packs < LK_TILE_PACKS ? left->packs : LK_TILE_PACKS,
    };

    left->first += span.packs;
    left->packs -= span.packs;
    return span;
}

void lk_lines_run(struct lk_cta *cta)
{
    const struct lk_ring_head *head = cta->head;
    struct lk_ring_state *state = head->rings.state;
    uint64_t number = lk_next_lines(state->lines);
    struct lk_span all = share(cta, 0, head->packs);
    struct lk_span left = all;

    while (left.packs) {
        struct lk_span span = cut(&left);

        lk_span_round(cta, span, 0);
        send_lines(cta, span, number, cta->wire);
    }
    if (lk_lines_refresh(number)) {
        uint32_t whole = head->rings.shape.line_bytes / LK_PACK_BYTES;

        send_lines(cta, share(cta, head->packs, whole - head->packs), number, NULL);
    }
    left = all;
    while (left.packs) {
        if (!add_lines(cta, cut(&left), number))
            return;
    }
    /* The last thread moves the state on when none reads it any more. */
    if (__atomic_add_fetch(&state->lines_done, 1, __ATOMIC_ACQ_REL) == cta->ctas) {
        state->lines_done = 0;
        state->lines = number;
    }
}
