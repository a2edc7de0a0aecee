/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/tuner.h"

#include "common/log.h"
#include "common/profile.h"
#include "interpose/call.h"
#include "interpose/loongcomm.h"
#include "interpose/process.h"

#include <dirent.h>
#include <pthread.h>
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

/* Written once by load, constant afterwards. */
static uint64_t profile_hash;

static void load(void)
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
        profile_hash = profile->hash;
    else
        lc_warn("profile %s is for %s and NCCL %d, and here are %s and NCCL %d: it is not used",
                path, profile->gpu, profile->nccl, gpu, version);
    free(profile);
}

uint64_t lc_tuner_profile_hash(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return profile_hash;
}

void lc_tuner_open(bool own)
{
    lc_thread.creating = own && lc_thread.depth == 0;
}

void lc_tuner_close(void)
{
    lc_thread.creating = false;
    lc_tuner_put(lc_tuner_take());
}

struct lc_tuned *lc_tuner_take(void)
{
    struct lc_tuned *tuned = lc_thread.tuned;

    lc_thread.tuned = NULL;
    return tuned;
}

void lc_tuner_put(struct lc_tuned *tuned)
{
    if (tuned && atomic_fetch_sub(&tuned->refs, 1) == 1)
        free(tuned);
}

LC_EXPORT const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash)
{
    struct lc_tuned *tuned;

    if (!lc_enabled || !lc_thread.creating || lc_thread.tuned || hash == 0 ||
        hash != lc_tuner_profile_hash())
        return NULL;
    tuned = calloc(1, sizeof(*tuned));
    if (!tuned)
        return NULL;
    atomic_store(&tuned->refs, 2);
    lc_thread.tuned = tuned;
    return (const uint32_t *)tuned;
}

LC_EXPORT void loongcomm_tuner_end_v1(const uint32_t *agreed)
{
    lc_tuner_put((struct lc_tuned *)(uintptr_t)agreed);
}
