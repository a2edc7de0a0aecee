/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_internal.h"
#include "kernels/value_internal.h"

static void run_feedback(void *arg)
{
    const struct lk_feedback *f = arg;
    float scale = lk_host_scale(f->scale, f->scale_type, f->scale_pointer);
    bool stochastic = f->rounding == LK_STOCHASTIC;
    struct lk_host_draws draws;

    lk_host_use((uintptr_t)f->in, f->count * 4, false);
    lk_host_use((uintptr_t)f->packed, f->count * 2, true);
    lk_host_use((uintptr_t)f->residual, f->count * 4, true);
    lk_host_draws_begin(&draws, &f->draws);
    for (uint64_t i = 0; i < f->count; i++)
        f->packed[i] = (uint16_t)feed_bf16(f->in[i], scale, &f->residual[i], stochastic,
                                           stochastic ? lk_host_draw(&draws) : 0);
}

int lk_run_feedback(const struct lk_feedback *feedback, void *stream)
{
    struct lk_feedback copy = *feedback;

    return lk_host_submit(stream, "lk_cast_feedback", run_feedback, &copy, sizeof(copy));
}
