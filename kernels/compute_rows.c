/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_internal.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>

/* A matrix of bf16 as an argument. */
struct matrix {
    const void *base;
    uint64_t stride;
    uint64_t columns;
    bool written;
};

static bool good_matrix(const struct matrix *matrix, uint64_t rows)
{
    uint64_t last;

    if (!matrix->base || (uintptr_t)matrix->base % 2)
        return false;
    if (matrix->written && rows > 1 && matrix->stride < matrix->columns)
        return false;
    return !__builtin_mul_overflow(rows, matrix->stride, &last) && last < UINT64_C(1) << 61;
}

static bool is_wide(const struct matrix *matrix)
{
    return (uintptr_t)matrix->base % 16 == 0 && matrix->stride % LK_VECTOR == 0;
}

/* All of them, as far as they are there; *wide: groups of columns are aligned in every row. */
static bool good_matrices(const struct matrix *matrices, size_t n, uint64_t rows, uint64_t columns,
                          uint32_t *wide)
{
    if (rows > INT32_MAX || !columns || columns >= UINT64_C(1) << 40)
        return false;
    *wide = columns % LK_VECTOR == 0;
    for (size_t i = 0; i < n; i++) {
        if (matrices[i].base && !good_matrix(&matrices[i], rows))
            return false;
        *wide &= !matrices[i].base || is_wide(&matrices[i]);
    }
    return true;
}

static bool good_floats(const float *pointer)
{
    return (uintptr_t)pointer % 4 == 0;
}

static int make_swiglu(const struct lk_swiglu *swiglu, struct lk_swiglu_launch *out)
{
    if (!swiglu || !swiglu->z || !good_floats(swiglu->row_scale) ||
        !(swiglu->drop >= 0 && swiglu->drop < 1) || (uintptr_t)swiglu->rng.device_offset % 8)
        return -EINVAL;
    out->swiglu = *swiglu;
    out->threshold = (uint32_t)rint(65536 * swiglu->drop);
    if (out->threshold == 65536)
        return -EINVAL;
    out->kept = (float)(65536.0 / (65536 - out->threshold));
    return 0;
}

LK_API int lk_swiglu_forward(const struct lk_swiglu *swiglu, void *h, uint64_t h_stride,
                             void *stream)
{
    struct lk_swiglu_launch launch = {
        .grads = {.h = h, .h_stride = h_stride}
    };
    int err = make_swiglu(swiglu, &launch);

    if (err)
        return err;
    const struct matrix matrices[] = {
        {swiglu->z, swiglu->z_stride, 2 * swiglu->columns, false},
        { h,        h_stride,         swiglu->columns,     true },
    };
    if (!h || !good_matrices(matrices, 2, swiglu->rows, swiglu->columns, &launch.wide))
        return -EINVAL;
    return swiglu->rows ? lk_run_swiglu_forward(&launch, stream) : 0;
}

LK_API int lk_swiglu_backward(const struct lk_swiglu *swiglu, const struct lk_swiglu_grads *grads,
                              void *stream)
{
    struct lk_swiglu_launch launch = { 0 };
    int err = make_swiglu(swiglu, &launch);

    if (err || !grads)
        return -EINVAL;
    const struct matrix matrices[] = {
        {swiglu->z,  swiglu->z_stride, 2 * swiglu->columns, false},
        { grads->dh, grads->dh_stride, swiglu->columns,     false},
        { grads->dz, grads->dz_stride, 2 * swiglu->columns, true },
        { grads->h,  grads->h_stride,  swiglu->columns,     true },
    };
    if (!grads->dh || !grads->dz || !good_floats(grads->row_dot) ||
        (grads->dz == swiglu->z && grads->dz_stride != swiglu->z_stride) ||
        !good_matrices(matrices, 4, swiglu->rows, swiglu->columns, &launch.wide))
        return -EINVAL;
    launch.grads = *grads;
    return swiglu->rows ? lk_run_swiglu_backward(&launch, stream) : 0;
}

static bool good_norm(const struct lk_norm *norm)
{
    uintptr_t mask = norm && norm->weight_type == LK_FP32 ? 3 : 1;

    if (!norm || (norm->kind != LK_RMS_NORM && norm->kind != LK_LAYER_NORM) ||
        (norm->weight_type != LK_FP32 && norm->weight_type != LK_BF16))
        return false;
    if (((uintptr_t)norm->gamma | (uintptr_t)norm->beta) & mask || !(norm->eps >= 0))
        return false;
    return norm->rstd && good_floats(norm->rstd) && good_floats(norm->mean) &&
           (norm->kind == LK_RMS_NORM || norm->mean);
}

static uint32_t partial_rows(const struct lk_norm *norm)
{
    return (uint32_t)(norm->rows < LK_NORM_PARTIALS ? norm->rows : LK_NORM_PARTIALS);
}

LK_API size_t lk_norm_workspace_bytes(const struct lk_norm *norm)
{
    return (size_t)(partial_rows(norm) * ((norm->columns + 7) / 8) * 16 * sizeof(float));
}

static int norm_forward(const struct lk_norm *norm, const struct lk_norm_forward *forward,
                        bool like_y, void *stream)
{
    struct lk_norm_launch launch = { .like_y = like_y };

    if (!good_norm(norm) || !forward || !forward->x || (forward->residual && !forward->sum))
        return -EINVAL;
    const struct matrix matrices[] = {
        {forward->x,         forward->x_stride,        norm->columns, false},
        { forward->residual, forward->residual_stride, norm->columns, false},
        { forward->sum,      forward->sum_stride,      norm->columns, true },
        { forward->y,        forward->y_stride,        norm->columns, true },
    };
    if (!good_matrices(matrices, 4, norm->rows, norm->columns, &launch.wide))
        return -EINVAL;
    launch.wide &= ((uintptr_t)norm->gamma | (uintptr_t)norm->beta) % 16 == 0;
    launch.norm = *norm;
    launch.forward = *forward;
    return norm->rows ? lk_run_norm_forward(&launch, stream) : 0;
}

LK_API int lk_norm_forward(const struct lk_norm *norm, const struct lk_norm_forward *forward,
                           void *stream)
{
    return norm_forward(norm, forward, false, stream);
}

int lk_norm_forward_like_y(const struct lk_norm *norm, const struct lk_norm_forward *forward,
                           void *stream)
{
    return norm_forward(norm, forward, true, stream);
}

int lk_norm_backward_beside(const struct lk_norm *norm, const struct lk_norm_backward *backward,
                            const struct lk_column_sums *also, void *stream)
{
    struct lk_norm_launch launch = { .also = *also };

    if (!good_norm(norm) || !backward || !backward->s || !backward->dy || !backward->dx ||
        !good_floats(backward->dgamma) || !good_floats(backward->dbeta))
        return -EINVAL;
    const struct matrix matrices[] = {
        {backward->s,   backward->s_stride,  norm->columns, false},
        { backward->dy, backward->dy_stride, norm->columns, false},
        { backward->ds, backward->ds_stride, norm->columns, false},
        { backward->dx, backward->dx_stride, norm->columns, true },
    };
    if (!good_matrices(matrices, 4, norm->rows, norm->columns, &launch.wide))
        return -EINVAL;
    launch.wide &= ((uintptr_t)norm->gamma | (uintptr_t)norm->beta) % 16 == 0;
    launch.norm = *norm;
    launch.backward = *backward;
    if (backward->dgamma || backward->dbeta) {
        if (norm->rows && (!backward->workspace || (uintptr_t)backward->workspace % 16))
            return -EINVAL;
        launch.partials = partial_rows(norm);
    }
    return lk_run_norm_backward(&launch, stream);
}

LK_API int lk_norm_backward(const struct lk_norm *norm, const struct lk_norm_backward *backward,
                            void *stream)
{
    const struct lk_column_sums none = { 0 };

    return lk_norm_backward_beside(norm, backward, &none, stream);
}
