/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/tuner.h"

#include "interpose/call.h"
#include "interpose/loongcomm.h"
#include "interpose/machine.h"
#include "interpose/process.h"

#include <stdlib.h>

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
        hash != lc_machine_hash())
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
