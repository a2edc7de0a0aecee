/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rules_internal.h"

_Static_assert(sizeof(struct lk_adamw_entry) == 64, "entries keep the table aligned");
_Static_assert(sizeof(struct lk_adamw_state) == 48, "the state is laid out as callers see it");

static uint64_t chunks_of(uint64_t count)
{
    return count / LK_ADAMW_CHUNK + (count % LK_ADAMW_CHUNK != 0);
}

/* Tensors that are not empty and their chunks; false if a grid cannot hold them. */
static bool count_list(const struct lk_adamw_tensor *tensors, size_t n, uint64_t *used,
                       uint64_t *chunks)
{
    *used = 0;
    *chunks = 0;
    for (size_t i = 0; i < n; i++) {
        *used += tensors[i].count != 0;
        *chunks += chunks_of(tensors[i].count);
        if (*chunks > INT32_MAX)
            return false;
    }
    return true;
}

LK_API size_t lk_adamw_table_bytes(const struct lk_adamw_tensor *tensors, size_t n)
{
    uint64_t used, chunks;

    if ((!tensors && n) || !count_list(tensors, n, &used, &chunks))
        return 0;
    /* never 0: an empty list has a table, too */
    return 16 + used * sizeof(struct lk_adamw_entry) + (chunks * sizeof(uint32_t) + 15) / 16 * 16;
}

LK_API size_t lk_adamw_workspace_bytes(const struct lk_adamw_plan *plan)
{
    return ((size_t)plan->chunks + 2) / 2 * 2 * sizeof(double);
}

static bool good_pointer(const void *pointer, unsigned int alignment)
{
    return pointer && (uintptr_t)pointer % alignment == 0;
}

/* What is wrong with it; NULL: nothing. */
static const char *find_fault(const struct lk_adamw_tensor *tensor)
{
    bool half = tensor->param_type == LK_BF16;

    if (tensor->param_type != LK_FP32 && !half)
        return "param_type is neither fp32 nor bf16";
    if (tensor->grad_type != LK_FP32 && tensor->grad_type != LK_BF16)
        return "grad_type is neither fp32 nor bf16";
    if (!half && tensor->master)
        return "a master of an fp32 parameter";
    if (half && !good_pointer(tensor->master, 4))
        return "master is NULL or not aligned to its elements";
    if (!good_pointer(tensor->param, half ? 2 : 4))
        return "param is NULL or not aligned to its elements";
    if (!good_pointer(tensor->grad, tensor->grad_type == LK_BF16 ? 2 : 4))
        return "grad is NULL or not aligned to its elements";
    if (!good_pointer(tensor->m, 4))
        return "m is NULL or not aligned to its elements";
    return good_pointer(tensor->v, 4) ? NULL : "v is NULL or not aligned to its elements";
}

static struct lk_adamw_entry make_entry(const struct lk_adamw_tensor *tensor, uint32_t first_chunk)
{
    bool half = tensor->param_type == LK_BF16;
    uintptr_t all = (uintptr_t)tensor->param | (uintptr_t)tensor->grad | (uintptr_t)tensor->m |
                    (uintptr_t)tensor->v | (uintptr_t)tensor->master;

    return (struct lk_adamw_entry){
        .param = half ? tensor->master : tensor->param,
        .copy = half ? tensor->param : NULL,
        .grad = tensor->grad,
        .m = tensor->m,
        .v = tensor->v,
        .count = tensor->count,
        .first_chunk = first_chunk,
        .flags = (half ? LK_ADAMW_COPY : 0U) |
                 (tensor->grad_type == LK_BF16 ? LK_ADAMW_GRAD16 : 0U) |
                 (all % 16 == 0 ? LK_ADAMW_FAST : 0U),
        .lr_factor = tensor->lr_factor,
        .weight_decay = tensor->weight_decay,
    };
}

LK_API int lk_adamw_plan(const struct lk_adamw_tensor *tensors, size_t n,
                         struct lk_adamw_plan *plan)
{
    static const char call[] = "lk_adamw_plan";
    struct lk_adamw_entry *entries;
    uint32_t *chunk_entry;
    uint64_t used, chunks, elements = 0;
    uint32_t entry = 0, chunk = 0;

    if (lk_breaks(call, plan && (tensors || !n), "a NULL argument") ||
        lk_breaks(call, good_pointer(plan->table, 16),
                  "the table is NULL or not aligned to 16 bytes") ||
        lk_breaks(call, count_list(tensors, n, &used, &chunks), "too many elements") ||
        lk_breaks(call, plan->bytes >= lk_adamw_table_bytes(tensors, n), "the table is too small"))
        return -EINVAL;
    for (size_t i = 0; i < n; i++) {
        const char *fault = tensors[i].count ? find_fault(&tensors[i]) : NULL;

        if (fault)
            return lk_blas_fail(-EINVAL, "%s: tensor %zu: %s", call, i, fault);
        elements += tensors[i].count;
    }
    entries = plan->table;
    chunk_entry = (uint32_t *)(entries + used);
    for (size_t i = 0; i < n; i++) {
        if (!tensors[i].count)
            continue;
        entries[entry] = make_entry(&tensors[i], chunk);
        for (uint64_t c = chunks_of(tensors[i].count); c; c--)
            chunk_entry[chunk++] = entry;
        entry++;
    }
    plan->elements = elements;
    plan->tensors = entry;
    plan->chunks = chunk;
    return 0;
}

static bool good_scalar(const struct lk_scale *scale)
{
    return !scale->device_value ||
           ((unsigned int)scale->type <= LK_FP16 &&
            good_pointer(scale->device_value, scale->type == LK_FP32 ? 4 : 2));
}

static bool good_beta(double beta)
{
    return beta >= 0 && beta < 1;
}

static int make_launch(const char *call, const struct lk_adamw_plan *plan,
                       const struct lk_adamw *adamw, struct lk_adamw_launch *out)
{
    if (lk_breaks(call, plan && adamw, "a NULL argument") ||
        lk_breaks(call, good_pointer(plan->device_table, 16),
                  "device_table is NULL or not aligned to 16 bytes") ||
        lk_breaks(call, good_pointer(adamw->state, 16),
                  "state is NULL or not aligned to 16 bytes") ||
        lk_breaks(call, good_pointer(adamw->workspace, 16),
                  "the workspace is NULL or not aligned to 16 bytes") ||
        lk_breaks(call, good_scalar(&adamw->lr), "lr: unknown type, or not aligned") ||
        lk_breaks(call, good_scalar(&adamw->loss_scale),
                  "loss_scale: unknown type, or not aligned") ||
        lk_breaks(call, good_beta(adamw->beta1), "beta1 is not in [0, 1)") ||
        lk_breaks(call, good_beta(adamw->beta2), "beta2 is not in [0, 1)") ||
        lk_breaks(call, adamw->eps >= 0, "eps is negative or no number") ||
        lk_breaks(call, adamw->max_norm >= 0, "max_norm is negative or no number"))
        return -EINVAL;
    *out = (struct lk_adamw_launch){
        .entries = plan->device_table,
        .partials = adamw->workspace,
        .state = adamw->state,
        .chunks = plan->chunks,
        .tensors = plan->tensors,
        .lr = adamw->lr,
        .loss_scale = adamw->loss_scale,
        .beta1 = adamw->beta1,
        .beta2 = adamw->beta2,
        .eps = adamw->eps,
        .max_norm = adamw->max_norm,
    };
    out->chunk_entry = (const uint32_t *)(out->entries + plan->tensors);
    return 0;
}

LK_API int lk_adamw_norm(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw,
                         void *stream)
{
    struct lk_adamw_launch launch;
    int err = make_launch("lk_adamw_norm", plan, adamw, &launch);

    return err ? err : lk_run_adamw_norm(&launch, stream);
}

LK_API int lk_adamw_update(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw,
                           void *stream)
{
    struct lk_adamw_launch launch;
    int err = make_launch("lk_adamw_update", plan, adamw, &launch);

    return err ? err : lk_run_adamw_update(&launch, stream);
}

LK_API int lk_adamw_step(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw,
                         void *stream)
{
    int err = lk_adamw_norm(plan, adamw, stream);

    return err ? err : lk_adamw_update(plan, adamw, stream);
}
