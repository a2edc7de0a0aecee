/* SPDX-License-Identifier: Apache-2.0
 *
 * test_rings threads|processes [SECONDS [SEED]]: calls on rings against the reference, then random ones for a time.
 */
#include "kernels/host_rings_internal.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rings_world.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

/* What data may have in common with what travels. */
static const struct {
    enum lk_type type;
    enum lk_type wire;
} pairs[] = {
    {LK_FP32,  LK_FP32},
    { LK_FP32, LK_BF16},
    { LK_BF16, LK_BF16},
    { LK_FP16, LK_FP16},
};
#define PAIRS 4

/* How ranks are run: as threads or as processes. */
static void (*run_ranks)(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                         void *arg);
static bool small; /* under a checker that makes everything slow */

/* A series of calls that all ranks make, without waiting for each other in between. */
struct series {
    const char *name;
    void (*make)(struct ring_call *call, const struct lk_ring_shape *shape, uint64_t number);
    uint64_t begin;
    uint64_t end;
    uint64_t step;
};

static void play_series(struct ring_rank *me, void *arg)
{
    const struct series *series = arg;
    struct ring_call *call = malloc(sizeof(*call));

    CHECK(call);
    for (uint64_t i = series->begin; i < series->end; i += series->step) {
        series->make(call, &me->world->shape, i);
        ring_play(me, call);
    }
    free(call);
}

static void run_series(struct series series, uint32_t ranks, uint32_t channels, uint32_t slots)
{
    struct ring_world world;
    struct timespec begin, end;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    ring_world_init(&world, ranks, channels, slots, LINES);
    run_ranks(&world, play_series, &series);
    ring_world_fini(&world);
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%s: %u ranks, %u channels, %u slots: %.2f s\n", series.name, ranks, channels, slots,
           (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9);
    fflush(stdout);
}

/* Every size up to 64 KB in odd steps, for each operation, type and wire in turn. */
static void make_size(struct ring_call *call, const struct lk_ring_shape *shape, uint64_t number)
{
    uint64_t kind = number % (PAIRS * RING_OPS);
    enum ring_op op = (enum ring_op)(kind / PAIRS);
    enum lk_type type = pairs[kind % PAIRS].type;
    uint64_t bytes = number / (PAIRS * RING_OPS);

    if (op == RING_REDUCE_SCATTER)
        bytes /= shape->ranks;
    ring_call_init(call, op, type, pairs[kind % PAIRS].wire, bytes / (type == LK_FP32 ? 4 : 2),
                   number);
    call->in_place = number % 5 == 0;
    call->data = number % 7 == 0 ? RING_SPARSE : RING_NORMAL;
}

/* A power of two of bytes, one less, one more; in elements. */
static void make_power(struct ring_call *call, const struct lk_ring_shape *shape, uint64_t number)
{
    uint64_t kind = number % PAIRS;
    enum lk_type type = pairs[kind].type;
    uint64_t count = (UINT64_C(1) << number / PAIRS / 3) / (type == LK_FP32 ? 4 : 2);

    ring_call_init(call, number / PAIRS % 2 ? RING_REDUCE_SCATTER : RING_ALL_REDUCE, type,
                   pairs[kind].wire, count + number / PAIRS % 3 - 1, number);
    if (call->op == RING_REDUCE_SCATTER)
        call->counts[0] /= shape->ranks;
    call->ctas[0] = 2;
}

/* Both sides at every distance from an aligned address. */
static void make_alignment(struct ring_call *call, const struct lk_ring_shape *shape,
                           uint64_t number)
{
    uint64_t kind = number / 64 % PAIRS;

    ring_call_init(call, (enum ring_op)(number / 64 / PAIRS % RING_OPS), pairs[kind].type,
                   pairs[kind].wire, 777, number);
    call->in_skew = number % 8;
    call->out_skew = number / 8 % 8;
    call->n = 3;
    call->counts[1] = 5;
    call->counts[2] = 300;
}

/* Lists of up to 2000 tensors, some of them empty. */
static void make_list(struct ring_call *call, const struct lk_ring_shape *shape, uint64_t number)
{
    static const uint32_t lengths[] = { 1, 2, 3, 17, LK_RING_MAX, LK_RING_MAX + 1, RING_TENSORS };
    uint64_t kind = number % PAIRS;
    uint64_t state = number;

    ring_call_init(call, (enum ring_op)(number / PAIRS % RING_OPS), pairs[kind].type,
                   pairs[kind].wire, 0, number);
    call->stochastic = true; /* numbers run on over a cut list */
    call->n = lengths[number / PAIRS / RING_OPS % 7];
    for (size_t t = 0; t < call->n; t++) {
        uint64_t random = ref_next(&state);

        call->counts[t] = random % 5 ? (random >> 8) % (call->op == RING_LINES ? 12 : 70) : 0;
        if (random % 97 == 0 && call->op != RING_LINES)
            call->counts[t] = (random >> 8) % 20000;
    }
    if (call->op == RING_LINES && ring_call_bytes(call) > shape->line_bytes)
        call->op = RING_ALL_REDUCE;
}

/* Everything that a call can be, but for size. */
static void make_any(struct ring_call *call, const struct lk_ring_shape *shape, uint64_t number)
{
    uint64_t state = number;
    uint64_t random = ref_next(&state), more = ref_next(&state);
    uint64_t kind = random % PAIRS;
    static const float factors[] = { 1, 0.5F, -3, 0.0999755859375F, 1, 1, 1024, 0 };

    ring_call_init(call, (enum ring_op)(random >> 4 & 3 ? random >> 8 & 1 : RING_LINES),
                   pairs[kind].type, pairs[kind].wire, 0, number);
    call->data = (enum ring_data)(random >> 12 & 3);
    call->stochastic = random >> 16 & 1;
    call->draws = (random >> 20 & 1) ? more : more % 1000;
    call->device_draws = random >> 21 & 1;
    call->pre = factors[random >> 24 & 7];
    call->device_pre = random >> 27 & 1;
    call->pre_type = (enum lk_type)((random >> 28 & 15) % 3);
    if (call->pre_type == LK_BF16 && call->pre == factors[3])
        call->pre = 0.25F;
    call->post = (random >> 32 & 3) ? 1 : 1.0F / (float)shape->ranks;
    call->in_place = random >> 34 & 1;
    call->in_skew = random >> 35 & 7;
    call->out_skew = random >> 38 & 7;
    for (uint32_t r = 0; r < shape->ranks; r++)
        call->ctas[r] = 1 + (uint32_t)(ref_next(&state) % 4);
    call->n = 1 + (random >> 41 & 7);
    for (size_t t = 0; t < call->n; t++) {
        uint64_t size = ref_next(&state);

        call->counts[t] = (size >> 8) % (UINT64_C(1) << size % (small ? 13 : 16));
    }
    if (call->op == RING_LINES && ring_call_bytes(call) > shape->line_bytes)
        call->op = RING_REDUCE_SCATTER;
    if (call->op == RING_LINES)
        call->wire = call->type;
}

static void every_call(void)
{
    uint64_t odd = small ? 49999 : 3001; /* steps through the sizes and through the kinds */
    uint64_t lists = getenv("LCTEST_SOAK") ? 1 : 5;

    run_series((struct series){ "sizes", make_size, 0, 65537 * PAIRS * RING_OPS, odd }, 2, 3, 2);
    run_series((struct series){ "sizes", make_size, 1, 65537 * PAIRS * RING_OPS, odd }, 3, 4, 1);
    run_series(
        (struct series){ "alignments", make_alignment, 0, 64 * PAIRS * RING_OPS, small ? 7 : 1 }, 2,
        2, 2);
    run_series((struct series){ "lists", make_list, 0, 7 * PAIRS * RING_OPS, lists }, 3, 5, 3);
    /* The two lists that are cut and draw. */
    run_series((struct series){ "cut lists", make_list, 73, 78, 4 }, 2, 2, 2);
    for (uint32_t ranks = 2; ranks <= 8; ranks += small ? 3 : 1)
        run_series((struct series){ "kinds", make_any, ranks * 1000, ranks * 1000 + 40, 1 }, ranks,
                   ranks % 3 + 1, 1);
}

static void large_calls(void)
{
    bool soak = getenv("LCTEST_SOAK");
    uint64_t top = soak ? 26 : 21;

    run_series(
        (struct series){ "powers of two", make_power, 16 * 3 * PAIRS, (top + 1) * 3 * PAIRS, 1 }, 2,
        16, 4);
    if (!soak) /* 64 MB once: one byte pair more, on a bf16 wire */
        run_series((struct series){ "64 MB", make_power, (26 * 3 + 2) * PAIRS + 1,
                                    (26 * 3 + 2) * PAIRS + 2, 1 },
                   2, 16, 4);
}

/* ---- random calls for a time ---- */

static double seconds_since(const struct timespec *begin)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - begin->tv_sec) + (double)(now.tv_nsec - begin->tv_nsec) * 1e-9;
}

static void random_calls(double seconds, uint64_t seed)
{
    struct timespec begin;
    uint64_t state = seed;

    printf("random calls for %g s, seed %llu\n", seconds, (unsigned long long)seed);
    fflush(stdout);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (uint64_t round = 0; seconds_since(&begin) < seconds; round++) {
        uint64_t random = ref_next(&state);
        struct series series = { "random", make_any, random >> 8, (random >> 8) + 25, 1 };

        run_series(series, 2 + (uint32_t)(random % 7), 1 + (uint32_t)(random >> 8) % 6,
                   1 + (uint32_t)(random >> 16) % 4);
    }
}

/* ---- how good the results are ---- */

#define SHARE 20000u

struct accuracy {
    enum lk_type wire;
    double error[LK_RANKS_MAX]; /* each by its rank: square of the error and of the true sum */
    double truth[LK_RANKS_MAX];
};

static double gauss(uint64_t seed, uint64_t i)
{
    uint64_t state = seed + i * 2654435769u;
    double u = ((double)(ref_next(&state) >> 11) + 0.5) * 0x1p-53;
    double v = (double)(ref_next(&state) >> 11) * 0x1p-53;

    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v);
}

static void measure(struct ring_rank *me, void *arg)
{
    struct accuracy *accuracy = arg;
    uint32_t ranks = me->world->shape.ranks;
    size_t count = (size_t)SHARE * 4 / ranks * ranks;
    float *data = malloc(count * sizeof(*data));
    struct lk_buffers buffers = { data, data, count };
    struct lk_reduction how = { LK_FP32, accuracy->wire, NULL, 1, LK_NEAREST, NULL, NULL };
    size_t begin = count / ranks * me->rank;

    CHECK(data);
    for (size_t i = 0; i < count; i++)
        data[i] = (float)gauss(me->rank + 1, i);
    CHECK(lk_rings_all_reduce(&me->rings, &how, &buffers, 1, 1, NULL) == 0);
    accuracy->error[me->rank] = accuracy->truth[me->rank] = 0;
    for (size_t i = begin; i < begin + count / ranks; i++) {
        double sum = 0;

        for (uint32_t r = 0; r < ranks; r++)
            sum += (double)(float)gauss(r + 1, i);
        accuracy->error[me->rank] += (data[i] - sum) * (data[i] - sum);
        accuracy->truth[me->rank] += sum * sum;
        if (ranks == 2 && accuracy->wire == LK_FP32) {
            volatile float exact = (float)gauss(1, i) + (float)gauss(2, i);

            CHECK(data[i] == exact);
        }
    }
    free(data);
}

static double relative_error(uint32_t ranks, enum lk_type wire)
{
    static struct accuracy accuracy;
    struct ring_world world;
    double error = 0, truth = 0;

    ring_world_init(&world, ranks, 2, 2, 0);
    accuracy.wire = wire;
    ring_threads(&world, measure, &accuracy);
    ring_world_fini(&world);
    for (uint32_t r = 0; r < ranks; r++) {
        error += accuracy.error[r];
        truth += accuracy.truth[r];
    }
    printf("%u ranks, wire %d: relative error %.3g\n", ranks, wire, sqrt(error / truth));
    return sqrt(error / truth);
}

static void errors_are_within_bounds(void)
{
    static const uint32_t counts[] = { 2, 3, 4, 8, 16, 64 };

    for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
        CHECK(relative_error(counts[i], LK_BF16) <= (counts[i] == 2 ? 2.1e-3 : 2.4e-3));
        CHECK(relative_error(counts[i], LK_FP32) <= 5e-7);
    }
}

/* ---- what residuals are for ---- */

#define OWED_TENSORS 2000u /* more than a launch takes */
#define OWED_STEPS   24

struct owed {
    bool fed, stochastic, scatter;
    uint64_t sums[LK_RANKS_MAX]; /* of all that a rank got, each written by it */
    double worst[LK_RANKS_MAX];  /* how far sums of results are from what they should be */
};

static uint64_t owed_count(size_t t)
{
    return t == 700 ? 20000 : t % 5 ? t % 23 : 0;
}

/* Alike at every step: what rounding loses, it loses again. Some granules are of zeros, at all ranks. */
static float owed_value(uint32_t rank, uint64_t i)
{
    return i / 600 % 5 == 1 ? 0 : 1.001F + (float)(i % 100) / 128 + (float)rank / 100;
}

static double owed_sum(uint32_t ranks, uint64_t i)
{
    double sum = 0;

    for (uint32_t r = 0; r < ranks; r++)
        sum += (double)owed_value(r, i);
    return sum;
}

struct owed_memory {
    uint64_t in, out; /* elements */
    struct lk_buffers list[OWED_TENSORS];
    float *from, *to, *residual;
    uint64_t residuals;
    double *sum;
};

static void owed_init(struct owed_memory *m, const struct ring_rank *me, const struct owed *owed)
{
    struct lk_reduction how = { .wire = LK_BF16 };
    uint64_t parts = owed->scatter ? me->world->shape.ranks : 1, at = 0;

    memset(m, 0, sizeof(*m));
    for (size_t t = 0; t < OWED_TENSORS; t++)
        m->out += m->list[t].count = owed_count(t);
    m->in = parts * m->out;
    m->residuals = parts * lk_rings_elements(&how, m->list, OWED_TENSORS);
    m->from = calloc(m->in, sizeof(*m->from));
    m->to = calloc(m->out, sizeof(*m->to));
    m->sum = calloc(m->out, sizeof(*m->sum));
    m->residual = aligned_alloc(64, (m->residuals * 4 + 127) / 64 * 64);
    CHECK(m->from && m->to && m->sum && m->residual);
    memset(m->residual, 0, (m->residuals * 4 + 127) / 64 * 64);
    for (size_t t = 0; t < OWED_TENSORS; t++) {
        m->list[t].in = m->from + parts * at;
        m->list[t].out = m->to + at;
        at += m->list[t].count;
    }
    for (uint64_t i = 0; i < m->in; i++)
        m->from[i] = owed_value(me->rank, i);
}

static void owed_fini(struct owed_memory *m)
{
    CHECK(m->residual[m->residuals] == 0); /* nothing behind them */
    free(m->from);
    free(m->to);
    free(m->sum);
    free(m->residual);
}

static void owed_step(struct owed_memory *m, const struct ring_rank *me, struct owed *owed,
                      uint64_t step)
{
    struct lk_rng rng = { .seed = 3 + me->rank, .offset = step << 24 };
    struct lk_reduction how = { .type = LK_FP32,
                                .wire = LK_BF16,
                                .post = 1,
                                .rounding = owed->stochastic ? LK_STOCHASTIC : LK_NEAREST,
                                .rng = &rng,
                                .residual = owed->fed ? m->residual : NULL };
    __typeof__(lk_rings_all_reduce) *call = owed->scatter ? lk_rings_reduce_scatter
                                                          : lk_rings_all_reduce;

    CHECK(call(&me->rings, &how, m->list, OWED_TENSORS, 1 + me->rank % 2, NULL) == 0);
    for (uint64_t i = 0; i < m->out; i++) {
        m->sum[i] += (double)m->to[i];
        owed->sums[me->rank] = owed->sums[me->rank] * 31 + float_bits(m->to[i]);
    }
}

static void owe(struct ring_rank *me, void *arg)
{
    static struct owed_memory memories[LK_RANKS_MAX];
    struct owed_memory *m = &memories[me->rank];
    struct owed *owed = arg;
    uint32_t ranks = me->world->shape.ranks;

    owed_init(m, me, owed);
    for (uint64_t step = 0; step < OWED_STEPS; step++)
        owed_step(m, me, owed, step);
    for (size_t t = 0; t < OWED_TENSORS; t++) {
        const float *in = m->list[t].in;
        uint64_t at = (uint64_t)((const float *)m->list[t].out - m->to);
        uint64_t first = (uint64_t)(in - m->from) +
                         (owed->scatter ? me->rank * m->list[t].count : 0);

        for (uint64_t i = 0; i < m->list[t].count; i++) {
            double want = OWED_STEPS * owed_sum(ranks, first + i);

            owed->worst[me->rank] = fmax(owed->worst[me->rank], fabs(m->sum[at + i] - want));
        }
    }
    owed_fini(m);
}

/* With residuals sums over many calls stay near, without they drift away or wander; either way all ranks have the same bits. */
static void sums_stay_near_with_residuals(uint32_t ranks)
{
    for (unsigned int way = 0; way < 8; way++) {
        struct owed owed = { .fed = way & 1, .stochastic = way & 2, .scatter = way & 4 };
        struct ring_world world;
        double worst = 0;

        ring_world_init(&world, ranks, 3, 2, 0);
        ring_threads(&world, owe, &owed);
        ring_world_fini(&world);
        for (uint32_t r = 0; r < ranks; r++) {
            CHECK(owed.scatter || owed.sums[r] == owed.sums[0]);
            worst = fmax(worst, owed.worst[r]);
        }
        printf("%u ranks, %s, %s, %s residuals: off by %.3g after %d calls\n", ranks,
               owed.scatter ? "reduce-scatter" : "all-reduce",
               owed.stochastic ? "stochastic" : "nearest", owed.fed ? "with" : "without", worst,
               OWED_STEPS);
        CHECK(!owed.fed || worst < (owed.stochastic ? 0.07 : 0.03));
        CHECK(owed.fed || worst > 0.08);
    }
}

int main(int argc, char **argv)
{
    bool threads;
    double seconds;

    CHECK(argc >= 2);
    threads = strcmp(argv[1], "threads") == 0;
    CHECK(threads || strcmp(argv[1], "processes") == 0);
    seconds = argc > 2 ? atof(argv[2]) : 1;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    small = true;
#endif
    run_ranks = threads ? ring_threads : ring_processes;
    lk_host_cta_threads = threads;
    lk_bell_nap_ms = 1000 * 3600; /* whoever forgets the doorbell is never heard */
    every_call();
    if (threads) {
        sums_stay_near_with_residuals(2);
        sums_stay_near_with_residuals(3);
    }
    if (threads && !small) {
        large_calls();
        errors_are_within_bounds();
    }
    random_calls(getenv("LCTEST_SOAK") ? 60 * seconds : seconds,
                 argc > 3 ? strtoull(argv[3], NULL, 0) : 1);
    return 0;
}
