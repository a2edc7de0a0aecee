/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/tune.h"

#include "interpose/cli/cli.h"

#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: loongcomm tune --explain SIZE [--op OP] [--type T] [--ranks N] [--nodes N]\n"
    "                      [--profile FILE] [--json]\n"
    "\n"
    "Says what would become of one call with the settings of this environment: which path it takes,\n"
    "with which algorithm where NCCL carries it, and which setting, rule of a profile or default\n"
    "decides that. Nothing is measured or changed.\n"
    "\n"
    "  --explain SIZE    bytes of a rank's send buffer (4096, 64k, 16m)\n"
    "  --op OP           all-reduce (default), reduce-scatter, all-gather, all-to-all, broadcast, ...\n"
    "  --type T          f32 (default), bf16, f16, f64, i32, ...\n"
    "  --ranks N         ranks of the communicator (as the profile's rules, else 2)\n"
    "  --nodes N         on so many nodes (as NCCL counts in the profile's rules, else 1)\n"
    "  --profile FILE    this profile instead of LOONGCOMM_PROFILE's\n"
    "  --json            one JSON document, \"schema\": \"loongcomm.explain/1\"\n"
    "\n"
    "exit codes: 0 said, 1 the profile cannot be read, 2 wrong usage.\n";

struct options {
    struct lc_tune_question question;
    bool help;
};

static int parse_count(const char *name, const char *text, int most, int *out)
{
    char *end;
    long value = strtol(text, &end, 10);

    if (end == text || *end || value < 1 || value > most)
        return lc_cli_usage("tune: %s takes a number up to %d, not '%s'", name, most, text);
    *out = (int)value;
    return LC_CLI_FINE;
}

static int parse(int argc, char **argv, struct options *out)
{
    const char *ranks = NULL, *nodes = NULL;
    const struct {
        const char *name, **value;
    } valued[] = {
        {"--explain",  &out->question.size   },
        { "--op",      &out->question.op     },
        { "--type",    &out->question.type   },
        { "--profile", &out->question.profile},
        { "--ranks",   &ranks                },
        { "--nodes",   &nodes                },
    };
    const size_t n_valued = sizeof(valued) / sizeof(*valued);
    int code = LC_CLI_FINE;

    for (int i = 1; i < argc; i++) {
        size_t at = 0;

        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            out->help = true;
            return LC_CLI_FINE;
        }
        if (strcmp(argv[i], "--json") == 0) {
            out->question.json = true;
            continue;
        }
        while (at < n_valued && strcmp(argv[i], valued[at].name) != 0)
            at++;
        if (at == n_valued)
            return lc_cli_usage("tune: unexpected '%s'; see `loongcomm tune --help`", argv[i]);
        if (i + 1 == argc || !*argv[i + 1])
            return lc_cli_usage("tune: %s needs a value", argv[i]);
        *valued[at].value = argv[++i];
    }
    if (ranks)
        code = parse_count("--ranks", ranks, 1 << 24, &out->question.ranks);
    if (!code && nodes)
        code = parse_count("--nodes", nodes, 1 << 24, &out->question.nodes);
    return code;
}

int lc_cli_tune(int argc, char **argv)
{
    struct options options = { 0 };
    int code = parse(argc, argv, &options);

    if (code)
        return code;
    if (options.help) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    if (!options.question.size)
        return lc_cli_usage("tune: --explain SIZE is missing; see `loongcomm tune --help`");
    return lc_tune_explain(&options.question);
}
