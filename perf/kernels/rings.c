/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-rings LIBRARY [OPTION VALUE]...
 * All-reduces and all-to-alls on peer-mapped rings, the ranks as streams of this process on one device, whose memory stands for the link:
 * time by case, shape of the rings, variant of the kernels and number of CTAs, beside what a copy takes in the same run.
 * Results are checked before they are timed. Behind each line of the table the same as one JSON line. The host library
 * runs the same with small sizes, to check the program.
 *   --ranks N          2 (2 to 8)
 *   --cases LIST       numbers, from 0; all
 *   --variant LIST     0; others with libloongkernels-variants.so only
 *   --ctas LIST        8,16,32,64
 *   --channels LIST    64
 *   --slots LIST       4
 *   --samples N        101 at most in each row
 *   --limit SECONDS    1 for the samples of a row
 *
 * Exit codes: 0 all results right, 1 a wrong result or a failure, 2 bad usage, 3 a row that did not end, 77 no device.
 */
#include "kernels/rings.h"
#include "common/json.h"
#include "kernels/rings_internal.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SKIP           77
#define RANKS_MAX      8
#define VALUES_MAX     32 /* of an option's list */
#define STUCK_S        30
#define MAX_SAMPLES    1000
#define GRAPH_CALLS    20
#define LIST           500
#define LIST_ALIGNMENT 512
#define BLOCK \
    256 /* elements that are zero or not together: no less than a granule, whatever the wire */
#define EXPERT 4096 /* the same where rows of experts lie together: a tile */

struct library {
    __typeof__(lk_backend) *backend;
    __typeof__(lk_rings_load) *rings_load;
    __typeof__(lk_error_text) *error_text;
    __typeof__(lk_ring_bytes) *ring_bytes;
    __typeof__(lk_ring_state_bytes) *state_bytes;
    __typeof__(lk_segment_new) *segment_new;
    __typeof__(lk_segment_free) *segment_free;
    __typeof__(lk_rings_all_reduce) *all_reduce;
    __typeof__(lk_lines_all_reduce) *lines;
    __typeof__(lk_rings_exchange) *exchange;
    __typeof__(lk_rings_variant) *variant; /* NULL: there is one only */
};

struct bench_case {
    const char *what;
    size_t bytes; /* of data, a rank; 0: those of the list */
    enum lk_type type, wire;
    bool lines; /* one-shot, in a graph of GRAPH_CALLS, per call */
    bool list;
    uint32_t zero_blocks; /* of 16, after which values repeat */
    double bound_us;      /* to be reached with two ranks and 32 CTAs; 0: none */
    bool exchange;        /* an all-to-all of the bytes, the own part included */
    bool experts;         /* blocks are as large as EXPERT says */
};

/* clang-format off */
static const struct bench_case cases[] = {
    { "fp32 256 MB, bf16 wire", 256U << 20, LK_FP32, LK_BF16, false, false, 0, 430, false, false },
    { "bf16 128 MB", 128U << 20, LK_BF16, LK_BF16, false, false, 0, 330, false, false },
    { "fp32 256 MB", 256U << 20, LK_FP32, LK_FP32, false, false, 0, 580, false, false },
    { "500 tensors 4 KB - 4 MB, bf16 wire", 0, LK_FP32, LK_BF16, false, true, 0, 0, false, false },
    { "the same bytes in one, bf16 wire", 0, LK_FP32, LK_BF16, false, false, 0, 0, false, false },
    { "one-shot 8 B", 8, LK_FP32, LK_FP32, true, false, 0, 6, false, false },
    { "one-shot 4 KB", 4096, LK_FP32, LK_FP32, true, false, 0, 6, false, false },
    { "one-shot 64 KB", 65536, LK_FP32, LK_FP32, true, false, 0, 6, false, false },
    { "fp32 16 MB, bf16 wire", 16U << 20, LK_FP32, LK_BF16, false, false, 0, 0, false, false },
    { "fp32 1 MB, bf16 wire", 1U << 20, LK_FP32, LK_BF16, false, false, 0, 0, false, false },
    { "fp32 256 MB, bf16 wire, 1/2 zeros", 256U << 20, LK_FP32, LK_BF16, false, false, 8, 0, false, false },
    { "fp32 256 MB, bf16 wire, 15/16 zeros", 256U << 20, LK_FP32, LK_BF16, false, false, 15, 0, false, false },
    { "all-to-all 256 MB", 256U << 20, LK_FP32, LK_FP32, false, false, 0, 0, true, false },
    { "all-to-all 256 MB, 10/16 zeros", 256U << 20, LK_FP32, LK_FP32, false, false, 10, 0, true, false },
    { "all-to-all 256 MB, 12/16 zeros", 256U << 20, LK_FP32, LK_FP32, false, false, 12, 0, true, false },
    { "all-to-all 256 MB, 15/16 zeros", 256U << 20, LK_FP32, LK_FP32, false, false, 15, 0, true, false },
    { "all-to-all 16 MB", 16U << 20, LK_FP32, LK_FP32, false, false, 0, 0, true, false },
    { "all-to-all 1 MB", 1U << 20, LK_FP32, LK_FP32, false, false, 0, 0, true, false },
    { "all-to-all 256 MB, 12/16 zeros, experts of 256 KB", 256U << 20, LK_FP32, LK_FP32, false, false, 12, 0, true, true },
};
/* clang-format on */

#define CASES (sizeof(cases) / sizeof(*cases))

/* Of an option. */
struct values {
    uint32_t of[VALUES_MAX];
    size_t n;
};

/* One row's figures. */
struct row {
    const struct bench_case *c;
    struct lk_ring_shape shape;
    uint32_t variant;
    const char *variant_name;
    uint32_t ctas;
    size_t bytes;
    double median_us, p10_us, p90_us;
    double must_move;   /* bytes that all ranks read and write in device memory, rings included */
    double roofline_us; /* that a copy takes for as many; 0: not said */
    int samples;
    bool verified;
};

static struct library lib;
static bool cuda;

static struct {
    uint32_t ranks;
    struct lk_rings rings[RANKS_MAX];
    uint8_t *in[RANKS_MAX], *out[RANKS_MAX];
    const struct bench_case *filled; /* what `in` is for */
    struct lk_buffers list[RANKS_MAX][LIST];
    size_t list_bytes;
    uint8_t *fetched; /* where results are compared */
    cudaStream_t streams[RANKS_MAX];
    cudaEvent_t begin, end, fork, join;
    double copy_gbs; /* read and written */
    int samples;
    double limit_us;
    char machine[300];
} bench;

static void must(int err, const char *what)
{
    if (!err)
        return;
    fprintf(stderr, "%s: %s\n", what,
            cuda && err > 0 ? cudaGetErrorString((cudaError_t)err) : lib.error_text(err));
    exit(1);
}

#define CUDA(call) must((int)(call), #call)

static void *device_alloc(size_t bytes)
{
    void *ptr;

    if (cuda) {
        CUDA(cudaMalloc(&ptr, bytes));
        CUDA(cudaMemset(ptr, 0, bytes));
        return ptr;
    }
    ptr = aligned_alloc(128, (bytes + 127) / 128 * 128);
    if (!ptr)
        exit(1);
    return memset(ptr, 0, bytes);
}

/* ---- values: small integers, of which every sum is exact in each type ---- */

/* Elements. */
static size_t block_of(const struct bench_case *c)
{
    return c->experts ? EXPERT : BLOCK;
}

/* Values repeat after so many elements. */
static size_t period_elements(const struct bench_case *c)
{
    return 16 * block_of(c);
}

/* Of element `i` of a period. Sums of all ranks stay below 128: exact in bf16. The first blocks are zero on all ranks. */
static float value_of(const struct bench_case *c, uint32_t rank, size_t i)
{
    if (i / block_of(c) < c->zero_blocks)
        return 0;
    return (float)((i * 7 + (size_t)rank * 3) % (128 / bench.ranks));
}

static void encode(enum lk_type type, float x, uint8_t *p)
{
    uint32_t bits;
    uint16_t half;

    memcpy(&bits, &x, 4);
    half = (uint16_t)(bits >> 16);
    if (type == LK_FP32)
        memcpy(p, &bits, 4);
    else
        memcpy(p, &half, 2);
}

static size_t size_of(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

/* A period of what `rank` has, or of everybody's sum (bench.ranks). */
static uint8_t *period_of(const struct bench_case *c, uint32_t rank)
{
    size_t each = size_of(c->type);
    uint8_t *values = malloc(period_elements(c) * each);

    if (!values)
        exit(1);
    for (size_t i = 0; i < period_elements(c); i++) {
        float x = 0;

        for (uint32_t r = 0; r < bench.ranks; r++)
            if (rank == r || rank == bench.ranks)
                x += value_of(c, r, i);
        encode(c->type, x, values + i * each);
    }
    return values;
}

static size_t period_bytes(const struct bench_case *c)
{
    return period_elements(c) * size_of(c->type);
}

static void fill(uint32_t rank, const struct bench_case *c, size_t bytes)
{
    size_t period = period_bytes(c), done = period < bytes ? period : bytes;
    uint8_t *values = period_of(c, rank);

    if (cuda)
        CUDA(cudaMemcpy(bench.in[rank], values, done, cudaMemcpyHostToDevice));
    else
        memcpy(bench.in[rank], values, done);
    while (done < bytes) { /* doubles what is there */
        size_t size = bytes - done < done ? bytes - done : done;

        if (cuda)
            CUDA(cudaMemcpy(bench.in[rank] + done, bench.in[rank], size, cudaMemcpyDeviceToDevice));
        else
            memcpy(bench.in[rank] + done, bench.in[rank], size);
        done += size;
    }
    free(values);
}

/* Nothing that was right before is left. */
static void spoil(uint32_t rank, size_t bytes)
{
    if (cuda)
        CUDA(cudaMemset(bench.out[rank], 0xa5, bytes));
    else
        memset(bench.out[rank], 0xa5, bytes);
}

/* Of an all-to-all: what a rank sends to each one, in whole granules. */
static size_t part_of(const struct row *row)
{
    return row->bytes / bench.ranks / LK_GRANULE * LK_GRANULE;
}

/* `bytes` from `got` on repeat the first `period` of `want`, of which they begin at byte `begin`. */
static bool repeats(const uint8_t *got, size_t bytes, const uint8_t *want, size_t period,
                    size_t begin)
{
    while (bytes) {
        size_t size = period - begin < bytes ? period - begin : bytes;

        if (memcmp(got, want + begin, size) != 0)
            return false;
        got += size, bytes -= size, begin = 0;
    }
    return true;
}

/* Of the list; between its tensors there is nothing. */
static bool right_list(uint32_t rank, const uint8_t *got, const struct row *row)
{
    size_t period = period_bytes(row->c);
    uint8_t *want = period_of(row->c, bench.ranks);
    bool good = true;

    for (size_t i = 0; good && i < LIST; i++) {
        const struct lk_buffers *b = &bench.list[rank][i];
        size_t at = (size_t)((uint8_t *)b->out - bench.out[rank]);

        good = repeats(got + at, b->count * size_of(row->c->type), want, period, at % period);
    }
    free(want);
    return good;
}

/* Everybody's sum, or behind one another what each rank has sent here. */
static bool right(uint32_t rank, const struct row *row)
{
    const struct bench_case *c = row->c;
    size_t period = period_bytes(c), part = c->exchange ? part_of(row) : row->bytes;
    const uint8_t *got = cuda ? bench.fetched : bench.out[rank];
    bool good = true;

    if (cuda)
        CUDA(cudaMemcpy(bench.fetched, bench.out[rank], row->bytes, cudaMemcpyDeviceToHost));
    if (c->list)
        return right_list(rank, got, row);
    for (uint32_t src = 0; good && src < (c->exchange ? bench.ranks : 1); src++) {
        uint8_t *want = period_of(c, c->exchange ? src : bench.ranks);

        good = repeats(got + src * part, part, want, period,
                       c->exchange ? rank * part % period : 0);
        free(want);
    }
    return good;
}

/* ---- calls ---- */

struct one_call {
    const struct row *row;
    uint32_t rank;
};

static int exchange_all(const struct one_call *one)
{
    struct lk_message sends[RANKS_MAX], recvs[RANKS_MAX];
    size_t part = part_of(one->row);

    for (uint32_t r = 0; r < bench.ranks; r++) {
        sends[r] = (struct lk_message){ bench.in[one->rank] + r * part, part, r, 1 };
        recvs[r] = (struct lk_message){ bench.out[one->rank] + r * part, part, r, 0 };
    }
    return lib.exchange(&bench.rings[one->rank], sends, bench.ranks, recvs, bench.ranks, NULL,
                        one->row->ctas, bench.streams[one->rank]);
}

static void *call_rank(void *arg)
{
    const struct one_call *one = arg;
    const struct bench_case *c = one->row->c;
    struct lk_reduction how = { .type = c->type, .wire = c->wire, .post = 1 };
    struct lk_buffers single = { bench.in[one->rank], bench.out[one->rank],
                                 one->row->bytes / size_of(c->type) };
    const struct lk_buffers *list = c->list ? bench.list[one->rank] : &single;
    const struct lk_rings *rings = &bench.rings[one->rank];
    void *stream = bench.streams[one->rank];
    size_t n = c->list ? LIST : 1;

    must(c->exchange ? exchange_all(one)
         : c->lines  ? lib.lines(rings, &how, list, n, one->row->ctas, stream)
                     : lib.all_reduce(rings, &how, list, n, one->row->ctas, stream),
         c->what);
    return NULL;
}

/* All ranks. Calls of the host library end when all are done. */
static void call_all(const struct row *row)
{
    struct one_call ones[RANKS_MAX];
    pthread_t threads[RANKS_MAX];

    if (cuda) {
        for (uint32_t r = 0; r < bench.ranks; r++) {
            ones[r] = (struct one_call){ row, r };
            call_rank(&ones[r]);
        }
        return;
    }
    for (uint32_t r = 0; r < bench.ranks; r++) {
        ones[r] = (struct one_call){ row, r };
        if (pthread_create(&threads[r], NULL, call_rank, &ones[r]))
            exit(1);
    }
    for (uint32_t r = 0; r < bench.ranks; r++)
        pthread_join(threads[r], NULL);
}

static void fork_streams(void)
{
    CUDA(cudaEventRecord(bench.fork, bench.streams[0]));
    for (uint32_t r = 1; r < bench.ranks; r++)
        CUDA(cudaStreamWaitEvent(bench.streams[r], bench.fork, 0));
}

static void join_streams(void)
{
    for (uint32_t r = 1; r < bench.ranks; r++) {
        CUDA(cudaEventRecord(bench.join, bench.streams[r]));
        CUDA(cudaStreamWaitEvent(bench.streams[0], bench.join, 0));
    }
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Of a graph: small calls follow each other. */
static int calls_of(const struct row *row)
{
    return row->c->lines ? GRAPH_CALLS : 1;
}

/* One sample: from when all may start until all have ended. */
static double sample_us(const struct row *row, cudaGraphExec_t graph)
{
    double begin = now_us();
    float ms;

    if (!cuda) {
        call_all(row);
        return now_us() - begin;
    }
    CUDA(cudaEventRecord(bench.begin, bench.streams[0]));
    if (graph) {
        CUDA(cudaGraphLaunch(graph, bench.streams[0]));
    } else {
        fork_streams();
        call_all(row);
        join_streams();
    }
    CUDA(cudaEventRecord(bench.end, bench.streams[0]));
    CUDA(cudaEventSynchronize(bench.end));
    CUDA(cudaEventElapsedTime(&ms, bench.begin, bench.end));
    return (double)ms * 1000 / (graph ? calls_of(row) : 1);
}

static cudaGraphExec_t make_graph(const struct row *row)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(bench.streams[0], cudaStreamCaptureModeThreadLocal));
    fork_streams();
    for (int i = 0; i < calls_of(row); i++)
        call_all(row);
    join_streams();
    CUDA(cudaStreamEndCapture(bench.streams[0], &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Each rank reads and writes all its data once; each leg, of which an all-to-all has one, writes and reads what is not its
 * own and not zero. */
static double traffic(const struct row *row)
{
    double ranks = bench.ranks, data = (double)size_of(row->c->type);
    double wire = (double)size_of(row->c->wire) * (16 - row->c->zero_blocks) / 16;
    double elements = (double)row->bytes / data, legs = row->c->exchange ? 1 : 2;

    return ranks * elements * (2 * data + legs * 2 * wire * (ranks - 1) / ranks);
}

static void take_samples(struct row *row)
{
    static double samples[MAX_SAMPLES];
    cudaGraphExec_t graph = cuda ? make_graph(row) : NULL; /* so that the host's time is in none */
    double begin = now_us();
    int n = 0;

    for (int i = 0; i < 3; i++)
        sample_us(row, graph);
    while (n < bench.samples && (n < 3 || now_us() - begin < bench.limit_us))
        samples[n++] = sample_us(row, graph);
    if (graph)
        CUDA(cudaGraphExecDestroy(graph));
    qsort(samples, (size_t)n, sizeof(*samples), by_value);
    row->median_us = samples[n / 2];
    row->p10_us = samples[n / 10];
    row->p90_us = samples[n * 9 / 10];
    row->samples = n;
}

static void measure(struct row *row)
{
    alarm(STUCK_S);
    for (uint32_t r = 0; r < bench.ranks; r++) {
        if (bench.filled != row->c)
            fill(r, row->c, row->bytes);
        spoil(r, row->bytes);
    }
    bench.filled = row->c;
    if (cuda)
        CUDA(cudaDeviceSynchronize());
    sample_us(row, NULL);
    row->verified = true;
    for (uint32_t r = 0; r < bench.ranks; r++)
        row->verified = right(r, row) && row->verified;
    take_samples(row);
    row->must_move = traffic(row);
    if (bench.copy_gbs > 0 && !row->c->lines)
        row->roofline_us = row->must_move / bench.copy_gbs / 1000;
    alarm(0);
}

static void stuck(int sig)
{
    static const char text[] = "a row did not end\n";

    (void)sig;
    if (write(2, text, sizeof(text) - 1) < 0)
        _exit(1);
    _exit(3);
}

/* ---- output ---- */

static void write_row(struct lc_json *json, const struct row *row)
{
    lc_json_object(json);
    lc_json_key_string(json, "schema", "loongcomm.bench/1");
    lc_json_key_string(json, "op",
                       row->c->exchange ? "rings all-to-all"
                       : row->c->lines  ? "rings one-shot"
                                        : "rings all-reduce");
    lc_json_key_string(json, "case", row->c->what);
    lc_json_key_double(json, "ranks", bench.ranks);
    lc_json_key_double(json, "variant", row->variant);
    lc_json_key_string(json, "variant_name", row->variant_name);
    lc_json_key_double(json, "ctas", row->ctas);
    lc_json_key_double(json, "channels", row->shape.channels);
    lc_json_key_double(json, "slots", row->shape.slots);
    lc_json_key_double(json, "bytes", (double)row->bytes);
    lc_json_key_double(json, "samples", row->samples);
    lc_json_key_double(json, "median_us", row->median_us);
    lc_json_key_double(json, "p10", row->p10_us);
    lc_json_key_double(json, "p90", row->p90_us);
    lc_json_key_double(json, "algbw", (double)row->bytes / row->median_us / 1000);
    lc_json_key_double(json, "must_move_bytes", row->must_move);
    lc_json_key_double(json, "roofline_us", row->roofline_us);
    lc_json_key_double(json, "share_of_roofline", row->roofline_us / row->median_us);
    lc_json_key_double(json, "bound_us", row->c->bound_us);
    lc_json_key_double(json, "copy_gbs", bench.copy_gbs);
    lc_json_key(json, "verified");
    lc_json_bool(json, row->verified);
    lc_json_key_string(json, "machine", bench.machine);
    lc_json_end(json);
}

static void print_row(const struct row *row)
{
    struct lc_json json;
    size_t bytes;
    char *text;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        exit(1);
    lc_json_init(&json, out);
    write_row(&json, row);
    if (lc_json_finish(&json) || fclose(out))
        exit(1);
    printf("%-36s %-24.24s %3u %2u %4u %9.1f %9.1f %9.1f %9.1f %5.2f  %s\n", row->c->what,
           row->variant_name, row->shape.channels, row->shape.slots, row->ctas, row->median_us,
           row->p10_us, row->p90_us, row->roofline_us, row->roofline_us / row->median_us,
           row->verified ? "right" : "WRONG");
    for (const char *p = text; *p; p++) {
        if (*p == '\n')
            p += strspn(p, "\n ") - 1;
        else
            putchar(*p);
    }
    putchar('\n');
    fflush(stdout);
    free(text);
}

/* ---- set-up ---- */

static void measure_copy(size_t bytes)
{
    double samples[21];
    float ms;

    if (!cuda)
        return;
    for (int i = 0; i < 21; i++) {
        CUDA(cudaEventRecord(bench.begin, bench.streams[0]));
        CUDA(cudaMemcpyAsync(bench.out[0], bench.in[0], bytes, cudaMemcpyDeviceToDevice,
                             bench.streams[0]));
        CUDA(cudaEventRecord(bench.end, bench.streams[0]));
        CUDA(cudaEventSynchronize(bench.end));
        CUDA(cudaEventElapsedTime(&ms, bench.begin, bench.end));
        samples[i] = (double)ms * 1000;
    }
    qsort(samples, 21, sizeof(*samples), by_value);
    bench.copy_gbs = 2 * (double)bytes / samples[10] / 1000;
    printf("copy: %.0f GB/s\n", bench.copy_gbs);
}

/* Sizes spread evenly by their logarithm, addresses as allocators give them. */
static void make_list(size_t shrink)
{
    uint64_t state = 5;
    size_t at = 0;

    for (size_t i = 0; i < LIST; i++) {
        size_t bytes;

        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        bytes = (size_t)(4096 * pow(1024, (double)(state >> 40) * 0x1p-24)) / shrink / 16 * 16;
        for (uint32_t r = 0; r < bench.ranks; r++) {
            bench.list[r][i].in = (void *)(uintptr_t)
                at; /* made addresses when the buffers are there */
            bench.list[r][i].count = bytes / 4;
        }
        at += (bytes + LIST_ALIGNMENT - 1) / LIST_ALIGNMENT * LIST_ALIGNMENT;
    }
    bench.list_bytes = at;
}

static void set_up(size_t most)
{
    uint32_t *abort_word;

    if (cuda) {
        struct cudaDeviceProp prop;

        CUDA(cudaSetDevice(0));
        CUDA(cudaGetDeviceProperties(&prop, 0));
        snprintf(bench.machine, sizeof(bench.machine), "%s", prop.name);
        for (uint32_t r = 0; r < bench.ranks; r++)
            CUDA(cudaStreamCreateWithFlags(&bench.streams[r], cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&bench.begin));
        CUDA(cudaEventCreate(&bench.end));
        CUDA(cudaEventCreateWithFlags(&bench.fork, cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&bench.join, cudaEventDisableTiming));
        CUDA(cudaMallocHost((void **)&bench.fetched, most));
    }
    must(lib.rings_load(), "lk_rings_load");
    abort_word = device_alloc(sizeof(*abort_word));
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench.in[r] = device_alloc(most);
        bench.out[r] = device_alloc(most);
        for (size_t i = 0; i < LIST; i++) {
            uintptr_t at = (uintptr_t)bench.list[r][i].in;

            bench.list[r][i].in = bench.in[r] + at;
            bench.list[r][i].out = bench.out[r] + at;
        }
        bench.rings[r].rank = r;
        bench.rings[r].abort = abort_word;
    }
}

static void make_rings(const struct lk_ring_shape *shape)
{
    for (uint32_t r = 0; r < bench.ranks; r++) {
        void *segment;
        int fd;

        must(lib.segment_new(lib.ring_bytes(shape), bench.streams[r], &segment, &fd), "segment");
        close(fd);
        bench.rings[r].shape = *shape;
        bench.rings[r].state = device_alloc(lib.state_bytes(shape));
        for (uint32_t to = 0; to < bench.ranks; to++)
            bench.rings[to].segments[r] = segment;
    }
    if (cuda)
        CUDA(cudaDeviceSynchronize());
}

static void free_rings(void)
{
    for (uint32_t r = 0; r < bench.ranks; r++) {
        struct lk_rings *rings = &bench.rings[r];

        if (cuda)
            CUDA(cudaFree(rings->state));
        else
            free(rings->state);
        must(lib.segment_free(rings->segments[r], lib.ring_bytes(&rings->shape)), "segment");
    }
}

static void open_library(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    bool whole = true;

#define FIND(member, name)                                                                \
    lib.member = handle ? (__typeof__(lib.member))(uintptr_t)dlsym(handle, #name) : NULL; \
    whole = whole && lib.member;
    FIND(backend, lk_backend)
    FIND(rings_load, lk_rings_load)
    FIND(error_text, lk_error_text)
    FIND(ring_bytes, lk_ring_bytes)
    FIND(state_bytes, lk_ring_state_bytes)
    FIND(segment_new, lk_segment_new)
    FIND(segment_free, lk_segment_free)
    FIND(all_reduce, lk_rings_all_reduce)
    FIND(lines, lk_lines_all_reduce)
    FIND(exchange, lk_rings_exchange)
#undef FIND
    if (!whole) {
        fprintf(stderr, "%s: %s\n", path, handle ? "no kernels library with rings" : dlerror());
        exit(1);
    }
    lib.variant = (__typeof__(lib.variant))(uintptr_t)dlsym(handle, "lk_rings_variant");
    cuda = strcmp(lib.backend(), "cuda") == 0;
}

/* ---- options ---- */

static struct {
    struct values cases, variants, ctas, channels, slots;
} chosen = {
    .variants = {{ 0 },              1},
    .ctas = { { 8, 16, 32, 64 }, 4},
    .channels = { { 64 },            1},
    .slots = { { 4 },             1},
};

static bool parse_list(const char *text, struct values *list)
{
    char *end;

    for (list->n = 0; list->n < VALUES_MAX; text = end + 1) {
        list->of[list->n++] = (uint32_t)strtoul(text, &end, 10);
        if (end == text || (*end && *end != ','))
            return false;
        if (!*end)
            return true;
    }
    return false;
}

static bool parse_option(const char *name, const char *text)
{
    static const struct {
        const char *name;
        struct values *list;
    } lists[] = {
        {"--cases",     &chosen.cases   },
        { "--variant",  &chosen.variants},
        { "--ctas",     &chosen.ctas    },
        { "--channels", &chosen.channels},
        { "--slots",    &chosen.slots   },
    };
    uint32_t value = (uint32_t)strtoul(text, NULL, 10);

    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++)
        if (strcmp(name, lists[i].name) == 0)
            return parse_list(text, lists[i].list);
    if (strcmp(name, "--ranks") == 0)
        bench.ranks = value;
    else if (strcmp(name, "--samples") == 0)
        bench.samples = (int)value;
    else if (strcmp(name, "--limit") == 0)
        bench.limit_us = value * 1e6;
    else
        return false;
    return bench.ranks >= 2 && bench.ranks <= RANKS_MAX && bench.samples >= 1 &&
           bench.samples <= MAX_SAMPLES;
}

static bool parse(int argc, char **argv)
{
    bench.ranks = 2;
    bench.samples = 101;
    bench.limit_us = 1e6;
    for (chosen.cases.n = 0; chosen.cases.n < CASES; chosen.cases.n++)
        chosen.cases.of[chosen.cases.n] = (uint32_t)chosen.cases.n;
    for (int i = 2; i + 1 < argc; i += 2)
        if (!parse_option(argv[i], argv[i + 1]))
            return false;
    for (size_t i = 0; i < chosen.cases.n; i++)
        if (chosen.cases.of[i] >= CASES)
            return false;
    return argc >= 2 && argc % 2 == 0;
}

/* ---- rows ---- */

static const char *choose_variant(uint32_t number)
{
    const char *name = lib.variant ? lib.variant((int)number) : number ? NULL : "product";

    if (!name) {
        fprintf(stderr, "no variant %u\n", number);
        exit(2);
    }
    return name;
}

/* One-shot calls are the same in all variants and shapes: with the first of each only. */
static bool measure_case(const struct bench_case *c, bool first, size_t shrink,
                         const struct lk_ring_shape *shape)
{
    bool good = true;

    for (size_t v = 0; v < (c->lines ? first : chosen.variants.n); v++) {
        const char *name = choose_variant(chosen.variants.of[v]);

        for (size_t g = 0; g < chosen.ctas.n; g++) {
            struct row row = { .c = c,
                               .shape = *shape,
                               .variant = chosen.variants.of[v],
                               .variant_name = name,
                               .ctas = chosen.ctas.of[g] };

            row.bytes = !c->bytes ? bench.list_bytes : c->lines ? c->bytes : c->bytes / shrink;
            measure(&row);
            print_row(&row);
            good = good && row.verified;
        }
    }
    return good;
}

static bool measure_all(size_t shrink)
{
    bool good = true;

    printf("%-36s %-24s %3s %2s %4s %9s %9s %9s %9s %5s\n", "case", "variant", "ch", "sl", "CTAs",
           "median us", "p10", "p90", "roofline", "share");
    for (size_t i = 0; i < chosen.channels.n; i++) {
        for (size_t j = 0; j < chosen.slots.n; j++) {
            struct lk_ring_shape shape = { bench.ranks, chosen.channels.of[i], chosen.slots.of[j],
                                           65536, 524288 };

            if (!lib.ring_bytes(&shape))
                exit(2);
            make_rings(&shape);
            for (size_t c = 0; c < chosen.cases.n; c++)
                good = measure_case(&cases[chosen.cases.of[c]], i + j == 0, shrink, &shape) && good;
            free_rings();
        }
    }
    return good;
}

int main(int argc, char **argv)
{
    size_t shrink, most;
    int devices = 0;

    if (!parse(argc, argv))
        return 2;
    open_library(argv[1]);
    if (cuda && (cudaGetDeviceCount(&devices) != cudaSuccess || !devices)) {
        printf("SKIPPED: no GPU on this machine\n");
        return SKIP;
    }
    signal(SIGALRM, stuck);
    snprintf(bench.machine, sizeof(bench.machine), "host");
    shrink = cuda ? 1 : 512;
    make_list(shrink);
    most = (256U << 20) / shrink;
    set_up((bench.list_bytes > most ? bench.list_bytes : most) + 65536);
    measure_copy(most);
    return measure_all(shrink) ? 0 : 1;
}
