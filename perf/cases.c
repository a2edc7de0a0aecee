/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *const lc_bench_op_names[] = { "alltoall", "allreduce", "reducescatter", "allgather" };
const char *const lc_bench_variant_names[] = { "nccl", "loongcomm" };

const struct lc_bench_dtype lc_bench_dtypes[] = {
    {"f32",     ncclFloat32,    4, 24, 8,  true },
    { "bf16",   ncclBfloat16,   2, 8,  8,  true },
    { "f16",    ncclFloat16,    2, 11, 5,  true },
    { "f64",    ncclFloat64,    8, 53, 11, true },
    { "f8e4m3", ncclFloat8e4m3, 1, 4,  4,  true },
    { "f8e5m2", ncclFloat8e5m2, 1, 3,  5,  true },
    { "i8",     ncclInt8,       1, 7,  0,  true },
    { "u8",     ncclUint8,      1, 8,  0,  false},
    { "i32",    ncclInt32,      4, 31, 0,  true },
    { "u32",    ncclUint32,     4, 32, 0,  false},
    { "i64",    ncclInt64,      8, 63, 0,  true },
    { "u64",    ncclUint64,     8, 63, 0,  false},
};
#define N_DTYPES ((int)(sizeof(lc_bench_dtypes) / sizeof(*lc_bench_dtypes)))

int lc_bench_dtype_find(const char *name)
{
    for (int i = 0; i < N_DTYPES; i++) {
        if (strcasecmp(name, lc_bench_dtypes[i].name) == 0)
            return i;
    }
    return -1;
}

int lc_bench_op_find(const char *name)
{
    for (int i = 0; i < LC_BENCH_OPS; i++) {
        if (strcmp(name, lc_bench_op_names[i]) == 0)
            return i;
    }
    return -1;
}

const char *lc_bench_side_name(const struct lc_bench_options *options,
                               enum lc_bench_variant variant)
{
    return variant == LC_BENCH_OURS && options->no_preload ? "nccl-b"
                                                           : lc_bench_variant_names[variant];
}

bool lc_bench_is_sum(enum lc_bench_op op)
{
    return op == LC_BENCH_ALLREDUCE || op == LC_BENCH_REDUCESCATTER;
}

size_t lc_bench_send_bytes(const struct lc_bench_case *kase, int ranks)
{
    return kase->op == LC_BENCH_ALLGATHER ? kase->bytes / (size_t)ranks : kase->bytes;
}

size_t lc_bench_recv_bytes(const struct lc_bench_case *kase, int ranks)
{
    return kase->op == LC_BENCH_REDUCESCATTER ? kase->bytes / (size_t)ranks : kase->bytes;
}

int64_t lc_bench_term_max(const struct lc_bench_case *kase, int ranks)
{
    unsigned bits = lc_bench_dtypes[kase->dtype].bits;

    if (bits > kase->bits)
        bits = kase->bits;
    return (INT64_C(1) << bits) / ranks - (lc_bench_dtypes[kase->dtype].exponent == 0);
}

size_t lc_bench_round_bytes(enum lc_bench_op op, size_t bytes, size_t element, size_t ranks)
{
    size_t parts = op == LC_BENCH_ALLREDUCE ? 1 : ranks;
    size_t part = bytes / parts;

    part -= part % (part >= 16 ? 16 : element);
    return (part ? part : element) * parts;
}

static bool same_case(const struct lc_bench_case *a, const struct lc_bench_case *b)
{
    return a->dtype == b->dtype && a->bytes == b->bytes && a->live == b->live;
}

static int add_case(struct lc_bench_case *cases, int count, const struct lc_bench_case *kase)
{
    for (int i = 0; i < count; i++) {
        if (same_case(&cases[i], kase))
            return count;
    }
    cases[count] = *kase;
    return count + 1;
}

/* Every size and live share of one type, from cases[count] on. The new count or -EINVAL. */
static int add_dtype(const struct lc_bench_options *options, int ranks, int dtype,
                     struct lc_bench_case *cases, int count)
{
    struct lc_bench_case kase = {
        .op = options->op,
        .dtype = dtype,
        .inplace = options->inplace,
        .graph = options->graph,
        .sendrecv = options->sendrecv,
        .mask = options->mask,
        .tensors = options->tensors,
        .experts = options->experts,
        .bits = options->bits,
        .seed = options->seed,
    };

    if (lc_bench_is_sum(kase.op) && lc_bench_term_max(&kase, ranks) < 1) {
        fprintf(
            stderr,
            "loongcomm-bench: a sum of %d ranks is not exact in %s: fewer ranks or another type\n",
            ranks, lc_bench_dtypes[dtype].name);
        return -EINVAL;
    }
    for (int s = 0; s < options->n_sizes; s++) {
        for (int l = 0; l < options->n_lives; l++) {
            kase.bytes = lc_bench_round_bytes(kase.op, options->sizes[s],
                                              lc_bench_dtypes[dtype].size, (size_t)ranks);
            kase.live = options->lives[l];
            count = add_case(cases, count, &kase);
        }
    }
    return count;
}

int lc_bench_cases(const struct lc_bench_options *options, int ranks, struct lc_bench_case **out)
{
    size_t most = (size_t)options->n_dtypes * (size_t)options->n_sizes * (size_t)options->n_lives;
    struct lc_bench_case *cases = calloc(most, sizeof(*cases));
    int count = 0;

    if (!cases)
        return -ENOMEM;
    for (int d = 0; d < options->n_dtypes && count >= 0; d++)
        count = add_dtype(options, ranks, options->dtypes[d], cases, count);
    if (count < 0) {
        free(cases);
        return count;
    }
    *out = cases;
    return count;
}

void lc_bench_size_text(size_t bytes, char *text, size_t size)
{
    static const char suffixes[] = " kmg";
    int unit = 0;

    while (unit < 3 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    if (unit)
        snprintf(text, size, "%zu%c", bytes, suffixes[unit]);
    else
        snprintf(text, size, "%zu", bytes);
}

void lc_bench_case_text(const struct lc_bench_case *kase, char *text, size_t size)
{
    char bytes[32];
    char group[32] = "", experts[32] = "";

    lc_bench_size_text(kase->bytes, bytes, sizeof(bytes));
    if (kase->tensors > 1)
        snprintf(group, sizeof(group), " in %d tensors", kase->tensors);
    if (kase->experts != LC_BENCH_EXPERTS)
        snprintf(experts, sizeof(experts), " of %d experts", kase->experts);
    snprintf(text, size, "%s %s%s %s live %g%s%s%s%s%s", lc_bench_op_names[kase->op], bytes, group,
             lc_bench_dtypes[kase->dtype].name, kase->live, experts,
             kase->inplace ? " in place" : "", kase->sendrecv ? " by send/recv" : "",
             kase->mask ? " with a mask" : "", kase->graph ? " in a graph" : "");
}
