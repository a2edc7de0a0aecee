/* SPDX-License-Identifier: Apache-2.0
 *
 * Shows a topology. The library that reads it needs hwloc and libxml2, so it is opened by this command alone. */
#include "interpose/cli/cli.h"
#include "topology/loongtopo.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: loongcomm topo [--input FILE-OR-FOLDER] [--json] [--svg FILE] [--nccl-xml FILE]\n"
    "\n"
    "Shows what is connected to what in a machine: GPUs, NICs, PCIe switches, NUMA nodes, NVLinks, with\n"
    "link speeds, as a tree. Needs no GPU, changes nothing.\n"
    "\n"
    "  --input PATH       not this machine but: a topology file of NCCL or RCCL (NCCL_TOPO_FILE,\n"
    "                     NCCL_TOPO_DUMP_FILE), an XML file of hwloc's lstopo, or a folder that holds\n"
    "                     the /sys and /proc of another machine\n"
    "  --json             one JSON document, \"schema\": \"loongcomm.topology/1\"\n"
    "  --svg FILE         also draws a picture\n"
    "  --nccl-xml FILE    also writes it as NCCL's topology file, for NCCL_TOPO_FILE\n"
    "\n"
    "FILE may be - for standard output; nothing else goes there then.\n"
    "exit codes: 0 shown, 1 the input cannot be read or the output not written, 2 wrong usage.\n";

struct options {
    const char *input;
    const char *svg;
    const char *xml;
    bool json;
    bool help;
};

struct library {
    __typeof__(lc_topo_load) *load;
    __typeof__(lc_topo_free) *free;
    __typeof__(lc_topo_print_text) *print_text;
    __typeof__(lc_topo_print_json) *print_json;
    __typeof__(lc_topo_print_svg) *print_svg;
    __typeof__(lc_topo_write_nccl) *write_nccl;
};

static int parse(int argc, char **argv, struct options *options)
{
    for (int i = 1; i < argc; i++) {
        const struct {
            const char *name;
            const char **value;
        } valued[] = {
            {"--input",     &options->input},
            { "--svg",      &options->svg  },
            { "--nccl-xml", &options->xml  },
        };
        size_t at = 0;

        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            options->help = true;
            return LC_CLI_FINE;
        }
        if (strcmp(argv[i], "--json") == 0) {
            options->json = true;
            continue;
        }
        while (at < 3 && strcmp(argv[i], valued[at].name) != 0)
            at++;
        if (at == 3)
            return lc_cli_usage("topo: unexpected '%s'", argv[i]);
        if (i + 1 == argc || !*argv[i + 1])
            return lc_cli_usage("topo: %s needs a value", argv[i]);
        *valued[at].value = argv[++i];
    }
    return LC_CLI_FINE;
}

/* Stays open until the process ends. */
static int open_library(struct library *out)
{
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
        {"lc_topo_load",        &out->load      },
        { "lc_topo_free",       &out->free      },
        { "lc_topo_print_text", &out->print_text},
        { "lc_topo_print_json", &out->print_json},
        { "lc_topo_print_svg",  &out->print_svg },
        { "lc_topo_write_nccl", &out->write_nccl},
    };
    char path[PATH_MAX];
    void *handle;

    if (lc_cli_find_topology(path) != 0) {
        lc_cli_say("topo: libloongtopo.so is not installed: loongcomm was built without hwloc or "
                   "libxml2");
        return -ENOENT;
    }
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; handle && i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *found = dlsym(handle, symbols[i].name);

        if (!found)
            handle = NULL;
        else
            memcpy(symbols[i].slot, &found, sizeof(found));
    }
    if (handle)
        return 0;
    lc_cli_say("topo: libloongtopo.so cannot be loaded, it needs hwloc and libxml2: %s", dlerror());
    return -ELIBACC;
}

static bool is_stdout(const char *file)
{
    return file && strcmp(file, "-") == 0;
}

typedef int print_function(const struct lc_topo *topo, FILE *out);

static int print_to(const struct lc_topo *topo, const char *file, print_function *print)
{
    FILE *out = is_stdout(file) ? stdout : fopen(file, "we");
    int err = out ? print(topo, out) : -errno;

    if (out && out != stdout && fclose(out) != 0 && !err)
        err = -errno;
    if (err == -EILSEQ)
        lc_cli_say("topo: %s is incomplete: a name holds a character that NCCL cannot read", file);
    else if (err)
        lc_cli_say("topo: cannot write %s: %s", file, strerror(-err));
    return err;
}

static int show(const struct library *library, const struct lc_topo *topo,
                const struct options *options)
{
    int err = 0;

    if (!is_stdout(options->svg) && !is_stdout(options->xml))
        err = options->json ? library->print_json(topo, stdout) : library->print_text(topo, stdout);
    if (options->svg && print_to(topo, options->svg, library->print_svg))
        err = -EIO;
    if (options->xml && print_to(topo, options->xml, library->write_nccl))
        err = -EIO;
    return err;
}

int lc_cli_topo(int argc, char **argv)
{
    struct options options = { 0 };
    int code = parse(argc, argv, &options);
    struct lc_topo *topo = NULL;
    struct library library;
    char error[1024];
    int err;

    if (code)
        return code;
    if (options.help) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    if (is_stdout(options.svg) + is_stdout(options.xml) + options.json > 1)
        return lc_cli_usage("topo: one of --json, --svg and --nccl-xml can go to standard output");
    if (open_library(&library) != 0)
        return LC_CLI_FINDING;
    if (library.load(options.input, &topo, error, sizeof(error)) != 0) {
        lc_cli_say("topo: %s", error);
        return LC_CLI_FINDING;
    }
    err = show(&library, topo, &options);
    library.free(topo);
    return err ? LC_CLI_FINDING : LC_CLI_FINE;
}
