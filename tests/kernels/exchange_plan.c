/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/exchange_plan.h"

#include "tests/check.h"
#include "tests/kernels/reference.h"

#include <string.h>

#define GUARD_BYTE 0xa5
#define ROW        700u

/* NaNs with payloads, -0.0, denormals and what granules may hold in one place only. */
static uint32_t random_word(uint64_t *state)
{
    static const uint32_t special[] = {
        0x80000000, 0x7fc00001, 0x7f800123, 0xffc12345,
        0x00000001, 0x80000001, 0x00008000, 0x7fff0000,
    };
    uint64_t draw = ref_next(state);

    return draw % 5 == 0 ? special[draw >> 8 & 7] : (uint32_t)(draw >> 32);
}

/* What the message holds before any mask. */
static void fill(const struct exchange_message *m, uint8_t *out)
{
    uint64_t state = m->seed;
    uint64_t start = ref_next(&state) % ROW;

    for (uint64_t at = 0; at < m->bytes; at += 4) {
        uint32_t word = random_word(&state);
        uint64_t row_state = m->seed ^ (at + start) / ROW * 0x9e3779b97f4a7c15;
        size_t left = m->bytes - at < 4 ? (size_t)(m->bytes - at) : 4;

        if (ref_next(&row_state) % 100 < m->zeros)
            word = 0;
        memcpy(out + at, &word, left);
    }
    /* a granule that only its last byte keeps alive */
    if (m->bytes > 5000 && m->zeros && m->zeros < 100) {
        memset(out + 4096, 0, 511);
        out[4096 + 511] = 0x80;
    }
}

static bool masked(const struct exchange_plan *plan, const struct exchange_message *m)
{
    return plan->row_bytes && !m->apart;
}

static bool live(const struct exchange_plan *plan, uint32_t rank, uint64_t row)
{
    uint64_t state = plan->seed + row * 77 + rank * 1000003;

    ref_next(&state);
    return ref_next(&state) % 3 == 0;
}

static uint64_t place(uint64_t *at, uint64_t skew, uint64_t bytes)
{
    uint64_t here = (*at + 31) / 16 * 16 + skew;

    *at = here + bytes;
    return here;
}

/* Where the sends of a rank lie in its memory, by the plan's numbers: those under the mask first. Returns the bytes under
 * the mask, whole rows. */
static uint64_t lay_out(const struct exchange_plan *plan, uint32_t rank, uint64_t *offsets,
                        uint64_t *end)
{
    uint64_t at = 0, border = 0;

    for (int apart = 0; apart < 2; apart++) {
        for (size_t i = 0; i < plan->n; i++) {
            const struct exchange_message *m = &plan->messages[i];

            if (m->src == rank && masked(plan, m) == !apart)
                offsets[i] = place(&at, m->in_skew, m->bytes);
        }
        if (!apart && plan->row_bytes)
            at = border = (at + plan->row_bytes - 1) / plan->row_bytes * plan->row_bytes;
    }
    *end = at + 16;
    return border;
}

static void *get(uint64_t bytes)
{
    uint8_t *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);

    CHECK(memory);
    memset(memory, GUARD_BYTE, (bytes + 127) / 64 * 64);
    return memory;
}

static void make_mask(struct exchange_side *side, uint64_t border)
{
    uint64_t rows = side->plan->row_bytes ? border / side->plan->row_bytes : 0;
    uint32_t *bits = calloc(rows / 32 + 1, sizeof(*bits));

    CHECK(bits);
    for (uint64_t row = 0; row < rows; row++) {
        if (live(side->plan, side->rank, row))
            bits[row / 32] |= UINT32_C(1) << row % 32;
    }
    side->mask = (struct lk_row_mask){ side->in, bits, rows, side->plan->row_bytes };
}

struct exchange_side *exchange_side_make(const struct exchange_plan *plan, uint32_t rank)
{
    struct exchange_side *side = calloc(1, sizeof(*side));
    uint64_t *offsets = calloc(plan->n + 1, sizeof(*offsets));
    uint64_t border, at = 0;

    CHECK(side && offsets);
    side->plan = plan;
    side->rank = rank;
    border = lay_out(plan, rank, offsets, &side->in_bytes);
    for (size_t i = 0; i < plan->n; i++) {
        if (plan->messages[i].dst == rank)
            place(&at, plan->messages[i].out_skew, plan->messages[i].bytes);
    }
    side->out_bytes = at + 16;
    side->in = get(side->in_bytes);
    side->before = get(side->in_bytes);
    side->out = get(side->out_bytes);
    side->sends = calloc(plan->n + 1, sizeof(*side->sends));
    side->recvs = calloc(plan->n + 1, sizeof(*side->recvs));
    CHECK(side->sends && side->recvs);
    at = 0;
    for (size_t i = 0; i < plan->n; i++) {
        const struct exchange_message *m = &plan->messages[i];

        if (m->src == rank) {
            fill(m, side->in + offsets[i]);
            side->sends[side->n_sends++] = (struct lk_message){ side->in + offsets[i], m->bytes,
                                                                m->dst, m->scan };
        }
        if (m->dst == rank) {
            uint8_t *here = side->out + place(&at, m->out_skew, m->bytes);

            side->recvs[side->n_recvs++] = (struct lk_message){ m->in_place ? side->in + offsets[i]
                                                                            : here,
                                                                m->bytes, m->src, 0 };
        }
    }
    memcpy(side->before, side->in, side->in_bytes);
    make_mask(side, border);
    free(offsets);
    return side;
}

/* What the receiver of a message must have. */
static uint8_t *expected(const struct exchange_plan *plan, size_t i)
{
    const struct exchange_message *m = &plan->messages[i];
    uint64_t *offsets = calloc(plan->n, sizeof(*offsets));
    uint8_t *want = malloc(m->bytes + 1);
    uint64_t end;

    CHECK(offsets && want);
    lay_out(plan, m->src, offsets, &end);
    fill(m, want);
    for (uint64_t at = 0; masked(plan, m) && at < m->bytes; at++) {
        if (!live(plan, m->src, (offsets[i] + at) / plan->row_bytes))
            want[at] = 0;
    }
    free(offsets);
    return want;
}

static void check_message(const struct exchange_plan *plan, size_t i, const uint8_t *have)
{
    const struct exchange_message *m = &plan->messages[i];
    uint8_t *want = expected(plan, i);

    if (memcmp(want, have, m->bytes) != 0) {
        uint64_t at = 0;

        while (want[at] == have[at])
            at++;
        fprintf(stderr,
                "message %zu of %zu, from %u to %u, seed %llu, rows of %llu, zeros %u, scan %d, "
                "skews %u %u: byte %llu of %llu is %02x, not %02x\n",
                i, plan->n, m->src, m->dst, (unsigned long long)m->seed,
                (unsigned long long)plan->row_bytes, m->zeros, m->scan, m->in_skew, m->out_skew,
                (unsigned long long)at, (unsigned long long)m->bytes, have[at], want[at]);
        CHECK(!"the message is what was sent");
    }
    free(want);
}

void exchange_side_check(const struct exchange_side *side)
{
    const struct exchange_plan *plan = side->plan;
    uint64_t at = 0, end = 0;
    size_t number = 0;

    for (size_t i = 0; i < plan->n; i++) {
        const struct exchange_message *m = &plan->messages[i];
        uint64_t begin;

        if (m->dst != side->rank)
            continue;
        check_message(plan, i, side->recvs[number].address);
        if (m->in_place)
            memcpy(side->before + ((uint8_t *)side->recvs[number].address - side->in),
                   side->recvs[number].address, m->bytes);
        number++;
        begin = place(&at, m->out_skew, m->bytes);
        for (; end < (m->in_place ? at : begin); end++)
            CHECK(side->out[end] == GUARD_BYTE);
        end = at;
    }
    for (; end < side->out_bytes; end++)
        CHECK(side->out[end] == GUARD_BYTE);
    CHECK(memcmp(side->in, side->before, side->in_bytes) == 0);
}

void exchange_side_free(struct exchange_side *side)
{
    free((void *)(uintptr_t)side->mask.bits);
    free(side->in);
    free(side->before);
    free(side->out);
    free(side->sends);
    free(side->recvs);
    free(side);
}

static bool zero(const uint8_t *bytes, uint64_t n)
{
    while (n && !*bytes)
        bytes++, n--;
    return n == 0;
}

/* Tiles as ring_layout.h says, worked out anew. */
static bool in_lines(const struct lk_ring_shape *shape, uint64_t bytes)
{
    return bytes <= shape->short_bytes;
}

static uint64_t tile_count(const struct lk_ring_shape *shape, uint64_t bytes)
{
    uint64_t granules = (bytes + 511) / 512;
    uint64_t each = (granules + shape->channels - 1) / shape->channels;
    uint64_t most = in_lines(shape, bytes) ? 4 : 32;

    each = each > most ? most : each;
    return (granules + each - 1) / each;
}

/* What a message that is not sent in lines writes of its data, and what it does not. */
static void count_granules(const struct exchange_message *m, const uint8_t *data,
                           struct lk_ring_counts *counts)
{
    for (uint64_t at = 0; at < m->bytes; at += 512) {
        uint64_t size = m->bytes - at < 512 ? m->bytes - at : 512;

        if (m->scan && zero(data + at, size))
            counts->bytes_elided += size;
        else
            counts->bytes_sent += size;
    }
}

struct lk_ring_counts exchange_counts(const struct exchange_plan *plan, uint32_t rank,
                                      const struct lk_ring_shape *shape)
{
    struct lk_ring_counts counts = { 0 };

    for (size_t i = 0; i < plan->n; i++) {
        const struct exchange_message *m = &plan->messages[i];
        uint8_t *data = malloc(m->bytes + 1);

        CHECK(data);
        fill(m, data);
        if (m->dst == rank && m->src != rank && m->bytes)
            counts.bytes_sent += 8 * tile_count(shape, m->bytes); /* credits */
        if (m->src != rank || m->dst == rank || !m->bytes) {
            free(data);
            continue;
        }
        if (in_lines(shape, m->bytes)) {
            counts.bytes_sent += (m->bytes + 15) / 16 * 32;
        } else {
            counts.bytes_sent += 8 * tile_count(shape, m->bytes); /* words */
            count_granules(m, data, &counts);
        }
        free(data);
    }
    return counts;
}

void exchange_random(uint64_t seed, uint32_t ranks, uint32_t most, uint64_t bytes,
                     struct exchange_plan *out)
{
    static const uint32_t shares[] = { 0, 60, 75, 90, 100 };
    uint64_t state = seed * 2 + 1;
    uint64_t silent = ref_next(&state), deaf = ref_next(&state), kind = ref_next(&state);
    uint32_t n = 1 + (uint32_t)(ref_next(&state) % most);
    struct exchange_plan plan = { .ranks = ranks, .seed = seed };

    plan.messages = calloc(n, sizeof(*plan.messages));
    CHECK(plan.messages);
    if (kind & 1)
        plan.row_bytes = 1 + (kind >> 8) % (kind & 2 ? 3000 : 40000);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t draw = ref_next(&state), size = ref_next(&state);
        struct exchange_message m = {
            .src = (uint32_t)(draw % ranks),
            .dst = (uint32_t)((draw >> 8) % ranks),
            .bytes = draw >> 16 & 7 ? (size >> 8) % (1 + (bytes >> size % 12)) : 0,
            .seed = draw,
            .zeros = shares[(draw >> 20) % 5],
            .in_skew = draw >> 24 & 1 ? draw >> 25 & 15 : 0,
            .out_skew = draw >> 29 & 1 ? draw >> 30 & 15 : 0,
            .scan = draw >> 34 & 1,
            .apart = draw >> 35 & 1,
        };

        m.in_place = m.src == m.dst && (draw >> 36 & 1);
        /* ranks that send nothing and ranks that get nothing */
        if ((silent >> m.src & 3) == 3 || (deaf >> m.dst & 3) == 3)
            m.bytes = 0;
        plan.messages[plan.n++] = m;
    }
    *out = plan;
}
