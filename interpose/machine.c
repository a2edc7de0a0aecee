/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/machine.h"

#include "common/log.h"
#include "interpose/process.h"
#include "interpose/real.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

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
    lc_profile_gpu_here(gpu, sizeof(gpu));
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
