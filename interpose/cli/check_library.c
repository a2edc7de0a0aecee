/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/child.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/doctor.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TRIAL_MS 10000

/* A library's constructors run, and it may be broken: hence in a child. */
static void load_and_tell(void *arg)
{
    void *lib = dlopen(arg, RTLD_LAZY | RTLD_LOCAL);
    struct link_map *map = NULL;
    const char *(*version)(void);
    int (*nccl)(int *);
    int code = 0;

    if (!lib) {
        dprintf(LC_CLI_RESULT_FD, "why\t%s\n", dlerror());
        return;
    }
    if (dlinfo(lib, RTLD_DI_LINKMAP, &map) == 0 && map)
        dprintf(LC_CLI_RESULT_FD, "path\t%s\n", map->l_name);
    *(void **)&version = dlsym(lib, "loongcommVersion");
    if (version)
        dprintf(LC_CLI_RESULT_FD, "version\t%s\n", version());
    *(void **)&nccl = dlsym(lib, "ncclGetVersion");
    if (!version && nccl && nccl(&code) == 0)
        dprintf(LC_CLI_RESULT_FD, "nccl\t%d\n", code);
}

/* The rest of the line that begins with key and a tab; false if there is none. */
static bool line_of(const char *text, const char *key, char *out, size_t size)
{
    size_t len = strlen(key);

    for (; text; text = strchr(text, '\n')) {
        text += *text == '\n';
        if (strncmp(text, key, len) == 0 && text[len] == '\t') {
            text += len + 1;
            (void)snprintf(out, size, "%.*s", (int)strcspn(text, "\n"), text);
            return true;
        }
    }
    return false;
}

static void load_in_child(const char *name, struct lc_cli_outcome *outcome)
{
    struct lc_cli_child child = { .body = load_and_tell,
                                  .arg = (void *)(uintptr_t)name,
                                  .timeout_ms = TRIAL_MS };

    lc_cli_child_run(&child, outcome);
    if (outcome->end != LC_CLI_EXITED)
        (void)snprintf(outcome->result, sizeof(outcome->result), "why\t%s: %s\n", name,
                       lc_cli_child_end(&child, outcome));
}

void lc_cli_try_load(const char *name, struct lc_cli_loaded *out)
{
    static struct lc_cli_outcome outcome;
    char code[32];

    memset(out, 0, sizeof(*out));
    load_in_child(name, &outcome);
    if (!line_of(outcome.result, "path", out->path, sizeof(out->path)) &&
        !line_of(outcome.result, "why", out->why, sizeof(out->why)))
        (void)snprintf(out->why, sizeof(out->why), "%s: no answer", name);
    if (line_of(outcome.result, "nccl", code, sizeof(code)))
        out->nccl_code = atoi(code); /* NOLINT(cert-err34-c): we wrote it, 0 is fine */
}

/* The loader does not fail for a library that it cannot preload, it says so on standard error. Tried with this program: a
 * container may have no other. */
static bool preloadable(struct lc_cli_doctor *doctor, const char *path)
{
    static char self[] = "/proc/self/exe";
    static char version[] = "--version";
    static struct lc_cli_outcome outcome;
    char *argv[] = { self, version, NULL };
    char preload[PATH_MAX + 16];
    const char *const env[] = { preload, "LOONGCOMM_REPORT=off", NULL };
    struct lc_cli_child child = { .argv = argv, .env = env, .timeout_ms = TRIAL_MS };
    bool good;

    (void)snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", path);
    lc_cli_child_run(&child, &outcome);
    good = outcome.end == LC_CLI_EXITED && outcome.code == 0 && !*outcome.tail;
    if (!good) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "library-not-preloadable",
                    "a program with LD_PRELOAD=%s: %s; %s", path,
                    lc_cli_child_end(&child, &outcome), lc_cli_child_last_line(&outcome));
        lc_cli_remedy(&doctor->findings,
                      "reinstall loongcomm for this machine's architecture and C library");
    }
    return good;
}

void lc_cli_check_library(struct lc_cli_doctor *doctor)
{
    static struct lc_cli_outcome outcome;
    char path[PATH_MAX];
    char text[1024];
    const char *bad;

    if (lc_cli_find_library(path) != 0) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "library-missing",
                    "libloongcomm.so is not beside this program nor in ../lib");
        lc_cli_remedy(&doctor->findings, "reinstall loongcomm");
        return;
    }
    bad = lc_cli_unlistable(path, LC_CLI_PRELOAD_SEPARATORS);
    if (bad) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "library-path",
                    "%s has %s in its path, which LD_PRELOAD cannot express", path, bad);
        lc_cli_remedy(&doctor->findings,
                      "install loongcomm in a folder without, or preload a symbolic link to it");
        return;
    }
    load_in_child(path, &outcome);
    if (line_of(outcome.result, "why", text, sizeof(text))) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "library-not-loadable", "%s", text);
        lc_cli_remedy(&doctor->findings, "reinstall loongcomm");
        return;
    }
    if (!preloadable(doctor, path))
        return;
    if (!line_of(outcome.result, "version", text, sizeof(text)))
        (void)snprintf(text, sizeof(text), "unknown");
    lc_cli_find(&doctor->findings, LC_CLI_OK, "library", "%s, version %s, can be preloaded", path,
                text);
    if (strcmp(text, LC_VERSION) != 0) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "library-version",
                    "this command is version " LC_VERSION ", the library beside it %s", text);
        lc_cli_remedy(&doctor->findings, "reinstall loongcomm");
    }
    doctor->preload = lc_cli_list_with(getenv("LD_PRELOAD"), path, LC_CLI_PRELOAD_SEPARATORS, true);
}

static size_t entries_of(const char *folder)
{
    DIR *dir = opendir(folder);
    size_t count = 0;
    struct dirent *entry;

    while (dir && (entry = readdir(dir)))
        count += entry->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return count;
}

void lc_cli_check_gpu(struct lc_cli_doctor *doctor)
{
    bool driver = access("/proc/driver/nvidia/version", R_OK) == 0 ||
                  access("/dev/nvidiactl", F_OK) == 0;
    size_t gpus = entries_of("/proc/driver/nvidia/gpus");
    struct lc_cli_loaded cuda;

    lc_cli_try_load("libcuda.so.1", &cuda);
    if (!driver) {
        lc_cli_find(&doctor->findings, LC_CLI_INFO, "gpu-none",
                    "no NVIDIA driver is running here%s, so nothing can be said about GPUs",
                    *cuda.path ? " (libcuda.so.1 is installed)" : "");
        return;
    }
    if (!*cuda.path) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "gpu-libcuda",
                    "the NVIDIA driver is running, but libcuda.so.1 cannot be loaded: %s",
                    cuda.why);
        lc_cli_remedy(&doctor->findings,
                      "install the driver's user libraries of the same version; in a container, "
                      "start it with the NVIDIA runtime and the capability 'compute'");
        return;
    }
    if (gpus)
        lc_cli_find(&doctor->findings, LC_CLI_OK, "gpu", "%zu GPU%s, libcuda is %s", gpus,
                    gpus == 1 ? "" : "s", cuda.path);
    else
        lc_cli_find(&doctor->findings, LC_CLI_OK, "gpu",
                    "the NVIDIA driver is running, libcuda is %s", cuda.path);
}
