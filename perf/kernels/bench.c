/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-kernels: device bandwidth of the kernels library beside plain copies, then the host's cost of a
 * call. Results are checked before they are timed. Prints a table, then one JSON line per row.
 *
 * Exit codes: 0 all results right, 1 a wrong result or a failure, 2 bad usage, 77 no device.
 */
#include "common/json.h"
#include "kernels/loongkernels.h"
#include "kernels/value_internal.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SKIP        77
#define SAMPLES     60
#define SAMPLE_US   1000                 /* calls of about this long together make one sample */
#define ONE_COUNT   ((uint64_t)64 << 20) /* 256 MB of fp32 */
#define PERIOD      ((uint64_t)1 << 20)  /* source values repeat after so many elements */
#define LAYERS      ((size_t)25)
#define LAYER_PARTS ((size_t)12)
#define MODEL       (LAYERS * LAYER_PARTS)
#define MAX_TENSORS 1363
#define SUM_SHARDS  ((size_t)8)

static const struct lk_rng rng = { 2024, 0, NULL };
static const struct lk_scale scale = { .value = 0.125F };

enum op {
    MEMCPY,
    COPY32,
    COPY16,
    PACK,
    PACK_SCALAR,
    PACK_STOCHASTIC,
    UNPACK,
    SUM_BF16,
    SUM_FP32
};

static const char *const op_names[] = {
    "cudaMemcpyAsync",      "pack fp32",   "pack bf16",   "cast_pack",  "cast_pack scalar",
    "cast_pack stochastic", "cast_unpack", "sum to bf16", "sum to fp32"
};

/* One row. Lists of an unpacking case are its destinations. */
struct bench_case {
    const char *what;
    const struct lk_tensor *list;
    size_t n; /* tensors, or shards */
    uint64_t count;
    enum op op;
    bool verified;
    double median_us, p10_us, p90_us, gbs;
};

static struct {
    float *src;       /* fp32 values of every case */
    uint16_t *packed; /* where lists are packed, and what is unpacked */
    float *dst;       /* where copies and unpacking write */
    uint16_t *shards;
    float *scalar; /* holds scale.value */
    float *period; /* here: the first PERIOD values of src */
    cudaStream_t stream;
    cudaEvent_t events[2];
} bench;

static void must(int err, const char *what)
{
    if (!err)
        return;
    fprintf(stderr, "%s: %s\n", what, lk_error_text(err));
    exit(1);
}

static void must_cuda(cudaError_t err, const char *what)
{
    if (err == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(err));
    exit(1);
}

#define CUDA(call) must_cuda(call, #call)

static void *device_alloc(size_t bytes)
{
    void *ptr;

    CUDA(cudaMalloc(&ptr, bytes));
    return ptr;
}

/* The parts of a transformer's layer with 1024 columns: 25 of them are 399 million parameters in 300 tensors. Returns
 * elements, gaps included. */
static uint64_t make_model(struct lk_tensor *list, float *base)
{
    static const uint64_t parts[] = { 3072 * 1024UL, 3072, 1024 * 1024UL, 1024, 1024, 1024,
                                      5760 * 1024UL, 5760, 5760 * 1024UL, 1024, 1024, 1024 };
    uint64_t offset = 0;

    for (size_t i = 0; i < MODEL; i++) {
        uint64_t count = parts[i % LAYER_PARTS];

        list[i] = (struct lk_tensor){ base ? base + offset : NULL, count, offset };
        offset += (count + 127) / 128 *
                  128; /* as an allocator with 512-byte blocks lays them out */
    }
    return offset;
}

static void run_case(const struct bench_case *c)
{
    const struct lk_scale from_device = { 0, LK_FP32, bench.scalar };
    const struct lk_tensor *list = c->list;
    void *stream = bench.stream;

    switch (c->op) {
    case MEMCPY:
        CUDA(cudaMemcpyAsync(bench.dst, bench.src, c->count * 4, cudaMemcpyDeviceToDevice,
                             bench.stream));
        return;
    case COPY32: must(lk_pack(list, c->n, bench.dst, LK_FP32, stream), c->what); return;
    case COPY16: must(lk_pack(list, c->n, bench.packed, LK_BF16, stream), c->what); return;
    case PACK:
        must(lk_cast_pack(list, c->n, bench.packed, &scale, LK_NEAREST, NULL, stream), c->what);
        return;
    case PACK_SCALAR:
        must(lk_cast_pack(list, c->n, bench.packed, &from_device, LK_NEAREST, NULL, stream),
             c->what);
        return;
    case PACK_STOCHASTIC:
        must(lk_cast_pack(list, c->n, bench.packed, &scale, LK_STOCHASTIC, &rng, stream), c->what);
        return;
    case UNPACK: must(lk_cast_unpack(list, c->n, bench.packed, stream), c->what); return;
    case SUM_BF16:
    case SUM_FP32:
        must(lk_sum_shards(bench.shards, c->n, c->count, c->count, bench.dst,
                           c->op == SUM_FP32 ? LK_FP32 : LK_BF16, NULL, NULL, stream),
             c->what);
        return;
    }
}

static bool writes_packed(enum op op)
{
    return op == COPY16 || op == PACK || op == PACK_SCALAR || op == PACK_STOCHASTIC;
}

/* Bytes read and written. */
static double traffic(const struct bench_case *c)
{
    double count = (double)c->count;

    switch (c->op) {
    case MEMCPY:
    case COPY32: return 8 * count;
    case COPY16: return 4 * count;
    case PACK:
    case PACK_SCALAR:
    case PACK_STOCHASTIC:
    case UNPACK: return 6 * count;
    case SUM_BF16: return (2 * (double)c->n + 2) * count;
    case SUM_FP32: return (2 * (double)c->n + 4) * count;
    }
    return 0;
}

static uint32_t expected_narrow(enum op op, float x, uint64_t wire_index)
{
    uint32_t block[4];

    if (op != PACK_STOCHASTIC)
        return narrow_bf16(x, scale.value, 0, 0);
    philox(rng.seed, wire_index / 8, block);
    return narrow_bf16(x, scale.value, 1, random_bits(block, wire_index % 8));
}

/* Elements [at, at + n) of one tensor of a list against the source values; `where` is the tensor's place in src. */
static bool check_window(const struct bench_case *c, const struct lk_tensor *tensor, uint64_t where,
                         uint64_t at, size_t n)
{
    bool narrow = writes_packed(c->op);
    uint64_t index = tensor->offset + at;
    uint32_t *wide = malloc(n * 4);
    uint16_t *half = malloc(n * 2);
    bool good = wide && half;

    if (good && narrow)
        CUDA(cudaMemcpy(half, bench.packed + index, n * 2, cudaMemcpyDeviceToHost));
    else if (good)
        CUDA(cudaMemcpy(wide, c->op == UNPACK ? (float *)tensor->ptr + at : bench.dst + index,
                        n * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; good && i < n; i++) {
        float x = bench.period[(where + at + i) % PERIOD];

        if (narrow)
            good = half[i] == expected_narrow(c->op, x, index + i);
        else /* what is unpacked was packed from the same values */
            good = wide[i] == (c->op == UNPACK ? expected_narrow(PACK, x, 0) << 16 : float_bits(x));
    }
    free(wide);
    free(half);
    return good;
}

/* Shards hold the bits of src, 16 at a time; small windows are added again. */
static bool check_sum(const struct bench_case *c)
{
    const size_t n = 4096;
    const uint64_t places[] = { 0, c->count / 2 + 8, c->count - n };
    uint16_t *shard = malloc(n * 2 * c->n);
    uint32_t *out = malloc(n * 4);
    bool good = shard && out;

    for (int p = 0; p < 3 && good; p++) {
        size_t bytes = c->op == SUM_FP32 ? 4 : 2;

        for (size_t r = 0; r < c->n; r++)
            CUDA(cudaMemcpy(shard + r * n, bench.shards + r * c->count + places[p], n * 2,
                            cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(out, (char *)bench.dst + places[p] * bytes, n * bytes,
                        cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < n && good; i++) {
            float sum = widen_bf16(shard[i]);

            for (size_t r = 1; r < c->n; r++)
                sum += widen_bf16(shard[r * n + i]);
            good = bytes == 4 ? out[i] == float_bits(sum)
                              : ((uint16_t *)out)[i] == narrow_bf16(sum, 1, 0, 0);
        }
    }
    free(shard);
    free(out);
    return good;
}

static bool verify(const struct bench_case *c)
{
    const float *base = c->op == UNPACK ? bench.dst : bench.src;
    const struct lk_tensor one = { bench.src, c->count, 0 };

    CUDA(cudaMemsetAsync(writes_packed(c->op) ? (void *)bench.packed : (void *)bench.dst, 0xff,
                         c->count * 2, bench.stream));
    run_case(c);
    CUDA(cudaStreamSynchronize(bench.stream));
    if (c->op >= SUM_BF16)
        return check_sum(c);
    if (c->op == COPY16)
        return true; /* the same kernel as for fp32 but for the element; bits are the tests' matter */
    for (size_t i = 0; i < (c->list ? c->n : 1); i++) {
        const struct lk_tensor *tensor = c->list ? &c->list[i] : &one;
        uint64_t where = c->list ? (uint64_t)((float *)tensor->ptr - base) : 0;
        size_t n = tensor->count < 2000 ? tensor->count : 2000;

        if (!check_window(c, tensor, where, 0, n) ||
            !check_window(c, tensor, where, tensor->count - n, n) ||
            !check_window(c, tensor, where, (tensor->count - n) / 2, n))
            return false;
    }
    return true;
}

static double timed_us(const struct bench_case *c, int calls)
{
    float ms;

    CUDA(cudaEventRecord(bench.events[0], bench.stream));
    for (int i = 0; i < calls; i++)
        run_case(c);
    CUDA(cudaEventRecord(bench.events[1], bench.stream));
    CUDA(cudaEventSynchronize(bench.events[1]));
    CUDA(cudaEventElapsedTime(&ms, bench.events[0], bench.events[1]));
    return (double)ms * 1000 / calls;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void measure(struct bench_case *c, double copy_gbs)
{
    double samples[SAMPLES], once;
    int calls;

    c->verified = verify(c);
    timed_us(c, 3);
    once = timed_us(c, 3);
    calls = once < SAMPLE_US ? (int)(SAMPLE_US / once) + 1 : 1;
    for (int i = 0; i < SAMPLES; i++)
        samples[i] = timed_us(c, calls);
    qsort(samples, SAMPLES, sizeof(*samples), by_value);
    c->median_us = samples[SAMPLES / 2];
    c->p10_us = samples[SAMPLES / 10];
    c->p90_us = samples[SAMPLES * 9 / 10];
    c->gbs = traffic(c) / c->median_us / 1000;
    printf("%-22s %-26s %9.1f %9.1f %9.1f %8.0f %7.1f %%  %s\n", op_names[c->op], c->what,
           c->median_us, c->p10_us, c->p90_us, c->gbs,
           copy_gbs > 0 ? 100 * c->gbs / copy_gbs : 100.0, c->verified ? "right" : "WRONG");
    fflush(stdout);
}

/* Prints a document on one line. */
static void print_line(const char *text)
{
    for (; *text; text++) {
        if (*text == '\n')
            text += strspn(text, "\n ") - 1;
        else
            putchar(*text);
    }
    putchar('\n');
}

static void print_json(const struct bench_case *c, double copy_gbs, const char *machine)
{
    struct lc_json json;
    size_t bytes;
    char *text;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        exit(1);
    lc_json_init(&json, out);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.bench/1");
    lc_json_key(&json, "op");
    lc_json_string(&json, op_names[c->op]);
    lc_json_key(&json, "case");
    lc_json_string(&json, c->what);
    lc_json_key(&json, "tensors");
    lc_json_uint(&json, c->n);
    lc_json_key(&json, "bytes");
    lc_json_double(&json, traffic(c));
    lc_json_key(&json, "median_us");
    lc_json_double(&json, c->median_us);
    lc_json_key(&json, "p10");
    lc_json_double(&json, c->p10_us);
    lc_json_key(&json, "p90");
    lc_json_double(&json, c->p90_us);
    lc_json_key(&json, "algbw");
    lc_json_double(&json, c->gbs);
    lc_json_key(&json, "copy_share");
    lc_json_double(&json, c->gbs / copy_gbs);
    lc_json_key(&json, "verified");
    lc_json_bool(&json, c->verified);
    lc_json_key(&json, "machine");
    lc_json_string(&json, machine);
    lc_json_end(&json);
    if (lc_json_finish(&json) || fclose(out))
        exit(1);
    print_line(text);
    free(text);
}

/* Source values that repeat: random, in (-4, 4). */
static void make_data(uint64_t elements)
{
    uint32_t block[4];

    bench.src = device_alloc(elements * 4 + 256);
    bench.dst = device_alloc(elements * 4 + 256);
    bench.packed = device_alloc(elements * 2 + 256);
    bench.shards = device_alloc(ONE_COUNT * 2 * SUM_SHARDS / 2);
    bench.scalar = device_alloc(4);
    bench.period = malloc(PERIOD * 4);
    if (!bench.period)
        exit(1);
    for (uint64_t i = 0; i < PERIOD; i++) {
        philox(1, i / 4, block);
        bench.period[i] = ((float)(block[i % 4] >> 8) * 0x1p-24F - 0.5F) * 8;
    }
    CUDA(cudaMemcpy(bench.scalar, &scale.value, 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(bench.src, bench.period, PERIOD * 4, cudaMemcpyHostToDevice));
    for (uint64_t have = PERIOD; have < elements; have *= 2)
        CUDA(cudaMemcpy(bench.src + have, bench.src,
                        (elements - have < have ? elements - have : have) * 4,
                        cudaMemcpyDeviceToDevice));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&bench.events[0]));
    CUDA(cudaEventCreate(&bench.events[1]));
}

/* Random shards, packed from the source. */
static void make_shards(void)
{
    struct lk_tensor tensor = { bench.src, ONE_COUNT / 2 * SUM_SHARDS, 0 };

    must(lk_cast_pack(&tensor, 1, bench.shards, NULL, LK_NEAREST, NULL, bench.stream), "shards");
}

/* What a call costs on the processor, and what a launch over tiny tensors takes on the device. */
static void measure_calls(void)
{
    static const size_t lengths[] = { 1, 100, 300, 980, MAX_TENSORS };
    static struct lk_tensor list[MAX_TENSORS];
    struct bench_case c = { .op = PACK, .what = "tiny tensors", .list = list };
    struct timespec begin, end;
    const int calls = 200; /* fewer than a stream takes before it makes the caller wait */

    printf("\n%-22s %9s %12s\n", "cast_pack, 64 elements", "host us", "device us");
    for (size_t i = 0; i < MAX_TENSORS; i++)
        list[i] = (struct lk_tensor){ bench.src + i * 128, 64, i * 64 };
    for (size_t l = 0; l < sizeof(lengths) / sizeof(*lengths); l++) {
        double host_us;

        c.n = lengths[l];
        timed_us(&c, 10);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < calls; i++)
            run_case(&c);
        clock_gettime(CLOCK_MONOTONIC, &end);
        CUDA(cudaStreamSynchronize(bench.stream));
        host_us = ((double)(end.tv_sec - begin.tv_sec) * 1e6 +
                   (double)(end.tv_nsec - begin.tv_nsec) / 1e3) /
                  calls;
        printf("%4zu tensors           %9.2f %12.2f\n", c.n, host_us, timed_us(&c, calls));
    }
}

static struct lk_tensor one[1], one_dst[1], shifted[1], model[MODEL], model_dst[MODEL];

/* count 0: of the whole model */
static struct bench_case cases[] = {
    {.op = MEMCPY,           .what = "256 MB",                         .n = 1,                                                        .count = ONE_COUNT                                                                          },
    { .op = COPY32,          .what = "256 MB",                         .list = one,                                                   .n = 1,                                                                                       .count = ONE_COUNT },
    { .op = PACK,                     .what = "256 MB",                                                   .list = one,                                                                            .n = 1,                                                                                                           .count = ONE_COUNT },
    { .op = UNPACK,    .what = "256 MB",                                           .list = one_dst,                                                                                            .n = 1,                                                           .count = ONE_COUNT },
    { .op = PACK_SCALAR,                .what = "256 MB",                                      .list = one,       .n = 1,                        .count = ONE_COUNT },
    { .op = PACK_STOCHASTIC,           .what = "256 MB",        .list = one,                                             .n = 1,                                                                                                                 .count = ONE_COUNT },
    { .op = PACK,.what = "256 MB, misaligned by 4",                  .list = shifted,                             .n = 1,.count = ONE_COUNT },
    { .op = MEMCPY,            .what = "1.6 GB",                        .n = 1                                                    },
    { .op = COPY32,                     .what = "300 tensors, 1.6 GB",                                                 .list = model,                                                                                   .n = MODEL                                                                                                              },
    { .op = COPY16,          .what = "300 tensors, 0.8 GB", .list = model, .n = MODEL                                                                                                                                                 },
    { .op = PACK,          .what = "300 tensors, 1.6 GB",            .list = model,                                                            .n = MODEL},
    { .op = UNPACK,            .what = "300 tensors, 1.6 GB",              .list = model_dst,                                                   .n = MODEL                                                                                                                                             },
    { .op = PACK_STOCHASTIC,          .what = "300 tensors, 1.6 GB",          .list = model,                                         .n = MODEL                                                                         },
    { .op = SUM_BF16, .what = "2 shards of 64 MB",   .n = 2,                                          .count = ONE_COUNT / 2                                                                        },
    { .op = SUM_BF16,        .what = "8 shards of 64 MB",                     .n = SUM_SHARDS,                                                                          .count = ONE_COUNT / 2                                                                                   },
    { .op = SUM_FP32,        .what = "8 shards of 64 MB",              .n = SUM_SHARDS,                                        .count = ONE_COUNT / 2                                                                                                      },
};
#define ROWS (sizeof(cases) / sizeof(*cases))

/* Prints all rows; nonzero if a result was wrong. */
static int measure_all(uint64_t model_count, double *copy)
{
    int wrong = 0;

    for (size_t i = 0; i < ROWS; i++) {
        struct bench_case *c = &cases[i];

        c->count = c->count ? c->count : model_count;
        if (c->op == UNPACK) { /* what it reads: the source, packed */
            struct bench_case pack = *c;

            pack.op = PACK;
            pack.list = c->n == 1 ? one : model;
            run_case(&pack);
        }
        measure(c, *copy);
        wrong |= !c->verified;
        if (c->op <= COPY32 && c->gbs > *copy)
            *copy = c->gbs;
    }
    return wrong;
}

int main(int argc, char **argv)
{
    struct cudaDeviceProp properties;
    uint64_t model_count = make_model(model, NULL);
    int devices = 0, wrong;
    double copy = 0;

    if (argc != 1) {
        fprintf(stderr, "usage: %s (no arguments)\n", argv[0]);
        return 2;
    }
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
        printf("skipped: no CUDA device or driver\n");
        return SKIP;
    }
    CUDA(cudaGetDeviceProperties(&properties, 0));
    must(lk_load_all(), "lk_load_all");
    make_data(model_count);
    make_shards();
    make_model(model, bench.src);
    make_model(model_dst, bench.dst);
    *one = (struct lk_tensor){ bench.src, ONE_COUNT, 0 };
    *one_dst = (struct lk_tensor){ bench.dst, ONE_COUNT, 0 };
    *shifted = (struct lk_tensor){ bench.src + 1, ONE_COUNT, 0 };
    printf(
        "%s, %d multiprocessors, L2 %d MB; GB/s of bytes read and written, share of the fastest copy so far\n",
        properties.name, properties.multiProcessorCount, properties.l2CacheSize >> 20);
    printf("%-22s %-26s %9s %9s %9s %8s %9s\n", "operation", "case", "median us", "p10", "p90",
           "GB/s", "of copy");
    wrong = measure_all(model_count, &copy);
    measure_calls();
    printf("\n");
    for (size_t i = 0; i < ROWS; i++)
        print_json(&cases[i], copy, properties.name);
    return wrong;
}
