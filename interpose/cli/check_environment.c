/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "common/input.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/doctor.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* 0, or why no file can be read there. */
static int unreadable(const char *path)
{
    int fd = lc_input_open(AT_FDCWD, path, 0);

    if (fd < 0)
        return fd;
    close(fd);
    return 0;
}

static void check_settings(struct lc_cli_doctor *doctor)
{
    const struct lc_cli_settings *settings = &doctor->settings;
    const struct lc_config *config = &settings->config;
    size_t given = 0;
    struct stat st;
    int err;

    for (size_t i = 0; i < settings->count; i++)
        given += strcmp(settings->entry[i].origin, "default") != 0;
    for (size_t i = 0; i < settings->problem_count; i++) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "setting-bad", "%s", settings->problem[i]);
        lc_cli_remedy(&doctor->findings,
                      "`loongcomm config` lists the settings and what they take");
    }
    if (!settings->problem_total)
        lc_cli_find(&doctor->findings, LC_CLI_OK, "settings", "%zu settings, %zu of them given",
                    settings->count, given);
    if (!config->enable) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "disabled",
                    "LOONGCOMM_ENABLE is off: every call of a job goes straight to NCCL");
        lc_cli_remedy(&doctor->findings, "unset LOONGCOMM_ENABLE");
    }
    err = *config->nccl ? unreadable(config->nccl) : 0;
    if (!err && !lc_input_is_loadable(config->nccl))
        err = -ENXIO;
    if (err) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "setting-nccl",
                    "LOONGCOMM_NCCL names %s: %s", config->nccl, lc_input_why(err));
        lc_cli_remedy(&doctor->findings, "give the path of the real libnccl.so.2, or unset it");
    }
    if (*config->dir &&
        (stat(config->dir, &st) != 0 || !S_ISDIR(st.st_mode) || access(config->dir, W_OK) != 0)) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "setting-dir",
                    "LOONGCOMM_DIR names %s, which is no folder that can be written to",
                    config->dir);
        lc_cli_remedy(&doctor->findings, "make that folder, or give another");
    }
}

static void check_preload_entry(const char *entry, void *arg)
{
    struct lc_cli_doctor *doctor = arg;
    const char *base = strrchr(entry, '/');
    char own[PATH_MAX];
    char real[PATH_MAX];

    base = base ? base + 1 : entry;
    if (strchr(entry, '/') && *entry != '/') {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "preload-relative",
                    "LD_PRELOAD names %s, which is not found by processes in other folders", entry);
        lc_cli_remedy(&doctor->findings, "give its absolute path");
    } else if (*entry == '/' && access(entry, R_OK) != 0 && !strchr(entry, '$')) {
        lc_cli_find(
            &doctor->findings, LC_CLI_WARNING, "preload-missing",
            "LD_PRELOAD names %s: %s; the loader ignores it with a message in every process", entry,
            strerror(errno));
        lc_cli_remedy(&doctor->findings, "take it out of LD_PRELOAD");
    }
    if (strcmp(base, "libloongcomm.so") != 0 || lc_cli_find_library(own) != 0)
        return;
    if (!realpath(entry, real) || strcmp(real, own) != 0) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "preload-other-loongcomm",
                    "LD_PRELOAD already names %s, another one than %s: a job would load both",
                    entry, own);
        lc_cli_remedy(&doctor->findings, "take it out of LD_PRELOAD, `loongcomm run` puts ours in");
    }
}

enum {
    NET,
    TUNER,
    PROFILER
};

static const struct {
    const char *variable;
    const char *kind;
} plugins[] = {
    [NET] = {"NCCL_NET_PLUGIN",       "net"     },
    [TUNER] = { "NCCL_TUNER_PLUGIN",    "tuner"   },
    [PROFILER] = { "NCCL_PROFILER_PLUGIN", "profiler"},
};

struct plugin_check {
    struct lc_cli_doctor *doctor;
    int which;
};

/* Words that NCCL takes for no file; it accepts any beginning of the second. */
static bool is_word(const char *value)
{
    return strcasecmp(value, "none") == 0 || strncmp(value, "STATIC_PLUGIN", strlen(value)) == 0;
}

/* As NCCL 2.21 and later: the value as it stands, then as the middle of a file name unless it looks like
 * a path or a library. */
static void check_plugin(const char *value, void *arg)
{
    struct plugin_check *check = arg;
    const char *variable = plugins[check->which].variable;
    struct lc_cli_loaded loaded;
    char name[300];
    size_t len = strlen(value);
    bool like_file = strchr(value, '/') || (strncmp(value, "lib", 3) == 0 && len > 3 &&
                                            strcmp(value + len - 3, ".so") == 0);

    if (is_word(value))
        return;
    lc_cli_try_load(value, &loaded);
    if (!*loaded.path && !like_file) {
        (void)snprintf(name, sizeof(name), "libnccl-%s-%.200s.so", plugins[check->which].kind,
                       value);
        lc_cli_try_load(name, &loaded);
    }
    if (*loaded.path) {
        lc_cli_find(&check->doctor->findings, LC_CLI_OK, "plugin", "%s=%s is %s", variable, value,
                    loaded.path);
        return;
    }
    lc_cli_find(&check->doctor->findings, LC_CLI_WARNING, "plugin-missing",
                "%s=%s cannot be loaded, NCCL would go on without it: %s", variable, value,
                loaded.why);
    lc_cli_remedy(&check->doctor->findings,
                  "give the full path, put the plugin's folder into LD_LIBRARY_PATH, or unset %s",
                  variable);
}

static void check_nccl_files(struct lc_cli_doctor *doctor)
{
    static const char *const files[] = { "NCCL_CONF_FILE", "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE" };

    for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
        const char *path = getenv(files[i]);
        int err = path && *path ? unreadable(path) : 0;

        if (!err)
            continue;
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "nccl-file-missing", "%s names %s: %s; %s",
                    files[i], path, lc_input_why(err),
                    err == -ENXIO ? "NCCL may wait for it for ever" : "NCCL goes on without it");
        lc_cli_remedy(&doctor->findings, "correct or unset %s", files[i]);
    }
}

static void check_own_nccl_path(struct lc_cli_doctor *doctor)
{
    const char *path = getenv("VLLM_NCCL_SO_PATH");

    if (!path || !*path)
        return;
    lc_cli_find(&doctor->findings, LC_CLI_INFO, "nccl-by-path",
                "VLLM_NCCL_SO_PATH=%s: vLLM opens that file itself and asks it for its functions, "
                "which a preload does not see",
                path);
    lc_cli_remedy(&doctor->findings, "for vLLM, see --proxy in `loongcomm run --help`");
}

void lc_cli_check_environment(struct lc_cli_doctor *doctor)
{
    check_settings(doctor);
    lc_cli_list_each(getenv("LD_PRELOAD"), LC_CLI_PRELOAD_SEPARATORS, check_preload_entry, doctor);
    for (int i = 0; i < (int)(sizeof(plugins) / sizeof(*plugins)); i++) {
        struct plugin_check check = { doctor, i };

        /* Only the net plugin may be a list. */
        lc_cli_list_each(getenv(plugins[i].variable), i == NET ? "," : "", check_plugin, &check);
    }
    check_nccl_files(doctor);
    check_own_nccl_path(doctor);
}
