/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/ways.h"

#include "common/config.h"
#include "common/profile.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

static const char usage_text[] =
    "usage: loongcomm-bench ways --case OP:SIZES [--case ...] [--way OP:WAY ...] [options]\n"
    "\n"
    "Times NCCL's default, the same again, what the tuner makes of a profile, and other ways to do\n"
    "a collective, call by call in turns of one job. OP: allreduce, reducescatter, allgather.\n"
    "WAY: ALGORITHM/PROTOCOL/CHANNELS, as in a profile (ring/ll/0; 0: as many channels as NCCL\n"
    "chooses; never more than the communicator has), behind wide: on a second communicator that has\n"
    "the channels of --ctas. A way that NCCL rules out is said to be, and not measured.\n"
    "\n"
    "  --case OP:SIZES    sizes as in `loongcomm-bench --help`: ascending, all operations' smallest\n"
    "                     first\n"
    "  --way OP:[wide:]WAY\n"
    "  --profile FILE     of `loongcomm tune`, used through the tuner plugin as in a job\n"
    "  --ctas N           channels of the second communicator (none)\n"
    "  --comms N          equal communicators, up to 4, that take turns of two rounds (1): each has\n"
    "                     luck of its own, such as which connection is served by whom\n"
    "  --ranks N          ranks (as many as GPUs, at least 2)\n"
    "  --budget SECONDS   all cases together; what is left then is said to be (60)\n"
    "  --to-the-end       as many rounds as there is time for, also where a profile is surely no worse\n"
    "                     than all else, which ends them otherwise\n"
    "  --graph            calls are captured once a turn and replayed\n"
    "  --timeout SECONDS  longest wait for a rank (60)\n"
    "  --tuner PATH       libnccl-tuner-loongcomm-measure.so (the one beside this program)\n"
    "  --json FILE        write the results there as well; FILE.part are those of a job that a rank's\n"
    "                     end or silence has ended, as far as it came, and what was under way\n";

void lc_ways_usage(FILE *out)
{
    fputs(usage_text, out);
}

static int complain(const char *option, const char *text)
{
    fprintf(stderr, "loongcomm-bench: %s %s: not understood; see `loongcomm-bench ways --help`\n",
            option, text);
    return -EINVAL;
}

static int parse_number(const char *text, double low, double high, double *out)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end || !(value >= low && value <= high))
        return -EINVAL;
    *out = value;
    return 0;
}

static int parse_count(const char *text, int low, int high, int *out)
{
    double value;

    if (parse_number(text, low, high, &value) || value != (int)value)
        return -EINVAL;
    *out = (int)value;
    return 0;
}

/* The operation in front of a colon; what is behind it. */
static const char *split_op(const char *text, enum lc_bench_op *op)
{
    const char *colon = strchr(text, ':');
    char name[32];

    if (!colon || colon - text >= (int)sizeof(name))
        return NULL;
    snprintf(name, sizeof(name), "%.*s", (int)(colon - text), text);
    if (lc_bench_op_find(name) <= LC_BENCH_ALLTOALL)
        return NULL; /* NCCL asks no tuner there */
    *op = (enum lc_bench_op)lc_bench_op_find(name);
    return colon + 1;
}

static int find(const char *word, const char *(*name)(unsigned), unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(word, name(i)) == 0)
            return (int)i;
    }
    return -1;
}

int lc_way_parse(const char *text, struct lc_way *out)
{
    struct lc_way way = { .kind = LC_WAY_FORCED };
    const char *rest = split_op(text, &way.op);
    char copy[LC_WAYS_NAME];
    char *algorithm, *protocol, *at = copy;
    int channels, a, p;

    if (!rest)
        return -EINVAL;
    way.wide = strncmp(rest, "wide:", 5) == 0;
    if (snprintf(copy, sizeof(copy), "%s", rest + (way.wide ? 5 : 0)) >= (int)sizeof(copy))
        return -EINVAL;
    algorithm = strsep(&at, "/");
    protocol = strsep(&at, "/");
    if (!protocol || !at || parse_count(at, 0, 1024, &channels))
        return -EINVAL;
    a = find(algorithm, lc_profile_algorithm_name, LC_PROFILE_ALGORITHMS);
    p = find(protocol, lc_profile_protocol_name, LC_PROFILE_PROTOCOLS);
    if (a < 0 || p < 0)
        return -EINVAL;
    way.algorithm = (uint8_t)a;
    way.protocol = (uint8_t)p;
    way.channels = (uint16_t)channels;
    *out = way;
    return 0;
}

void lc_way_name(const struct lc_way *way, char out[LC_WAYS_NAME])
{
    static const char *const fixed[] = { "default", "again", "profile" };

    if (way->kind != LC_WAY_FORCED)
        snprintf(out, LC_WAYS_NAME, "%s", fixed[way->kind]);
    else
        snprintf(out, LC_WAYS_NAME, "%s%s/%s/%d", way->wide ? "wide:" : "",
                 lc_profile_algorithm_name(way->algorithm), lc_profile_protocol_name(way->protocol),
                 way->channels);
}

struct list {
    enum lc_bench_op op;
    size_t sizes[LC_BENCH_MAX_LIST];
    int n;
};

struct parser {
    struct lc_ways_options *out;
    struct list lists[LC_BENCH_OPS];
    int n_lists;
};

static int parse_case(struct parser *parser, const char *text)
{
    struct list *list = &parser->lists[parser->n_lists];
    const char *sizes;

    if (parser->n_lists == LC_BENCH_OPS || !(sizes = split_op(text, &list->op)))
        return -EINVAL;
    list->n = lc_bench_parse_sizes(sizes, list->sizes, LC_BENCH_MAX_LIST);
    for (int i = 1; i < list->n; i++) {
        if (list->sizes[i] <= list->sizes[i - 1])
            return -EINVAL;
    }
    parser->n_lists++;
    return list->n < 1 ? -EINVAL : 0;
}

enum option_id {
    OPT_CASE = 256,
    OPT_WAY,
    OPT_PROFILE,
    OPT_CTAS,
    OPT_COMMS,
    OPT_RANKS,
    OPT_BUDGET,
    OPT_TO_THE_END,
    OPT_GRAPH,
    OPT_TIMEOUT,
    OPT_TUNER,
    OPT_JSON,
    OPT_HELP,
};

static const struct option long_options[] = {
    {"case",        required_argument, NULL, OPT_CASE      },
    { "way",        required_argument, NULL, OPT_WAY       },
    { "profile",    required_argument, NULL, OPT_PROFILE   },
    { "ctas",       required_argument, NULL, OPT_CTAS      },
    { "comms",      required_argument, NULL, OPT_COMMS     },
    { "ranks",      required_argument, NULL, OPT_RANKS     },
    { "budget",     required_argument, NULL, OPT_BUDGET    },
    { "to-the-end", no_argument,       NULL, OPT_TO_THE_END},
    { "graph",      no_argument,       NULL, OPT_GRAPH     },
    { "timeout",    required_argument, NULL, OPT_TIMEOUT   },
    { "tuner",      required_argument, NULL, OPT_TUNER     },
    { "json",       required_argument, NULL, OPT_JSON      },
    { "help",       no_argument,       NULL, OPT_HELP      },
    { NULL,         0,                 NULL, 0             },
};

static int parse_one(int id, const char *text, struct parser *parser)
{
    struct lc_ways_options *o = parser->out;

    switch (id) {
    case OPT_CASE: return parse_case(parser, text);
    case OPT_WAY:
        if (o->n_ways == LC_WAYS_MAX)
            return -EINVAL;
        return lc_way_parse(text, &o->ways[o->n_ways++]);
    case OPT_PROFILE: o->profile = text; return *text ? 0 : -EINVAL;
    case OPT_CTAS: return parse_count(text, 1, 1024, &o->ctas);
    case OPT_COMMS: return parse_count(text, 1, LC_WAYS_COMMS, &o->comms);
    case OPT_RANKS: return parse_count(text, 2, LC_BENCH_MAX_RANKS, &o->bench.ranks);
    case OPT_BUDGET: return parse_number(text, 0.1, 1e6, &o->bench.budget_s);
    case OPT_TO_THE_END: o->to_the_end = true; return 0;
    case OPT_GRAPH: o->bench.graph = true; return 0;
    case OPT_TIMEOUT: return parse_count(text, 1, 1000000, &o->bench.timeout_s);
    case OPT_TUNER: o->tuner = text; return *text ? 0 : -EINVAL;
    case OPT_JSON: o->bench.json = text; return *text ? 0 : -EINVAL;
    default: o->help = true; return 0;
    }
}

/* What is dearest is last, when time may be up. */
static int by_bytes(const void *a, const void *b)
{
    const struct lc_bench_case *x = a, *y = b;

    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    return (x->op > y->op) - (x->op < y->op);
}

/* Above this, results are not checked: making them up takes longer than the calls. */
#define CHECKED_BYTES ((size_t)4 << 20)

static int make_cases(struct parser *parser)
{
    struct lc_ways_options *o = parser->out;

    for (int l = 0; l < parser->n_lists; l++) {
        for (int i = 0; i < parser->lists[l].n; i++) {
            if (o->n_cases == LC_WAYS_CASES) {
                fprintf(stderr, "loongcomm-bench: ways takes at most %d cases\n", LC_WAYS_CASES);
                return -EINVAL;
            }
            o->cases[o->n_cases++] = (struct lc_bench_case){
                .op = parser->lists[l].op,
                .dtype = lc_bench_dtype_find("f32"),
                .bytes = parser->lists[l].sizes[i],
                .live = 1,
                .graph = o->bench.graph,
                .tensors = 1,
                .bits = 20,
                .seed = 1,
                .unchecked = parser->lists[l].sizes[i] > CHECKED_BYTES,
            };
        }
    }
    qsort(o->cases, (size_t)o->n_cases, sizeof(*o->cases), by_bytes);
    return 0;
}

static int check_together(const struct lc_ways_options *o)
{
    if (o->n_cases == 0) {
        fprintf(stderr, "loongcomm-bench: ways needs a --case OP:SIZES\n");
        return -EINVAL;
    }
    for (int i = 0; i < o->n_ways; i++) {
        if (o->ways[i].wide && !o->ctas) {
            fprintf(stderr, "loongcomm-bench: a way that is wide needs --ctas\n");
            return -EINVAL;
        }
    }
    return 0;
}

int lc_ways_options_parse(int argc, char **argv, struct lc_ways_options *out)
{
    static struct lc_ways_options o;
    struct parser parser = { .out = &o };
    int index = 0;
    int id;

    o.comms = 1;
    o.bench = (struct lc_bench_options){
        .variants = {false, true},
        .no_preload = true,
        .measures = true,
        .budget_s = 60,
        .timeout_s = 60,
        .rotate = SIZE_MAX,
    };
    while ((id = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (id == '?')
            return -EINVAL;
        if (parse_one(id, optarg, &parser))
            return complain(argv[optind - 1 - (optarg != NULL)], optarg ? optarg : "");
    }
    if (optind < argc)
        return complain(argv[optind], "");
    if (!o.help && (make_cases(&parser) || check_together(&o)))
        return -EINVAL;
    *out = o;
    return 0;
}
