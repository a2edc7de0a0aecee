/* SPDX-License-Identifier: Apache-2.0
 *
 * Shows a topology. The library that reads it needs hwloc and libxml2, so it is opened by this command alone. */
#include "common/json.h"
#include "common/output.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/topo_library.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: loongcomm topo [--input FILE-OR-FOLDER] [--paths] [--json] [--svg FILE] [--nccl-xml FILE]\n"
    "       loongcomm topo --compare [--nodes N] [--input FILE-OR-FOLDER]... [--json]\n"
    "\n"
    "Shows what is connected to what in a machine: GPUs, NICs, PCIe switches, NUMA nodes, NVLinks, with\n"
    "link speeds, as a tree. Needs no GPU, changes nothing.\n"
    "\n"
    "  --input PATH       not this machine but: a topology file of NCCL or RCCL (NCCL_TOPO_FILE,\n"
    "                     NCCL_TOPO_DUMP_FILE), an XML file of hwloc's lstopo, or a folder that holds\n"
    "                     the /sys and /proc of another machine\n"
    "  --paths            also the way between any two GPUs and ports as NCCL 2.28 sees it (its name for\n"
    "                     it, GB/s), with the NCCL_ variables set here, and the ports that each GPU's\n"
    "                     channels take\n"
    "  --as-nccl          a machine as NCCL reads it: at no NUMA node where the kernel names none, and\n"
    "                     virtual ports at the first one\n"
    "  --compare          what a job on nodes like this one would put on the most loaded link, as\n"
    "                     NCCL chooses its ways (with the NCCL_ variables set here) and with the\n"
    "                     settings that do better; also for some made-up nodes. --input may be\n"
    "                     repeated; what cannot be read is left out\n"
    "  --nodes N          so many nodes (default 4)\n"
    "  --mixed            the inputs are nodes of one job, N of each\n"
    "  --json             one JSON document, \"schema\": \"loongcomm.topology/1\"\n"
    "  --svg FILE         also draws a picture\n"
    "  --nccl-xml FILE    also writes it as NCCL's topology file, for NCCL_TOPO_FILE\n"
    "  --most-speed MBPS  with no port faster than that in it, where --compare asks for it\n"
    "\n"
    "FILE may be - for standard output; nothing else goes there then.\n"
    "exit codes: 0 shown, 1 the input cannot be read or the output not written, 2 wrong usage.\n";

#define MAX_INPUTS 64

struct options {
    const char *inputs[MAX_INPUTS + 1]; /* the last one only has a place where a next would go */
    int input_count;
    const char *svg;
    const char *xml;
    const char *nodes;
    const char *speed;
    int64_t most_mbps; /* 0: as they are */
    bool compare;
    bool mixed;
    bool paths;
    bool as_nccl;
    bool json;
    bool help;
};

static int parse(int argc, char **argv, struct options *options)
{
    for (int i = 1; i < argc; i++) {
        const struct {
            const char *name;
            const char **value;
        } valued[] = {
            {"--input",       &options->inputs[options->input_count]},
            { "--svg",        &options->svg                         },
            { "--nccl-xml",   &options->xml                         },
            { "--nodes",      &options->nodes                       },
            { "--most-speed", &options->speed                       },
        };
        const struct {
            const char *name;
            bool *value;
        } flags[] = {
            {"--json",     &options->json   },
            { "--compare", &options->compare},
            { "--mixed",   &options->mixed  },
            { "--paths",   &options->paths  },
            { "--as-nccl", &options->as_nccl},
        };
        size_t flag = 0;
        size_t at = 0;

        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            options->help = true;
            return LC_CLI_FINE;
        }
        while (flag < 5 && strcmp(argv[i], flags[flag].name) != 0)
            flag++;
        if (flag < 5) {
            *flags[flag].value = true;
            continue;
        }
        while (at < 5 && strcmp(argv[i], valued[at].name) != 0)
            at++;
        if (at == 5)
            return lc_cli_usage("topo: unexpected '%s'", argv[i]);
        if (i + 1 == argc || !*argv[i + 1])
            return lc_cli_usage("topo: %s needs a value", argv[i]);
        if (at == 0 && options->input_count == MAX_INPUTS)
            return lc_cli_usage("topo: more than %d inputs", MAX_INPUTS);
        *valued[at].value = argv[++i];
        options->input_count += at == 0;
    }
    return LC_CLI_FINE;
}

static int check_speed(struct options *options)
{
    char *end = NULL;

    if (!options->speed)
        return LC_CLI_FINE;
    options->most_mbps = strtol(options->speed, &end, 10);
    if (!options->xml || *end || options->most_mbps < 1 || options->most_mbps > INT_MAX)
        return lc_cli_usage("topo: --most-speed takes a speed in Mb/s and goes with --nccl-xml");
    return LC_CLI_FINE;
}

static int check(const struct options *options, int *out_nodes)
{
    char *end = NULL;
    long nodes = options->nodes ? strtol(options->nodes, &end, 10) : 4;

    *out_nodes = (int)nodes;
    if (!options->compare && (options->nodes || options->mixed))
        return lc_cli_usage("topo: --nodes and --mixed go with --compare");
    if (!options->compare && options->input_count > 1)
        return lc_cli_usage("topo: several inputs go with --compare");
    if (options->mixed && options->input_count > LC_TOPO_MAX_KINDS)
        return lc_cli_usage("topo: --mixed takes %d inputs at most", LC_TOPO_MAX_KINDS);
    if (options->compare && (options->svg || options->xml || options->paths))
        return lc_cli_usage("topo: --compare draws and writes no files, and shows no --paths");
    if (options->nodes && (*end || nodes < 1 || nodes > 65536))
        return lc_cli_usage("topo: --nodes takes a number of nodes, not '%s'", options->nodes);
    if (nodes < 2 && !options->mixed)
        return lc_cli_usage("topo: one node sends nothing to others; --nodes 2 at least");
    return LC_CLI_FINE;
}

static bool is_stdout(const char *file)
{
    return file && strcmp(file, "-") == 0;
}

/* A picture, or NCCL's file. */
static int print_to(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                    const struct options *options, const char *file)
{
    FILE *out = stdout;
    int err = is_stdout(file) ? 0 : lc_output_open_in_place(file, &out);

    if (err == -ENXIO) {
        lc_cli_say("topo: cannot write %s: nobody reads it", file);
        return err;
    }
    if (!err)
        err = file == options->svg ? library->print_svg(topo, out)
                                   : library->write_nccl_slowed(topo, options->most_mbps, out);
    if (out != stdout && fclose(out) != 0 && !err)
        err = -errno;
    if (err == -EILSEQ)
        lc_cli_say("topo: %s is incomplete: a name holds a character that NCCL cannot read", file);
    else if (err)
        lc_cli_say("topo: cannot write %s: %s", file, strerror(-err));
    return err;
}

static int print_to_stdout(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                           const struct options *options)
{
    int err;

    if (options->json)
        err = options->paths ? library->print_json_paths(topo, lc_cli_nccl_get, stdout)
                             : library->print_json(topo, stdout);
    else
        err = library->print_text(topo, stdout);
    if (!err && options->paths && !options->json)
        err = library->print_paths(topo, lc_cli_nccl_get, stdout);
    if (err)
        lc_cli_say("topo: %s",
                   err == -E2BIG ? "more GPUs or ports than NCCL can hold" : strerror(-err));
    return err;
}

static int show(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                const struct options *options)
{
    int err = 0;

    if (!is_stdout(options->svg) && !is_stdout(options->xml))
        err = print_to_stdout(library, topo, options);
    if (options->svg && print_to(library, topo, options, options->svg))
        err = -EIO;
    if (options->xml && print_to(library, topo, options, options->xml))
        err = -EIO;
    return err;
}

/* --- --compare --- */

struct comparison {
    const struct lc_cli_topo_library *library;
    const struct options *options;
    struct lc_json json;
    int nodes;
    int shown;
    char winners[1024]; /* names of machines that gain something */
};

static void json_load(struct lc_json *json, const char *key, const struct lc_topo_load *load)
{
    lc_json_key(json, key);
    lc_json_object(json);
    lc_json_key(json, "ms");
    lc_json_double(json, load->ms);
    lc_json_key(json, "link");
    lc_json_string(json, load->link);
    lc_json_end(json);
}

static void json_side(struct comparison *comparison, const struct lc_topo_plan *plan,
                      const char *key, enum lc_topo_side side)
{
    struct lc_topo_side_loads loads = comparison->library->plan_loads(plan, side);

    lc_json_key(&comparison->json, key);
    lc_json_object(&comparison->json);
    json_load(&comparison->json, "all_to_all", &loads.all_to_all);
    json_load(&comparison->json, "all_reduce", &loads.all_reduce);
    lc_json_key(&comparison->json, "between_rails");
    lc_json_double(&comparison->json, loads.between_rails);
    lc_json_end(&comparison->json);
}

static void json_plan(struct comparison *comparison, const struct lc_topo_plan *plan,
                      const char *name)
{
    struct lc_json *json = &comparison->json;
    int64_t mbps = comparison->library->plan_most_mbps(plan);

    lc_json_object(json);
    lc_json_key(json, "name");
    lc_json_string(json, name);
    lc_json_key(json, "gpus");
    lc_json_int(json, comparison->library->plan_gpus(plan));
    json_side(comparison, plan, "nccl", LC_TOPO_NCCLS);
    json_side(comparison, plan, "loongcomm", LC_TOPO_OURS);
    lc_json_key(json, "settings");
    lc_json_object(json);
    for (int i = 0; i < comparison->library->plan_setting_count(plan); i++) {
        struct lc_topo_setting setting = comparison->library->plan_setting(plan, i);

        lc_json_key(json, setting.name);
        lc_json_string(json, *setting.value ? setting.value : NULL);
    }
    lc_json_end(json);
    if (mbps) {
        lc_json_key(json, "topology_file_most_mbits_per_s");
        lc_json_int(json, mbps);
    }
    lc_json_end(json);
}

static void compare(struct comparison *comparison, const struct lc_topo_kind *kinds, int count,
                    const char *name)
{
    const struct lc_cli_topo_library *library = comparison->library;
    struct lc_topo_plan *plan = NULL;
    int err = library->plan_make(kinds, count, lc_cli_nccl_get, &plan);

    if (err) {
        lc_cli_say("topo: %s cannot be planned: %s", name,
                   err == -EINVAL ? "it lacks GPUs or ports, or is several machines"
                                  : strerror(-err));
        return;
    }
    if (comparison->options->json)
        json_plan(comparison, plan, name);
    else
        (void)library->plan_print(plan, name, stdout);
    if (library->plan_setting_count(plan)) {
        size_t used = strlen(comparison->winners);

        (void)snprintf(comparison->winners + used, sizeof(comparison->winners) - used, "%s%s",
                       used ? ", " : "", name);
    }
    comparison->shown++;
    library->plan_free(plan);
}

static const char *base_name(const struct lc_cli_topo_library *library, const struct lc_topo *topo)
{
    const char *name = library->name(topo);
    const char *slash = strrchr(name, '/');

    return slash && slash[1] ? slash + 1 : name;
}

/* What has no NVLink or one port only has nothing to choose between. */
static void compare_inputs(struct comparison *comparison, struct lc_topo *const *topos, int count)
{
    const struct lc_cli_topo_library *library = comparison->library;
    struct lc_topo_kind kinds[MAX_INPUTS];

    for (int i = 0; i < count; i++) {
        kinds[i] = (struct lc_topo_kind){ topos[i], comparison->nodes };
        if (comparison->options->mixed || !topos[i])
            continue;
        if (library->is_plannable(topos[i]))
            compare(comparison, &kinds[i], 1, base_name(library, topos[i]));
        else if (!comparison->options->json)
            (void)printf("%s: nothing to choose: %s\n", base_name(library, topos[i]),
                         library->is_partial(topos[i])
                             ? "GPUs or ports are not in it, NCCL finds those on the machine"
                             : "no NVLink, or fewer than two network ports");
    }
    if (comparison->options->mixed)
        compare(comparison, kinds, count, "mixed");
}

static void compare_samples(struct comparison *comparison)
{
    const char *name;

    for (int i = 0; (name = comparison->library->sample_name(i)); i++) {
        struct lc_topo *topo = NULL;

        if (comparison->library->sample(name, &topo) != 0)
            continue;
        compare(comparison,
                &(struct lc_topo_kind){ topo, comparison->nodes < 2 ? 2 : comparison->nodes }, 1,
                name);
        comparison->library->free(topo);
    }
}

static int show_comparison(const struct lc_cli_topo_library *library, struct lc_topo *const *topos,
                           int count, const struct options *options, int nodes)
{
    struct comparison comparison = { .library = library, .options = options, .nodes = nodes };

    if (options->json) {
        lc_json_init(&comparison.json, stdout);
        lc_json_object(&comparison.json);
        lc_json_key(&comparison.json, "schema");
        lc_json_string(&comparison.json, "loongcomm.plan/1");
        lc_json_key(&comparison.json, "nodes");
        lc_json_int(&comparison.json, nodes);
        lc_json_key(&comparison.json, "plans");
        lc_json_array(&comparison.json);
    } else {
        (void)printf("all-to-all: each GPU sends 1 GB to all other nodes together; all-reduce: of "
                     "1 GB. Times are bytes by nominal bandwidth.\n");
    }
    compare_inputs(&comparison, topos, count);
    if (!options->mixed)
        compare_samples(&comparison);
    if (options->json) {
        lc_json_end(&comparison.json);
        lc_json_end(&comparison.json);
        (void)lc_json_finish(&comparison.json); /* a failing stream is seen by main() */
    } else {
        (void)printf("better than NCCL's own: %s\n",
                     *comparison.winners ? comparison.winners : "none of these");
    }
    return comparison.shown ? LC_CLI_FINE : LC_CLI_FINDING;
}

/* Loads all inputs, this machine if there are none; how many could not be. */
static int load(const struct lc_cli_topo_library *library, const struct options *options, int count,
                struct lc_topo **out)
{
    int refused = 0;

    for (int i = 0; i < count; i++) {
        char error[1024];

        if ((options->as_nccl ? library->load_as_nccl : library->load)(options->inputs[i], &out[i],
                                                                       error, sizeof(error)) == 0)
            continue;
        lc_cli_say("topo: %s", error);
        refused++;
    }
    return refused;
}

int lc_cli_topo(int argc, char **argv)
{
    struct options options = { 0 };
    int code = parse(argc, argv, &options);
    struct lc_topo *topos[MAX_INPUTS] = { 0 };
    struct lc_cli_topo_library library;
    char why[512];
    int nodes = 0;
    int count, refused;

    if (code)
        return code;
    if (options.help) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    code = check_speed(&options);
    if (!code)
        code = check(&options, &nodes);
    if (code)
        return code;
    if (is_stdout(options.svg) + is_stdout(options.xml) + options.json > 1)
        return lc_cli_usage("topo: one of --json, --svg and --nccl-xml can go to standard output");
    if (lc_cli_topo_open(&library, why, sizeof(why)) != 0) {
        lc_cli_say("topo: %s", why);
        return LC_CLI_FINDING;
    }
    count = options.input_count ? options.input_count : 1;
    refused = load(&library, &options, count, topos);
    if (options.compare && (refused == 0 || (!options.mixed && refused < count)))
        code = show_comparison(&library, topos, count, &options, nodes);
    else if (refused == 0)
        code = show(&library, topos[0], &options) ? LC_CLI_FINDING : LC_CLI_FINE;
    if (refused)
        code = LC_CLI_FINDING;
    for (int i = 0; i < count; i++)
        library.free(topos[i]);
    return code;
}
