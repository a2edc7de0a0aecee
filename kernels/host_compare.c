/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_internal.h"
#include "kernels/value_internal.h"

#include <math.h>

static double element(const void *data, uint64_t i, enum lk_type type)
{
    if (type == LK_FP32)
        return ((const float *)data)[i];
    return type == LK_BF16 ? widen_bf16(((const uint16_t *)data)[i])
                           : widen_fp16(((const uint16_t *)data)[i]);
}

static void run_compare(void *arg)
{
    const struct lk_comparison *c = arg;
    uint64_t bytes = c->count * (c->type == LK_FP32 ? 4 : 2);
    struct lk_difference found = { 0 };
    double apart = 0, norm = 0;

    lk_host_use((uintptr_t)c->got, bytes, false);
    lk_host_use((uintptr_t)c->want, bytes, false);
    for (uint64_t i = 0; i < c->count; i++) {
        double got = element(c->got, i, c->type), want = element(c->want, i, c->type);
        double by = fabs(got - want);

        if (!isfinite(got) || !isfinite(want)) {
            found.strange += got != want && !(isnan(got) && isnan(want));
            continue;
        }
        apart += by * by;
        norm += want * want;
        found.most = by > found.most ? by : found.most;
    }
    c->out->relative = apart == 0 ? 0 : sqrt(apart / norm);
    c->out->most = found.most;
    c->out->strange = found.strange;
    __atomic_store_n(&c->out->done, 1, __ATOMIC_RELEASE);
}

int lk_run_compare(const struct lk_comparison *comparison, void *stream)
{
    struct lk_comparison copy = *comparison;

    return lk_host_submit(stream, "lk_compare", run_compare, &copy, sizeof(copy));
}
