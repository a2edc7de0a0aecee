/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/machine.h"

#include "common/log.h"
#include "interpose/process.h"
#include "interpose/real.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPUS "/proc/driver/nvidia/gpus"

/* Name of the first GPU, as the driver tells it; "none" where there is no driver. */
static void gpu_name(char *out, size_t size)
{
    DIR *dir = opendir(GPUS);
    struct dirent *entry = NULL;
    char line[256];
    FILE *file = NULL;

    (void)snprintf(out, size, "none");
    while (dir && (entry = readdir(dir)) && entry->d_name[0] == '.')
        ;
    if (entry && snprintf(line, sizeof(line), GPUS "/%s/information", entry->d_name) > 0)
        file = fopen(line, "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (strncmp(line, "Model:", 6) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        (void)snprintf(out, size, "%s", line + 6 + strspn(line + 6, " \t"));
        break;
    }
    if (file)
        (void)fclose(file);
    if (dir)
        closedir(dir);
}

/* Written once by look, constant afterwards and kept. `looked` is stored behind it (release): asked on the path of every
 * call, which takes no lock. */
static struct lc_profile *here;
static _Atomic bool looked;

static void look(void)
{
    const char *path = lc_process_config()->profile;
    struct lc_profile *profile = *path ? lc_profile_load(path) : NULL;
    char gpu[sizeof(profile->gpu)];
    int version = 0;

    if (!profile)
        return;
    gpu_name(gpu, sizeof(gpu));
    if (!lc_real()->ncclGetVersion || lc_real()->ncclGetVersion(&version) != ncclSuccess)
        version = 0;
    if (strcmp(gpu, profile->gpu) == 0 && version == profile->nccl)
        here = profile;
    else
        lc_warn("profile %s is for %s and NCCL %d, and here are %s and NCCL %d: it is not used",
                path, profile->gpu, profile->nccl, gpu, version);
    if (!here)
        free(profile);
}

static void load(void)
{
    look();
    atomic_store_explicit(&looked, true, memory_order_release);
}

const struct lc_profile *lc_machine_profile(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    if (__builtin_expect(!atomic_load_explicit(&looked, memory_order_acquire), 0))
        pthread_once(&once, load);
    return here;
}

uint64_t lc_machine_hash(void)
{
    const struct lc_profile *profile = lc_machine_profile();

    return profile ? profile->hash : 0;
}
