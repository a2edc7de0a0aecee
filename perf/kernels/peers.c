/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-peers LIBRARY [OPTION VALUE]...
 * Sums and all-to-alls between devices of one process: NCCL and variants of the kernels take turns in one run, each call
 * of a graph on its own part of the buffers where they are small. Results are checked before they are timed. Behind each
 * line of the table the same as one JSON line. Where there is one device the ranks share it, and there is no NCCL; the
 * host library runs the same with small sizes, to check the program.
 *   --ranks N         2 (2 to 8)
 *   --cases LIST      numbers, from 0; all
 *   --variants LIST   0; others with libloongkernels-variants.so only; all: every one
 *   --without LIST    of them, left out
 *   --ctas LIST       32
 *   --channels N      64
 *   --slots N         8 (of exchanges: twice as many, up to 16)
 *   --short N         bytes of the largest messages that exchanges send in lines: 524288
 *   --nccl PATH       libnccl.so.2, measured beside them
 *   --memory vmm      or plain: of cudaMalloc, with peer access
 *   --rounds N        5 turns of each
 *   --list 1          says which variants there are, and ends
 *   --beside 1        products run beside each case; time of both
 *
 * Exit codes: 0 all results right, 1 a wrong result or a failure, 2 bad usage, 3 a candidate that did not end (the line
 * `stuck: NUMBER` names it), 77 no device.
 */
#include "perf/kernels/peers.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SKIP       77
#define ROW_VALUES (ROW_BYTES / 4)
#define ROWS       20  /* of which the first zero_rows are zeros; values repeat after them */
#define TOGETHER   400 /* in a row, where zeros are: 32 MB to an expert */
#define PERIOD(c)  ((size_t)ROW_VALUES * rows_of(c) * together(c))
#define MASK_BYTES 8192              /* a bit for each row of 256 MB */
#define CHECKED    ((size_t)8 << 20) /* bytes at either end that are looked at */
#define MB         ((size_t)1 << 20)

/* clang-format off */
static const struct bench_case cases[] = {
    { "fp32 256 MB",                256 * MB, LK_FP32, LK_FP32, LK_KIND_FP32,     .zero_rows = 0 },
    { "fp32 256 MB, bf16 wire",     256 * MB, LK_FP32, LK_BF16, LK_KIND_NARROWED, .zero_rows = 0 },
    { "fp32 16 MB, bf16 wire",       16 * MB, LK_FP32, LK_BF16, LK_KIND_NARROWED, .zero_rows = 0 },
    { "all-to-all 256 MB",          256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "all-to-all 256 MB, 90 % 0",  256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 18 },
    { "one-shot 8 B",                      8, LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 1 KB",                  1024, LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 8 KB",                  8192, LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 64 KB",                65536, LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "fp32 16 MB",                  16 * MB, LK_FP32, LK_FP32, LK_KIND_FP32,     .zero_rows = 0 },
    { "all-to-all 256 MB, 60 % 0",  256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 12 },
    { "all-to-all 256 MB, 75 % 0",  256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 15 },
    { "all-to-all 16 MB",            16 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "bf16 128 MB",                128 * MB, LK_BF16, LK_BF16, LK_KIND_BF16,     .zero_rows = 0 },
    { "fp32 1 MB, bf16 wire",         1 * MB, LK_FP32, LK_BF16, LK_KIND_NARROWED, .zero_rows = 0 },
    { "all-to-all 4 MB",              4 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "all-to-all 1 MB",              1 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "all-to-all 256 KB",       256 << 10,   LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "all-to-all 64 KB",         64 << 10,   LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 0 },
    { "one-shot 128 KB",         128 << 10,   LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 256 KB",         256 << 10,   LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 512 KB",         512 << 10,   LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "one-shot 1 MB",             1 * MB,    LK_FP32, LK_FP32, LK_KIND_LINES,    .zero_rows = 0 },
    { "fp32 256 KB",             256 << 10,   LK_FP32, LK_FP32, LK_KIND_FP32,     .zero_rows = 0 },
    { "fp32 1 MB",                 1 * MB,    LK_FP32, LK_FP32, LK_KIND_FP32,     .zero_rows = 0 },
    { "fp32 2 MB",                 2 * MB,    LK_FP32, LK_FP32, LK_KIND_FP32,     .zero_rows = 0 },
    { "fp32 4 MB, bf16 wire",      4 * MB,    LK_FP32, LK_BF16, LK_KIND_NARROWED, .zero_rows = 0 },
    { "bf16 16 MB",               16 * MB,    LK_BF16, LK_BF16, LK_KIND_BF16,     .zero_rows = 0 },
    { "all-to-all 256 MB, 60 % 0 together", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 12, .together = true },
    { "all-to-all 256 MB, 75 % 0 together", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 15, .together = true },
    { "all-to-all 256 MB, 90 % 0 together", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 18, .together = true },
    { "all-to-all 256 MB, 60 % 0 masked", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 12, .masked = true },
    { "all-to-all 256 MB, 75 % 0 masked", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 15, .masked = true },
    { "all-to-all 256 MB, 90 % 0 masked", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 18, .masked = true },
    { "all-to-all 256 MB, 90 % 0 together, masked", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 18, .together = true, .masked = true },
    { "all-to-all 256 MB, 75 % 0, experts of 256 KB", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 48, .rows = 64 },
    { "all-to-all 256 MB, 75 % 0, experts of 256 KB, masked", 256 * MB, LK_FP32, LK_FP32, LK_KIND_EXCHANGE, .zero_rows = 48, .rows = 64, .masked = true },
};
/* clang-format on */
#define CASES ((int)(sizeof(cases) / sizeof(*cases)))

struct numbers {
    int of[CANDIDATES_MAX];
    int n;
};

static struct {
    struct numbers cases, variants, without, ctas;
    struct lk_ring_shape shape;
    const char *nccl; /* NULL: none */
    bool all_variants, plain_memory, beside, list;
    int rounds;
} chosen;

struct bench bench;
static size_t shrink = 1; /* sizes of the host library are smaller */
static char at_work[40] =
    "\nstuck: 0\n"; /* said if the candidate does not end; no alarm is set while it is written */
static const struct bench_case *filled;
static uint8_t *fetched;

void bench_use(uint32_t rank)
{
    if (bench.cuda)
        CUDA(cudaSetDevice(bench.of[rank].device));
}

static void stuck(int sig)
{
    (void)sig;
    if (write(1, at_work, strlen(at_work)) < 0)
        _exit(1);
    _exit(3);
}

/* Longer than anything takes; connections of NCCL take longest. */
static void watch(int number)
{
    alarm(0);
    snprintf(at_work, sizeof(at_work), "\nstuck: %d\n", number);
    alarm(bench.cuda ? 40 : 110);
}

static size_t bytes_of(const struct bench_case *c)
{
    return c->kind == LK_KIND_LINES ? c->bytes : c->bytes / shrink;
}

/* ---- values: small integers, of which every sum is exact in each type ---- */

/* Rows that are zeros or not as one. */
static size_t together(const struct bench_case *c)
{
    return c->together ? TOGETHER / shrink + 1 : 1;
}

static size_t rows_of(const struct bench_case *c)
{
    return c->rows ? c->rows : ROWS;
}

static float value_of(const struct bench_case *c, uint32_t rank, size_t i)
{
    if (i / ROW_VALUES / together(c) < c->zero_rows)
        return 0;
    return (float)((i * 7 + (size_t)rank * 3) % (128 / bench.ranks) + 1);
}

/* A period of what `rank` has, or of everybody's sum (bench.ranks). The caller's. */
static uint8_t *period_of(const struct bench_case *c, uint32_t rank)
{
    size_t each = c->type == LK_FP32 ? 4 : 2;
    uint8_t *values = malloc(PERIOD(c) * each);

    if (!values)
        exit(1);
    for (size_t i = 0; i < PERIOD(c); i++) {
        float x = 0;
        uint8_t bytes[4];

        for (uint32_t r = 0; r < bench.ranks; r++)
            if (rank == r || rank == bench.ranks)
                x += value_of(c, r, i);
        memcpy(bytes, &x, 4);
        memcpy(values + i * each, each == 4 ? bytes : bytes + 2, each); /* bf16: the upper half */
    }
    return values;
}

static size_t period_bytes(const struct bench_case *c)
{
    return PERIOD(c) * (c->type == LK_FP32 ? 4 : 2);
}

static void move(void *to, const void *from, size_t bytes)
{
    if (bench.cuda)
        CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    else
        memcpy(to, from, bytes);
}

/* Of the rows of a rank's input. */
static void fill_mask(const struct bench_case *c, struct rank *r)
{
    uint32_t bits[MASK_BYTES / 4] = { 0 };
    size_t rows = bench.most / ROW_BYTES;

    if (rows > (size_t)MASK_BYTES * 8)
        exit(1);
    for (size_t row = 0; row < rows; row++)
        if (row / together(c) % rows_of(c) >= c->zero_rows)
            bits[row / 32] |= UINT32_C(1) << row % 32;
    move(r->mask, bits, sizeof(bits));
}

static void fill(const struct bench_case *c)
{
    if (filled == c)
        return;
    for (uint32_t r = 0; r < bench.ranks; r++) {
        size_t done = period_bytes(c) < bench.most ? period_bytes(c) : bench.most;
        uint8_t *values = period_of(c, r), *in = bench.of[r].in;

        bench_use(r);
        for (move(in, values, done); done < bench.most;) { /* doubles what is there */
            size_t size = bench.most - done < done ? bench.most - done : done;

            move(in + done, in, size);
            done += size;
        }
        free(values);
        fill_mask(c, &bench.of[r]);
    }
    filled = c;
}

/* Whether `bytes` of a rank's result from `at` on repeat `want`, which begins with what is at byte `base` of the input. */
static bool repeats(const struct bench_case *c, uint32_t rank, size_t at, size_t bytes, size_t base,
                    const uint8_t *want)
{
    size_t period = period_bytes(c), in = (base + at) % period;

    move(fetched, bench.of[rank].out + at, bytes);
    for (size_t done = 0; done < bytes;) {
        size_t size = bytes - done < period - in ? bytes - done : period - in;

        if (memcmp(fetched + done, want + in, size) != 0)
            return false;
        done += size;
        in = 0;
    }
    return true;
}

/* Both ends of what came from each rank, or of the sum. */
static bool right(const struct bench_case *c, uint32_t rank)
{
    uint32_t parts = c->kind == LK_KIND_EXCHANGE ? bench.ranks : 1;
    size_t part = bytes_of(c) / parts, look = part < CHECKED ? part : CHECKED;
    bool good = true;

    bench_use(rank);
    for (uint32_t src = 0; good && src < parts; src++) {
        uint8_t *want = period_of(c, parts > 1 ? src : bench.ranks);
        /* What lies at `src` parts of the output lay at `rank` parts of the input. */
        size_t begin = src * part;
        size_t base = parts > 1 ? period_bytes(c) * bench.most + rank * part - begin : 0;

        good = repeats(c, rank, begin, look, base, want) &&
               repeats(c, rank, begin + part - look, look, base, want);
        free(want);
    }
    return good;
}

/* ---- calls ---- */

struct one_call {
    const struct row *row;
    uint32_t rank;
};

static void *host_call(void *arg)
{
    const struct one_call *one = arg;

    library_call(one->row, one->rank, 0);
    return NULL;
}

/* Of the host library: ends when all are done. */
static void host_calls(const struct row *row)
{
    struct one_call ones[RANKS_MAX];
    pthread_t threads[RANKS_MAX];

    for (uint32_t r = 0; r < bench.ranks; r++) {
        ones[r] = (struct one_call){ row, r };
        if (pthread_create(&threads[r], NULL, host_call, &ones[r]))
            exit(1);
    }
    for (uint32_t r = 0; r < bench.ranks; r++)
        pthread_join(threads[r], NULL);
}

/* The i-th calls of all ranks; each on the next part of the buffers. */
static void call_all(const struct row *row, int i)
{
    size_t slots = bench.most / ((row->bytes + 511) / 512 * 512);
    size_t at = slots ? (size_t)i % slots * ((row->bytes + 511) / 512 * 512) : 0;

    if (row->number == NCCL) {
        nccl_call(row, at);
        return;
    }
    for (uint32_t r = 0; r < bench.ranks; r++)
        library_call(row, r, at);
}

/* None is instantiated before all captures have ended: a thread may not while it captures another stream. */
static void make_graphs(struct row *row)
{
    cudaGraph_t graphs[RANKS_MAX];

    row->calls = row->c->kind == LK_KIND_LINES ? 20 : row->bytes < 64 * MB ? 16 : 4;
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        CUDA(cudaStreamBeginCapture(bench.of[r].stream, cudaStreamCaptureModeThreadLocal));
    }
    for (int i = 0; i < row->calls; i++)
        call_all(row, i);
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        CUDA(cudaStreamEndCapture(bench.of[r].stream, &graphs[r]));
    }
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        CUDA(cudaGraphInstantiate(&row->graphs[r], graphs[r], 0));
        CUDA(cudaGraphDestroy(graphs[r]));
        CUDA(cudaGraphUpload(row->graphs[r], bench.of[r].stream));
        CUDA(cudaStreamSynchronize(bench.of[r].stream));
    }
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Time of a call; the longest that a rank saw. */
static double sample(const struct row *row)
{
    double begin = now_us(), worst = 0;

    if (!bench.cuda) {
        host_calls(row);
        return now_us() - begin;
    }
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        CUDA(cudaEventRecord(bench.of[r].begin, bench.of[r].stream));
        CUDA(cudaGraphLaunch(row->graphs[r], bench.of[r].stream));
        CUDA(cudaEventRecord(bench.of[r].end, bench.of[r].stream));
    }
    for (uint32_t r = 0; r < bench.ranks; r++) {
        float ms;

        CUDA(cudaEventSynchronize(bench.of[r].end));
        CUDA(cudaEventElapsedTime(&ms, bench.of[r].begin, bench.of[r].end));
        worst = (double)ms > worst ? (double)ms : worst;
    }
    return worst * 1000 / row->calls;
}

/* Chooses the candidate, checks its result, and leaves it with graphs. */
static void prepare(struct row *row)
{
    const char *name = row->number == NCCL ? "NCCL"
                       : bench.variant     ? bench.variant(row->number)
                                           : "product";

    if (!name) {
        fprintf(stderr, "no variant %d\n", row->number);
        exit(2);
    }
    snprintf(row->name, sizeof(row->name), "%s", name);
    for (uint32_t r = 0; bench.cuda && r < bench.ranks; r++) {
        bench_use(r);
        if (row->number > 0)
            bench.variant(row->number); /* loads it on this device, too */
        CUDA(cudaMemset(bench.of[r].out, 0xa5, row->bytes));
        CUDA(cudaDeviceSynchronize());
    }
    if (row->number == NCCL)
        nccl_call(row, 0); /* connects outside of captures */
    if (bench.cuda)
        make_graphs(row);
    sample(row);
    row->verified = true;
    for (uint32_t r = 0; r < bench.ranks; r++)
        row->verified = right(row->c, r) && row->verified;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median_of(const struct row *row)
{
    return row->us[row->samples / 2];
}

static void print(const struct row *row, const struct row *nccl, const struct row *base)
{
    double us = median_of(row), p10 = row->us[row->samples / 10];
    double p90 = row->us[row->samples * 9 / 10];
    double to_nccl = nccl ? median_of(nccl) / us : 0, to_base = base ? median_of(base) / us : 0;
    uint32_t ctas = row->number == NCCL ? 0 : row->ctas;

    printf("%-42s %4d %-40s %3u %9.2f %9.2f %9.2f %7.1f %6.3f %6.3f  %s\n", row->c->what,
           row->number, row->name, ctas, us, p10, p90, (double)row->bytes / us / 1000, to_nccl,
           to_base, row->verified ? "right" : "WRONG");
    printf("{\"schema\":\"loongcomm.peers/1\",\"case\":\"%s\",\"variant\":%d,\"name\":\"%s\","
           "\"ctas\":%u,\"channels\":%u,\"slots\":%u,\"bytes\":%zu,\"samples\":%d,"
           "\"median_us\":%.3f,\"p10\":%.3f,\"p90\":%.3f,\"x_nccl\":%.4f,\"x_base\":%.4f,"
           "\"memory\":\"%s\",\"verified\":%s}\n",
           row->c->what, row->number, row->name, ctas, chosen.shape.channels, chosen.shape.slots,
           row->bytes, row->samples, us, p10, p90, to_nccl, to_base,
           chosen.plain_memory ? "plain" : "vmm", row->verified ? "true" : "false");
    fflush(stdout);
}

static bool listed(const struct numbers *list, int number)
{
    for (int i = 0; i < list->n; i++)
        if (list->of[i] == number)
            return true;
    return false;
}

static bool has_kernel(const struct bench_case *c, int number)
{
    return number == 0 || (bench.variant_kinds && bench.variant_kinds(number) & c->kind);
}

/* NCCL, the product, and what else has a kernel for the case. */
static int candidates(struct row *rows, const struct bench_case *c, uint32_t ctas)
{
    int n = 0;

    for (int i = chosen.nccl ? NCCL : 0; i < CANDIDATES_MAX - 2; i++) {
        if (i == NCCL ? false
            : chosen.all_variants
                ? !has_kernel(c, i) || listed(&chosen.without, i)
                : !listed(&chosen.variants, i) || !has_kernel(c, i) || listed(&chosen.without, i))
            continue;
        rows[n++] = (struct row){ .c = c, .bytes = bytes_of(c), .number = i, .ctas = ctas };
    }
    return n;
}

static void free_graphs(struct row *row)
{
    for (uint32_t r = 0; bench.cuda && r < bench.ranks; r++)
        CUDA(cudaGraphExecDestroy(row->graphs[r]));
}

static bool measure(const struct bench_case *c, uint32_t ctas)
{
    static struct row rows[CANDIDATES_MAX];
    const struct row *nccl = NULL, *base = NULL;
    int n = candidates(rows, c, ctas);
    bool good = true;

    fill(c);
    for (int i = 0; i < n; i++) {
        watch(rows[i].number);
        prepare(&rows[i]);
        nccl = rows[i].number == NCCL ? &rows[i] : nccl;
        base = rows[i].number == 0 ? &rows[i] : base;
        if (chosen.beside)
            beside_measure(&rows[i]);
    }
    for (int round = 0; round < chosen.rounds && !chosen.beside; round++) {
        for (int i = 0; i < n; i++) {
            watch(rows[i].number);
            sample(&rows[i]);
            for (int s = 0; s < 5 && rows[i].samples < SAMPLES_MAX; s++)
                rows[i].us[rows[i].samples++] = sample(&rows[i]);
        }
    }
    alarm(0);
    for (int i = 0; i < n; i++)
        qsort(rows[i].us, (size_t)rows[i].samples, sizeof(*rows[i].us), by_value);
    for (int i = 0; i < n; i++) {
        if (!chosen.beside)
            print(&rows[i], nccl, base);
        good = good && rows[i].verified;
        free_graphs(&rows[i]);
    }
    return good;
}

/* ---- set-up ---- */

static void set_up(void)
{
    bench.most = 256 * MB / shrink;
    for (uint32_t i = 0; i < bench.ranks; i++) {
        struct rank *r = &bench.of[i];

        if (!bench.cuda) {
            r->in = malloc(bench.most);
            r->out = malloc(bench.most);
            r->mask = malloc(MASK_BYTES);
            if (!r->in || !r->out || !r->mask)
                exit(1);
            continue;
        }
        r->device = (int)i % bench.devices;
        bench_use(i);
        CUDA(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&r->other, cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&r->begin));
        CUDA(cudaEventCreate(&r->end));
        CUDA(cudaEventCreate(&r->other_begin));
        CUDA(cudaEventCreate(&r->other_end));
        CUDA(cudaMalloc((void **)&r->in, bench.most));
        CUDA(cudaMalloc((void **)&r->out, bench.most));
        CUDA(cudaMalloc((void **)&r->mask, MASK_BYTES));
    }
    if (bench.cuda)
        CUDA(cudaMallocHost((void **)&fetched, CHECKED));
    else if (!(fetched = malloc(CHECKED)))
        exit(1);
    chosen.shape.ranks = bench.ranks;
    library_make_rings(&chosen.shape, chosen.plain_memory);
}

static bool parse_list(const char *text, struct numbers *list)
{
    char *end;

    for (list->n = 0; list->n < CANDIDATES_MAX; text = end + 1) {
        list->of[list->n++] = (int)strtol(text, &end, 10);
        if (end == text || (*end && *end != ','))
            return false;
        if (!*end)
            return true;
    }
    return false;
}

static bool parse_option(const char *name, const char *text)
{
    uint32_t value = (uint32_t)strtoul(text, NULL, 10);

    if (strcmp(name, "--cases") == 0)
        return parse_list(text, &chosen.cases);
    if (strcmp(name, "--variants") == 0) {
        chosen.all_variants = strcmp(text, "all") == 0;
        return chosen.all_variants || parse_list(text, &chosen.variants);
    }
    if (strcmp(name, "--without") == 0)
        return parse_list(text, &chosen.without);
    if (strcmp(name, "--ctas") == 0)
        return parse_list(text, &chosen.ctas);
    if (strcmp(name, "--nccl") == 0)
        chosen.nccl = text;
    else if (strcmp(name, "--memory") == 0)
        chosen.plain_memory = strcmp(text, "plain") == 0;
    else if (strcmp(name, "--ranks") == 0)
        bench.ranks = value;
    else if (strcmp(name, "--channels") == 0)
        chosen.shape.channels = value;
    else if (strcmp(name, "--slots") == 0)
        chosen.shape.slots = value;
    else if (strcmp(name, "--short") == 0)
        chosen.shape.short_bytes = value;
    else if (strcmp(name, "--rounds") == 0)
        chosen.rounds = (int)value;
    else if (strcmp(name, "--list") == 0)
        chosen.list = value != 0;
    else if (strcmp(name, "--beside") == 0)
        chosen.beside = value != 0;
    else
        return false;
    return bench.ranks >= 2 && bench.ranks <= RANKS_MAX;
}

static bool parse(int argc, char **argv)
{
    bench.ranks = 2;
    chosen.shape.channels = 64;
    chosen.shape.slots = 8;
    chosen.shape.line_bytes = LK_LINES_MAX;
    chosen.shape.short_bytes = 512 << 10;
    chosen.rounds = 5;
    chosen.ctas.of[chosen.ctas.n++] = 32;
    chosen.variants.n = 1;
    for (int i = 0; i < CASES; i++)
        chosen.cases.of[chosen.cases.n++] = i;
    for (int i = 2; i + 1 < argc; i += 2)
        if (!parse_option(argv[i], argv[i + 1]))
            return false;
    for (int i = 0; i < chosen.cases.n; i++)
        if (chosen.cases.of[i] < 0 || chosen.cases.of[i] >= CASES)
            return false;
    return argc >= 2 && argc % 2 == 0;
}

int main(int argc, char **argv)
{
    bool good = true;

    if (!parse(argc, argv))
        return 2;
    library_open(argv[1]);
    if (bench.cuda && (cudaGetDeviceCount(&bench.devices) != cudaSuccess || !bench.devices)) {
        printf("SKIPPED: no GPU on this machine\n");
        return SKIP;
    }
    if (chosen.list) {
        printf("%3d product\n", 0);
        for (int i = 1; bench.variant_kinds && bench.variant_kinds(i); i++)
            printf("%3d %s\n", i, bench.variant(i));
        return 0;
    }
    signal(SIGALRM, stuck);
    watch(0);
    shrink = bench.cuda ? 1 : 512;
    set_up();
    if (!bench.cuda || bench.devices < (int)bench.ranks || (chosen.nccl && !nccl_open(chosen.nccl)))
        chosen.nccl = NULL;
    if (chosen.beside && bench.cuda)
        library_gemm_open(8192);
    chosen.beside = chosen.beside && bench.cuda;
    printf("%-42s %4s %-40s %3s %9s %9s %9s %7s %6s %6s\n", "case", "no", "candidate", "CTA",
           "median us", "p10", "p90", "GB/s", "x NCCL", "x ours");
    for (int i = 0; i < chosen.ctas.n; i++) {
        uint32_t ctas = (uint32_t)chosen.ctas.of[i];

        watch(0);
        if (chosen.nccl)
            nccl_use(chosen.beside ? ctas : 0);
        for (int c = 0; c < chosen.cases.n; c++)
            good = measure(&cases[chosen.cases.of[c]], ctas) && good;
    }
    return good ? 0 : 1;
}
