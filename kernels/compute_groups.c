/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups of products: which way each is made, and what is made in none of them.
 */
#include "kernels/gemm_internal.h"

#include <errno.h>

/* What LK_GROUP_AUTO goes by. A launch takes about as long as so many operations: with fewer a product is not worth one of
 * its own. A method makes a tile of a result at a time on each multiprocessor: so many products are made side by side that
 * their tiles are one for each. */
#define LAUNCH_OPERATIONS 0x1p30
#define TILE_ROWS         128
#define TILE_COLUMNS      256

/* Where tiles leave room for so many products, all streams are used, with methods chosen for this part of the multiprocessors:
 * what runs side by side then overlaps. On one H200 64 and 128 experts of 512 tokens take 0.98 and 1.02 of the time that they
 * take in torch's _grouped_mm; on as many streams as there is room for, with methods for all multiprocessors, 1.43. */
#define MANY  4
#define SHARE 4

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

    return g->rows && g->columns && lk_gemm_is_plain(g) && !odd && !g->bias &&
           g->out_type == g->type && g->type == first->type &&
           (!g->c || g->beta == 0 || g->c == g->d) &&
           (g->a_stride | g->b_stride | g->d_stride) <= INT32_MAX;
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

/* Lists of the addresses of b, a and d, LK_GEMM_GROUP apart, which the device reads. */
static int write_lists(const struct lk_gemm *const *gemms, uint32_t n, void **to, void *stream)
{
    int err = 0;

    for (int side = 0; !err && side < 3; side++) {
        struct lk_pointers_launch launch = { to + (size_t)side * LK_GEMM_GROUP, n, { NULL } };

        for (uint32_t i = 0; i < n; i++)
            launch.values[i] = side == 0 ? gemms[i]->b : side == 1 ? gemms[i]->a : gemms[i]->d;
        err = lk_run_pointers(&launch, stream);
    }
    return err ? lk_blas_fail(err, "lk_gemm_groups_run: a launch failed: %s", lk_error_text(err))
               : 0;
}

/* At most LK_GEMM_GROUP that may share. */
static int run_group(struct lk_blas *blas, struct lk_cublas *cublas,
                     const struct lk_gemm *const *gemms, uint32_t n, void *workspace, void *stream)
{
    struct lk_cublas_memory memory = { .pointers = workspace,
                                       .workspace = (char *)workspace + POINTER_BYTES,
                                       .bytes = LK_GEMM_WORKSPACE };
    int err = write_lists(gemms, n, memory.pointers, stream);

    if (err)
        return err;
    err = lk_cublas_run(cublas, gemms, n, &memory, stream);
    if (!err)
        lk_count(&blas->grouped_products, n);
    return err;
}

/* As it is made when the workspace is cut into `parts`. */
static struct lk_gemm placed(const struct lk_blas *blas, const struct lk_gemm *gemm,
                             void *workspace, uint32_t part, uint32_t parts)
{
    size_t bytes = lk_gemm_workspace_bytes(blas) / parts / LK_BLOCKS_ALIGN * LK_BLOCKS_ALIGN;
    struct lk_gemm out = *gemm;

    out.workspace_bytes = bytes;
    out.workspace = bytes ? (char *)workspace + POINTER_BYTES + part * bytes : NULL;
    return out;
}

static int run_single(struct lk_blas *blas, const struct lk_gemm *gemm, void *workspace,
                      void *stream)
{
    struct lk_gemm own = placed(blas, gemm, workspace, 0, 1);

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

/* ---- one by one, on several streams ---- */

static double operations_of(const struct lk_gemm *g)
{
    return 2.0 * (double)g->rows * (double)g->columns * (double)g->depth;
}

static double mean_operations(const struct lk_gemm_groups *groups)
{
    double operations = 0;

    for (uint32_t i = 0; i < groups->count; i++)
        operations += operations_of(&groups->gemms[i]);
    return operations / (groups->count ? groups->count : 1);
}

/* What takes part in a group: of `own`, its place in the workspace and its share of the device. */
static struct lk_gemm placed_beside(const struct lk_blas *blas, const struct lk_gemm_groups *groups,
                                    uint32_t i, uint32_t stream, uint32_t streams)
{
    struct lk_gemm out = placed(blas, &groups->gemms[i], groups->workspace, stream, streams);

    if (!out.sms)
        out.sms = groups->sms;
    return out;
}

static uint32_t least_of(const double *values, uint32_t n)
{
    uint32_t least = 0;

    for (uint32_t i = 1; i < n; i++)
        if (values[i] < values[least])
            least = i;
    return least;
}

/* One that is made on the stream that has the least to do. */
static int run_on_least(struct lk_blas *blas, const struct lk_gemm_groups *groups, uint32_t i,
                        uint32_t streams, double *load, void *stream)
{
    uint32_t to = least_of(load, streams);
    struct lk_gemm own = placed_beside(blas, groups, i, to, streams);
    int err = lk_gemm_run_one(blas, &own, lk_forks_stream(blas->forks, to, stream));

    load[to] += operations_of(&own) + LAUNCH_OPERATIONS;
    if (!err)
        lk_count(&blas->spread_products, 1);
    return err;
}

/* Large ones first, so that none of them is left over at the end. */
static int run_beside(struct lk_blas *blas, const struct lk_gemm_groups *groups, uint32_t streams,
                      void *stream)
{
    double load[LK_GEMM_STREAMS] = { 0 }, mean = mean_operations(groups);
    int err = 0;

    for (int small = 0; small < 2; small++)
        for (uint32_t i = 0; !err && i < groups->count; i++) {
            const struct lk_gemm *g = &groups->gemms[i];

            if (g->rows && g->columns && (operations_of(g) < mean) == small)
                err = run_on_least(blas, groups, i, streams, load, stream);
        }
    return err;
}

/* Methods are measured alone, and before. */
static int tune_spread(struct lk_blas *blas, const struct lk_gemm_groups *groups, uint32_t streams,
                       void *stream)
{
    int err = 0;

    for (uint32_t i = 0; !err && i < groups->count; i++) {
        struct lk_gemm own = placed_beside(blas, groups, i, 0, streams);

        err = lk_gemm_tune_one(blas, &own, stream);
    }
    return err;
}

static int run_spread(struct lk_blas *blas, const struct lk_gemm_groups *groups, void *stream)
{
    uint32_t streams = groups->streams;
    int err = tune_spread(blas, groups, streams, stream), end;

    if (!err)
        err = lk_forks_begin(blas->forks, streams, stream);
    if (err == LK_VENDOR_NONE) { /* the same methods, in a row */
        err = 0;
        for (uint32_t i = 0; !err && i < groups->count; i++) {
            struct lk_gemm own = placed_beside(blas, groups, i, 0, streams);

            err = lk_gemm_run_one(blas, &own, stream);
        }
        return err;
    }
    if (err)
        return err;
    err = run_beside(blas, groups, streams, stream);
    end = lk_forks_end(blas->forks, streams, stream);
    return err ? err : end;
}

/* ---- equal ones, as one batch ---- */

/* From one of a matrix to the next one, in elements. Never backwards: that is nowhere promised to be served, and two matrices
 * lie evenly wherever they are. */
static bool find_step(const void *first, const void *second, enum lk_type type, int64_t *out)
{
    int64_t bytes = (int64_t)((uintptr_t)second - (uintptr_t)first);

    *out = bytes / (int64_t)lk_type_bytes(type);
    return bytes >= 0 && bytes % (int64_t)lk_type_bytes(type) == 0;
}

/* Whether matrix `i` lies where the steps lead to. */
static bool is_at(const void *first, const void *here, int64_t step, uint32_t i, enum lk_type type)
{
    return (uintptr_t)here == (uintptr_t)first + (uint64_t)step * i * lk_type_bytes(type);
}

static bool are_alike(const struct lk_gemm *g, const struct lk_gemm *first)
{
    return g->rows == first->rows && g->columns == first->columns && g->depth == first->depth &&
           g->type == first->type && g->out_type == first->out_type &&
           g->a_stride == first->a_stride && g->b_stride == first->b_stride &&
           g->d_stride == first->d_stride && !g->a_transposed == !first->a_transposed &&
           !g->b_transposed == !first->b_transposed && g->alpha == first->alpha &&
           g->beta == first->beta && !g->c == !first->c && g->c_stride == first->c_stride &&
           g->sms == first->sms && !g->bias;
}

/* Two at least, of the same sizes. */
static bool are_all_alike(const struct lk_gemm_groups *groups)
{
    const struct lk_gemm *first = groups->gemms;

    if (groups->count < 2 || groups->count > INT32_MAX || !lk_gemm_is_plain(first) ||
        !first->rows || !first->columns || first->bias)
        return false;
    for (uint32_t i = 1; i < groups->count; i++)
        if (!are_alike(&groups->gemms[i], first))
            return false;
    return true;
}

/* Each matrix is a step further than the last one of its kind. */
static bool find_steps(const struct lk_gemm_groups *groups, struct lk_batch *out)
{
    const struct lk_gemm *first = groups->gemms, *second = first + 1;

    *out = (struct lk_batch){ .count = groups->count };
    if (!find_step(first->a, second->a, first->type, &out->a) ||
        !find_step(first->b, second->b, first->type, &out->b) ||
        !find_step(first->c, second->c, first->out_type, &out->c) ||
        !find_step(first->d, second->d, first->out_type, &out->d))
        return false;
    for (uint32_t i = 1; i < groups->count; i++) {
        const struct lk_gemm *g = &groups->gemms[i];

        if (!is_at(first->a, g->a, out->a, i, g->type) ||
            !is_at(first->b, g->b, out->b, i, g->type) ||
            !is_at(first->c, g->c, out->c, i, g->out_type) ||
            !is_at(first->d, g->d, out->d, i, g->out_type))
            return false;
    }
    return true;
}

static int run_batch(struct lk_blas *blas, const struct lk_gemm_groups *groups,
                     const struct lk_batch *batch, void *stream)
{
    struct lk_gemm own = placed_beside(blas, groups, 0, 0, 1);
    int err = lk_gemm_tune_if_told(blas, &own, batch, stream);

    if (!err)
        err = lk_gemm_run_vendor(blas, &own, batch, stream);
    if (!err)
        lk_count(&blas->batched_products, batch->count);
    return err;
}

/* Wherever they lie: as many as there is room for lists. */
static int run_listed(struct lk_blas *blas, const struct lk_gemm_groups *groups, void *stream)
{
    const struct lk_gemm *listed[LK_GEMM_GROUP];
    struct lk_batch batch = { .count = groups->count, .pointers = groups->workspace };
    int err;

    if (groups->count > LK_GEMM_GROUP)
        return LK_VENDOR_NONE;
    for (uint32_t i = 0; i < groups->count; i++) {
        const struct lk_gemm *g = listed[i] = &groups->gemms[i];

        if (g->c && g->beta != 0 && g->c != g->d)
            return LK_VENDOR_NONE;
        batch.a_bits |= (uintptr_t)g->a;
        batch.b_bits |= (uintptr_t)g->b;
        batch.d_bits |= (uintptr_t)g->d;
    }
    err = write_lists(listed, groups->count, batch.pointers, stream);
    return err ? err : run_batch(blas, groups, &batch, stream);
}

/* ---- which way ---- */

/* 1: the device has enough to do with one. */
static uint32_t streams_for(const struct lk_blas *blas, const struct lk_gemm_groups *groups)
{
    uint64_t tiles = 0, filled = 0, sms = lk_forks_sms(blas->forks), streams;

    for (uint32_t i = 0; i < groups->count; i++) {
        const struct lk_gemm *g = &groups->gemms[i];
        uint64_t its = (g->rows + TILE_ROWS - 1) / TILE_ROWS *
                       ((g->columns + TILE_COLUMNS - 1) / TILE_COLUMNS);

        tiles += its;
        filled += its > 0;
    }
    if (!tiles)
        return 1;
    streams = (sms * filled + tiles - 1) / tiles;
    if (streams > filled)
        streams = filled;
    if (streams < 1)
        return 1;
    return streams < LK_GEMM_STREAMS ? (uint32_t)streams : LK_GEMM_STREAMS;
}

/* What the caller has left open is chosen. */
static int run_streams(struct lk_blas *blas, const struct lk_gemm_groups *groups, void *stream)
{
    struct lk_gemm_groups own = *groups;

    if (!own.streams) {
        own.streams = streams_for(blas, groups);
        if (own.streams >= MANY) {
            own.streams = LK_GEMM_STREAMS;
            own.sms = own.sms ? own.sms : lk_forks_sms(blas->forks) / SHARE;
        }
    }
    return run_spread(blas, &own, stream);
}

static enum lk_gemm_grouping choose_way(const struct lk_blas *blas,
                                        const struct lk_gemm_groups *groups)
{
    if (mean_operations(groups) < LAUNCH_OPERATIONS)
        return LK_GROUP_ALWAYS;
    return streams_for(blas, groups) > 1 ? LK_GROUP_STREAMS : LK_GROUP_NEVER;
}

static int run_in_a_row(struct lk_blas *blas, const struct lk_gemm_groups *groups, void *stream)
{
    int err = 0;

    for (uint32_t i = 0; !err && i < groups->count; i++)
        err = run_single(blas, &groups->gemms[i], groups->workspace, stream);
    return err;
}

/* LK_VENDOR_NONE: it cannot be done in this way. */
static int run_way(struct lk_blas *blas, const struct lk_gemm_groups *groups,
                   enum lk_gemm_grouping way, void *stream)
{
    struct lk_cublas *cublas = NULL;
    struct lk_batch batch;
    int err;

    switch (way) {
    case LK_GROUP_BATCHED:
        if (!are_all_alike(groups))
            return LK_VENDOR_NONE;
        if (find_steps(groups, &batch))
            return run_batch(blas, groups, &batch, stream);
        return groups->grouping == LK_GROUP_BATCHED ? run_listed(blas, groups, stream)
                                                    : LK_VENDOR_NONE;
    case LK_GROUP_ALWAYS:
        err = get_cublas(blas, &cublas);
        if (err)
            return err;
        return cublas ? run_grouped(blas, cublas, groups, stream) : LK_VENDOR_NONE;
    case LK_GROUP_STREAMS: return blas->forks ? run_streams(blas, groups, stream) : LK_VENDOR_NONE;
    default: return run_in_a_row(blas, groups, stream);
    }
}

static int check_groups(const struct lk_gemm_groups *groups)
{
    if ((unsigned int)groups->grouping > LK_GROUP_BATCHED)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: grouping %d is unknown",
                            (int)groups->grouping);
    if (groups->streams > LK_GEMM_STREAMS)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: %u streams, there are %d",
                            groups->streams, LK_GEMM_STREAMS);
    if (groups->count && !groups->gemms)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: gemms is NULL");
    if (lk_check_workspace("lk_gemm_groups_run", groups->workspace))
        return -EINVAL;
    for (uint32_t i = 0; i < groups->count; i++) {
        struct lk_gemm gemm = groups->gemms[i];

        gemm.workspace_bytes = 0;
        if (lk_gemm_check(&gemm))
            return -EINVAL;
    }
    return 0;
}

LK_API int lk_gemm_groups_run(struct lk_blas *blas, const struct lk_gemm_groups *groups,
                              void *stream)
{
    bool chosen;
    int err;

    if (!blas || !groups)
        return lk_blas_fail(-EINVAL, "lk_gemm_groups_run: a NULL argument");
    err = check_groups(groups);
    if (err)
        return err;
    chosen = groups->grouping == LK_GROUP_AUTO;
    if (!blas->vendor)
        return run_in_a_row(blas, groups, stream);
    err = run_way(blas, groups, chosen ? LK_GROUP_BATCHED : groups->grouping, stream);
    if (err == LK_VENDOR_NONE && chosen) {
        enum lk_gemm_grouping way = choose_way(blas, groups);

        err = run_way(blas, groups, way, stream);
        if (err == -ENOSYS && way == LK_GROUP_ALWAYS) /* no cuBLAS */
            err = run_way(blas, groups, LK_GROUP_STREAMS, stream);
    }
    return err == LK_VENDOR_NONE ? run_in_a_row(blas, groups, stream) : err;
}
