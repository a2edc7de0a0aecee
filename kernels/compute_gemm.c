/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/blocks_internal.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define GEMM_WORKSPACE \
    ((size_t)32 << 20) /* what cuBLAS itself takes on this generation of devices */

/* Counters and `tuning`: any thread writes, any reads, relaxed; they order nothing. `lock` guards what is opened late. The rest
 * is constant after lk_blas_open(). */
struct lk_blas {
    struct lk_vendor *vendor; /* NULL: only the kernel of our own */
    uint64_t vendor_products, general_products, plans, grouped_products;
    int tuning;
    pthread_mutex_t lock;
    struct lk_cublas *cublas;     /* guarded; NULL: not yet, or it is missing */
    int cublas_tried, cublas_err; /* guarded */
};

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
    if (err) {
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
    lk_vendor_close(blas->vendor);
    pthread_mutex_destroy(&blas->lock);
    free(blas);
}

static void count(uint64_t *counter)
{
    __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

LK_API void lk_blas_counts(const struct lk_blas *blas, struct lk_blas_counts *out)
{
    out->vendor = __atomic_load_n(&blas->vendor_products, __ATOMIC_RELAXED);
    out->general = __atomic_load_n(&blas->general_products, __ATOMIC_RELAXED);
    out->plans = __atomic_load_n(&blas->plans, __ATOMIC_RELAXED);
    out->grouped = __atomic_load_n(&blas->grouped_products, __ATOMIC_RELAXED);
}

LK_API void lk_blas_tune(struct lk_blas *blas, int on)
{
    __atomic_store_n(&blas->tuning, on, __ATOMIC_RELAXED);
}

LK_API size_t lk_gemm_workspace_bytes(const struct lk_blas *blas)
{
    return blas && blas->vendor ? GEMM_WORKSPACE : 0;
}

/* ---- arguments ---- */

static uint64_t type_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

int lk_check_operand(const char *call, const struct lk_operand *operand, bool written)
{
    uint64_t elements;

    if (!operand->rows || !operand->columns)
        return 0; /* nothing of it is touched */
    if (!operand->base)
        return lk_blas_fail(-EINVAL, "%s: %s is NULL", call, operand->name);
    if ((uintptr_t)operand->base % type_bytes(operand->type))
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

static int check_gemm(const struct lk_gemm *g)
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

/* What the vendor's library can be asked for: its columns, our rows, may not overlap. */
static bool is_plain(const struct lk_gemm *g)
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

LK_API int lk_gemm_run(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream)
{
    int planned = 0, err;

    if (!blas || !gemm)
        return lk_blas_fail(-EINVAL, "lk_gemm_run: a NULL argument");
    err = check_gemm(gemm);
    if (err || !gemm->rows || !gemm->columns)
        return err;
    if (blas->vendor && is_plain(gemm)) {
        struct lk_gemm_tuned tuned = { 0 };

        if (__atomic_load_n(&blas->tuning, __ATOMIC_RELAXED))
            err = lk_vendor_tune(blas->vendor, gemm, &tuned, stream);
        if (!err)
            err = lk_vendor_gemm(blas->vendor, gemm, stream, &planned);
        if (planned)
            count(&blas->plans);
        if (err == 0)
            count(&blas->vendor_products);
        if (err != LK_VENDOR_NONE)
            return err;
    }
    count(&blas->general_products);
    return run_general(gemm, stream);
}

LK_API int lk_gemm_tune(struct lk_blas *blas, const struct lk_gemm *gemm, struct lk_gemm_tuned *out,
                        void *stream)
{
    struct lk_gemm_tuned tuned = { 0 };
    int err;

    if (!blas || !gemm)
        return lk_blas_fail(-EINVAL, "lk_gemm_tune: a NULL argument");
    err = check_gemm(gemm);
    if (err)
        return err;
    if (blas->vendor && gemm->rows && gemm->columns && is_plain(gemm))
        err = lk_vendor_tune(blas->vendor, gemm, &tuned, stream);
    if (err == LK_VENDOR_NONE)
        err = 0;
    if (!err && out)
        *out = tuned;
    return err;
}

/* ---- groups of products ---- */

#define POINTER_BYTES (3 * (size_t)LK_GEMM_GROUP * sizeof(void *))

LK_API size_t lk_gemm_groups_workspace_bytes(const struct lk_blas *blas)
{
    return POINTER_BYTES + lk_gemm_workspace_bytes(blas);
}

/* Two of them could be in one group. */
static bool may_share(const struct lk_gemm *g, const struct lk_gemm *first)
{
    uintptr_t odd = ((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->d) % 16 |
                    (g->a_stride | g->b_stride | g->d_stride) % 8;

    return g->rows && g->columns && is_plain(g) && !odd && !g->bias && g->out_type == g->type &&
           g->type == first->type && (!g->c || g->beta == 0 || g->c == g->d) &&
           (g->a_stride | g->b_stride | g->d_stride) <= INT32_MAX;
}

static bool are_small(const struct lk_gemm_groups *groups)
{
    double operations = 0;

    for (uint32_t i = 0; i < groups->count; i++)
        operations += 2.0 * (double)groups->gemms[i].rows * (double)groups->gemms[i].columns *
                      (double)groups->gemms[i].depth;
    return operations < 0x1p32 * groups->count;
}

/* Opened once; what failed then fails again. */
static int get_cublas(struct lk_blas *blas, struct lk_cublas **out)
{
    int err;

    pthread_mutex_lock(&blas->lock);
    if (!blas->cublas_tried)
        blas->cublas_err = lk_cublas_open(&blas->cublas);
    blas->cublas_tried = 1;
    err = blas->cublas_err;
    *out = blas->cublas;
    pthread_mutex_unlock(&blas->lock);
    return err;
}

/* At most LK_GEMM_GROUP that may share. */
static int run_group(struct lk_blas *blas, struct lk_cublas *cublas,
                     const struct lk_gemm *const *gemms, uint32_t n, void *workspace, void *stream)
{
    struct lk_cublas_memory memory = { .pointers = workspace,
                                       .workspace = (char *)workspace + POINTER_BYTES,
                                       .bytes = GEMM_WORKSPACE };
    int err = 0;

    for (int side = 0; !err && side < 3; side++) {
        struct lk_pointers_launch launch = { memory.pointers + (size_t)side * LK_GEMM_GROUP,
                                             n,
                                             { NULL } };

        for (uint32_t i = 0; i < n; i++)
            launch.values[i] = side == 0 ? gemms[i]->b : side == 1 ? gemms[i]->a : gemms[i]->d;
        err = lk_run_pointers(&launch, stream);
    }
    if (err)
        return lk_blas_fail(err, "lk_gemm_groups_run: a launch failed: %s", lk_error_text(err));
    err = lk_cublas_run(cublas, gemms, n, &memory, stream);
    if (!err)
        __atomic_fetch_add(&blas->grouped_products, n, __ATOMIC_RELAXED);
    return err;
}

static int run_single(struct lk_blas *blas, const struct lk_gemm *gemm, void *workspace,
                      void *stream)
{
    struct lk_gemm own = *gemm;

    own.workspace_bytes = lk_gemm_workspace_bytes(blas);
    own.workspace = own.workspace_bytes ? (char *)workspace + POINTER_BYTES : NULL;
    return lk_gemm_run(blas, &own, stream);
}

static int run_singles(struct lk_blas *blas, const struct lk_gemm *const *gemms, uint32_t n,
                       void *workspace, void *stream)
{
    int err = 0;

    for (uint32_t i = 0; !err && i < n; i++)
        err = run_single(blas, gemms[i], workspace, stream);
    return err;
}

/* Groups as they fill up; what does not fit into one is made at once. */
static int run_grouped(struct lk_blas *blas, struct lk_cublas *cublas,
                       const struct lk_gemm_groups *groups, void *stream)
{
    const struct lk_gemm *waiting[LK_GEMM_GROUP];
    uint32_t n = 0;

    for (uint32_t i = 0; i <= groups->count; i++) {
        bool last = i == groups->count;
        int err = 0;

        if (!last && may_share(&groups->gemms[i], n ? waiting[0] : &groups->gemms[i]))
            waiting[n++] = &groups->gemms[i];
        else if (!last)
            err = run_single(blas, &groups->gemms[i], groups->workspace, stream);
        if (!err && n && (last || n == LK_GEMM_GROUP)) {
            err = run_group(blas, cublas, waiting, n, groups->workspace, stream);
            if (err == LK_VENDOR_NONE)
                err = run_singles(blas, waiting, n, groups->workspace, stream);
            n = 0;
        }
        if (err)
            return err;
    }
    return 0;
}

static int check_groups(const struct lk_gemm_groups *groups)
{
    if ((unsigned int)groups->grouping > LK_GROUP_ALWAYS)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: grouping %d is unknown",
                            (int)groups->grouping);
    if (groups->count && !groups->gemms)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: gemms is NULL");
    if (lk_check_workspace("lk_gemm_groups_run", groups->workspace))
        return -EINVAL;
    for (uint32_t i = 0; i < groups->count; i++) {
        struct lk_gemm gemm = groups->gemms[i];

        gemm.workspace_bytes = 0;
        if (check_gemm(&gemm))
            return -EINVAL;
    }
    return 0;
}

LK_API int lk_gemm_groups_run(struct lk_blas *blas, const struct lk_gemm_groups *groups,
                              void *stream)
{
    struct lk_cublas *cublas = NULL;
    int err;

    if (!blas || !groups)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: a NULL argument");
    err = check_groups(groups);
    if (err)
        return err;
    if (blas->vendor && groups->grouping != LK_GROUP_NEVER &&
        (groups->grouping == LK_GROUP_ALWAYS || are_small(groups)))
        err = get_cublas(blas, &cublas);
    if (err && groups->grouping == LK_GROUP_ALWAYS)
        return err;
    if (cublas)
        return run_grouped(blas, cublas, groups, stream);
    for (uint32_t i = 0; i < groups->count; i++) {
        err = run_single(blas, &groups->gemms[i], groups->workspace, stream);
        if (err)
            return err;
    }
    return 0;
}
