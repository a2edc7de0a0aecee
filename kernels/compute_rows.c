/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rules_internal.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>

/* A matrix of bf16 as an argument. */
struct matrix {
    const char *name;
    const void *base; /* NULL: it is not there */
    uint64_t stride;
    uint64_t columns;
    bool written;
};

static int check_matrix(const char *call, const struct matrix *matrix, uint64_t rows)
{
    uint64_t last;

    if (!lk_is_aligned(matrix->base, 2))
        return lk_blas_fail(-EINVAL, "%s: %s is not aligned to its elements", call, matrix->name);
    if (matrix->written && rows > 1 && matrix->stride < matrix->columns)
        return lk_blas_fail(-EINVAL, "%s: rows of %s overlap: stride %llu, %llu columns", call,
                            matrix->name, (unsigned long long)matrix->stride,
                            (unsigned long long)matrix->columns);
    if (__builtin_mul_overflow(rows, matrix->stride, &last) || last >= UINT64_C(1) << 61)
        return lk_blas_fail(-EINVAL, "%s: stride %llu of %s is too large", call,
                            (unsigned long long)matrix->stride, matrix->name);
    return 0;
}

static bool is_wide(const struct matrix *matrix)
{
    return lk_is_aligned(matrix->base, 16) && matrix->stride % LK_VECTOR == 0;
}

/* All of them, as far as they are there; *wide: groups of columns are aligned in every row. */
static int check_matrices(const char *call, const struct matrix *matrices, size_t n, uint64_t rows,
                          uint64_t columns, uint32_t *wide)
{
    if (rows > INT32_MAX || !columns || columns >= UINT64_C(1) << 40)
        return lk_blas_fail(-EINVAL, "%s: %llu rows of %llu columns", call,
                            (unsigned long long)rows, (unsigned long long)columns);
    *wide = columns % LK_VECTOR == 0;
    for (size_t i = 0; i < n; i++) {
        if (!matrices[i].base)
            continue;
        if (check_matrix(call, &matrices[i], rows))
            return -EINVAL;
        *wide &= is_wide(&matrices[i]);
    }
    return 0;
}

/* General ones, wide ones. Every call adds to one, lk_compute_counts() reads; relaxed, they order nothing. */
static uint64_t counts[2];

void lk_count_call(bool wide)
{
    __atomic_fetch_add(&counts[wide], 1, __ATOMIC_RELAXED);
}

LK_API void lk_compute_counts(struct lk_compute_counts *out)
{
    out->wide = __atomic_load_n(&counts[1], __ATOMIC_RELAXED);
    out->general = __atomic_load_n(&counts[0], __ATOMIC_RELAXED);
}

static int make_swiglu(const char *call, const struct lk_swiglu *swiglu,
                       struct lk_swiglu_launch *out)
{
    if (lk_breaks(call, swiglu, "a NULL argument") || lk_breaks(call, swiglu->z, "z is NULL") ||
        lk_breaks(call, lk_is_aligned(swiglu->row_scale, 4), "row_scale is not aligned") ||
        lk_breaks(call, swiglu->drop >= 0 && swiglu->drop < 1, "drop is not in [0, 1)") ||
        lk_breaks(call, lk_is_aligned(swiglu->rng.device_offset, 8), "rng is not aligned"))
        return -EINVAL;
    out->swiglu = *swiglu;
    out->threshold = (uint32_t)rint(65536 * swiglu->drop);
    if (lk_breaks(call, out->threshold < 65536, "drop is so near to 1 that nothing is kept"))
        return -EINVAL;
    out->kept = (float)(65536.0 / (65536 - out->threshold));
    return 0;
}

LK_API int lk_swiglu_forward(const struct lk_swiglu *swiglu, void *h, uint64_t h_stride,
                             void *stream)
{
    static const char call[] = "lk_swiglu_forward";
    struct lk_swiglu_launch launch = {
        .grads = {.h = h, .h_stride = h_stride}
    };

    if (make_swiglu(call, swiglu, &launch) || lk_breaks(call, h, "h is NULL"))
        return -EINVAL;
    const struct matrix matrices[] = {
        {"z",  swiglu->z, swiglu->z_stride, 2 * swiglu->columns, false},
        { "h", h,         h_stride,         swiglu->columns,     true },
    };
    if (check_matrices(call, matrices, 2, swiglu->rows, swiglu->columns, &launch.wide))
        return -EINVAL;
    if (!swiglu->rows)
        return 0;
    lk_count_call(launch.wide);
    return lk_run_swiglu_forward(&launch, stream);
}

LK_API int lk_swiglu_backward(const struct lk_swiglu *swiglu, const struct lk_swiglu_grads *grads,
                              void *stream)
{
    static const char call[] = "lk_swiglu_backward";
    struct lk_swiglu_launch launch = { 0 };

    if (make_swiglu(call, swiglu, &launch) || lk_breaks(call, grads, "a NULL argument") ||
        lk_breaks(call, grads->dh, "dh is NULL") || lk_breaks(call, grads->dz, "dz is NULL") ||
        lk_breaks(call, lk_is_aligned(grads->row_dot, 4), "row_dot is not aligned") ||
        lk_breaks(call, grads->dz != swiglu->z || grads->dz_stride == swiglu->z_stride,
                  "dz is z, but with another stride"))
        return -EINVAL;
    const struct matrix matrices[] = {
        {"z",   swiglu->z, swiglu->z_stride, 2 * swiglu->columns, false},
        { "dh", grads->dh, grads->dh_stride, swiglu->columns,     false},
        { "dz", grads->dz, grads->dz_stride, 2 * swiglu->columns, true },
        { "h",  grads->h,  grads->h_stride,  swiglu->columns,     true },
    };
    if (check_matrices(call, matrices, 4, swiglu->rows, swiglu->columns, &launch.wide))
        return -EINVAL;
    launch.grads = *grads;
    if (!swiglu->rows)
        return 0;
    lk_count_call(launch.wide);
    return lk_run_swiglu_backward(&launch, stream);
}

static int check_norm(const char *call, const struct lk_norm *n)
{
    unsigned int bytes = n && n->weight_type == LK_FP32 ? 4 : 2;

    if (lk_breaks(call, n, "a NULL argument") ||
        lk_breaks(call, n->kind == LK_RMS_NORM || n->kind == LK_LAYER_NORM, "unknown kind") ||
        lk_breaks(call, n->weight_type == LK_FP32 || n->weight_type == LK_BF16,
                  "weight_type is neither fp32 nor bf16") ||
        lk_breaks(call, lk_is_aligned(n->gamma, bytes), "gamma is not aligned to its elements") ||
        lk_breaks(call, lk_is_aligned(n->beta, bytes), "beta is not aligned to its elements") ||
        lk_breaks(call, n->eps >= 0, "eps is negative or no number") ||
        lk_breaks(call, n->rstd && lk_is_aligned(n->rstd, 4), "rstd is NULL or not aligned") ||
        lk_breaks(call, lk_is_aligned(n->mean, 4), "mean is not aligned") ||
        lk_breaks(call, n->kind == LK_RMS_NORM || n->mean, "mean is NULL"))
        return -EINVAL;
    return 0;
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
    static const char call[] = "lk_norm_forward";
    struct lk_norm_launch launch = { .like_y = like_y };

    if (check_norm(call, norm) || lk_breaks(call, forward, "a NULL argument") ||
        lk_breaks(call, forward->x, "x is NULL") ||
        lk_breaks(call, !forward->residual || forward->sum, "sum is NULL, but not residual"))
        return -EINVAL;
    const struct matrix matrices[] = {
        {"x",         forward->x,        forward->x_stride,        norm->columns, false},
        { "residual", forward->residual, forward->residual_stride, norm->columns, false},
        { "sum",      forward->sum,      forward->sum_stride,      norm->columns, true },
        { "y",        forward->y,        forward->y_stride,        norm->columns, true },
    };
    if (check_matrices(call, matrices, 4, norm->rows, norm->columns, &launch.wide))
        return -EINVAL;
    launch.wide &= ((uintptr_t)norm->gamma | (uintptr_t)norm->beta) % 16 == 0;
    launch.norm = *norm;
    launch.forward = *forward;
    if (!norm->rows)
        return 0;
    lk_count_call(launch.wide);
    return lk_run_norm_forward(&launch, stream);
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
                            const struct lk_norm_beside *beside, void *stream)
{
    static const char call[] = "lk_norm_backward";
    struct lk_norm_launch launch = {
        .also = beside->also,
        .forward = {.y = beside->y, .y_stride = beside->y_stride}
    };

    if (check_norm(call, norm) || lk_breaks(call, backward, "a NULL argument") ||
        lk_breaks(call, backward->s, "s is NULL") || lk_breaks(call, backward->dy, "dy is NULL") ||
        lk_breaks(call, backward->dx, "dx is NULL") ||
        lk_breaks(call, lk_is_aligned(backward->dgamma, 4), "dgamma is not aligned") ||
        lk_breaks(call, lk_is_aligned(backward->dbeta, 4), "dbeta is not aligned"))
        return -EINVAL;
    const struct matrix matrices[] = {
        {"s",   backward->s,  backward->s_stride,  norm->columns, false},
        { "dy", backward->dy, backward->dy_stride, norm->columns, false},
        { "ds", backward->ds, backward->ds_stride, norm->columns, false},
        { "dx", backward->dx, backward->dx_stride, norm->columns, true },
    };
    if (check_matrices(call, matrices, 4, norm->rows, norm->columns, &launch.wide))
        return -EINVAL;
    launch.wide &= ((uintptr_t)norm->gamma | (uintptr_t)norm->beta) % 16 == 0;
    launch.norm = *norm;
    launch.backward = *backward;
    if (backward->dgamma || backward->dbeta) {
        if (norm->rows &&
            lk_breaks(call, backward->workspace && lk_is_aligned(backward->workspace, 16),
                      "the workspace is NULL or not aligned to 16 bytes"))
            return -EINVAL;
        launch.partials = partial_rows(norm);
    }
    if (norm->rows)
        lk_count_call(launch.wide);
    return lk_run_norm_backward(&launch, stream);
}

LK_API int lk_norm_backward(const struct lk_norm *norm, const struct lk_norm_backward *backward,
                            void *stream)
{
    const struct lk_norm_beside none = { 0 };

    return lk_norm_backward_beside(norm, backward, &none, stream);
}
