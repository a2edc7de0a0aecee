/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rules_internal.h"

static bool good_type(enum lk_type type)
{
    return type == LK_FP32 || type == LK_BF16;
}

static bool good_pointer(const void *pointer, enum lk_type type)
{
    return (uintptr_t)pointer % (type == LK_FP32 ? 4 : 2) == 0;
}

static int check_fold(const struct lk_fold *fold)
{
    if (!fold || !good_type(fold->weight_type) || !good_type(fold->gamma_type))
        return lk_blas_fail(-EINVAL,
                            "lk_fold: no argument, or a type that is neither fp32 nor bf16");
    if (fold->rows > INT32_MAX || !fold->columns || fold->columns > INT32_MAX)
        return lk_blas_fail(-EINVAL, "lk_fold: %llu x %llu", (unsigned long long)fold->rows,
                            (unsigned long long)fold->columns);
    if (!good_pointer(fold->weight, fold->weight_type) ||
        !good_pointer(fold->gamma, fold->gamma_type))
        return lk_blas_fail(-EINVAL, "lk_fold: weight or gamma is not aligned to its elements");
    return 0;
}

static bool is_wide(const struct lk_fold *fold)
{
    return fold->columns % LK_VECTOR == 0 &&
           ((uintptr_t)fold->weight | (uintptr_t)fold->gamma) % 16 == 0;
}

LK_API size_t lk_fold_workspace_bytes(const struct lk_fold *fold)
{
    return lk_fold_partials(fold->rows, fold->columns) * ((fold->columns + 7) / 8) * 8 *
           sizeof(float);
}

LK_API int lk_fold_forward(const struct lk_fold *fold, void *folded, void *stream)
{
    int err = check_fold(fold);

    if (err)
        return err;
    if (!fold->weight || !fold->gamma || !folded || (uintptr_t)folded % 2)
        return lk_blas_fail(-EINVAL, "lk_fold_forward: a NULL or misaligned pointer");
    const struct lk_fold_launch launch = {
        .fold = *fold,
        .folded = folded,
        .wide = is_wide(fold) && (uintptr_t)folded % 16 == 0,
    };
    if (!fold->rows)
        return 0;
    lk_count_call(launch.wide);
    return lk_run_fold_forward(&launch, stream);
}

LK_API int lk_fold_backward(const struct lk_fold *fold, const struct lk_fold_grads *grads,
                            void *stream)
{
    int err = check_fold(fold);

    if (err)
        return err;
    if (!grads || !good_type(grads->grad_type) || !grads->dfolded ||
        !good_pointer(grads->dfolded, grads->grad_type) ||
        !good_pointer(grads->dweight, grads->grad_type) || (uintptr_t)grads->dgamma % 4)
        return lk_blas_fail(-EINVAL,
                            "lk_fold_backward: a NULL or misaligned pointer, or a wrong type");
    if ((grads->dgamma && !fold->weight) || (grads->dweight && !fold->gamma))
        return lk_blas_fail(-EINVAL, "lk_fold_backward: weight and gamma are needed");
    if (grads->dgamma && fold->rows && (!grads->workspace || (uintptr_t)grads->workspace % 16))
        return lk_blas_fail(-EINVAL, "lk_fold_backward: the workspace is not aligned to 16 bytes");
    const struct lk_fold_launch launch = {
        .fold = *fold,
        .grads = *grads,
        .stride = fold->columns,
        .wide = is_wide(fold) && ((uintptr_t)grads->dfolded | (uintptr_t)grads->dweight) % 16 == 0,
        .partials = grads->dgamma ? lk_fold_partials(fold->rows, fold->columns) : 0,
    };
    if (!grads->dgamma && (!grads->dweight || !fold->rows))
        return 0;
    if (fold->rows)
        lk_count_call(launch.wide);
    return lk_run_fold_backward(&launch, stream);
}
