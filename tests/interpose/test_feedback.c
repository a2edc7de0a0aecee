/* SPDX-License-Identifier: Apache-2.0
 *
 * Which buffer has which residuals: places, buffers that come no more, graphs. */
#include "interpose/feedback.h"
#include "interpose/process.h"
#include "tests/check.h"

#include <string.h>

#define ROOM    ((size_t)4096)       /* bytes of residuals */
#define QUARTER ((uint64_t)256)      /* elements that take a quarter of it */
#define AT(n)   (data + (n)*QUARTER) /* buffers beside each other */

static _Alignas(256) char memory[ROOM];
static float data[64 * QUARTER];
static struct lc_ledger ledger;
static int cleared;

static cudaError_t allocate(void **out, size_t bytes)
{
    CHECK(bytes == ROOM);
    *out = memory;
    return cudaSuccess;
}

static cudaError_t release(void *ptr)
{
    CHECK(ptr == memory);
    return cudaSuccess;
}

static cudaError_t clear(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    CHECK((char *)to >= memory && (char *)to + bytes <= memory + ROOM);
    memset(to, value, bytes);
    cleared++;
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    (void)stream;
    return cudaSuccess;
}

static cudaError_t last_error(void)
{
    return cudaSuccess;
}

static const struct lc_backend backend = { .cudaMalloc = allocate,
                                           .cudaFree = release,
                                           .cudaMemsetAsync = clear,
                                           .cudaGetLastError = last_error,
                                           .cudaEventRecord = record };

/* ---- what belongs to other files, stood in for ---- */

const struct lc_config *lc_process_config(void)
{
    static const struct lc_config config = { .error_feedback = true,
                                             .allreduce_wire = LC_WIRE_BF16,
                                             .feedback_max = ROOM };

    return &config;
}

static struct lc_reducer begin(void)
{
    struct lc_reducer reducer = { .backend = &backend };

    memset(&ledger, 0, sizeof(ledger));
    lc_feedback_set_up(&reducer, NULL, &ledger);
    CHECK(reducer.feedback);
    cleared = 0;
    return reducer;
}

/* Of a list of `n` buffers of `count` elements, `step` apart. */
static float *of_list(struct lc_reducer *reducer, const float *first, size_t count, size_t n,
                      size_t step, bool captured)
{
    struct lc_span span = { .reducer = reducer, .capture = captured };
    struct lc_owing owing = { .n = n, .parts = 1, .redop = LC_REDOP_SUM, .elements = n * count };
    struct lk_buffers list[8] = { 0 };

    CHECK(n <= 8);
    owing.list = list;
    for (size_t i = 0; i < n; i++)
        list[i] = (struct lk_buffers){ first + i * step, NULL, count };
    return lc_feedback_of(&span, &owing);
}

static float *of(struct lc_reducer *reducer, const float *buffer, size_t count, bool captured)
{
    return of_list(reducer, buffer, count, 1, 0, captured);
}

static void buffers_keep_their_places(void)
{
    struct lc_reducer reducer = begin();
    float *first = of(&reducer, AT(0), QUARTER, false), *second = of(&reducer, AT(1), 3, false);

    CHECK(first && second && first != second);
    CHECK(of(&reducer, AT(0), QUARTER, false) == first && of(&reducer, AT(1), 3, false) == second);
    CHECK(cleared == 0 && ledger.fed == 4 && ledger.unfed == 0); /* all was zero */
    CHECK(ledger.feedback_bytes == QUARTER * sizeof(float) + 256);
    lc_feedback_free(reducer.feedback);
}

static void a_full_pool_is_left_to_those_who_have_it(void)
{
    struct lc_reducer reducer = begin();

    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < 6; i++)
            CHECK((of(&reducer, AT(i), QUARTER, false) != NULL) == (i < 4));
    }
    CHECK(ledger.unfed == 80 && cleared == 0);
    lc_feedback_free(reducer.feedback);
}

static void who_comes_no_more_makes_room(void)
{
    struct lc_reducer reducer = begin();
    float *last = NULL;

    for (int i = 0; i < 4; i++)
        last = of(&reducer, AT(i), QUARTER, false);
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < 3; i++)
            CHECK(of(&reducer, AT(i), QUARTER, false));
    }
    *last = 1;
    CHECK(of(&reducer, AT(4), QUARTER, false) == last && *last == 0 && cleared == 1);
    lc_feedback_free(reducer.feedback);
}

static void what_lies_across_an_older_one_ends_it(void)
{
    struct lc_reducer reducer = begin();
    float *first = of(&reducer, AT(0), QUARTER, false), *other;

    *first = 1;
    other = of(&reducer, AT(0) + QUARTER / 2, QUARTER, false);
    CHECK(other == first && *other == 0);
    CHECK(of(&reducer, AT(0), QUARTER, false) == first && cleared == 2);
    lc_feedback_free(reducer.feedback);
}

/* It may be replayed at any time, and would clear at each replay what the graph clears. */
static void graphs_keep_their_residuals(void)
{
    struct lc_reducer reducer = begin();
    float *graph = of(&reducer, AT(0), QUARTER, true), *late;

    CHECK(graph && of(&reducer, AT(1), QUARTER, false));
    late = of(&reducer, AT(1), QUARTER - 1, true); /* where nothing has been */
    CHECK(late == graph + 2 * (ptrdiff_t)QUARTER && cleared == 0);
    CHECK(of(&reducer, AT(1), QUARTER - 1, false) == late);
    CHECK(!of(&reducer, AT(3), QUARTER + 1, true)); /* the last quarter is too small */
    CHECK(of(&reducer, AT(0) + 3, QUARTER, false) != graph);
    for (int i = 2; i < 500; i++)
        CHECK(of(&reducer, AT(1 + i % 60), QUARTER - (size_t)i % 7, false) != graph);
    CHECK(of(&reducer, AT(0), QUARTER, false) == graph);
    lc_feedback_free(reducer.feedback);
}

/* They are known together: by all that they are, and in their order. */
static void lists_keep_their_places(void)
{
    struct lc_reducer reducer = begin();
    float *list = of_list(&reducer, AT(0), 64, 3, QUARTER, false);
    struct lk_buffers buffers[] = {
        {AT(8),  NULL, 64},
        { AT(9), NULL, 64}
    };
    struct lc_span span = { .reducer = &reducer };
    struct lc_owing owing = { buffers, 2, 1, LC_REDOP_SUM, 5, 128 };
    float *other = lc_feedback_of(&span, &owing);

    CHECK(list && other && list != other && ledger.fed == 5);
    CHECK(of_list(&reducer, AT(0), 64, 3, QUARTER, false) == list);
    CHECK(lc_feedback_of(&span, &owing) == other && cleared == 0);
    *other = 1;
    owing.layout = 6;
    CHECK(lc_feedback_of(&span, &owing) == other && *other == 0 && cleared == 1);
    *other = 1;
    owing.redop = LC_REDOP_AVG;
    CHECK(lc_feedback_of(&span, &owing) == other && *other == 0 && cleared == 2);
    *other = 1;
    buffers[0] = (struct lk_buffers){ AT(9), NULL, 64 };
    buffers[1] = (struct lk_buffers){ AT(8), NULL, 64 };
    CHECK(lc_feedback_of(&span, &owing) == other && *other == 0 && cleared == 3);
    CHECK(of_list(&reducer, AT(0), 64, 3, QUARTER, false) == list);
    lc_feedback_free(reducer.feedback);
}

/* Buffers of one list lie between those of another, which end nothing; one that is in both ends the other list. */
static void lists_end_what_they_share(void)
{
    struct lc_reducer reducer = begin();
    float *even = of_list(&reducer, AT(0), QUARTER / 8, 4, 2 * QUARTER, false);
    float *odd = of_list(&reducer, AT(1), QUARTER / 8, 4, 2 * QUARTER, false);

    CHECK(even && odd && even != odd);
    *even = *odd = 1;
    for (int round = 0; round < 3; round++) {
        CHECK(of_list(&reducer, AT(0), QUARTER / 8, 4, 2 * QUARTER, false) == even);
        CHECK(of_list(&reducer, AT(1), QUARTER / 8, 4, 2 * QUARTER, false) == odd);
    }
    CHECK(*even == 1 && *odd == 1 && cleared == 0);
    CHECK(of(&reducer, AT(4) + QUARTER / 8 - 1, 1, false) == even && *even == 0);
    CHECK(of_list(&reducer, AT(1), QUARTER / 8, 4, 2 * QUARTER, false) == odd && *odd == 1);
    CHECK(of_list(&reducer, AT(0), QUARTER / 8, 4, 2 * QUARTER, false) != NULL);
    CHECK(*even == 0);
    lc_feedback_free(reducer.feedback);
}

int main(void)
{
    buffers_keep_their_places();
    a_full_pool_is_left_to_those_who_have_it();
    who_comes_no_more_makes_room();
    what_lies_across_an_older_one_ends_it();
    graphs_keep_their_residuals();
    lists_keep_their_places();
    lists_end_what_they_share();
    return 0;
}
