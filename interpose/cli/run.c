/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/plan.h"
#include "interpose/cli/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "LOONGCOMM_"

static const char help[] =
    "usage: loongcomm run [OPTIONS] -- CMD [ARGS]\n"
    "\n"
    "Starts CMD with libloongcomm.so preloaded: the absolute path of the library stands first in\n"
    "LD_PRELOAD, and what was there stays behind it. Everything CMD starts inherits that.\n"
    "\n"
    "  --report off|text|json   what each process that used NCCL reports at its exit\n"
    "                           (LOONGCOMM_REPORT)\n"
    "  --dir D                  folder for the reports, one file a process; made if missing\n"
    "                           (LOONGCOMM_DIR)\n"
    "  --set NAME=VALUE         any setting of `loongcomm config`, LOONGCOMM_ may be left out;\n"
    "                           may be repeated\n"
    "  --proxy                  for programs that load NCCL themselves with dlopen and ask for its\n"
    "                           functions by dlsym (vLLM, SGLang, JAX, XGBoost): nothing is preloaded,\n"
    "                           the folder of loongcomm's own libnccl.so.2 stands first in\n"
    "                           LD_LIBRARY_PATH, and that library opens the real one. If it should\n"
    "                           not find it: --set NCCL=/path/of/libnccl.so.2. A program that opens\n"
    "                           NCCL by a full path needs that path changed (vLLM: set\n"
    "                           VLLM_NCCL_SO_PATH to the libnccl.so.2 that --proxy names in\n"
    "                           LD_LIBRARY_PATH).\n"
    "  --topology PATH          plan by that description of this machine: a topology file of NCCL, XML of\n"
    "                           lstopo, or a folder with its /sys and /proc\n"
    "\n"
    "On machines with NVLink and several network ports it also sets those NCCL_ variables that take\n"
    "load off the most loaded link between nodes (`loongcomm topo --compare` shows why), never over\n"
    "yours, with a line for each; LOONGCOMM_PXN=auto|force|off governs that. Where /sys shows GPUs or\n"
    "ports elsewhere than they are (containers, firmware without NUMA nodes), NCCL is given a topology\n"
    "file, written into the folder of --dir.\n"
    "\n"
    "Where NCCL_NET_PLUGIN names loongcomm's network plugin and it is certain that all ranks see that\n"
    "there are 2 to 4 of them, each on a node of its own (torchrun's variables; mpirun's for 2 ranks),\n"
    "NCCL is told to make more channels than it does for TCP, with a line for each variable; not where\n"
    "CMD is a launcher or NCCL_TUNER_PLUGIN names another tuner than loongcomm's.\n"
    "LOONGCOMM_NET_CHANNELS=auto|force|off governs that.\n"
    "\n"
    "exit code: CMD's; 127 if CMD is not found, 126 if it cannot be executed, 2 for wrong usage, 1 if\n"
    "the library is missing or cannot be preloaded.\n"
    "\n"
    "examples:\n"
    "  loongcomm run -- torchrun --nproc-per-node 8 train.py\n"
    "  loongcomm run --report json --dir /tmp/reports -- mpirun -n 4 ./train\n";

struct options {
    bool proxy;
    bool help;
    char **command; /* NULL-terminated, part of argv */
};

static const struct lc_config_entry *entry_named(const struct lc_cli_settings *settings,
                                                 const char *name, size_t len)
{
    for (size_t i = 0; i < settings->count; i++) {
        const char *own = settings->entry[i].name;

        if (strlen(own) == len && memcmp(own, name, len) == 0)
            return &settings->entry[i];
    }
    return NULL;
}

/* Puts a setting into our own environment, which CMD inherits, if it is one and has a good value. */
static int set(const char *name, size_t name_len, const char *value)
{
    static struct lc_cli_settings settings;
    const struct lc_config_entry *entry;
    char full[128];

    if (name_len > strlen(PREFIX) && memcmp(name, PREFIX, strlen(PREFIX)) == 0) {
        name += strlen(PREFIX);
        name_len -= strlen(PREFIX);
    }
    (void)snprintf(full, sizeof(full), PREFIX "%.*s", (int)(name_len < 64 ? name_len : 64), name);
    lc_cli_settings_load(&settings);
    if (!entry_named(&settings, full, strlen(full)))
        return lc_cli_usage("run: there is no setting %s; `loongcomm config` lists them", full);
    if (setenv(full, value, 1) != 0) {
        lc_cli_say("run: %s: %s", full, strerror(errno));
        return LC_CLI_FINDING;
    }
    lc_cli_settings_load(&settings);
    entry = entry_named(&settings, full, strlen(full));
    if (entry && strcmp(entry->value, value) != 0) /* the table fell back to the default */
        return lc_cli_usage("run: '%.64s' is not accepted for %s: %s", value, full, entry->help);
    return LC_CLI_FINE;
}

static int set_pair(const char *pair)
{
    const char *equals = strchr(pair, '=');

    if (!equals || equals == pair)
        return lc_cli_usage("run: --set takes NAME=VALUE, not '%s'", pair);
    return set(pair, (size_t)(equals - pair), equals + 1);
}

/* Absolute, since CMD may change folders before a process ends. */
static int set_folder(const char *folder)
{
    char path[PATH_MAX];

    if (mkdir(folder, 0700) != 0 && errno != EEXIST) {
        lc_cli_say("run: cannot make the folder %s: %s", folder, strerror(errno));
        return LC_CLI_FINDING;
    }
    if (!realpath(folder, path)) {
        lc_cli_say("run: cannot use the folder %s: %s", folder, strerror(errno));
        return LC_CLI_FINDING;
    }
    return set("DIR", strlen("DIR"), path);
}

static const char *topology; /* of --topology; NULL */

static int set_topology(const char *path)
{
    topology = path;
    return LC_CLI_FINE;
}

static int set_report(const char *kind)
{
    return set("REPORT", strlen("REPORT"), kind);
}

static int parse(int argc, char **argv, struct options *out)
{
    static const struct {
        const char *name;
        int (*take)(const char *value);
    } with_value[] = {
        {"--topology", set_topology},
        { "--report",  set_report  },
        { "--dir",     set_folder  },
        { "--set",     set_pair    }
    };

    for (int i = 1; i < argc; i++) {
        size_t k = 0;
        int code;

        if (strcmp(argv[i], "--") == 0) {
            out->command = argv + i + 1;
            break;
        }
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            out->help = true;
            return LC_CLI_FINE;
        }
        if (strcmp(argv[i], "--proxy") == 0) {
            out->proxy = true;
            continue;
        }
        while (k < sizeof(with_value) / sizeof(*with_value) &&
               strcmp(argv[i], with_value[k].name) != 0)
            k++;
        if (k == sizeof(with_value) / sizeof(*with_value))
            return lc_cli_usage("run: unexpected '%s'; the command stands behind --", argv[i]);
        if (i + 1 >= argc || strcmp(argv[i + 1], "--") == 0)
            return lc_cli_usage("run: %s needs a value", argv[i]);
        code = with_value[k].take(argv[++i]);
        if (code)
            return code;
    }
    if (!out->command || !*out->command)
        return lc_cli_usage("run: no command; usage: loongcomm run [OPTIONS] -- CMD [ARGS]");
    return LC_CLI_FINE;
}

/* Among preloaded libraries ours may stand anywhere; of folders the first that holds an NCCL is taken. */
static int put_in_front(const char *variable, const char *path, const char *separators,
                        bool anywhere)
{
    const char *why = lc_cli_unlistable(path, separators);
    lc_autofree char *list = NULL;

    if (why) {
        lc_cli_say("run: %s has %s in its path, and the loader would misread it in %s; install "
                   "loongcomm in a folder without, or put a symbolic link to the file into such a "
                   "folder and set %s to the link yourself",
                   path, why, variable, variable);
        return LC_CLI_FINDING;
    }
    list = lc_cli_list_with(getenv(variable), path, separators, anywhere);
    if (!list || setenv(variable, list, 1) != 0) {
        lc_cli_say("run: cannot set %s: out of memory", variable);
        return LC_CLI_FINDING;
    }
    return LC_CLI_FINE;
}

static int arrange(bool proxy)
{
    char path[PATH_MAX];

    if (proxy) {
        if (lc_cli_find_proxy(path) != 0) {
            lc_cli_say(
                "run: loongcomm's own libnccl.so.2 is not beside libloongcomm.so; reinstall");
            return LC_CLI_FINDING;
        }
        return put_in_front("LD_LIBRARY_PATH", path, LC_CLI_LIBRARY_PATH_SEPARATORS, false);
    }
    if (lc_cli_find_library(path) != 0) {
        lc_cli_say("run: libloongcomm.so is not beside this program nor in ../lib; reinstall");
        return LC_CLI_FINDING;
    }
    return put_in_front("LD_PRELOAD", path, LC_CLI_PRELOAD_SEPARATORS, true);
}

int lc_cli_run(int argc, char **argv)
{
    static struct lc_cli_settings settings;
    struct options options = { 0 };
    int code = parse(argc, argv, &options);
    int err;

    if (code)
        return code;
    if (options.help || !options.command) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    code = arrange(options.proxy);
    if (code)
        return code;
    lc_cli_settings_load(&settings);
    if (settings.config.enable)
        lc_cli_apply_plan(&settings.config, topology);
    /* A rank without the library has the plugin, and must have as many channels as the others. */
    lc_cli_apply_channels(&settings.config, options.command);
    (void)execvp(options.command[0], options.command);
    err = errno;
    lc_cli_say("run: %s: %s", options.command[0], strerror(err));
    return err == ENOENT ? LC_CLI_NOT_FOUND : LC_CLI_CANNOT_EXEC;
}
