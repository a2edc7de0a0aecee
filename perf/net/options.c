/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/net/net.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef LC_LIBDIR
#define LC_LIBDIR "../lib"
#endif

static const char usage_text[] =
    "usage: loongcomm-bench net [options]\n"
    "\n"
    "Times loongcomm's network plugin beside one TCP socket, and beside another plugin, in turns, between\n"
    "two processes, and checks what arrives. All are driven as NCCL drives a plugin. Needs no GPU and no\n"
    "NCCL. Settings of the plugins come from the environment (LOONGCOMM_NET_SOCKETS ...).\n"
    "\n"
    "  --ops LIST        stream (one way), exchange (both ways at once), pingpong (there and back)\n"
    "                    (stream,pingpong)\n"
    "  --sizes LIST|MIN:MAX:FACTOR  bytes of a message, with k, m, g (4k,64k,128k,512k,1m,4m,64m)\n"
    "  --live LIST       shares of 4 KiB blocks that are not zero (1.0)\n"
    "  --sides LIST      socket, loongcomm (both)\n"
    "  --peer PATH       another network plugin for NCCL 2.28 or newer, as a further side; no relay\n"
    "  --flows N         connections in each direction (1)\n"
    "  --depth N         messages in flight on a connection (8)\n"
    "  --rounds N        turns of each side (11)\n"
    "  --budget SECONDS  about so long in all (30)\n"
    "  --link WHAT       what is between the ends (nothing: loopback):\n"
    "                    relay[,rate=BYTES][,delay=MS][,slow=FACTOR][,stall=SHARE]  a process that passes\n"
    "                    on: bytes a second of each TCP connection, one-way delay, the second connection\n"
    "                    slower by a factor, the share of 64 KiB blocks that wait a round trip longer\n"
    "                    veth[,rate=BYTES]  two network namespaces, and a token bucket at both devices\n"
    "  --timeout SECONDS longest wait for an end (60)\n"
    "  --seed N          of the data (1)\n"
    "  --lib PATH        libnccl-net-loongcomm.so (the one near this program)\n"
    "  --json FILE       write the results there as well\n";

enum option_id {
    OPT_OPS = 256,
    OPT_SIZES,
    OPT_LIVE,
    OPT_SIDES,
    OPT_FLOWS,
    OPT_DEPTH,
    OPT_ROUNDS,
    OPT_BUDGET,
    OPT_LINK,
    OPT_TIMEOUT,
    OPT_SEED,
    OPT_LIB,
    OPT_PEER,
    OPT_JSON,
};

static const struct option long_options[] = {
    {"ops",      required_argument, NULL, OPT_OPS    },
    { "sizes",   required_argument, NULL, OPT_SIZES  },
    { "live",    required_argument, NULL, OPT_LIVE   },
    { "sides",   required_argument, NULL, OPT_SIDES  },
    { "flows",   required_argument, NULL, OPT_FLOWS  },
    { "depth",   required_argument, NULL, OPT_DEPTH  },
    { "rounds",  required_argument, NULL, OPT_ROUNDS },
    { "budget",  required_argument, NULL, OPT_BUDGET },
    { "link",    required_argument, NULL, OPT_LINK   },
    { "timeout", required_argument, NULL, OPT_TIMEOUT},
    { "seed",    required_argument, NULL, OPT_SEED   },
    { "lib",     required_argument, NULL, OPT_LIB    },
    { "peer",    required_argument, NULL, OPT_PEER   },
    { "json",    required_argument, NULL, OPT_JSON   },
    { NULL,      0,                 NULL, 0          },
};

void lc_bnet_usage(FILE *out)
{
    fputs(usage_text, out);
}

static int parse_number(const char *text, double low, double high, double *out)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end || !isfinite(value) || value < low || value > high)
        return -EINVAL;
    *out = value;
    return 0;
}

static int parse_int(const char *text, int low, int high, int *out)
{
    double value;

    if (parse_number(text, low, high, &value) || value != floor(value))
        return -EINVAL;
    *out = (int)value;
    return 0;
}

/* Names of a list, each once, as flags; `skip`: what they begin with, that nobody types. */
static int parse_names(const char *text, const char *const *names, int count, size_t skip,
                       bool *out)
{
    bool chosen[LC_BNET_OPS] = { false };
    char copy[128];
    char *rest = copy;
    char *part;

    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
        return -EINVAL;
    while ((part = strsep(&rest, ","))) {
        int i = 0;

        while (i < count && strcmp(part, names[i] + skip) != 0)
            i++;
        if (i == count)
            return -EINVAL;
        chosen[i] = true;
    }
    memcpy(out, chosen, (size_t)count * sizeof(*out));
    return 0;
}

static int parse_bytes(const char *text, double *out)
{
    size_t sizes[1];

    if (strchr(text, ':') || lc_bench_parse_sizes(text, sizes, 1) != 1)
        return -EINVAL;
    *out = (double)sizes[0];
    return 0;
}

int lc_bnet_parse_link(const char *text, struct lc_bnet_link *out)
{
    struct lc_bnet_link link = { 0 };
    char copy[128];
    char *rest = copy;
    char *part;
    double ms;

    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
        return -EINVAL;
    part = strsep(&rest, ",");
    link.relay = strcmp(part, "relay") == 0;
    link.veth = strcmp(part, "veth") == 0;
    if (!link.relay && !link.veth)
        return -EINVAL;
    while ((part = strsep(&rest, ","))) {
        char *value = strchr(part, '=');
        int err = value ? 0 : -EINVAL;

        if (!err)
            *value++ = '\0';
        if (!err && strcmp(part, "rate") == 0) {
            err = parse_bytes(value, &link.rate);
        } else if (!err && link.relay && strcmp(part, "delay") == 0) {
            err = parse_number(value, 0, 10000, &ms);
            link.delay_s = err ? 0 : ms / 1e3;
        } else if (!err && link.relay && strcmp(part, "slow") == 0) {
            err = parse_number(value, 1, 1e6, &link.slow);
        } else if (!err && link.relay && strcmp(part, "stall") == 0) {
            err = parse_number(value, 0, 1, &link.stall);
        } else {
            err = -EINVAL;
        }
        if (err)
            return err;
    }
    if (link.slow > 0 && link.rate <= 0)
        return -EINVAL; /* slower than what? */
    *out = link;
    return 0;
}

static int parse_count(int count, int *out)
{
    *out = count;
    return count < 1 ? -EINVAL : 0;
}

static int parse_one(int id, const char *text, struct lc_bnet_options *o)
{
    static const char *const sides[] = { "socket", "loongcomm" };
    double seed;

    switch (id) {
    case OPT_OPS: return parse_names(text, lc_bnet_op_names, LC_BNET_OPS, strlen("net-"), o->ops);
    case OPT_SIZES:
        return parse_count(lc_bench_parse_sizes(text, o->sizes, LC_BENCH_MAX_LIST), &o->n_sizes);
    case OPT_LIVE:
        return parse_count(lc_bench_parse_lives(text, o->lives, LC_BENCH_MAX_LIST), &o->n_lives);
    case OPT_SIDES: return parse_names(text, sides, 2, 0, o->sides);
    case OPT_FLOWS: return parse_int(text, 1, LC_BNET_FLOWS, &o->flows);
    case OPT_DEPTH: return parse_int(text, 1, LC_BNET_DEPTH, &o->depth);
    case OPT_ROUNDS: return parse_int(text, 1, 10000, &o->rounds);
    case OPT_BUDGET: return parse_number(text, 0.1, 1e6, &o->budget_s);
    case OPT_LINK: return lc_bnet_parse_link(text, &o->link);
    case OPT_TIMEOUT: return parse_int(text, 1, 100000, &o->timeout_s);
    case OPT_SEED:
        if (parse_number(text, 0, 0x1p53, &seed))
            return -EINVAL;
        o->seed = (uint64_t)seed;
        return 0;
    case OPT_LIB: o->library = text; return *text ? 0 : -EINVAL;
    case OPT_PEER:
        o->peer = text;
        o->sides[LC_BNET_PEER] = true;
        return *text ? 0 : -EINVAL;
    default: o->json = text; return *text ? 0 : -EINVAL;
    }
}

/* In the build tree, in one folder, or where both are installed. */
static int find_library(struct lc_bnet_options *o)
{
    static const char *const places[] = { "../plugin/net/abi/", "", LC_LIBDIR "/", "../lib/" };
    static char path[PATH_MAX];
    char self[PATH_MAX];
    char candidate[2 * PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (o->library || !o->sides[LC_BNET_OURS])
        return 0;
    self[length < 0 ? 0 : length] = '\0';
    if (strrchr(self, '/'))
        strrchr(self, '/')[1] = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        (void)snprintf(candidate, sizeof(candidate), "%s%slibnccl-net-loongcomm.so",
                       places[i][0] == '/' ? "" : self, places[i]);
        if (realpath(candidate, path)) {
            o->library = path;
            return 0;
        }
    }
    fprintf(stderr, "loongcomm-bench: libnccl-net-loongcomm.so is not near this program; name it "
                    "with --lib\n");
    return -EINVAL;
}

int lc_bnet_options_parse(int argc, char **argv, struct lc_bnet_options *out)
{
    struct lc_bnet_options o = {
        .ops = {[LC_BNET_STREAM] = true, [LC_BNET_PINGPONG] = true },
        .sides = { true,                      true },
        .lives = { 1},
        .n_lives = 1,
        .flows = 1,
        .depth = 8,
        .rounds = 11,
        .budget_s = 30,
        .timeout_s = 60,
        .seed = 1,
    };
    int index = 0;
    int id;

    o.n_sizes = lc_bench_parse_sizes("4k,64k,128k,512k,1m,4m,64m", o.sizes, LC_BENCH_MAX_LIST);
    while ((id = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (id == '?')
            return -EINVAL; /* getopt has said what */
        if (parse_one(id, optarg, &o)) {
            fprintf(stderr, "loongcomm-bench net: --%s %s: not understood; see net --help\n",
                    long_options[index].name, optarg);
            return -EINVAL;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "loongcomm-bench net: %s: unexpected argument; see net --help\n",
                argv[optind]);
        return -EINVAL;
    }
    if (find_library(&o))
        return -EINVAL;
    *out = o;
    return 0;
}
