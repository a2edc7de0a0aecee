/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"

#include "perf/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct lc_bench_case make_case(enum lc_bench_op op, const char *dtype, size_t bytes,
                                      double live)
{
    struct lc_bench_case kase = {
        .op = op,
        .dtype = lc_bench_dtype_find(dtype),
        .bytes = bytes,
        .live = live,
        .experts = LC_BENCH_EXPERTS,
        .bits = 20,
        .seed = 7,
    };

    CHECK(kase.dtype >= 0);
    return kase;
}

static void percentiles_are_interpolated(void)
{
    double values[] = { 5, 1, 4, 2, 3 };
    double one[] = { 7 };

    CHECK(lc_bench_percentile(values, 5, 50) == 3);
    CHECK(lc_bench_percentile(values, 5, 0) == 1);
    CHECK(lc_bench_percentile(values, 5, 100) == 5);
    CHECK(fabs(lc_bench_percentile(values, 5, 10) - 1.4) < 1e-12);
    CHECK(fabs(lc_bench_percentile(values, 4, 50) - 2.5) < 1e-12);
    CHECK(lc_bench_percentile(one, 1, 99) == 7);
    CHECK(isnan(lc_bench_percentile(NULL, 0, 50)));
}

static void bandwidths_are_those_of_nccl_tests(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "f32", 8000, 1);

    CHECK(fabs(lc_bench_algbw(&kase, 2) - 4) < 1e-12);
    CHECK(fabs(lc_bench_busbw(&kase, 4, 2) - 3) < 1e-12);
    kase.op = LC_BENCH_ALLREDUCE;
    CHECK(fabs(lc_bench_busbw(&kase, 4, 2) - 6) < 1e-12);
    CHECK(lc_bench_algbw(&kase, 0) == 0);
}

static void size_lists_and_ranges(void)
{
    size_t sizes[4];

    CHECK(lc_bench_parse_sizes("64k,1m,3", sizes, 4) == 3);
    CHECK(sizes[0] == 65536 && sizes[1] == 1048576 && sizes[2] == 3);
    CHECK(lc_bench_parse_sizes("1k:64k:8", sizes, 4) == 3);
    CHECK(sizes[0] == 1024 && sizes[1] == 8192 && sizes[2] == 65536);
    CHECK(lc_bench_parse_sizes("5:5:2", sizes, 4) == 1 && sizes[0] == 5);
    CHECK(lc_bench_parse_sizes("8g:15g:2", sizes, 4) == 1);
}

static void malformed_lists_are_refused(void)
{
    static const char *const bad_sizes[] = { "",       "0",       "1,",       "1x",
                                             "1:2",    "2:1:2",   "1:9:1",    "0:8:2",
                                             "1:16:2", "1:2:3:4", "1,2,3,4,5" };
    static const char *const bad_lives[] = { "", "1.1", "-0.1", "nan", "0.5,", "0.5x", " 0.5" };
    size_t sizes[4];
    double lives[4];
    int dtypes[4];

    CHECK(lc_bench_parse_sizes("1:4:2", sizes, 4) == 3);
    for (size_t i = 0; i < sizeof(bad_sizes) / sizeof(*bad_sizes); i++)
        CHECK(lc_bench_parse_sizes(bad_sizes[i], sizes, 4) < 0);
    for (size_t i = 0; i < sizeof(bad_lives) / sizeof(*bad_lives); i++)
        CHECK(lc_bench_parse_lives(bad_lives[i], lives, 4) < 0);
    CHECK(lc_bench_parse_lives("0,1.0,0.25", lives, 4) == 3 && lives[2] == 0.25);
    CHECK(lc_bench_parse_dtypes("bf16,F32", dtypes, 4) == 2);
    CHECK(lc_bench_parse_dtypes("bf16,q", dtypes, 4) < 0);
}

static void equal_cases_are_run_once(void)
{
    struct lc_bench_options options = { .op = LC_BENCH_ALLTOALL, .bits = 20 };
    struct lc_bench_case *cases;

    options.n_sizes = lc_bench_parse_sizes("1,2,100,1m", options.sizes, LC_BENCH_MAX_LIST);
    options.n_dtypes = lc_bench_parse_dtypes("f32", options.dtypes, LC_BENCH_MAX_LIST);
    options.n_lives = lc_bench_parse_lives("1,0.5", options.lives, LC_BENCH_MAX_LIST);
    CHECK(lc_bench_cases(&options, 3, &cases) == 6);
    CHECK(cases[0].bytes == 12); /* one element to each rank */
    CHECK(cases[2].bytes == 96); /* whole 16 bytes */
    CHECK(cases[4].bytes % 48 == 0 && cases[4].bytes <= 1048576);
    free(cases);
}

static void a_sum_that_would_round_is_refused(void)
{
    struct lc_bench_options options = { .op = LC_BENCH_ALLREDUCE, .bits = 20, .sizes = { 64 } };
    struct lc_bench_case *cases;

    options.n_sizes = options.n_lives = 1;
    options.n_dtypes = lc_bench_parse_dtypes("f8e5m2", options.dtypes, LC_BENCH_MAX_LIST);
    CHECK(lc_bench_cases(&options, 9, &cases) < 0);
    CHECK(lc_bench_cases(&options, 8, &cases) == 1);
    free(cases);
}

static bool is_zero(const unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (bytes[i])
            return false;
    }
    return true;
}

/* Rows of every expert: first live ones without a gap, then zeros, as many as were drawn. */
static void check_chunk(const struct lc_bench_case *kase, int src, int dst,
                        const unsigned char *chunk, size_t bytes)
{
    struct lc_bench_rows rows;

    lc_bench_rows_layout(kase, bytes, &rows);
    CHECK(rows.rows * rows.row_bytes >= bytes && (rows.rows - 1) * rows.row_bytes < bytes);
    for (size_t r = 0; r < rows.rows; r++) {
        size_t at = r * rows.row_bytes;
        size_t length = bytes - at < rows.row_bytes ? bytes - at : rows.row_bytes;
        size_t live = lc_bench_rows_live(kase, &rows, src, dst, r / rows.capacity);

        CHECK(is_zero(chunk + at, length) == (r % rows.capacity >= live));
    }
}

static void check_buffer(const struct lc_bench_case *kase)
{
    unsigned char *buffer = malloc(kase->bytes);

    CHECK(buffer);
    lc_bench_fill_send(kase, 3, 1, buffer);
    for (int dst = 0; dst < 3; dst++)
        check_chunk(kase, 1, dst, buffer + (size_t)dst * kase->bytes / 3, kase->bytes / 3);
    free(buffer);
}

static void experts_have_live_rows_first(void)
{
    static const size_t sizes[] = { 3, 48, 3000, 196608, 810000 };

    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        for (int live = 0; live <= 10; live++) {
            struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "u8", sizes[s], live / 10.0);

            check_buffer(&kase);
            kase.experts = 12;
            check_buffer(&kase);
        }
    }
}

static void the_drawn_share_is_near_the_asked_one(void)
{
    for (int live = 0; live <= 20; live++) {
        struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "f32", 64 << 20, live / 20.0);
        double share = lc_bench_live_share(&kase, 8);

        CHECK(fabs(share - kase.live) < 0.05);
        CHECK(kase.live < 1 || share == 1);
        CHECK(kase.live > 0 || share == 0);
    }
}

static void experts_differ_in_popularity(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "f32", 64 << 20, 0.25);
    struct lc_bench_rows rows;
    size_t low = SIZE_MAX;
    size_t high = 0;

    lc_bench_rows_layout(&kase, kase.bytes / 8, &rows);
    for (size_t i = 0; i < 8 * rows.experts; i++) {
        size_t live = lc_bench_rows_live(&kase, &rows, 3, (int)(i / rows.experts),
                                         i % rows.experts);

        low = live < low ? live : low;
        high = live > high ? live : high;
    }
    CHECK(high > 2 * low && low > 0);
}

static void what_is_sent_is_what_is_expected(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "bf16", 40024, 0.4);
    size_t chunk = kase.bytes / 4;
    unsigned char *sent = malloc(kase.bytes);
    unsigned char *expected = malloc(kase.bytes);

    CHECK(sent && expected);
    for (int src = 0; src < 4; src++) {
        int dst = src ^ 2;

        lc_bench_fill_send(&kase, 4, src, sent);
        lc_bench_fill_expected(&kase, 4, dst, expected);
        CHECK(memcmp(sent + (size_t)dst * chunk, expected + (size_t)src * chunk, chunk) == 0);
        lc_bench_fill_expected(&kase, 4, src, expected);
        CHECK(memcmp(sent + (size_t)src * chunk, expected + (size_t)src * chunk, chunk) == 0);
    }
    kase.seed++;
    lc_bench_fill_expected(&kase, 4, 3, expected);
    CHECK(memcmp(sent + 3 * chunk, expected + 3 * chunk, chunk) != 0);
    free(sent);
    free(expected);
}

/* An all-to-all must carry bits that no arithmetic would: some must be there to be lost. */
static void awkward_bits_are_among_the_data(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLTOALL, "f32", 1 << 20, 1);
    uint32_t *words = malloc(kase.bytes);
    int negative_zeros = 0;
    int signalling = 0;

    CHECK(words);
    lc_bench_fill_send(&kase, 2, 0, words);
    for (size_t i = 0; i < kase.bytes / 4; i++) {
        negative_zeros += words[i] == 0x80000000;
        signalling += words[i] == 0x7f800001;
    }
    CHECK(negative_zeros > 100 && signalling > 100);
    free(words);
}

static float from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void encoded_values_are_eighths(void)
{
    const struct lc_bench_dtype *f32 = &lc_bench_dtypes[lc_bench_dtype_find("f32")];
    const struct lc_bench_dtype *f64 = &lc_bench_dtypes[lc_bench_dtype_find("f64")];
    uint32_t bits = 0;
    uint16_t half = 0;
    uint8_t byte = 0;
    double wide = 0;

    for (int64_t v = -70000; v <= 70000; v += 7) {
        lc_bench_encode(f32, v, &bits);
        CHECK(from_bits(bits) == (float)v / 8);
        lc_bench_encode(f64, v, &wide);
        CHECK(wide == (double)v / 8);
    }
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("bf16")], -200, &half);
    CHECK(from_bits((uint32_t)half << 16) == -25);
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("f16")], 8, &half);
    CHECK(half == 0x3c00);
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("f8e4m3")], 12, &byte);
    CHECK(byte == 0x3c); /* 1.5 */
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("f8e4m3")], 16, &byte);
    CHECK(byte == 0x40); /* 2, one bit more than the fraction holds */
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("f8e5m2")], -6, &byte);
    CHECK(byte == 0xba); /* -0.75 */
    lc_bench_encode(&lc_bench_dtypes[lc_bench_dtype_find("i8")], -5, &byte);
    CHECK((int8_t)byte == -5);
}

/* Backwards and pairwise: no order may round, or exact equality would be too strict a check. */
static void sums_are_exact_in_any_order(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLREDUCE, "f32", 40000, 0.4);
    size_t count = kase.bytes / 4;
    float *terms = malloc(5 * kase.bytes);
    float *expected = malloc(kase.bytes);
    size_t zeros = 0;

    CHECK(terms && expected);
    for (int rank = 0; rank < 5; rank++) {
        lc_bench_fill_send(&kase, 5, rank, terms + (size_t)rank * count);
        check_chunk(&kase, rank, 0, (unsigned char *)(terms + (size_t)rank * count), kase.bytes);
    }
    lc_bench_fill_expected(&kase, 5, 3, expected);
    for (size_t i = 0; i < count; i++) {
        const float *t = terms + i;
        float backwards = t[4 * count] + t[3 * count] + t[2 * count] + t[count] + t[0];
        float pairs = (t[0] + t[3 * count]) + (t[count] + t[4 * count]) + t[2 * count];

        CHECK(backwards == expected[i] && pairs == expected[i]);
        zeros += expected[i] == 0;
    }
    CHECK(zeros > count / 10 && zeros < count * 9 / 10);
    free(terms);
    free(expected);
}

static void parts_of_a_scattered_sum_make_up_the_sum(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLREDUCE, "f32", 48000, 0.4);
    unsigned char *sum = malloc(kase.bytes), *part = malloc(kase.bytes);

    CHECK(sum && part);
    kase.op = LC_BENCH_REDUCESCATTER;
    CHECK(lc_bench_send_bytes(&kase, 3) == 48000 && lc_bench_recv_bytes(&kase, 3) == 16000);
    lc_bench_fill_expected(&kase, 3, 0, sum); /* the whole sum stands behind rank 0's part */
    for (int rank = 0; rank < 3; rank++) {
        lc_bench_fill_expected(&kase, 3, rank, part);
        CHECK(memcmp(part, sum + (size_t)rank * 16000, 16000) == 0 && !is_zero(part, 16000));
    }
    free(sum);
    free(part);
}

static void all_gather_what_each_sends(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLGATHER, "u8", 48000, 0.4);
    unsigned char *all = malloc(kase.bytes), *one = malloc(kase.bytes);

    CHECK(all && one);
    CHECK(lc_bench_send_bytes(&kase, 3) == 16000 && lc_bench_recv_bytes(&kase, 3) == 48000);
    lc_bench_fill_expected(&kase, 3, 2, all);
    for (int rank = 0; rank < 3; rank++) {
        lc_bench_fill_send(&kase, 3, rank, one);
        CHECK(memcmp(one, all + (size_t)rank * 16000, 16000) == 0 && !is_zero(one, 16000));
    }
    free(all);
    free(one);
}

static void terms_leave_room_for_the_sum(void)
{
    struct lc_bench_case kase = make_case(LC_BENCH_ALLREDUCE, "bf16", 64, 1);

    CHECK(lc_bench_term_max(&kase, 16) * 16 <= 256);
    kase = make_case(LC_BENCH_ALLREDUCE, "i8", 64, 1);
    CHECK(lc_bench_term_max(&kase, 3) * 3 <= 127);
    kase = make_case(LC_BENCH_ALLREDUCE, "f32", 64, 1);
    kase.bits = 8;
    CHECK(lc_bench_term_max(&kase, 2) == 128);
}

int main(void)
{
    percentiles_are_interpolated();
    bandwidths_are_those_of_nccl_tests();
    size_lists_and_ranges();
    malformed_lists_are_refused();
    equal_cases_are_run_once();
    a_sum_that_would_round_is_refused();
    experts_have_live_rows_first();
    the_drawn_share_is_near_the_asked_one();
    experts_differ_in_popularity();
    what_is_sent_is_what_is_expected();
    awkward_bits_are_among_the_data();
    encoded_values_are_eighths();
    sums_are_exact_in_any_order();
    parts_of_a_scattered_sum_make_up_the_sum();
    all_gather_what_each_sends();
    terms_leave_room_for_the_sum();
    return 0;
}
