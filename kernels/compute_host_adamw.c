/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_adamw.h"
#include "kernels/compute_host.h"

static double chunk_squares(const struct adamw_piece *piece)
{
    struct adamw_squares threads[LK_BLOCK];
    double wide[LK_BLOCK] = { 0 };

    for (uint32_t t = 0; t < LK_BLOCK; t++)
        threads[t] = adamw_squares_thread(piece, t);
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2)
        for (uint32_t t = 0; t < half; t++)
            adamw_join(&threads[t], &threads[t + half]);
    if (adamw_needs_wide(threads)) {
        for (uint32_t t = 0; t < LK_BLOCK; t++)
            wide[t] = adamw_wide_thread(piece, t);
        for (uint32_t half = LK_BLOCK / 2; half; half /= 2)
            for (uint32_t t = 0; t < half; t++)
                wide[t] += wide[t + half];
    }
    return adamw_partial(threads, wide[0]);
}

static uint64_t grad_bytes(const struct lk_adamw_entry *entry)
{
    return entry->count * (entry->flags & LK_ADAMW_GRAD16 ? 2 : 4);
}

static void use_table(const struct lk_adamw_launch *launch)
{
    host_use(launch->entries, launch->tensors * sizeof(*launch->entries), false);
    host_use(launch->chunk_entry, launch->chunks * sizeof(uint32_t), false);
    host_use(launch->state, sizeof(*launch->state), true);
    for (uint32_t i = 0; i < launch->tensors; i++)
        host_use(launch->entries[i].grad, grad_bytes(&launch->entries[i]), false);
}

static void run_norm(void *arg)
{
    const struct lk_adamw_launch *launch = arg;
    double sums[LK_BLOCK];

    use_table(launch);
    host_use(launch->partials, launch->chunks * sizeof(double), true);
    for (uint32_t chunk = 0; chunk < launch->chunks; chunk++) {
        struct adamw_piece piece = adamw_find(launch, chunk);

        launch->partials[chunk] = chunk_squares(&piece);
    }
    for (uint32_t t = 0; t < LK_BLOCK; t++)
        sums[t] = adamw_partials_thread(launch->partials, launch->chunks, t);
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2)
        for (uint32_t t = 0; t < half; t++)
            sums[t] += sums[t + half];
    launch->state->sum_squares = sums[0];
}

static void use_tensors(const struct lk_adamw_launch *launch)
{
    for (uint32_t i = 0; i < launch->tensors; i++) {
        const struct lk_adamw_entry *entry = &launch->entries[i];

        host_use(entry->param, entry->count * 4, true);
        host_use(entry->m, entry->count * 4, true);
        host_use(entry->v, entry->count * 4, true);
        host_use_optional(entry->copy, entry->count * 2, true);
    }
}

static void run_update(void *arg)
{
    const struct lk_adamw_launch *launch = arg;
    struct adamw_factors factors = { 0 };

    use_table(launch);
    host_use_scale(&launch->lr);
    host_use_scale(&launch->loss_scale);
    adamw_make_factors(launch, &factors);
    if (factors.apply)
        use_tensors(launch);
    for (uint32_t chunk = 0; factors.apply && chunk < launch->chunks; chunk++) {
        struct adamw_piece piece = adamw_find(launch, chunk);

        adamw_tensor_factors(launch, &piece.entry, &factors);
        for (uint32_t t = 0; t < LK_BLOCK; t++)
            adamw_update_thread(&piece, &factors, t);
    }
    adamw_end(launch->state, &factors);
}

int lk_run_adamw_norm(const struct lk_adamw_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_adamw_norm", run_norm, launch, sizeof(*launch));
}

int lk_run_adamw_update(const struct lk_adamw_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_adamw_update", run_update, launch, sizeof(*launch));
}
