/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <string.h>

#define STEP UINT64_C(0x9e3779b97f4a7c15)

/* Finaliser of splitmix64: a counter in, a word without visible pattern out. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t word(uint64_t key, uint64_t index)
{
    return mix(key + (index + 1) * STEP);
}

static uint64_t pair_key(const struct lc_bench_case *kase, int src, int dst)
{
    return word(word(word(kase->seed, kase->op), (uint64_t)src), (uint64_t)dst);
}

static double unit(uint64_t x)
{
    return (double)(x >> 11) * 0x1p-53;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

void lc_bench_rows_layout(const struct lc_bench_case *kase, size_t bytes, struct lc_bench_rows *out)
{
    size_t row = 4096, experts = (size_t)kase->experts;

    while (row > 64 && bytes < 16 * row)
        row /= 2;
    out->row_bytes = row;
    out->rows = (bytes + row - 1) / row;
    out->experts = experts > 0 && out->rows >= 4 * experts ? experts : 1;
    out->capacity = (out->rows + out->experts - 1) / out->experts;
}

/* Rows of one expert: the last one of uneven chunks has fewer. */
static size_t expert_rows(const struct lc_bench_rows *rows, size_t expert)
{
    size_t first = expert * rows->capacity;

    return first >= rows->rows ? 0 : min_size(rows->capacity, rows->rows - first);
}

/* Around live x capacity, as far as half of it either way: experts are never equally popular. */
size_t lc_bench_rows_live(const struct lc_bench_case *kase, const struct lc_bench_rows *rows,
                          int src, int dst, size_t expert)
{
    size_t all = expert_rows(rows, expert);
    uint64_t h = word(pair_key(kase, src, dst) ^ STEP, expert);
    double spread = kase->live / 2 < 1 - kase->live ? kase->live / 2 : 1 - kase->live;
    double n = (kase->live + spread * (2 * unit(h) - 1)) * (double)all;

    if (kase->live >= 1)
        return all;
    return min_size((size_t)(n + unit(mix(h))), all);
}

static size_t chunk_bytes(const struct lc_bench_case *kase, int ranks)
{
    return lc_bench_is_sum(kase->op) ? kase->bytes : kase->bytes / (size_t)ranks;
}

double lc_bench_live_share(const struct lc_bench_case *kase, int ranks)
{
    int targets = kase->op == LC_BENCH_ALLTOALL ? ranks : 1;
    struct lc_bench_rows rows;
    size_t live = 0;

    lc_bench_rows_layout(kase, chunk_bytes(kase, ranks), &rows);
    for (int src = 0; src < ranks; src++) {
        for (int dst = 0; dst < targets; dst++) {
            for (size_t e = 0; e < rows.experts; e++)
                live += lc_bench_rows_live(kase, &rows, src, dst, e);
        }
    }
    return (double)live / ((double)rows.rows * ranks * targets);
}

/* Bits that a careless copy, comparison or sum would change. */
static const uint64_t awkward[] = {
    UINT64_C(0x8000000080000000), /* -0.0 twice as fp32 */
    UINT64_C(0x8000800080008000), /* -0.0 as a 16-bit type */
    UINT64_C(0x7f8000017fc00001), /* signalling and quiet NaN with payload */
    UINT64_C(0x0000000000000000), /* zeros inside a live row */
};

static void fill_row(uint64_t key, size_t index, unsigned char *row, size_t bytes)
{
    uint64_t row_key = word(key, index);

    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = word(row_key, at);

        if (bits % 61 == 0)
            bits = awkward[(bits >> 32) % 4];
        memcpy(row + at, &bits, min_size(8, bytes - at));
    }
    row[0] |= 1; /* a live row is never all zero */
}

static void fill_chunk(const struct lc_bench_case *kase, int ranks, int src, int dst,
                       unsigned char *chunk)
{
    size_t bytes = chunk_bytes(kase, ranks);
    uint64_t key = pair_key(kase, src, dst);
    struct lc_bench_rows rows;

    memset(chunk, 0, bytes);
    lc_bench_rows_layout(kase, bytes, &rows);
    for (size_t e = 0; e < rows.experts; e++) {
        size_t first = e * rows.capacity;
        size_t live = lc_bench_rows_live(kase, &rows, src, dst, e);

        for (size_t r = first; r < first + live; r++) {
            size_t at = r * rows.row_bytes;

            fill_row(key, r, chunk + at, min_size(rows.row_bytes, bytes - at));
        }
    }
}

size_t lc_bench_fill_mask(const struct lc_bench_case *kase, int ranks, int rank, uint32_t *bits)
{
    size_t bytes = chunk_bytes(kase, ranks);
    struct lc_bench_rows rows;

    lc_bench_rows_layout(kase, bytes, &rows);
    if (bytes % rows.row_bytes)
        return 0;
    for (int dst = 0; bits && dst < ranks; dst++) {
        for (size_t r = 0; r < rows.rows; r++) {
            size_t at = (size_t)dst * rows.rows + r;

            if (r % rows.capacity < lc_bench_rows_live(kase, &rows, rank, dst, r / rows.capacity))
                bits[at / 32] |= UINT32_C(1) << at % 32;
        }
    }
    return rows.rows * (size_t)ranks;
}

/* Sign, exponent and fraction of an integer that needs at most mantissa + 1 bits. */
static uint64_t float_bits(int64_t value, int exponent, int mantissa)
{
    int shift = 3; /* the integer counts eighths: fractions travel too */
    uint64_t magnitude = value < 0 ? (uint64_t)-value : (uint64_t)value;
    uint64_t fraction;
    uint64_t biased;
    int top;

    if (value == 0)
        return 0;
    top = 63 - __builtin_clzll(magnitude);
    fraction = magnitude ^ (UINT64_C(1) << top);
    fraction = top <= mantissa ? fraction << (mantissa - top) : fraction >> (top - mantissa);
    biased = (uint64_t)(top - shift + (1 << (exponent - 1)) - 1);
    return (value < 0 ? UINT64_C(1) << (exponent + mantissa) : 0) | biased << mantissa | fraction;
}

void lc_bench_encode(const struct lc_bench_dtype *dtype, int64_t value, void *out)
{
    uint64_t bits = (uint64_t)value;

    if (dtype->exponent)
        bits = float_bits(value, dtype->exponent, (int)dtype->size * 8 - 1 - dtype->exponent);
    memcpy(out, &bits, dtype->size); /* little endian, as every machine with a GPU */
}

static int64_t term(uint64_t key, size_t index, int64_t max, bool has_sign)
{
    uint64_t h = word(key, index);
    int64_t magnitude = 1 + (int64_t)((h >> 1) % (uint64_t)max);

    return has_sign && (h & 1) ? -magnitude : magnitude;
}

/* Sum of the terms of the ranks [first, first + count) for each element. */
static void fill_sum(const struct lc_bench_case *kase, int ranks, int first, int count,
                     unsigned char *out)
{
    const struct lc_bench_dtype *dtype = &lc_bench_dtypes[kase->dtype];
    int64_t max = lc_bench_term_max(kase, ranks);
    struct lc_bench_rows rows;

    memset(out, 0, kase->bytes);
    lc_bench_rows_layout(kase, kase->bytes, &rows);
    for (size_t r = 0; r < rows.rows; r++) {
        size_t begin = r * rows.row_bytes / dtype->size;
        size_t end = min_size(begin + rows.row_bytes / dtype->size, kase->bytes / dtype->size);
        size_t expert = r / rows.capacity;
        uint64_t keys[LC_BENCH_MAX_RANKS]; /* of the ranks whose row is live */
        int live = 0;

        for (int rank = first; rank < first + count; rank++) {
            if (r % rows.capacity < lc_bench_rows_live(kase, &rows, rank, 0, expert))
                keys[live++] = pair_key(kase, rank, 0);
        }
        for (size_t at = begin; live > 0 && at < end; at++) {
            int64_t sum = 0;

            for (int i = 0; i < live; i++)
                sum += term(keys[i], at, max, dtype->has_sign);
            lc_bench_encode(dtype, sum, out + at * dtype->size);
        }
    }
}

void lc_bench_fill_send(const struct lc_bench_case *kase, int ranks, int rank, void *out)
{
    int targets = kase->op == LC_BENCH_ALLGATHER ? 1 : ranks;

    if (lc_bench_is_sum(kase->op)) {
        fill_sum(kase, ranks, rank, 1, out);
        return;
    }
    for (int dst = 0; dst < targets; dst++)
        fill_chunk(kase, ranks, rank, dst,
                   (unsigned char *)out + (size_t)dst * chunk_bytes(kase, ranks));
}

void lc_bench_fill_expected(const struct lc_bench_case *kase, int ranks, int rank, void *out)
{
    size_t part = lc_bench_recv_bytes(kase, ranks);

    if (lc_bench_is_sum(kase->op)) {
        fill_sum(kase, ranks, 0, ranks, out);
        if (kase->op == LC_BENCH_REDUCESCATTER)
            memmove(out, (unsigned char *)out + (size_t)rank * part, part);
        return;
    }
    for (int src = 0; src < ranks; src++)
        fill_chunk(kase, ranks, src, kase->op == LC_BENCH_ALLGATHER ? 0 : rank,
                   (unsigned char *)out + (size_t)src * chunk_bytes(kase, ranks));
}
