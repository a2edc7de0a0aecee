/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include "common/config.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: loongcomm-bench alltoall|allreduce|reducescatter|allgather [options]\n"
    "       loongcomm-bench ways [options]     NCCL's ways in turns of one job: ways --help\n"
    "       loongcomm-bench net [options]      the network plugin beside a socket: net --help\n"
    "       loongcomm-bench compare [--threshold PERCENT] [--force] REFERENCE.json NEW.json\n"
    "       loongcomm-bench plot RESULT.json... >PICTURE.svg\n"
    "\n"
    "Times NCCL alone and NCCL with libloongcomm.so preloaded, in turns, and checks every result.\n"
    "Under mpirun each process drives one rank.\n"
    "\n"
    "  --sizes LIST|MIN:MAX:FACTOR  bytes of a rank's send buffer (all-gather: receive buffer), with\n"
    "                               k, m, g (64k,1m,4m,16m)\n"
    "  --types LIST                 f32 bf16 f16 f64 f8e4m3 f8e5m2 i8 u8 i32 u32 i64 u64 (f32)\n"
    "  --live LIST                  shares of rows that are not zero (1.0,0.4,0.25,0.1)\n"
    "  --experts N                  runs of such rows that a rank gets from each other one (4)\n"
    "  --ranks N                    ranks (as many as GPUs, at least 2)\n"
    "  --variants LIST              nccl, loongcomm (both)\n"
    "  --inplace                    all-reduce within one buffer\n"
    "  --sendrecv                   all-to-all as a group of sends and receives\n"
    "  --mask                       tell libloongcomm.so which rows of an all-to-all are not zero\n"
    "  --tensors N                  all-reduce the buffer in N parts, as one group (1)\n"
    "  --graph                      capture the calls once and replay them\n"
    "  --bits N                     sums have at most N significant bits (20);\n"
    "                               8 are exact through a bf16 wire\n"
    "  --rounds N --iters N --warmup N   turns of each variant, samples and untimed calls of a turn\n"
    "  --budget SECONDS             what is not given above is chosen to last about this long (60)\n"
    "  --settle SECONDS             first so long calls of the first case that do not count (0): what\n"
    "                               ranks agree on at their calls is in force then\n"
    "  --rotate BYTES               use several buffers in turn, this much in all (twice the L2)\n"
    "  --timeout SECONDS            longest wait for a rank (60)\n"
    "  --seed N                     of the data (1)\n"
    "  --lib PATH                   libloongcomm.so (the one beside this program)\n"
    "  --env-b NAME=VALUE           a variable of the second variant alone; may be repeated\n"
    "  --no-preload                 the second variant is NCCL as well, nccl-b: with --env-b another\n"
    "                               setting of it, without, how far two equal sides differ\n"
    "  --json FILE, --csv FILE      write the results there as well\n"
    "  --help\n";

enum option_id {
    OPT_SIZES = 256,
    OPT_TYPES,
    OPT_LIVE,
    OPT_EXPERTS,
    OPT_RANKS,
    OPT_VARIANTS,
    OPT_INPLACE,
    OPT_SENDRECV,
    OPT_MASK,
    OPT_TENSORS,
    OPT_GRAPH,
    OPT_BITS,
    OPT_ROUNDS,
    OPT_ITERS,
    OPT_WARMUP,
    OPT_BUDGET,
    OPT_SETTLE,
    OPT_ROTATE,
    OPT_TIMEOUT,
    OPT_SEED,
    OPT_LIB,
    OPT_ENV_B,
    OPT_NO_PRELOAD,
    OPT_JSON,
    OPT_CSV,
};

static const struct option long_options[] = {
    {"sizes",       required_argument, NULL, OPT_SIZES     },
    { "types",      required_argument, NULL, OPT_TYPES     },
    { "live",       required_argument, NULL, OPT_LIVE      },
    { "experts",    required_argument, NULL, OPT_EXPERTS   },
    { "ranks",      required_argument, NULL, OPT_RANKS     },
    { "variants",   required_argument, NULL, OPT_VARIANTS  },
    { "inplace",    no_argument,       NULL, OPT_INPLACE   },
    { "sendrecv",   no_argument,       NULL, OPT_SENDRECV  },
    { "mask",       no_argument,       NULL, OPT_MASK      },
    { "tensors",    required_argument, NULL, OPT_TENSORS   },
    { "graph",      no_argument,       NULL, OPT_GRAPH     },
    { "bits",       required_argument, NULL, OPT_BITS      },
    { "rounds",     required_argument, NULL, OPT_ROUNDS    },
    { "iters",      required_argument, NULL, OPT_ITERS     },
    { "warmup",     required_argument, NULL, OPT_WARMUP    },
    { "budget",     required_argument, NULL, OPT_BUDGET    },
    { "settle",     required_argument, NULL, OPT_SETTLE    },
    { "rotate",     required_argument, NULL, OPT_ROTATE    },
    { "timeout",    required_argument, NULL, OPT_TIMEOUT   },
    { "seed",       required_argument, NULL, OPT_SEED      },
    { "lib",        required_argument, NULL, OPT_LIB       },
    { "env-b",      required_argument, NULL, OPT_ENV_B     },
    { "no-preload", no_argument,       NULL, OPT_NO_PRELOAD},
    { "json",       required_argument, NULL, OPT_JSON      },
    { "csv",        required_argument, NULL, OPT_CSV       },
    { NULL,         0,                 NULL, 0             },
};

void lc_bench_usage(FILE *out)
{
    fputs(usage_text, out);
}

static int parse_long(const char *text, long low, long high, long *out)
{
    char *end;
    long value;

    errno = 0;
    value = strtol(text, &end, 10);
    if (errno || end == text || *end || isspace((unsigned char)*text) || value < low ||
        value > high)
        return -EINVAL;
    *out = value;
    return 0;
}

static int parse_int(const char *text, int low, int *out)
{
    long value;

    if (parse_long(text, low, 1000000, &value))
        return -EINVAL;
    *out = (int)value;
    return 0;
}

static int parse_share(const char *text, double low, double high, double *out)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end || isspace((unsigned char)*text) || !(value >= low && value <= high))
        return -EINVAL;
    *out = value;
    return 0;
}

/* Calls `item` for each part of a comma-separated list. The number of parts or -EINVAL. */
static int split(const char *text, int max, int (*item)(const char *text, int index, void *arg),
                 void *arg)
{
    char copy[1024];
    char *rest = copy;
    char *part;
    int count = 0;

    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
        return -EINVAL;
    while ((part = strsep(&rest, ","))) {
        if (count == max || item(part, count, arg))
            return -EINVAL;
        count++;
    }
    return count;
}

static int size_item(const char *text, int index, void *arg)
{
    size_t *sizes = arg;

    return lc_parse_size(text, &sizes[index]) || sizes[index] == 0 ? -EINVAL : 0;
}

static int size_range(char *text, size_t *sizes, int max)
{
    char *second = strchr(text, ':');
    char *third = strchr(second + 1, ':');
    size_t low;
    size_t high;
    long factor;
    int count = 0;

    if (!third)
        return -EINVAL;
    *second++ = '\0';
    *third++ = '\0';
    if (lc_parse_size(text, &low) || lc_parse_size(second, &high) ||
        parse_long(third, 2, 1 << 20, &factor) || low == 0 || low > high)
        return -EINVAL;
    while (low <= high) {
        if (count == max)
            return -EINVAL;
        sizes[count++] = low;
        if (low > high / (size_t)factor)
            break;
        low *= (size_t)factor;
    }
    return count;
}

int lc_bench_parse_sizes(const char *text, size_t *sizes, int max)
{
    char copy[128];

    if (!strchr(text, ':'))
        return split(text, max, size_item, sizes);
    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
        return -EINVAL;
    return size_range(copy, sizes, max);
}

static int live_item(const char *text, int index, void *arg)
{
    return parse_share(text, 0, 1, (double *)arg + index);
}

int lc_bench_parse_lives(const char *text, double *lives, int max)
{
    return split(text, max, live_item, lives);
}

static int dtype_item(const char *text, int index, void *arg)
{
    int dtype = lc_bench_dtype_find(text);

    ((int *)arg)[index] = dtype;
    return dtype < 0 ? -EINVAL : 0;
}

int lc_bench_parse_dtypes(const char *text, int *dtypes, int max)
{
    return split(text, max, dtype_item, dtypes);
}

static int variant_item(const char *text, int index __attribute__((unused)), void *arg)
{
    bool *variants = arg;

    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        if (strcmp(text, lc_bench_variant_names[v]) == 0) {
            variants[v] = true;
            return 0;
        }
    }
    return -EINVAL;
}

static int parse_variants(const char *text, bool *variants)
{
    bool chosen[LC_BENCH_VARIANTS] = { false };

    if (split(text, LC_BENCH_VARIANTS, variant_item, chosen) < 1)
        return -EINVAL;
    memcpy(variants, chosen, sizeof(chosen));
    return 0;
}

static int count_or_error(int count, int *out)
{
    if (count < 1)
        return -EINVAL;
    *out = count;
    return 0;
}

static int parse_seed(const char *text, uint64_t *out)
{
    long value;
    int err = parse_long(text, 0, LONG_MAX, &value);

    if (!err)
        *out = (uint64_t)value;
    return err;
}

static int parse_text(const char *text, const char **out)
{
    *out = text;
    return *text ? 0 : -EINVAL;
}

/* Not what the launcher itself arranges for each side. */
static int parse_env(const char *text, struct lc_bench_options *o)
{
    static const char *const ours[] = { "LD_PRELOAD=", "LCRIG_RANK=" };
    const char *equals = strchr(text, '=');

    if (!equals || equals == text || o->n_env == LC_BENCH_MAX_LIST)
        return -EINVAL;
    for (size_t i = 0; i < sizeof(ours) / sizeof(*ours); i++) {
        if (strncmp(text, ours[i], strlen(ours[i])) == 0)
            return -EINVAL;
    }
    o->env[o->n_env++] = text;
    return 0;
}

static int parse_one(int id, const char *text, struct lc_bench_options *o)
{
    long bits;
    int err;

    switch (id) {
    case OPT_SIZES:
        return count_or_error(lc_bench_parse_sizes(text, o->sizes, LC_BENCH_MAX_LIST), &o->n_sizes);
    case OPT_TYPES:
        return count_or_error(lc_bench_parse_dtypes(text, o->dtypes, LC_BENCH_MAX_LIST),
                              &o->n_dtypes);
    case OPT_LIVE:
        return count_or_error(lc_bench_parse_lives(text, o->lives, LC_BENCH_MAX_LIST), &o->n_lives);
    case OPT_EXPERTS: return parse_int(text, 1, &o->experts);
    case OPT_RANKS:
        err = parse_int(text, 2, &o->ranks);
        return err || o->ranks > LC_BENCH_MAX_RANKS ? -EINVAL : 0;
    case OPT_VARIANTS: return parse_variants(text, o->variants);
    case OPT_INPLACE: o->inplace = true; return 0;
    case OPT_SENDRECV: o->sendrecv = true; return 0;
    case OPT_MASK: o->mask = true; return 0;
    case OPT_TENSORS: return parse_int(text, 1, &o->tensors);
    case OPT_GRAPH: o->graph = true; return 0;
    case OPT_BITS:
        err = parse_long(text, 1, 40, &bits);
        o->bits = err ? o->bits : (unsigned)bits;
        return err;
    case OPT_ROUNDS: return parse_int(text, 1, &o->rounds);
    case OPT_ITERS:
        err = parse_int(text, 1, &o->iters);
        return err || o->iters > LC_BENCH_MAX_ITERS ? -EINVAL : 0;
    case OPT_WARMUP: return parse_int(text, 0, &o->warmup);
    case OPT_BUDGET: return parse_share(text, 0.1, 1e6, &o->budget_s);
    case OPT_SETTLE: return parse_share(text, 0, 1e6, &o->settle_s);
    case OPT_ROTATE: return lc_parse_size(text, &o->rotate);
    case OPT_TIMEOUT: return parse_int(text, 1, &o->timeout_s);
    case OPT_SEED: return parse_seed(text, &o->seed);
    case OPT_LIB: return parse_text(text, &o->library);
    case OPT_ENV_B: return parse_env(text, o);
    case OPT_NO_PRELOAD: o->no_preload = true; return 0;
    case OPT_JSON: return parse_text(text, &o->json);
    default: return parse_text(text, &o->csv);
    }
}

static int check_together(const struct lc_bench_options *o)
{
    if (o->inplace && o->op != LC_BENCH_ALLREDUCE) {
        fprintf(stderr, "loongcomm-bench: --inplace is for allreduce\n");
        return -EINVAL;
    }
    if (o->tensors > 1 && o->op != LC_BENCH_ALLREDUCE) {
        fprintf(stderr, "loongcomm-bench: --tensors is for allreduce\n");
        return -EINVAL;
    }
    if ((o->sendrecv || o->mask) && o->op != LC_BENCH_ALLTOALL) {
        fprintf(stderr, "loongcomm-bench: --sendrecv and --mask are for alltoall\n");
        return -EINVAL;
    }
    if (!o->variants[LC_BENCH_OURS] && (o->no_preload || o->n_env)) {
        fprintf(stderr, "loongcomm-bench: --env-b and --no-preload are for the second variant\n");
        return -EINVAL;
    }
    return 0;
}

int lc_bench_options_parse(int argc, char **argv, struct lc_bench_options *out)
{
    struct lc_bench_options o = {
        .warmup = -1,
        .variants = {true, true},
        .tensors = 1,
        .experts = LC_BENCH_EXPERTS,
        .bits = 20,
        .budget_s = 60,
        .timeout_s = 60,
        .seed = 1,
        .rotate = SIZE_MAX,
    };
    int index = 0;
    int id;

    id = lc_bench_op_find(argv[0]);
    o.op = id < 0 ? LC_BENCH_ALLTOALL : (enum lc_bench_op)id;
    o.n_sizes = lc_bench_parse_sizes("64k,1m,4m,16m", o.sizes, LC_BENCH_MAX_LIST);
    o.n_dtypes = lc_bench_parse_dtypes("f32", o.dtypes, LC_BENCH_MAX_LIST);
    o.n_lives = lc_bench_parse_lives("1.0,0.4,0.25,0.1", o.lives, LC_BENCH_MAX_LIST);
    while ((id = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (id == '?')
            return -EINVAL; /* getopt has said what */
        if (parse_one(id, optarg, &o)) {
            fprintf(stderr, "loongcomm-bench: --%s %s: not understood; see --help\n",
                    long_options[index].name, optarg);
            return -EINVAL;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "loongcomm-bench: %s: unexpected argument; see --help\n", argv[optind]);
        return -EINVAL;
    }
    if (check_together(&o))
        return -EINVAL;
    *out = o;
    return 0;
}
