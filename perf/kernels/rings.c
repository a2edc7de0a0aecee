/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-rings LIBRARY [--channels N] [--slots N] [--samples N]
 * All-reduce on peer-mapped rings, two ranks as two streams of this process on one device, whose memory stands for the
 * link: time by number of CTAs beside what a copy of the same bytes takes in the same run. Results are checked before they
 * are timed. A table, then one JSON line a row. The host library runs the same with small sizes, to check the program.
 *
 * Exit codes: 0 all results right, 1 a wrong result or a failure, 2 bad usage, 77 no device.
 */
#include "kernels/rings.h"
#include "common/json.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SKIP        77
#define RANKS       2
#define MAX_SAMPLES 1000
#define GRAPH_CALLS 20
#define LIST        500
#define PERIOD      4096 /* source values repeat after so many elements */

struct library {
    __typeof__(lk_backend) *backend;
    __typeof__(lk_load_all) *load_all;
    __typeof__(lk_error_text) *error_text;
    __typeof__(lk_ring_bytes) *ring_bytes;
    __typeof__(lk_ring_state_bytes) *state_bytes;
    __typeof__(lk_segment_new) *segment_new;
    __typeof__(lk_rings_all_reduce) *all_reduce;
    __typeof__(lk_lines_all_reduce) *lines;
};

struct bench_case {
    const char *what;
    size_t bytes; /* of data, a rank */
    enum lk_type type, wire;
    bool lines; /* one-shot, in a graph of GRAPH_CALLS, per call */
    bool list;
    double prototype_us[4]; /* by number of CTAs; 0: none */
};

static const uint32_t grids[] = { 8, 16, 32, 64 };

static const struct bench_case cases[] = {
    {"fp32 256 MB, bf16 wire",
     256U << 20,
     LK_FP32,                                                    LK_BF16,
     false,                                                                      false,
     { 2432, 1271, 728, 0 }                                                                  },
    { "bf16 128 MB",                        128U << 20, LK_BF16, LK_BF16, false, false, { 0 }},
    { "fp32 256 MB",                        256U << 20, LK_FP32, LK_FP32, false, false, { 0 }},
    { "fp32 16 MB, bf16 wire",              16U << 20,  LK_FP32, LK_BF16, false, false, { 0 }},
    { "fp32 1 MB, bf16 wire",               1U << 20,   LK_FP32, LK_BF16, false, false, { 0 }},
    { "500 tensors 4 KB - 4 MB, bf16 wire", 0,          LK_FP32, LK_BF16, false, true,  { 0 }},
    { "the same bytes in one, bf16 wire",   0,          LK_FP32, LK_BF16, false, false, { 0 }},
    { "one-shot 8 B",                       8,          LK_FP32, LK_FP32, true,  false, { 0 }},
    { "one-shot 4 KB",                      4096,       LK_FP32, LK_FP32, true,  false, { 0 }},
    { "one-shot 64 KB",                     65536,      LK_FP32, LK_FP32, true,  false, { 0 }},
};

/* One row's figures. */
struct row {
    const struct bench_case *c;
    uint32_t ctas;
    size_t bytes;
    double median_us, p10_us, p90_us, roofline_us, prototype_us;
    bool verified;
};

static struct library lib;
static bool cuda;

static struct {
    struct lk_rings rings[RANKS];
    uint8_t *in[RANKS], *out[RANKS];
    struct lk_buffers list[RANKS][LIST];
    size_t list_bytes;
    cudaStream_t streams[RANKS];
    cudaEvent_t begin, end, fork, join;
    double copy_gbs; /* read and written */
    int samples;
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

static float value_of(uint32_t rank, size_t i)
{
    return (float)((i % PERIOD * 7 + (size_t)rank * 3) % 64);
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

static void fill(uint32_t rank, enum lk_type type, size_t bytes)
{
    size_t each = type == LK_FP32 ? 4 : 2, period = PERIOD * each;
    uint8_t *values = malloc(period);

    if (!values)
        exit(1);
    for (size_t i = 0; i < PERIOD; i++)
        encode(type, value_of(rank, i), values + i * each);
    for (size_t at = 0; at < bytes; at += period) {
        size_t size = bytes - at < period ? bytes - at : period;

        if (!cuda)
            memcpy(bench.in[rank] + at, values, size);
        else if (at == 0)
            CUDA(cudaMemcpy(bench.in[rank], values, size, cudaMemcpyHostToDevice));
        else { /* doubles what is there */
            size = bytes - at < at ? bytes - at : at;
            CUDA(cudaMemcpy(bench.in[rank] + at, bench.in[rank], size, cudaMemcpyDeviceToDevice));
            at += size - period;
        }
    }
    free(values);
}

static bool right(uint32_t rank, enum lk_type type, size_t bytes)
{
    size_t each = type == LK_FP32 ? 4 : 2;
    uint8_t *got = malloc(bytes), want[4];
    bool good = got != NULL;

    if (good && cuda)
        CUDA(cudaMemcpy(got, bench.out[rank], bytes, cudaMemcpyDeviceToHost));
    else if (good)
        memcpy(got, bench.out[rank], bytes);
    for (size_t i = 0; good && i < bytes / each; i++) {
        encode(type, value_of(0, i) + value_of(1, i), want);
        good = memcmp(got + i * each, want, each) == 0;
    }
    free(got);
    return good;
}

/* ---- calls ---- */

struct one_call {
    const struct row *row;
    uint32_t rank;
};

static void *call_rank(void *arg)
{
    const struct one_call *one = arg;
    const struct bench_case *c = one->row->c;
    struct lk_reduction how = { .type = c->type, .wire = c->wire, .post = 1 };
    struct lk_buffers single = { bench.in[one->rank], bench.out[one->rank],
                                 one->row->bytes / (c->type == LK_FP32 ? 4 : 2) };
    const struct lk_buffers *list = c->list ? bench.list[one->rank] : &single;
    const struct lk_rings *rings = &bench.rings[one->rank];
    void *stream = bench.streams[one->rank];
    size_t n = c->list ? LIST : 1;

    must(c->lines ? lib.lines(rings, &how, list, n, one->row->ctas, stream)
                  : lib.all_reduce(rings, &how, list, n, one->row->ctas, stream),
         c->what);
    return NULL;
}

/* Both ranks. Calls of the host library end when both are done. */
static void call_both(const struct row *row)
{
    struct one_call ones[RANKS] = {
        {row,  0},
        { row, 1}
    };
    pthread_t other;

    if (cuda) {
        call_rank(&ones[0]);
        call_rank(&ones[1]);
        return;
    }
    if (pthread_create(&other, NULL, call_rank, &ones[1]))
        exit(1);
    call_rank(&ones[0]);
    pthread_join(other, NULL);
}

static void fork_stream(void)
{
    CUDA(cudaEventRecord(bench.fork, bench.streams[0]));
    CUDA(cudaStreamWaitEvent(bench.streams[1], bench.fork, 0));
}

static void join_stream(void)
{
    CUDA(cudaEventRecord(bench.join, bench.streams[1]));
    CUDA(cudaStreamWaitEvent(bench.streams[0], bench.join, 0));
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* One sample: from when both may start until both have ended. */
static double sample_us(const struct row *row, cudaGraphExec_t graph)
{
    double begin = now_us();
    float ms;

    if (!cuda) {
        call_both(row);
        return now_us() - begin;
    }
    CUDA(cudaEventRecord(bench.begin, bench.streams[0]));
    if (graph) {
        CUDA(cudaGraphLaunch(graph, bench.streams[0]));
    } else {
        fork_stream();
        call_both(row);
        join_stream();
    }
    CUDA(cudaEventRecord(bench.end, bench.streams[0]));
    CUDA(cudaEventSynchronize(bench.end));
    CUDA(cudaEventElapsedTime(&ms, bench.begin, bench.end));
    return (double)ms * 1000 / (graph ? GRAPH_CALLS : 1);
}

static cudaGraphExec_t make_graph(const struct row *row)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(bench.streams[0], cudaStreamCaptureModeThreadLocal));
    fork_stream();
    for (int i = 0; i < GRAPH_CALLS; i++)
        call_both(row);
    join_stream();
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

/* Bytes that both ranks read and write in device memory, rings included. */
static double traffic(const struct row *row)
{
    double data = row->c->type == LK_FP32 ? 4 : 2, wire = row->c->wire == LK_FP32 ? 4 : 2;

    return 4 * ((double)row->bytes / data) * (data + wire);
}

static void measure(struct row *row)
{
    static double samples[MAX_SAMPLES];
    cudaGraphExec_t graph = NULL;

    for (uint32_t r = 0; r < RANKS; r++)
        fill(r, row->c->type, row->bytes);
    sample_us(row, NULL);
    row->verified = right(0, row->c->type, row->bytes) && right(1, row->c->type, row->bytes);
    if (cuda && row->c->lines)
        graph = make_graph(row);
    for (int i = 0; i < 5; i++)
        sample_us(row, graph);
    for (int i = 0; i < bench.samples; i++)
        samples[i] = sample_us(row, graph);
    if (graph)
        CUDA(cudaGraphExecDestroy(graph));
    qsort(samples, (size_t)bench.samples, sizeof(*samples), by_value);
    row->median_us = samples[bench.samples / 2];
    row->p10_us = samples[bench.samples / 10];
    row->p90_us = samples[bench.samples * 9 / 10];
    row->roofline_us = bench.copy_gbs > 0 && !row->c->lines ? traffic(row) / bench.copy_gbs / 1000
                                                            : 0;
    printf("%-36s %4u %9.1f %9.1f %9.1f %9.1f %9.1f  %s\n", row->c->what, row->ctas, row->median_us,
           row->p10_us, row->p90_us, row->roofline_us, row->prototype_us,
           row->verified ? "right" : "WRONG");
    fflush(stdout);
}

/* ---- output ---- */

static void key_double(struct lc_json *json, const char *key, double value)
{
    lc_json_key(json, key);
    lc_json_double(json, value);
}

static void key_string(struct lc_json *json, const char *key, const char *value)
{
    lc_json_key(json, key);
    lc_json_string(json, value);
}

static void print_json(const struct row *row, const char *machine)
{
    struct lc_json json;
    size_t bytes;
    char *text;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        exit(1);
    lc_json_init(&json, out);
    lc_json_object(&json);
    key_string(&json, "schema", "loongcomm.bench/1");
    key_string(&json, "op", row->c->lines ? "rings one-shot" : "rings all-reduce");
    key_string(&json, "case", row->c->what);
    key_double(&json, "ranks", RANKS);
    key_double(&json, "ctas", row->ctas);
    key_double(&json, "bytes", (double)row->bytes);
    key_double(&json, "median_us", row->median_us);
    key_double(&json, "p10", row->p10_us);
    key_double(&json, "p90", row->p90_us);
    key_double(&json, "algbw", (double)row->bytes / row->median_us / 1000);
    key_double(&json, "roofline_us", row->roofline_us);
    key_double(&json, "prototype_us", row->prototype_us);
    key_double(&json, "copy_gbs", bench.copy_gbs);
    lc_json_key(&json, "verified");
    lc_json_bool(&json, row->verified);
    key_string(&json, "machine", machine);
    lc_json_end(&json);
    if (lc_json_finish(&json) || fclose(out))
        exit(1);
    for (const char *p = text; *p; p++) {
        if (*p == '\n')
            p += strspn(p, "\n ") - 1;
        else
            putchar(*p);
    }
    putchar('\n');
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

/* Sizes spread evenly by their logarithm. */
static void make_list(size_t shrink)
{
    uint64_t state = 5;
    size_t at = 0;

    for (size_t i = 0; i < LIST; i++) {
        size_t bytes;

        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        bytes = (size_t)(4096 * pow(1024, (double)(state >> 40) * 0x1p-24)) / shrink / 16 * 16;
        for (uint32_t r = 0; r < RANKS; r++) {
            bench.list[r][i].in = (void *)(uintptr_t)
                at; /* made addresses when the buffers are there */
            bench.list[r][i].count = bytes / 4;
        }
        at += bytes;
    }
    bench.list_bytes = at;
}

static void set_up(struct lk_ring_shape shape, size_t most)
{
    void *segments[RANKS];
    uint32_t *abort_word = NULL;

    if (cuda) {
        CUDA(cudaSetDevice(0));
        for (uint32_t r = 0; r < RANKS; r++)
            CUDA(cudaStreamCreateWithFlags(&bench.streams[r], cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&bench.begin));
        CUDA(cudaEventCreate(&bench.end));
        CUDA(cudaEventCreateWithFlags(&bench.fork, cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&bench.join, cudaEventDisableTiming));
    }
    must(lib.load_all(), "lk_load_all");
    abort_word = device_alloc(sizeof(*abort_word));
    for (uint32_t r = 0; r < RANKS; r++) {
        int fd;

        must(lib.segment_new(lib.ring_bytes(&shape), bench.streams[r], &segments[r], &fd),
             "segment");
        close(fd);
        bench.in[r] = device_alloc(most);
        bench.out[r] = device_alloc(most);
        for (size_t i = 0; i < LIST; i++) {
            uintptr_t at = (uintptr_t)bench.list[r][i].in;

            bench.list[r][i].in = bench.in[r] + at;
            bench.list[r][i].out = bench.out[r] + at;
        }
        bench.rings[r] = (struct lk_rings){ .shape = shape,
                                            .rank = r,
                                            .state = device_alloc(lib.state_bytes(&shape)),
                                            .abort = abort_word };
    }
    for (uint32_t r = 0; r < RANKS; r++)
        memcpy(bench.rings[r].segments, segments, sizeof(segments));
    if (cuda)
        CUDA(cudaDeviceSynchronize());
}

static void open_library(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    bool whole = true;

#define FIND(member, name)                                                                \
    lib.member = handle ? (__typeof__(lib.member))(uintptr_t)dlsym(handle, #name) : NULL; \
    whole = whole && lib.member;
    FIND(backend, lk_backend)
    FIND(load_all, lk_load_all)
    FIND(error_text, lk_error_text)
    FIND(ring_bytes, lk_ring_bytes)
    FIND(state_bytes, lk_ring_state_bytes)
    FIND(segment_new, lk_segment_new)
    FIND(all_reduce, lk_rings_all_reduce)
    FIND(lines, lk_lines_all_reduce)
#undef FIND
    if (!whole) {
        fprintf(stderr, "%s: %s\n", path, handle ? "no kernels library with rings" : dlerror());
        exit(1);
    }
    cuda = strcmp(lib.backend(), "cuda") == 0;
}

#define GRIDS (sizeof(grids) / sizeof(*grids))
#define CASES (sizeof(cases) / sizeof(*cases))

static bool measure_all(size_t shrink, struct row rows[CASES * GRIDS])
{
    bool good = true;

    printf("%-36s %4s %9s %9s %9s %9s %9s\n", "case", "CTAs", "median us", "p10", "p90", "roofline",
           "prototype");
    for (size_t i = 0; i < CASES; i++) {
        const struct bench_case *c = &cases[i];

        for (size_t g = 0; g < GRIDS; g++) {
            struct row *row = &rows[i * GRIDS + g];

            *row = (struct row){ .c = c,
                                 .ctas = grids[g],
                                 .prototype_us = cuda ? c->prototype_us[g] : 0 };
            row->bytes = !c->bytes ? bench.list_bytes : c->lines ? c->bytes : c->bytes / shrink;
            measure(row);
            good = good && row->verified;
        }
    }
    return good;
}

int main(int argc, char **argv)
{
    static struct row rows[CASES * GRIDS];
    struct lk_ring_shape shape = { RANKS, 64, 4, 65536 };
    char machine[300] = "host";
    int devices = 0;
    size_t shrink;
    bool good;

    bench.samples = 101;
    for (int i = 2; i + 1 < argc; i += 2) {
        uint32_t value = (uint32_t)strtoul(argv[i + 1], NULL, 10);

        if (strcmp(argv[i], "--channels") == 0)
            shape.channels = value;
        else if (strcmp(argv[i], "--slots") == 0)
            shape.slots = value;
        else if (strcmp(argv[i], "--samples") == 0 && value >= 1 && value <= MAX_SAMPLES)
            bench.samples = (int)value;
        else
            return 2;
    }
    if (argc < 2 || argc % 2)
        return 2;
    open_library(argv[1]);
    if (cuda && (cudaGetDeviceCount(&devices) != cudaSuccess || !devices)) {
        printf("SKIPPED: no GPU on this machine\n");
        return SKIP;
    }
    if (!lib.ring_bytes(&shape))
        return 2;
    if (cuda) {
        struct cudaDeviceProp prop;

        CUDA(cudaGetDeviceProperties(&prop, 0));
        snprintf(machine, sizeof(machine), "%s", prop.name);
    }
    shrink = cuda ? 1 : 512;
    make_list(shrink);
    set_up(shape,
           (bench.list_bytes > 256U << 20 ? bench.list_bytes : (256U << 20) / shrink) + 65536);
    measure_copy((256U << 20) / shrink);
    good = measure_all(shrink, rows);
    for (size_t i = 0; i < CASES * GRIDS; i++)
        print_json(&rows[i], machine);
    return good ? 0 : 1;
}
