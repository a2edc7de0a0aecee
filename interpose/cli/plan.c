/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/plan.h"

#include "common/input.h"
#include "common/output.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/topo_library.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What NCCL reads where no variable names a file: virtual machines have it from their provider. */
#define VIRTUAL_TOPOLOGY "/var/run/nvidia-topologyd/virtualTopology.xml"
#define NODES            4 /* how many more there are changes little */

void lc_cli_put(const char *name, const char *value, const char *why)
{
    if (lc_cli_nccl_get(name))
        lc_cli_say("run: %s is set already and stays: %s would set it to %s", name, why, value);
    else if (setenv(name, value, 1) == 0)
        lc_cli_say("run: %s=%s: %s", name, value, why);
}

static bool has_gpus(void)
{
    return access("/proc/driver/nvidia/version", R_OK) == 0 ||
           access("/dev/nvidiactl", F_OK) == 0 || access("/dev/kfd", F_OK) == 0;
}

/* What NCCL would look at: the user's topology file if that is whole, else the machine. */
static struct lc_topo *look(const struct lc_cli_topo_library *library, const char *input)
{
    const char *file = lc_cli_nccl_get("NCCL_TOPO_FILE");
    struct lc_topo *topo = NULL;
    char error[512];

    if (input) {
        if (library->load(input, &topo, error, sizeof(error)) != 0)
            lc_cli_say("run: %s", error);
        return topo;
    }
    if (file && *file && library->load(file, &topo, error, sizeof(error)) == 0) {
        if (!library->is_partial(topo))
            return topo;
        library->free(topo);
        topo = NULL;
    }
    if (has_gpus() && library->load(NULL, &topo, error, sizeof(error)) != 0)
        return NULL;
    return topo;
}

static int write_file(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                      int64_t most_mbps, const char *path)
{
    struct lc_output_file file = { 0 };
    int err = lc_output_open(&file, path);
    int close_err;

    if (!err)
        err = library->write_nccl_slowed(topo, most_mbps, file.out);
    close_err = lc_output_close(&file, !err);
    err = err ? err : close_err;
    if (err)
        lc_cli_say("run: cannot write %s: %s", path, lc_input_why(err));
    return err;
}

/* Each node of a job has its own. */
static void put_file(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                     int64_t most_mbps, const char *folder, const char *why)
{
    char host[65] = "";
    char path[PATH_MAX];

    (void)gethostname(host, sizeof(host) - 1);
    for (char *at = host; *at; at++) {
        if (*at == '/')
            *at = '-';
    }
    if (!*folder) {
        lc_cli_say("run: NCCL_TOPO_FILE not set: %s with a topology file, which is written only "
                   "where LOONGCOMM_DIR (--dir) names a folder",
                   why);
        return;
    }
    (void)snprintf(path, sizeof(path), "%.3000s/nccl-topology-%s.xml", folder, host);
    if (lc_cli_nccl_get("NCCL_TOPO_FILE") || write_file(library, topo, most_mbps, path) == 0)
        lc_cli_put("NCCL_TOPO_FILE", path, why);
}

/* How NCCL itself would see the machine: this one, or where no GPU shows here the one of the folder that is given. */
static struct lc_topo *look_as_nccl(const struct lc_cli_topo_library *library,
                                    const struct lc_topo *truth, const char *input)
{
    struct lc_topo *topo = NULL;
    char error[512];

    if (library->load_as_nccl(NULL, &topo, error, sizeof(error)) != 0)
        return NULL;
    if (library->next(topo, LC_TOPO_GPU, -1) >= 0)
        return topo;
    library->free(topo);
    topo = NULL;
    if (!input || library->format(truth) != LC_TOPO_SYSFS ||
        library->load_as_nccl(input, &topo, error, sizeof(error)) != 0)
        return NULL;
    return topo;
}

/* Containers hide parts of /sys, and some machines' firmware names no NUMA nodes: NCCL is told. */
static bool correct(const struct lc_cli_topo_library *library, const struct lc_topo *truth,
                    const char *input, int64_t most_mbps, const char *folder)
{
    const char *file = lc_cli_nccl_get("NCCL_TOPO_FILE");
    struct lc_topo *seen;
    char first[256] = "";
    char why[400];
    int count;

    if ((file && *file && !input) || access(VIRTUAL_TOPOLOGY, F_OK) == 0)
        return false; /* the truth is that file */
    seen = look_as_nccl(library, truth, input);
    count = seen ? library->misplaced(seen, truth, first, sizeof(first)) : 0;
    library->free(seen);
    if (count <= 0)
        return false;
    (void)snprintf(why, sizeof(why), "/sys misplaces %d of the GPUs and ports: %s", count, first);
    put_file(library, truth, most_mbps, folder, why);
    return true;
}

static void follow(const struct lc_cli_topo_library *library, const struct lc_topo *topo,
                   const struct lc_topo_plan *plan, bool written, const char *folder)
{
    double theirs = library->plan_loads(plan, LC_TOPO_NCCLS).all_to_all.ms;
    double ours = library->plan_loads(plan, LC_TOPO_OURS).all_to_all.ms;
    char why[160];

    (void)snprintf(
        why, sizeof(why),
        "takes %.0f %% off the most loaded link of an all-to-all between nodes like this",
        100 - 100 * ours / theirs);
    for (int i = 0; i < library->plan_setting_count(plan); i++) {
        struct lc_topo_setting setting = library->plan_setting(plan, i);

        if (*setting.value)
            lc_cli_put(setting.name, setting.value, why);
        else if (!written)
            put_file(library, topo, library->plan_most_mbps(plan), folder, why);
    }
}

static void plan_machine(const char *folder, const char *input, bool only_correct)
{
    struct lc_topo_kind kind = { .nodes = NODES };
    struct lc_cli_topo_library library;
    struct lc_topo_plan *plan = NULL;
    struct lc_topo *topo;
    char why[512];
    bool written;

    if (!input && !has_gpus() && !lc_cli_nccl_get("NCCL_TOPO_FILE"))
        return;
    if (lc_cli_topo_open(&library, why, sizeof(why)) != 0)
        return;
    topo = look(&library, input);
    kind.topo = topo;
    if (!topo || only_correct || !library.is_plannable(topo) ||
        library.plan_make(&kind, 1, lc_cli_nccl_get, &plan) != 0)
        plan = NULL;
    written = topo &&
              correct(&library, topo, input, plan ? library.plan_most_mbps(plan) : 0, folder);
    if (plan)
        follow(&library, topo, plan, written, folder);
    library.plan_free(plan);
    library.free(topo);
}

void lc_cli_apply_plan(const struct lc_config *config, const char *input)
{
    switch (config->pxn) {
    case LC_PEER_OFF: lc_cli_put("NCCL_PXN_DISABLE", "1", "LOONGCOMM_PXN=off"); break;
    case LC_PEER_FORCE:
        lc_cli_put("NCCL_PXN_DISABLE", "0", "LOONGCOMM_PXN=force");
        lc_cli_put("NCCL_P2P_PXN_LEVEL", "2", "LOONGCOMM_PXN=force");
        plan_machine(config->dir, input, true);
        break;
    default: plan_machine(config->dir, input, false); break;
    }
}
