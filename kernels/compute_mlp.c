/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm, SwiGLU and dropout between two matrix products. With the norm's weight folded into the first matrix the rows'
 * factors r commute with it: z = x W^T is made of x itself and SwiGLU multiplies by r. Backward, with dz' = r dz, d = the
 * row's sum of dz * z (both from SwiGLU) and dr/dx = -r^3 x / hidden:
 *     dW = dz'^T x,  dx = dz' W - r^3 d / hidden x + what is added
 * The last two terms are written first, the product is added to them.
 */
#include "kernels/gemm_internal.h"

#include <errno.h>

/* Where everything lies. */
struct memory {
    void *gemm; /* workspace of products */
    float *rstd;
    void *y, *z, *h;
    void *dz, *dy;
    float *row_dot;
    void *norm; /* workspace of the norm's backward */
    bool make_norm, make_y, make_z;
};

static struct lk_norm norm_of(const struct lk_mlp *mlp, float *rstd)
{
    return (struct lk_norm){
        .kind = LK_RMS_NORM,
        .rows = mlp->rows,
        .columns = mlp->hidden,
        .eps = mlp->eps,
        .weight_type = mlp->gamma ? mlp->gamma_type : LK_FP32,
        .gamma = mlp->gamma,
        .gamma_offset = mlp->gamma_offset,
        .rstd = rstd,
    };
}

/* Bytes of the workspace. */
static uint64_t lay_out(const struct lk_blas *blas, const struct lk_mlp *mlp,
                        const struct lk_mlp_backward *backward, void *workspace, struct memory *out)
{
    const struct lk_saved *saved = &mlp->saved;
    struct lk_arena arena = { .base = workspace };
    struct lk_norm norm = norm_of(mlp, NULL);
    uint64_t hidden = mlp->rows * mlp->hidden * 2, ffn = mlp->rows * mlp->ffn * 2;
    bool weighted = mlp->gamma != NULL, need_y = weighted;

    if (backward) /* y serves the gradient of the matrix, or z */
        need_y = weighted && (backward->dgate_up || !saved->z);
    *out = (struct memory){ .rstd = saved->rstd, .y = saved->y, .z = saved->z };
    out->make_z = !backward || !saved->z;
    out->make_y = need_y && (!backward || !saved->y);
    out->make_norm = !backward || !saved->rstd || out->make_y;
    out->gemm = lk_take(&arena, true, lk_gemm_workspace_bytes(blas));
    if (!saved->rstd || (backward && out->make_norm))
        out->rstd = lk_take(&arena, true, mlp->rows * sizeof(float));
    if (need_y && !saved->y)
        out->y = lk_take(&arena, true, hidden);
    if (!saved->z)
        out->z = lk_take(&arena, true, 2 * ffn);
    out->h = lk_take(&arena, true, ffn);
    if (!backward)
        return arena.used;
    out->dz = saved->z && !backward->overwrite_z ? lk_take(&arena, true, 2 * ffn) : out->z;
    out->row_dot = lk_take(&arena, !weighted, mlp->rows * sizeof(float));
    /* y is not needed any more when dy is made */
    out->dy = need_y && !saved->y ? out->y : lk_take(&arena, weighted, hidden);
    out->norm = lk_take(&arena, weighted && backward->dgamma, lk_norm_workspace_bytes(&norm));
    return arena.used;
}

static int check_mlp(const char *call, const struct lk_blas *blas, const struct lk_mlp *mlp)
{
    if (!blas || !mlp)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    if (mlp->rows > INT32_MAX || !mlp->hidden || mlp->hidden > INT32_MAX || !mlp->ffn ||
        mlp->ffn > INT32_MAX / 2)
        return lk_blas_fail(-EINVAL, "%s: %llu rows of %llu, ffn of %llu", call,
                            (unsigned long long)mlp->rows, (unsigned long long)mlp->hidden,
                            (unsigned long long)mlp->ffn);
    if (!(mlp->eps >= 0) || !(mlp->drop >= 0 && mlp->drop <= 65535.0 / 65536) ||
        (uintptr_t)mlp->rng.device_offset % 8)
        return lk_blas_fail(-EINVAL, "%s: eps, drop or rng", call);
    if (mlp->gamma && mlp->gamma_type != LK_FP32 && mlp->gamma_type != LK_BF16)
        return lk_blas_fail(-EINVAL, "%s: gamma_type %d", call, (int)mlp->gamma_type);
    const struct lk_operand read[] = {
        {"x",        mlp->x,       mlp->rows,          mlp->hidden, mlp->x_stride, LK_BF16        },
        { "gate_up", mlp->gate_up, 2 * mlp->ffn,       mlp->hidden, mlp->hidden,   LK_BF16        },
        { "down",    mlp->down,    mlp->hidden,        mlp->ffn,    mlp->ffn,      LK_BF16        },
        { "gamma",   mlp->gamma,   mlp->gamma ? 1 : 0, mlp->hidden, mlp->hidden,   mlp->gamma_type},
    };
    const struct lk_operand saved[] = {
        {"saved.rstd", mlp->saved.rstd, mlp->saved.rstd ? mlp->rows : 0, 1,            1,            LK_FP32},
        { "saved.y",   mlp->saved.y,    mlp->saved.y ? mlp->rows : 0,    mlp->hidden,  mlp->hidden,
         LK_BF16                                                                                            },
        { "saved.z",   mlp->saved.z,    mlp->saved.z ? mlp->rows : 0,    2 * mlp->ffn, 2 * mlp->ffn,
         LK_BF16                                                                                            },
    };
    for (size_t i = 0; i < 4; i++)
        if (lk_check_operand(call, &read[i], false))
            return -EINVAL;
    for (size_t i = 0; i < 3; i++)
        if (lk_check_operand(call, &saved[i], true))
            return -EINVAL;
    return lk_check_workspace(call, mlp->workspace);
}

/* ---- steps ---- */

static int make_norm(const char *call, const struct lk_mlp *mlp, const struct memory *m,
                     void *stream)
{
    struct lk_norm norm = norm_of(mlp, m->rstd);
    struct lk_norm_forward forward = {
        .x = mlp->x,
        .x_stride = mlp->x_stride,
        .y = m->make_y ? m->y : NULL,
        .y_stride = mlp->hidden,
    };
    int err = lk_norm_forward(&norm, &forward, stream);

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

/* What the first matrix is multiplied with. */
static void set_input(const struct lk_mlp *mlp, const struct memory *m, const void **base,
                      uint64_t *stride)
{
    *base = mlp->gamma ? m->y : mlp->x;
    *stride = mlp->gamma ? mlp->hidden : mlp->x_stride;
}

static int make_z(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                  void *stream)
{
    struct lk_gemm gemm = product(m, blas);

    gemm.rows = mlp->rows;
    gemm.columns = 2 * mlp->ffn;
    gemm.depth = mlp->hidden;
    set_input(mlp, m, &gemm.a, &gemm.a_stride);
    gemm.b = mlp->gate_up;
    gemm.b_stride = mlp->hidden;
    gemm.b_transposed = 1;
    gemm.d = m->z;
    gemm.d_stride = 2 * mlp->ffn;
    return lk_gemm_run(blas, &gemm, stream);
}

static struct lk_swiglu swiglu_of(const struct lk_mlp *mlp, const struct memory *m)
{
    return (struct lk_swiglu){
        .z = m->z,
        .z_stride = 2 * mlp->ffn,
        .row_scale = mlp->gamma ? NULL : m->rstd,
        .rows = mlp->rows,
        .columns = mlp->ffn,
        .drop = mlp->drop,
        .rng = mlp->rng,
    };
}

static int make_h(const struct lk_mlp *mlp, const struct memory *m, void *stream)
{
    struct lk_swiglu swiglu = swiglu_of(mlp, m);
    int err = lk_swiglu_forward(&swiglu, m->h, mlp->ffn, stream);

    return err ? lk_blas_fail(err, "lk_mlp_forward: SwiGLU: %s", lk_error_text(err)) : 0;
}

static int make_out(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                    const struct lk_mlp_forward *forward, void *stream)
{
    struct lk_gemm gemm = product(m, blas);

    gemm.rows = mlp->rows;
    gemm.columns = mlp->hidden;
    gemm.depth = mlp->ffn;
    gemm.a = m->h;
    gemm.a_stride = mlp->ffn;
    gemm.b = mlp->down;
    gemm.b_stride = mlp->ffn;
    gemm.b_transposed = 1;
    gemm.c = forward->add;
    gemm.c_stride = forward->add_stride;
    gemm.beta = forward->add ? 1 : 0;
    gemm.d = forward->out;
    gemm.d_stride = forward->out_stride;
    return lk_gemm_run(blas, &gemm, stream);
}

/* The gradients of h, then, in their place, h once more; those of z. */
static int make_dz(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                   const struct lk_mlp_backward *b, void *stream)
{
    struct lk_swiglu swiglu = swiglu_of(mlp, m);
    const struct lk_swiglu_grads grads = {
        .dh = m->h,
        .dh_stride = mlp->ffn,
        .dz = m->dz,
        .dz_stride = 2 * mlp->ffn,
        .h = b->ddown ? m->h : NULL,
        .h_stride = mlp->ffn,
        .row_dot = m->row_dot,
    };
    struct lk_gemm gemm = product(m, blas);
    int err;

    gemm.rows = mlp->rows;
    gemm.columns = mlp->ffn;
    gemm.depth = mlp->hidden;
    gemm.a = b->dout;
    gemm.a_stride = b->dout_stride;
    gemm.b = mlp->down;
    gemm.b_stride = mlp->ffn;
    gemm.d = m->h;
    gemm.d_stride = mlp->ffn;
    err = lk_gemm_run(blas, &gemm, stream);
    if (err)
        return err;
    err = lk_swiglu_backward(&swiglu, &grads, stream);
    return err ? lk_blas_fail(err, "lk_mlp_backward: SwiGLU: %s", lk_error_text(err)) : 0;
}

/* grad = left^T right, or added to it. */
struct weight_grad {
    void *grad;
    const void *left, *right;
    uint64_t left_stride, right_stride;
    uint64_t rows, columns;
};

static int make_weight_grad(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                            const struct lk_mlp_backward *b, const struct weight_grad *w,
                            void *stream)
{
    struct lk_gemm gemm = product(m, blas);

    if (!w->grad)
        return 0;
    gemm.rows = w->rows;
    gemm.columns = w->columns;
    gemm.depth = mlp->rows;
    gemm.out_type = b->grad_type;
    gemm.a = w->left;
    gemm.a_stride = w->left_stride;
    gemm.a_transposed = 1;
    gemm.b = w->right;
    gemm.b_stride = w->right_stride;
    gemm.d = w->grad;
    gemm.d_stride = w->columns;
    if (b->accumulate) {
        gemm.c = w->grad;
        gemm.c_stride = w->columns;
        gemm.beta = 1;
    }
    return lk_gemm_run(blas, &gemm, stream);
}

static int make_weight_grads(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                             const struct lk_mlp_backward *b, void *stream)
{
    struct weight_grad down = {
        .grad = b->ddown,
        .left = b->dout,
        .left_stride = b->dout_stride,
        .right = m->h,
        .right_stride = mlp->ffn,
        .rows = mlp->hidden,
        .columns = mlp->ffn,
    };
    struct weight_grad gate_up = {
        .grad = b->dgate_up,
        .left = m->dz,
        .left_stride = 2 * mlp->ffn,
        .rows = 2 * mlp->ffn,
        .columns = mlp->hidden,
    };
    int err = make_weight_grad(blas, mlp, m, b, &down, stream);

    set_input(mlp, m, &gate_up.right, &gate_up.right_stride);
    return err ? err : make_weight_grad(blas, mlp, m, b, &gate_up, stream);
}

static bool aligned(const void *base, uint64_t stride)
{
    return (uintptr_t)base % 16 == 0 && stride % LK_VECTOR == 0;
}

/* The folded norm's own part of dx, and what is added to it. */
static int start_dx(const struct lk_mlp *mlp, const struct memory *m,
                    const struct lk_mlp_backward *b, void *stream)
{
    const struct lk_undo_launch launch = {
        .rows = mlp->rows,
        .columns = mlp->hidden,
        .x = mlp->x,
        .x_stride = mlp->x_stride,
        .add = b->dx_add,
        .add_stride = b->dx_add_stride,
        .dx = b->dx,
        .dx_stride = b->dx_stride,
        .rstd = m->rstd,
        .row_dot = m->row_dot,
        .wide = mlp->hidden % LK_VECTOR == 0 && aligned(mlp->x, mlp->x_stride) &&
                aligned(b->dx_add, b->dx_add ? b->dx_add_stride : 0) &&
                aligned(b->dx, b->dx_stride),
    };
    int err = mlp->rows ? lk_run_undo(&launch, stream) : 0;

    return err ? lk_blas_fail(err, "lk_mlp_backward: dx: %s", lk_error_text(err)) : 0;
}

static int finish_dx(const struct lk_mlp *mlp, const struct memory *m,
                     const struct lk_mlp_backward *b, void *stream)
{
    struct lk_norm norm = norm_of(mlp, m->rstd);
    const struct lk_norm_backward backward = {
        .s = mlp->x,
        .s_stride = mlp->x_stride,
        .dy = m->dy,
        .dy_stride = mlp->hidden,
        .ds = b->dx_add,
        .ds_stride = b->dx_add_stride,
        .dx = b->dx,
        .dx_stride = b->dx_stride,
        .dgamma = b->dgamma,
        .workspace = m->norm,
    };
    int err = lk_norm_backward(&norm, &backward, stream);

    return err ? lk_blas_fail(err, "lk_mlp_backward: the norm: %s", lk_error_text(err)) : 0;
}

static int make_dx(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                   const struct lk_mlp_backward *b, void *stream)
{
    struct lk_gemm gemm = product(m, blas);
    int err = mlp->gamma ? 0 : start_dx(mlp, m, b, stream);

    gemm.rows = mlp->rows;
    gemm.columns = mlp->hidden;
    gemm.depth = 2 * mlp->ffn;
    gemm.a = m->dz;
    gemm.a_stride = 2 * mlp->ffn;
    gemm.b = mlp->gate_up;
    gemm.b_stride = mlp->hidden;
    gemm.d = mlp->gamma ? m->dy : b->dx;
    gemm.d_stride = mlp->gamma ? mlp->hidden : b->dx_stride;
    if (!mlp->gamma) {
        gemm.c = b->dx;
        gemm.c_stride = b->dx_stride;
        gemm.beta = 1;
    }
    if (!err)
        err = lk_gemm_run(blas, &gemm, stream);
    return err || !mlp->gamma ? err : finish_dx(mlp, m, b, stream);
}

/* Forward's. With a folded weight z does not wait for the statistics: few rows have them made beside. */
static int make_norm_and_z(struct lk_blas *blas, const struct lk_mlp *mlp, const struct memory *m,
                           void *stream)
{
    static const char call[] = "lk_mlp_forward";
    int none = mlp->gamma || !lk_gemm_leaves_room(blas, mlp->rows, mlp->hidden) ||
               __atomic_load_n(&blas->tuning, __ATOMIC_RELAXED);
    int err = none ? LK_VENDOR_NONE : lk_forks_begin(blas->forks, 2, stream), end;

    if (err == LK_VENDOR_NONE) {
        err = make_norm(call, mlp, m, stream);
        return err ? err : make_z(blas, mlp, m, stream);
    }
    if (err)
        return err;
    err = make_norm(call, mlp, m, lk_forks_stream(blas->forks, 1, stream));
    if (!err)
        err = make_z(blas, mlp, m, stream);
    end = lk_forks_end(blas->forks, 2, stream);
    return err ? err : end;
}

/* ---- calls ---- */

LK_API size_t lk_mlp_workspace_bytes(const struct lk_blas *blas, const struct lk_mlp *mlp,
                                     const struct lk_mlp_backward *backward, enum lk_pass pass)
{
    struct memory m;

    if (!mlp || (pass == LK_BACKWARD && !backward) || mlp->rows > INT32_MAX ||
        mlp->hidden > INT32_MAX || mlp->ffn > INT32_MAX / 2)
        return 0;
    return lay_out(blas, mlp, pass == LK_BACKWARD ? backward : NULL, NULL, &m);
}

LK_API int lk_mlp_forward(struct lk_blas *blas, const struct lk_mlp *mlp,
                          const struct lk_mlp_forward *forward, void *stream)
{
    static const char call[] = "lk_mlp_forward";
    struct memory m;
    int err = check_mlp(call, blas, mlp);

    if (err)
        return err;
    if (!forward)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    const struct lk_operand add = { "add",       forward->add,        forward->add ? mlp->rows : 0,
                                    mlp->hidden, forward->add_stride, LK_BF16 };
    const struct lk_operand out = { "out",       forward->out,        mlp->rows,
                                    mlp->hidden, forward->out_stride, LK_BF16 };
    if (lk_check_operand(call, &add, false) || lk_check_operand(call, &out, true))
        return -EINVAL;
    if (!mlp->rows)
        return 0;
    lay_out(blas, mlp, NULL, mlp->workspace, &m);
    err = make_norm_and_z(blas, mlp, &m, stream);
    if (!err)
        err = make_h(mlp, &m, stream);
    return err ? err : make_out(blas, mlp, &m, forward, stream);
}

static int check_backward(const char *call, const struct lk_mlp *mlp,
                          const struct lk_mlp_backward *b)
{
    if (!b)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    if (b->grad_type != LK_BF16 && b->grad_type != LK_FP32)
        return lk_blas_fail(-EINVAL, "%s: grad_type %d", call, (int)b->grad_type);
    if (b->dgamma && !mlp->gamma)
        return lk_blas_fail(-EINVAL, "%s: dgamma without gamma", call);
    const struct lk_operand operands[] = {
        {"dout",      b->dout,     mlp->rows,                      mlp->hidden, b->dout_stride,   LK_BF16     },
        { "dx_add",   b->dx_add,   b->dx_add ? mlp->rows : 0,      mlp->hidden, b->dx_add_stride, LK_BF16     },
        { "dx",       b->dx,       mlp->rows,                      mlp->hidden, b->dx_stride,     LK_BF16     },
        { "dgate_up", b->dgate_up, b->dgate_up ? 2 * mlp->ffn : 0, mlp->hidden, mlp->hidden,
         b->grad_type                                                                                         },
        { "ddown",    b->ddown,    b->ddown ? mlp->hidden : 0,     mlp->ffn,    mlp->ffn,         b->grad_type},
        { "dgamma",   b->dgamma,   b->dgamma ? 1 : 0,              mlp->hidden, mlp->hidden,      LK_FP32     },
    };
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        if (lk_check_operand(call, &operands[i], i >= 2))
            return -EINVAL;
    return 0;
}

LK_API int lk_mlp_backward(struct lk_blas *blas, const struct lk_mlp *mlp,
                           const struct lk_mlp_backward *backward, void *stream)
{
    static const char call[] = "lk_mlp_backward";
    struct memory m;
    int err = check_mlp(call, blas, mlp);

    if (!err)
        err = check_backward(call, mlp, backward);
    if (err)
        return err;
    lay_out(blas, mlp, backward, mlp->workspace, &m);
    if (m.make_norm)
        err = make_norm(call, mlp, &m, stream);
    if (!err && m.make_z)
        err = make_z(blas, mlp, &m, stream);
    if (!err)
        err = make_dz(blas, mlp, &m, backward, stream);
    if (!err)
        err = make_weight_grads(blas, mlp, &m, backward, stream);
    return err ? err : make_dx(blas, mlp, &m, backward, stream);
}
