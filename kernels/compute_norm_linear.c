/* SPDX-License-Identifier: Apache-2.0
 *
 * A norm and the matrix behind it. The result is final, so nothing behind the product could apply the rows' factors
 * without another pass over it, which is longer than y: y is made, for some rows at a time.
 */
#include "kernels/gemm_internal.h"

#include <errno.h>

/* Where everything lies. */
struct memory {
    void *gemm;
    float *rstd, *mean;
    void *y, *dy;
    void *norm; /* workspace of the norm's backward */
    void *sums; /* workspace of dbias */
    uint64_t chunk;
    bool make_norm, make_y;
    bool again; /* y is made beside dx, of the saved statistics, in place of dy */
    /* dweight, and what it is made of, is made at the same time as dx, on a stream of our own */
    bool beside;
    void *other_gemm; /* the workspace of its product */
};

static struct lk_norm norm_of(const struct lk_norm_linear *block, float *rstd, float *mean)
{
    return (struct lk_norm){
        .kind = block->kind,
        .rows = block->rows,
        .columns = block->hidden,
        .eps = block->eps,
        .weight_type = block->gamma || block->beta ? block->gamma_type : LK_FP32,
        .gamma = block->gamma,
        .beta = block->beta,
        .gamma_offset = block->gamma_offset,
        .mean = mean,
        .rstd = rstd,
    };
}

/* The partial sums of the rows of dout; their sums beside those of the norm's columns, or in a launch of their own. */
static struct lk_fold_launch sum_of(const struct lk_norm_linear *block,
                                    const struct lk_norm_linear_backward *b, const struct memory *m)
{
    bool with_norm = (b->dgamma || b->dbeta) && !m->beside;
    bool wide = block->columns % LK_VECTOR == 0 && b->dout_stride % LK_VECTOR == 0 &&
                (uintptr_t)b->dout % 16 == 0;

    if (!b->dbias)
        return (struct lk_fold_launch){ .fold.columns = block->columns };
    return (struct lk_fold_launch){
        .fold = {.rows = block->rows,                   .columns = block->columns},
        .grads = { .grad_type = LK_BF16,
                 .dfolded = b->dout,
                 .dgamma = with_norm ? NULL : b->dbias,
                 .workspace = m->sums },
        .stride = b->dout_stride,
        .wide = wide,
        .partials = lk_fold_partials(block->rows, block->columns),
        .plain = 1,
    };
}

static uint64_t chunk_of(const struct lk_norm_linear *block)
{
    return block->chunk_rows && block->chunk_rows < block->rows && !block->saved.y
               ? block->chunk_rows
               : block->rows;
}

/* Whether rows of the norm and its weights are aligned to groups. */
static bool is_aligned(const struct lk_norm_linear *block, const struct lk_norm_linear_backward *b)
{
    uintptr_t bits = (uintptr_t)block->x | (uintptr_t)block->gamma | (uintptr_t)block->beta |
                     (uintptr_t)b->dx | (uintptr_t)b->dx_add;
    uint64_t strides = block->x_stride | b->dx_stride | (b->dx_add ? b->dx_add_stride : 0);

    return block->hidden % LK_VECTOR == 0 && strides % LK_VECTOR == 0 && bits % 16 == 0;
}

/* Whether no row of a matrix, of so many bytes, lies where rows of dx do. */
static bool is_apart(const struct lk_norm_linear *block, const struct lk_norm_linear_backward *b,
                     const void *base, uint64_t columns, uint64_t stride)
{
    uintptr_t dx = (uintptr_t)b->dx, other = (uintptr_t)base;
    uint64_t before = block->rows ? block->rows - 1 : 0;

    return dx >= other + 2 * (before * stride + columns) ||
           other >= dx + 2 * (before * b->dx_stride + block->hidden);
}

/* Whether y can be made when dx is: dout, which dweight needs after that, must not lie where dx does. */
static bool can_make_again(const struct lk_norm_linear *block,
                           const struct lk_norm_linear_backward *b)
{
    return is_aligned(block, b) && lk_norm_makes_y(block->hidden, b->dx_add != NULL) &&
           is_apart(block, b, b->dout, block->columns, b->dout_stride);
}

/* Whether dweight can be made while dx is: what it is made of must not lie there. Products are measured alone. */
static bool can_be_beside(const struct lk_blas *blas, const struct lk_norm_linear *block,
                          const struct lk_norm_linear_backward *b)
{
    return is_apart(block, b, b->dout, block->columns, b->dout_stride) &&
           is_apart(block, b, block->x, block->hidden, block->x_stride) &&
           is_apart(block, b, block->saved.y, block->hidden, block->hidden) &&
           !__atomic_load_n(&blas->tuning, __ATOMIC_RELAXED);
}

/* Bytes of the workspace. */
static uint64_t lay_out(const struct lk_blas *blas, const struct lk_norm_linear *block,
                        const struct lk_norm_linear_backward *backward, void *workspace,
                        struct memory *out)
{
    const struct lk_saved *saved = &block->saved;
    struct lk_arena arena = { .base = workspace };
    struct lk_norm norm = norm_of(block, NULL, NULL);
    const struct lk_fold sum = { .rows = block->rows, .columns = block->columns };
    bool make_y = !saved->y && (!backward || backward->dweight);
    bool statistics = !saved->rstd || (backward && make_y); /* there is room for them */
    bool few = backward && backward->dweight &&
               lk_gemm_leaves_room(blas, block->rows, block->hidden);
    bool again = backward && make_y && saved->rstd && !few && can_make_again(block, backward);

    *out = (struct memory){
        .rstd = saved->rstd,
        .mean = saved->mean,
        .y = saved->y,
        .chunk = backward ? block->rows : chunk_of(block),
        .make_norm = !backward || (statistics && !again),
        .make_y = make_y || !backward,
        .again = again,
        .beside = few && can_be_beside(blas, block, backward),
    };
    out->gemm = lk_take(&arena, true, lk_gemm_workspace_bytes(blas));
    if (statistics) {
        out->rstd = lk_take(&arena, true, block->rows * sizeof(float));
        out->mean = lk_take(&arena, block->kind == LK_LAYER_NORM, block->rows * sizeof(float));
    }
    if (again) {
        out->rstd = saved->rstd;
        out->mean = saved->mean;
    }
    if (make_y)
        out->y = lk_take(&arena, true, out->chunk * block->hidden * 2);
    if (!backward)
        return arena.used;
    /* y is not needed any more when dy is made, or made of it, or both are there at a time */
    out->dy = make_y && !few ? out->y : lk_take(&arena, true, block->rows * block->hidden * 2);
    out->other_gemm = lk_take(&arena, few, lk_gemm_workspace_bytes(blas));
    out->norm = lk_take(&arena, backward->dgamma || backward->dbeta,
                        lk_norm_workspace_bytes(&norm));
    out->sums = lk_take(&arena, backward->dbias != NULL, lk_fold_workspace_bytes(&sum));
    return arena.used;
}

static int check_block(const char *call, const struct lk_blas *blas,
                       const struct lk_norm_linear *block)
{
    if (!blas || !block)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    if (block->rows > INT32_MAX || !block->hidden || block->hidden > INT32_MAX || !block->columns ||
        block->columns > INT32_MAX)
        return lk_blas_fail(-EINVAL, "%s: %llu rows of %llu, %llu columns", call,
                            (unsigned long long)block->rows, (unsigned long long)block->hidden,
                            (unsigned long long)block->columns);
    if ((block->kind != LK_RMS_NORM && block->kind != LK_LAYER_NORM) || !(block->eps >= 0))
        return lk_blas_fail(-EINVAL, "%s: kind or eps", call);
    if ((block->gamma || block->beta) && block->gamma_type != LK_FP32 &&
        block->gamma_type != LK_BF16)
        return lk_blas_fail(-EINVAL, "%s: gamma_type %d", call, (int)block->gamma_type);
    if (block->kind == LK_LAYER_NORM && !block->saved.rstd != !block->saved.mean)
        return lk_blas_fail(-EINVAL, "%s: rstd and mean are saved together", call);
    const struct lk_saved *s = &block->saved;
    const struct lk_operand operands[] = {
        {"x",           block->x,      block->rows,               block->hidden,  block->x_stride, LK_BF16},
        { "weight",     block->weight, block->columns,            block->hidden,  block->hidden,   LK_BF16},
        { "gamma",      block->gamma,  block->gamma ? 1 : 0,      block->hidden,  block->hidden,
         block->gamma_type                                                                                },
        { "beta",       block->beta,   block->beta ? 1 : 0,       block->hidden,  block->hidden,
         block->gamma_type                                                                                },
        { "bias",       block->bias,   block->bias ? 1 : 0,       block->columns, block->columns,  LK_BF16},
        { "saved.rstd", s->rstd,       s->rstd ? block->rows : 0, 1,              1,               LK_FP32},
        { "saved.mean", s->mean,       s->mean ? block->rows : 0, 1,              1,               LK_FP32},
        { "saved.y",    s->y,          s->y ? block->rows : 0,    block->hidden,  block->hidden,   LK_BF16},
    };
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        if (lk_check_operand(call, &operands[i], i >= 5))
            return -EINVAL;
    return lk_check_workspace(call, block->workspace);
}

static float *floats_at(float *base, uint64_t at)
{
    return base ? base + at : NULL;
}

/* Rows [at, at + n): statistics, and y into the beginning of its memory. */
static int make_norm(const char *call, const struct lk_norm_linear *block, const struct memory *m,
                     uint64_t at, uint64_t n, void *stream)
{
    struct lk_norm norm = norm_of(block, m->rstd + at,
                                  block->kind == LK_LAYER_NORM ? floats_at(m->mean, at) : NULL);
    const struct lk_norm_forward forward = {
        .x = (const uint16_t *)block->x + at * block->x_stride,
        .x_stride = block->x_stride,
        .y = m->make_y ? m->y : NULL,
        .y_stride = block->hidden,
    };
    int err;

    norm.rows = n;
    err = lk_norm_forward_like_y(&norm, &forward, stream);
    return err ? lk_blas_fail(err, "%s: the norm: %s", call, lk_error_text(err)) : 0;
}

static struct lk_gemm product(const struct memory *m, const struct lk_blas *blas)
{
    return (struct lk_gemm){
        .type = LK_BF16,
        .out_type = LK_BF16,
        .alpha = 1,
        .workspace = m->gemm,
        .workspace_bytes = lk_gemm_workspace_bytes(blas),
    };
}

static int make_out(struct lk_blas *blas, const struct lk_norm_linear *block,
                    const struct memory *m, uint16_t *out, uint64_t out_stride, uint64_t rows,
                    void *stream)
{
    struct lk_gemm gemm = product(m, blas);

    gemm.rows = rows;
    gemm.columns = block->columns;
    gemm.depth = block->hidden;
    gemm.a = m->y;
    gemm.a_stride = block->hidden;
    gemm.b = block->weight;
    gemm.b_stride = block->hidden;
    gemm.b_transposed = 1;
    gemm.bias = block->bias;
    gemm.d = out;
    gemm.d_stride = out_stride;
    return lk_gemm_run(blas, &gemm, stream);
}

static int make_dweight(struct lk_blas *blas, const struct lk_norm_linear *block,
                        const struct memory *m, const struct lk_norm_linear_backward *b,
                        void *stream)
{
    struct lk_gemm gemm = product(m, blas);

    if (!b->dweight)
        return 0;
    gemm.rows = block->columns;
    gemm.columns = block->hidden;
    gemm.depth = block->rows;
    gemm.out_type = b->grad_type;
    gemm.a = b->dout;
    gemm.a_stride = b->dout_stride;
    gemm.a_transposed = 1;
    gemm.b = m->y;
    gemm.b_stride = block->hidden;
    gemm.d = b->dweight;
    gemm.d_stride = block->hidden;
    if (b->accumulate) {
        gemm.c = b->dweight;
        gemm.c_stride = block->hidden;
        gemm.beta = 1;
    }
    return lk_gemm_run(blas, &gemm, stream);
}

/* The partial sums of dbias. */
static int make_sums(const struct lk_norm_linear *block, const struct memory *m,
                     const struct lk_norm_linear_backward *b, void *stream)
{
    const struct lk_fold_launch sum = sum_of(block, b, m);
    int err = sum.partials || sum.grads.dgamma ? lk_run_fold_backward(&sum, stream) : 0;

    return err ? lk_blas_fail(err, "lk_norm_linear_backward: dbias: %s", lk_error_text(err)) : 0;
}

static int make_dx(struct lk_blas *blas, const struct lk_norm_linear *block, const struct memory *m,
                   const struct lk_norm_linear_backward *b, void *stream)
{
    struct lk_norm norm = norm_of(block, m->rstd, m->mean);
    const struct lk_norm_backward backward = {
        .s = block->x,
        .s_stride = block->x_stride,
        .dy = m->dy,
        .dy_stride = block->hidden,
        .ds = b->dx_add,
        .ds_stride = b->dx_add_stride,
        .dx = b->dx,
        .dx_stride = b->dx_stride,
        .dgamma = b->dgamma,
        .dbeta = b->dbeta,
        .workspace = m->norm,
    };
    const struct lk_fold_launch sum = sum_of(block, b, m);
    const struct lk_norm_beside beside = {
        .also = {.partials = (const float *)m->sums,
                 .out = sum.grads.dgamma ? NULL : b->dbias,
                 .columns = block->columns,
                 .stride = (block->columns + 7) / 8 * 8,
                 .rows = sum.partials},
        .y = m->again ? m->y : NULL,
        .y_stride = block->hidden,
    };
    struct lk_gemm gemm = product(m, blas);
    int err;

    gemm.rows = block->rows;
    gemm.columns = block->hidden;
    gemm.depth = block->columns;
    gemm.a = b->dout;
    gemm.a_stride = b->dout_stride;
    gemm.b = block->weight;
    gemm.b_stride = block->hidden;
    gemm.d = m->dy;
    gemm.d_stride = block->hidden;
    err = lk_gemm_run(blas, &gemm, stream);
    if (err)
        return err;
    err = lk_norm_backward_beside(&norm, &backward, &beside, stream);
    return err ? lk_blas_fail(err, "lk_norm_linear_backward: the norm: %s", lk_error_text(err)) : 0;
}

/* What is made of dout and y. */
static int make_of_weight(struct lk_blas *blas, const struct lk_norm_linear *block,
                          const struct memory *m, const struct lk_norm_linear_backward *b,
                          void *stream)
{
    struct memory own = *m;
    int err = 0;

    own.gemm = m->other_gemm;
    if (m->make_norm)
        err = make_norm("lk_norm_linear_backward", block, m, 0, block->rows, stream);
    if (!err)
        err = make_sums(block, m, b, stream);
    return err ? err : make_dweight(blas, block, &own, b, stream);
}

/* Both sides of backward at once. *begun: false if there is no stream for that now, and nothing has been done but y and
 * statistics. Statistics that are saved are read by one side, while the other one makes them again, in the workspace. */
static int make_beside(struct lk_blas *blas, const struct lk_norm_linear *block,
                       const struct memory *m, const struct lk_norm_linear_backward *b, bool *begun,
                       void *stream)
{
    struct memory weight = *m, input = *m;
    int err = 0, end;

    if (m->make_norm && !block->saved.rstd) {
        err = make_norm("lk_norm_linear_backward", block, m, 0, block->rows, stream);
        weight.make_norm = false;
    } else {
        input.rstd = block->saved.rstd;
        input.mean = block->saved.mean;
    }
    if (err)
        return err;
    err = lk_forks_begin(blas->forks, 2, stream);
    *begun = err != LK_VENDOR_NONE;
    if (err)
        return *begun ? err : 0;
    err = make_of_weight(blas, block, &weight, b, lk_forks_stream(blas->forks, 1, stream));
    if (!err)
        err = make_dx(blas, block, &input, b, stream);
    end = lk_forks_end(blas->forks, 2, stream);
    return err ? err : end;
}

/* ---- calls ---- */

LK_API size_t lk_norm_linear_workspace_bytes(const struct lk_blas *blas,
                                             const struct lk_norm_linear *block,
                                             const struct lk_norm_linear_backward *backward,
                                             enum lk_pass pass)
{
    struct memory m;

    if (!block || (pass == LK_BACKWARD && !backward) || block->rows > INT32_MAX ||
        block->hidden > INT32_MAX || block->columns > INT32_MAX)
        return 0;
    return lay_out(blas, block, pass == LK_BACKWARD ? backward : NULL, NULL, &m);
}

LK_API int lk_norm_linear_forward(struct lk_blas *blas, const struct lk_norm_linear *block,
                                  void *out, uint64_t out_stride, void *stream)
{
    static const char call[] = "lk_norm_linear_forward";
    struct memory m;
    int err = check_block(call, blas, block);

    if (err)
        return err;
    const struct lk_operand operand = {
        "out", out, block->rows, block->columns, out_stride, LK_BF16
    };
    if (lk_check_operand(call, &operand, true))
        return -EINVAL;
    lay_out(blas, block, NULL, block->workspace, &m);
    for (uint64_t at = 0; !err && at < block->rows; at += m.chunk) {
        uint64_t rest = block->rows - at, n = rest < m.chunk ? rest : m.chunk;

        err = make_norm(call, block, &m, at, n, stream);
        if (!err)
            err = make_out(blas, block, &m, (uint16_t *)out + at * out_stride, out_stride, n,
                           stream);
    }
    return err;
}

static int check_backward(const char *call, const struct lk_norm_linear *block,
                          const struct lk_norm_linear_backward *b)
{
    if (!b)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    if (b->grad_type != LK_BF16 && b->grad_type != LK_FP32)
        return lk_blas_fail(-EINVAL, "%s: grad_type %d", call, (int)b->grad_type);
    const struct lk_operand operands[] = {
        {"dout",     b->dout,    block->rows,                     block->columns, b->dout_stride,   LK_BF16},
        { "dx_add",  b->dx_add,  b->dx_add ? block->rows : 0,     block->hidden,  b->dx_add_stride,
         LK_BF16                                                                                           },
        { "dx",      b->dx,      block->rows,                     block->hidden,  b->dx_stride,     LK_BF16},
        { "dweight", b->dweight, b->dweight ? block->columns : 0, block->hidden,  block->hidden,
         b->grad_type                                                                                      },
        { "dbias",   b->dbias,   b->dbias ? 1 : 0,                block->columns, block->columns,   LK_FP32},
        { "dgamma",  b->dgamma,  b->dgamma ? 1 : 0,               block->hidden,  block->hidden,    LK_FP32},
        { "dbeta",   b->dbeta,   b->dbeta ? 1 : 0,                block->hidden,  block->hidden,    LK_FP32},
    };
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        if (lk_check_operand(call, &operands[i], i >= 2))
            return -EINVAL;
    return 0;
}

LK_API int lk_norm_linear_backward(struct lk_blas *blas, const struct lk_norm_linear *block,
                                   const struct lk_norm_linear_backward *backward, void *stream)
{
    static const char call[] = "lk_norm_linear_backward";
    struct memory m;
    int err = check_block(call, blas, block);

    if (!err)
        err = check_backward(call, block, backward);
    if (err)
        return err;
    lay_out(blas, block, backward, block->workspace, &m);
    if (m.beside) {
        bool begun = true;

        err = make_beside(blas, block, &m, backward, &begun, stream);
        if (err || begun)
            return err;
        m.beside = false;
    }
    err = m.make_norm ? make_norm(call, block, &m, 0, block->rows, stream) : 0;
    if (!err)
        err = make_sums(block, &m, backward, stream);
    if (!err && !m.again)
        err = make_dweight(blas, block, &m, backward, stream);
    if (!err)
        err = make_dx(blas, block, &m, backward, stream);
    if (!err && m.again)
        err = make_dweight(blas, block, &m, backward, stream);
    return err;
}
