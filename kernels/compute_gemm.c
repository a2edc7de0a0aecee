/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/gemm_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* The thread's own. */
static _Thread_local char blas_error[256];

int lk_blas_fail(int err, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): it is, two lines above */
    vsnprintf(blas_error, sizeof(blas_error), format, args);
    va_end(args);
    return err;
}

LK_API const char *lk_blas_error(void)
{
    return blas_error;
}

LK_API const char *lk_compute_error(void)
{
    return blas_error;
}

LK_API int lk_blas_open(const char *library, uint32_t flags, struct lk_blas **out)
{
    struct lk_blas *blas;
    int err = 0;

    if (!out)
        return lk_blas_fail(-EINVAL, "lk_blas_open: out is NULL");
    if (flags & ~(uint32_t)LK_BLAS_GENERAL)
        return lk_blas_fail(-EINVAL, "lk_blas_open: unknown flags 0x%x", flags);
    blas = calloc(1, sizeof(*blas));
    if (!blas)
        return lk_blas_fail(-ENOMEM, "lk_blas_open: out of memory");
    if (!(flags & LK_BLAS_GENERAL))
        err = lk_vendor_open(library, &blas->vendor);
    if (!err && blas->vendor)
        err = lk_forks_open(&blas->forks);
    if (err) {
        lk_vendor_close(blas->vendor);
        free(blas);
        return err;
    }
    pthread_mutex_init(&blas->lock, NULL);
    *out = blas;
    return 0;
}

LK_API void lk_blas_close(struct lk_blas *blas)
{
    if (!blas)
        return;
    lk_cublas_close(blas->cublas);
    lk_forks_close(blas->forks);
    lk_vendor_close(blas->vendor);
    pthread_mutex_destroy(&blas->lock);
    free(blas);
}

LK_API void lk_blas_counts(const struct lk_blas *blas, struct lk_blas_counts *out)
{
    out->vendor = __atomic_load_n(&blas->vendor_products, __ATOMIC_RELAXED);
    out->general = __atomic_load_n(&blas->general_products, __ATOMIC_RELAXED);
    out->plans = __atomic_load_n(&blas->plans, __ATOMIC_RELAXED);
    out->grouped = __atomic_load_n(&blas->grouped_products, __ATOMIC_RELAXED);
    out->batched = __atomic_load_n(&blas->batched_products, __ATOMIC_RELAXED);
    out->spread = __atomic_load_n(&blas->spread_products, __ATOMIC_RELAXED);
}

LK_API void lk_blas_tune(struct lk_blas *blas, int on)
{
    __atomic_store_n(&blas->tuning, on, __ATOMIC_RELAXED);
}

LK_API size_t lk_gemm_workspace_bytes(const struct lk_blas *blas)
{
    return blas && blas->vendor ? LK_GEMM_WORKSPACE : 0;
}

/* ---- arguments ---- */

int lk_check_operand(const char *call, const struct lk_operand *operand, bool written)
{
    uint64_t elements;

    if (!operand->rows || !operand->columns)
        return 0; /* nothing of it is touched */
    if (!operand->base)
        return lk_blas_fail(-EINVAL, "%s: %s is NULL", call, operand->name);
    if ((uintptr_t)operand->base % lk_type_bytes(operand->type))
        return lk_blas_fail(-EINVAL, "%s: %s is not aligned to its elements", call, operand->name);
    if (written && operand->rows > 1 && operand->stride < operand->columns)
        return lk_blas_fail(-EINVAL, "%s: rows of %s overlap: stride %llu, %llu columns", call,
                            operand->name, (unsigned long long)operand->stride,
                            (unsigned long long)operand->columns);
    if (__builtin_mul_overflow(operand->rows, operand->stride, &elements) || elements >= UINT64_C(1)
                                                                                             << 60)
        return lk_blas_fail(-EINVAL, "%s: stride %llu of %s is too large", call,
                            (unsigned long long)operand->stride, operand->name);
    return 0;
}

int lk_check_workspace(const char *call, const void *workspace)
{
    if (!workspace || (uintptr_t)workspace % LK_BLOCKS_ALIGN)
        return lk_blas_fail(-EINVAL, "%s: the workspace is not aligned to 256 bytes", call);
    return 0;
}

int lk_gemm_check(const struct lk_gemm *g)
{
    if (g->type != LK_BF16 && g->type != LK_FP16)
        return lk_blas_fail(-EINVAL, "lk_gemm: type %d is neither bf16 nor fp16", (int)g->type);
    if (g->out_type != g->type && g->out_type != LK_FP32)
        return lk_blas_fail(-EINVAL, "lk_gemm: out_type %d with type %d", (int)g->out_type,
                            (int)g->type);
    if (g->rows > INT32_MAX || g->columns > INT32_MAX || g->depth > INT32_MAX)
        return lk_blas_fail(-EINVAL, "lk_gemm: %llu x %llu x %llu is too large",
                            (unsigned long long)g->rows, (unsigned long long)g->columns,
                            (unsigned long long)g->depth);
    if (g->c == g->d && g->c && g->c_stride != g->d_stride)
        return lk_blas_fail(-EINVAL, "lk_gemm: c is d with another stride");
    if (g->workspace_bytes && lk_check_workspace("lk_gemm", g->workspace))
        return -EINVAL;
    const struct lk_operand operands[] = {
        {"a",     g->a,    g->a_transposed ? g->depth : g->rows,    g->a_transposed ? g->rows : g->depth,
         g->a_stride,                                                                                                  g->type    },
        { "b",    g->b,    g->b_transposed ? g->columns : g->depth,
         g->b_transposed ? g->depth : g->columns,                                                         g->b_stride, g->type    },
        { "c",    g->c,    g->c ? g->rows : 0,                      g->columns,                           g->c_stride, g->out_type},
        { "bias", g->bias, g->bias ? 1 : 0,                         g->columns,                           g->columns,  g->out_type},
        { "d",    g->d,    g->rows,                                 g->columns,                           g->d_stride, g->out_type},
    };
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++) {
        int err = lk_check_operand("lk_gemm", &operands[i], operands[i].base == g->d);

        if (err)
            return err;
    }
    return 0;
}

bool lk_gemm_is_plain(const struct lk_gemm *g)
{
    return g->depth && g->a_stride >= (g->a_transposed ? g->rows : g->depth) &&
           g->b_stride >= (g->b_transposed ? g->depth : g->columns) &&
           (!g->c || g->beta == 0 || g->c_stride >= g->columns) && g->d_stride >= g->columns;
}

/* ---- calls ---- */

static int run_general(const struct lk_gemm *gemm, void *stream)
{
    int err = lk_run_gemm(gemm, stream);

    return err ? lk_blas_fail(err, "lk_gemm: the launch failed: %s", lk_error_text(err)) : 0;
}

static const struct lk_batch alone = { .count = 1 };

int lk_gemm_run_vendor(struct lk_blas *blas, const struct lk_gemm *gemm,
                       const struct lk_batch *batch, void *stream)
{
    int planned = 0, err = lk_vendor_gemm(blas->vendor, gemm, batch, stream, &planned);

    if (planned)
        lk_count(&blas->plans, 1);
    if (err == 0)
        lk_count(&blas->vendor_products, batch->count);
    return err;
}

int lk_gemm_tune_if_told(struct lk_blas *blas, const struct lk_gemm *gemm,
                         const struct lk_batch *batch, void *stream)
{
    struct lk_gemm_tuned tuned = { 0 };

    return __atomic_load_n(&blas->tuning, __ATOMIC_RELAXED)
               ? lk_vendor_tune(blas->vendor, gemm, batch, &tuned, stream)
               : 0;
}

int lk_gemm_run_one(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream)
{
    if (!gemm->rows || !gemm->columns)
        return 0;
    if (blas->vendor && lk_gemm_is_plain(gemm)) {
        int err = lk_gemm_run_vendor(blas, gemm, &alone, stream);

        if (err != LK_VENDOR_NONE)
            return err;
    }
    lk_count(&blas->general_products, 1);
    return run_general(gemm, stream);
}

int lk_gemm_tune_one(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream)
{
    int err = 0;

    if (blas->vendor && gemm->rows && gemm->columns && lk_gemm_is_plain(gemm))
        err = lk_gemm_tune_if_told(blas, gemm, &alone, stream);
    return err == LK_VENDOR_NONE ? 0 : err;
}

LK_API int lk_gemm_run(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream)
{
    int err;

    if (!blas || !gemm)
        return lk_blas_fail(-EINVAL, "lk_gemm_run: a NULL argument");
    err = lk_gemm_check(gemm);
    if (!err)
        err = lk_gemm_tune_one(blas, gemm, stream);
    return err ? err : lk_gemm_run_one(blas, gemm, stream);
}

LK_API int lk_gemm_tune(struct lk_blas *blas, const struct lk_gemm *gemm, struct lk_gemm_tuned *out,
                        void *stream)
{
    struct lk_gemm_tuned tuned = { 0 };
    int err;

    if (!blas || !gemm)
        return lk_blas_fail(-EINVAL, "lk_gemm_tune: a NULL argument");
    err = lk_gemm_check(gemm);
    if (err)
        return err;
    if (blas->vendor && gemm->rows && gemm->columns && lk_gemm_is_plain(gemm))
        err = lk_vendor_tune(blas->vendor, gemm, &alone, &tuned, stream);
    if (err == LK_VENDOR_NONE)
        err = 0;
    if (!err && out)
        *out = tuned;
    return err;
}
