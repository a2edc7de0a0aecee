/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_rings_internal.h"

/* Elements of one entry that lie in a span. */
struct piece {
    const struct lk_ring_entry *entry;
    uint64_t element; /* the first one, in the entry */
    uint32_t count;
    uint32_t at; /* where they lie in the span, in elements */
};

struct cursor {
    uint32_t entry;
    uint32_t pack;
};

static uint32_t entry_end(const struct lk_job *job, uint32_t entry)
{
    return entry + 1 < job->launch.head.n ? job->launch.entries[entry + 1].first
                                          : job->launch.head.packs;
}

static struct cursor find(const struct lk_job *job, struct lk_span span)
{
    uint32_t low = 0, high = job->launch.head.n;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (job->launch.entries[middle].first <= span.first)
            low = middle;
        else
            high = middle;
    }
    return (struct cursor){ .entry = low, .pack = span.first };
}

static bool next(const struct lk_job *job, struct lk_span span, struct cursor *cursor,
                 struct piece *out)
{
    uint32_t each = lk_pack_elements(job->launch.head.wire);
    uint32_t end = span.first + span.packs;
    uint32_t stop;

    if (cursor->pack == end)
        return false;
    stop = entry_end(job, cursor->entry);
    stop = stop < end ? stop : end;
    out->entry = &job->launch.entries[cursor->entry];
    out->element = (uint64_t)(cursor->pack - out->entry->first) * each;
    out->at = (cursor->pack - span.first) * each;
    out->count = (stop - cursor->pack) * each;
    if (out->element >= out->entry->count) /* padding */
        out->count = 0;
    else if (out->count > out->entry->count - out->element)
        out->count = (uint32_t)(out->entry->count - out->element);
    cursor->pack = stop;
    cursor->entry++;
    return true;
}

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS float load(uint32_t type, const void *base, uint64_t i)
{
    return lk_widen(type,
                    type == LK_FP32 ? ((const uint32_t *)base)[i] : ((const uint16_t *)base)[i]);
}

ALWAYS void store(uint32_t type, void *base, uint64_t i, uint32_t bits)
{
    if (type == LK_FP32)
        ((uint32_t *)base)[i] = bits;
    else
        ((uint16_t *)base)[i] = (uint16_t)bits;
}

/* Of a piece; offset: LK_RESULT_DRAWS when the result is rounded. */
static struct lk_host_draws start_draws(const struct lk_cta *cta, struct lk_span span,
                                        const struct piece *piece, uint64_t offset)
{
    uint64_t element = (uint64_t)span.first * lk_pack_elements(cta->head->wire) + piece->at;
    struct lk_draws from = { cta->head->seed, cta->job->index + offset + element, NULL };
    struct lk_host_draws draws;

    lk_host_draws_begin(&draws, &from);
    return draws;
}

/* Loops over the elements of a piece, compiled for each pair of types. owed: of the piece's first element; NULL: none. */
ALWAYS void round_piece(struct lk_cta *cta, const void *in, const struct piece *piece,
                        struct lk_host_draws *draws, float *owed, uint32_t type, uint32_t wire)
{
    float pre = cta->job->pre;

    for (uint32_t i = 0; i < piece->count; i++) {
        float value = multiply(load(type, in, i), pre);
        uint32_t random = draws ? lk_host_draw(draws) : 0;

        store(wire, cta->wire, piece->at + i,
              owed ? lk_feed(value, &owed[i], draws != NULL, random)
                   : lk_narrow(wire, value, draws != NULL, random));
    }
}

ALWAYS void own_piece(struct lk_cta *cta, const void *in, const struct piece *piece, bool add,
                      uint32_t type)
{
    float *sum = cta->sum + piece->at;
    float pre = cta->job->pre;

    for (uint32_t i = 0; i < piece->count; i++) {
        float value = multiply(load(type, in, i), pre);

        sum[i] = add ? sum[i] + value : value;
    }
}

ALWAYS void result_piece(struct lk_cta *cta, const struct piece *piece, struct lk_host_draws *draws,
                         float *owed, uint32_t wire)
{
    float post = cta->head->post;

    for (uint32_t i = 0; i < piece->count; i++) {
        float value = multiply(cta->sum[piece->at + i], post);
        uint32_t random = draws ? lk_host_draw(draws) : 0;

        store(wire, cta->wire, piece->at + i,
              owed ? lk_feed(value, &owed[i], draws != NULL, random)
                   : lk_narrow(wire, value, draws != NULL, random));
    }
}

/* What a piece owes; NULL: there is no feedback. */
static float *residual(const struct lk_cta *cta, struct lk_span span, const struct piece *piece,
                       uint32_t part)
{
    return cta->head->residual ? lk_residual(cta->head, part, span.first) + piece->at : NULL;
}

static const void *input(const struct lk_cta *cta, const struct piece *piece, uint32_t part)
{
    const struct lk_ring_head *head = cta->head;
    uint64_t stride = head->stride ? head->stride : piece->entry->count;
    uint64_t element = part * stride + piece->element;

    return (const void *)(uintptr_t)(piece->entry->in + element * (head->type == LK_FP32 ? 4 : 2));
}

static void clear(const struct lk_cta *cta, struct lk_span span, uint8_t *wire)
{
    memset(wire, 0, (size_t)span.packs * LK_PACK_BYTES);
}

void lk_span_round(struct lk_cta *cta, struct lk_span span, uint32_t part)
{
    struct cursor cursor = find(cta->job, span);
    struct piece piece;

    clear(cta, span, cta->wire);
    while (next(cta->job, span, &cursor, &piece)) {
        const void *in = input(cta, &piece, part);
        float *owed = residual(cta, span, &piece, part);

        if (cta->head->rounding == LK_STOCHASTIC) {
            struct lk_host_draws draws = start_draws(cta, span, &piece, 0);

            round_piece(cta, in, &piece, &draws, owed, LK_FP32, LK_BF16);
        } else if (cta->head->wire == LK_FP32) {
            round_piece(cta, in, &piece, NULL, NULL, LK_FP32, LK_FP32);
        } else if (cta->head->type == LK_FP32) {
            round_piece(cta, in, &piece, NULL, owed, LK_FP32, LK_BF16);
        } else if (cta->head->type == LK_BF16) {
            round_piece(cta, in, &piece, NULL, NULL, LK_BF16, LK_BF16);
        } else {
            round_piece(cta, in, &piece, NULL, NULL, LK_FP16, LK_FP16);
        }
    }
}

void lk_span_own(struct lk_cta *cta, struct lk_span span, uint32_t part, bool add)
{
    struct cursor cursor = find(cta->job, span);
    struct piece piece;

    while (next(cta->job, span, &cursor, &piece)) {
        const void *in = input(cta, &piece, part);

        switch (cta->head->type) {
        case LK_FP32: own_piece(cta, in, &piece, add, LK_FP32); break;
        case LK_BF16: own_piece(cta, in, &piece, add, LK_BF16); break;
        default: own_piece(cta, in, &piece, add, LK_FP16); break;
        }
    }
}

ALWAYS void add_wire(float *sum, const uint8_t *wire, uint32_t count, bool add, uint32_t type)
{
    for (uint32_t i = 0; i < count; i++)
        sum[i] = add ? sum[i] + load(type, wire, i) : load(type, wire, i);
}

void lk_span_add(struct lk_cta *cta, struct lk_span span, const uint8_t *wire, bool add)
{
    uint32_t count = span.packs * lk_pack_elements(cta->head->wire);

    switch (cta->head->wire) {
    case LK_FP32: add_wire(cta->sum, wire, count, add, LK_FP32); break;
    case LK_BF16: add_wire(cta->sum, wire, count, add, LK_BF16); break;
    default: add_wire(cta->sum, wire, count, add, LK_FP16); break;
    }
}

void lk_span_result(struct lk_cta *cta, struct lk_span span, uint32_t part)
{
    struct cursor cursor = find(cta->job, span);
    struct piece piece;

    clear(cta, span, cta->wire);
    while (next(cta->job, span, &cursor, &piece)) {
        float *owed = residual(cta, span, &piece, part);

        if (cta->head->rounding == LK_STOCHASTIC) {
            struct lk_host_draws draws = start_draws(cta, span, &piece, LK_RESULT_DRAWS);

            result_piece(cta, &piece, &draws, owed, LK_BF16);
        } else if (cta->head->wire == LK_FP32) {
            result_piece(cta, &piece, NULL, NULL, LK_FP32);
        } else if (cta->head->wire == LK_BF16) {
            result_piece(cta, &piece, NULL, owed, LK_BF16);
        } else {
            result_piece(cta, &piece, NULL, NULL, LK_FP16);
        }
    }
}

void lk_span_store(const struct lk_cta *cta, struct lk_span span, const uint8_t *wire)
{
    struct cursor cursor = find(cta->job, span);
    struct piece piece;

    while (next(cta->job, span, &cursor, &piece)) {
        uint32_t bytes = cta->head->type == LK_FP32 ? 4 : 2;
        uint8_t *out = (uint8_t *)(uintptr_t)(piece.entry->out + piece.element * bytes);

        if (cta->head->wire == cta->head->type) {
            memcpy(out, wire + (size_t)piece.at * bytes, (size_t)piece.count * bytes);
        } else {
            const uint16_t *from = (const uint16_t *)(const void *)wire + piece.at;

            for (uint32_t i = 0; i < piece.count; i++)
                ((uint32_t *)(void *)out)[i] = (uint32_t)from[i] << 16;
        }
    }
}
