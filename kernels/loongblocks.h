/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products and what is built around them: the multilayer perceptron and the projection of a transformer, forward
 * and backward. The rules of loongcompute.h hold here, too, with these additions.
 *
 * The vendor's library. On a GPU matrix products are left to cuBLASLt, which is opened when the first struct lk_blas is, not
 * linked: libloongkernels.so loads where it is missing. What cuBLASLt does not serve (a stride of 0, no method for the
 * shape) goes to a kernel of our own, which takes every shape, is many times slower and is counted. In the host library
 * that kernel's arithmetic serves everything.
 *
 * Memory. Host memory is taken by lk_blas_open() alone. cuBLASLt is asked for a method when a shape, with its types,
 * strides, alignment and workspace, comes for the first time; LK_BLAS_PLANS answers are kept. Before a graph is captured
 * each of its shapes should have run once: cuBLASLt loads kernels when they are needed first. Workspaces are aligned to 256
 * bytes here.
 *
 * Errors. -ENOSYS: the vendor's library, or what is needed of it, is missing; -EIO: it failed; -EINVAL as everywhere.
 * lk_blas_error() says which argument or which call it was.
 *
 * Repeatability. The same bits when a call is repeated with the same addresses' alignment on the same device, as long as
 * the struct lk_blas keeps its plan and lk_gemm_tune() is not called in between.
 */
#ifndef LOONGBLOCKS_H
#define LOONGBLOCKS_H

#include "kernels/loongcompute.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the vendor's library ---- */

#define LK_BLAS_PLANS 1024

enum lk_blas_flags {
    LK_BLAS_GENERAL = 1, /* do without the vendor's library: only the kernel of our own */
};

struct lk_blas;

struct lk_blas_counts {
    uint64_t vendor; /* products that cuBLASLt made */
    uint64_t
        general; /* products of the kernel of our own, where cuBLASLt was not asked or had no method */
    uint64_t plans;   /* times that cuBLASLt was asked for a method */
    uint64_t grouped; /* products that cuBLAS made in groups; the two below are among `vendor` */
    uint64_t batched; /* products that cuBLASLt made in batches */
    uint64_t spread;  /* products that were made side by side on several streams */
};

/* For the current device. library: path of libcublasLt, NULL for the one that the process has or the loader finds. One
 * struct lk_blas serves threads and streams at the same time. -ENOSYS, -EIO, -ENOMEM. */
int lk_blas_open(const char *library, uint32_t flags, struct lk_blas **out);

/* NULL is allowed. After the last call that uses it has returned. */
void lk_blas_close(struct lk_blas *blas);

void lk_blas_counts(const struct lk_blas *blas, struct lk_blas_counts *out);

/* on: until it is switched off again every product is measured before it is made, as lk_gemm_tune() does, also those inside
 * of the blocks below. For one step on data that is thrown away: it waits, and what is added up is added many times. */
void lk_blas_tune(struct lk_blas *blas, int on);

/* What made the last function of this header fail in this thread; an empty string before one has. */
const char *lk_blas_error(void);

/* ---- matrix products ----
 *
 *     d = alpha * a b + beta * c + bias
 *
 * a is rows x depth, b depth x columns, c and d rows x columns; rows are contiguous, a stride counts elements from row to
 * row. A transposed matrix lies in memory as its transpose: depth x rows for a, columns x depth for b. For y = x W^T, with
 * W as torch.nn.Linear has it:
 *     forward  y  = x W^T     a = x,  b = W transposed
 *     dgrad    dx = dy W      a = dy, b = W
 *     wgrad    dW = dy^T x    a = dy transposed, b = x; into fp32 with c = d and beta = 1 it is added up
 * Products are added in fp32 and rounded once. Bound on top of that rounding: (depth + 4) * 2^-21 times the sum of the
 * magnitudes of the terms (tensor cores add with fewer bits than fp32 has). One exception: into 16 bits, methods of the
 * vendor may round what there is to that type before they add bias, and before they add beta * c, whichever comes first, as
 * torch.addmm then has it, too: up to half a unit in the last place of each of the two more. What has to be added up exactly
 * is added up in fp32. NaN and infinities propagate; c is not read with beta 0. */

struct lk_gemm {
    uint64_t rows, columns, depth; /* each < 2^31; depth 0 leaves beta * c + bias */
    enum lk_type type;             /* of a and b: LK_BF16 or LK_FP16 */
    enum lk_type out_type;         /* of c, d and bias: the same, or LK_FP32 */
    const void *a, *b;
    uint64_t a_stride, b_stride;
    int a_transposed, b_transposed;
    float alpha, beta;
    const void *c; /* may be d itself, with its stride; else it must not overlap it. NULL: none */
    uint64_t c_stride;
    const void *bias; /* one per column; NULL: none */
    void *d;
    uint64_t d_stride;
    void *workspace;
    size_t workspace_bytes; /* any; lk_gemm_workspace_bytes() is enough for every method */
    uint32_t
        sms; /* multiprocessors that the method is chosen for, where others have work at the same time; 0: all */
};

size_t lk_gemm_workspace_bytes(const struct lk_blas *blas);
int lk_gemm_run(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream);

/* Measures the methods that cuBLASLt offers for this product and keeps the fastest one for this struct lk_blas. Runs the
 * product many times (so d is what it is afterwards only if it is not c), waits for the stream, not for graphs. *out: time
 * of the chosen method in microseconds, and of the one that would have been taken; may be NULL. Does nothing in the host
 * library. */
struct lk_gemm_tuned {
    double chosen_us, first_us;
    uint32_t methods; /* that were measured */
    uint32_t chosen;  /* number of the chosen one in cuBLASLt's order */
};
int lk_gemm_tune(struct lk_blas *blas, const struct lk_gemm *gemm, struct lk_gemm_tuned *out,
                 void *stream);

/* ---- groups of products ----
 *
 * Products that have nothing to do with each other, such as those of the experts that lk_moe_permute() has sorted rows for:
 * of expert e rows offsets[e] .. offsets[e] + counts[e) of a long matrix, and matrix e of the weights. Their sizes are read
 * on the host, so counts of tokens have to be known there: copy counts and offsets, and wait. With a capacity nobody has to
 * ask: each expert has `capacity` rows, of which those that no token has are zeros and cost as much as others.
 *
 * Sizes of 0 are as in lk_gemm: without rows or columns there is nothing to do, with depth 0 (the gradient of an expert's
 * weights, if it had no tokens) d = beta * c. Pointers of what is empty may be NULL.
 *
 * How they are made:
 *     batched    cuBLASLt makes all in one launch. All have the same sizes, types, strides, alpha and beta, and no bias.
 *                Either each matrix lies as far behind the last one of its kind as that behind the one before, which with
 *                a capacity is so; or there are at most LK_GEMM_GROUP, and c is NULL or d.
 *     streams    one by one, but on several streams of the struct lk_blas, which are tied to the caller's by events: what
 *                one leaves of the device another one uses. In the caller's order, and in a graph that is captured from
 *                the caller's stream. Each stream has its part of the workspace.
 *     grouped    cuBLAS makes up to LK_GEMM_GROUP in one launch. It is opened when it is needed first, which is not within
 *                a captured graph. Bases aligned to 16 bytes, strides that are multiples of 8, one type for all, c NULL or
 *                d, and no bias are what it takes; others are made one by one.
 *     in a row   as by lk_gemm_run().
 * What cannot be made in the way that is asked for is made in a row and counted as such; so is everything in the host
 * library, and what would be on several streams while these belong to a graph that is being captured from a stream other
 * than the caller's. Bounds as in lk_gemm, in each of these ways; bits depend on the way but are the same each time. */

#define LK_GEMM_GROUP   256 /* products in one launch of cuBLAS */
#define LK_GEMM_STREAMS 8   /* the caller's is one of them */

enum lk_gemm_grouping {
    /* batched if they can be and lie evenly; grouped if products have below 2^30 operations on average, which is what a launch is worth;
     * else on as many streams as it takes to give every multiprocessor 128 x 256 elements of a result: 1 is in a row */
    LK_GROUP_AUTO = 0,
    LK_GROUP_NEVER = 1,  /* in a row */
    LK_GROUP_ALWAYS = 2, /* grouped; without cuBLAS -ENOSYS */
    LK_GROUP_STREAMS = 3,
    LK_GROUP_BATCHED = 4,
};

struct lk_gemm_groups {
    const struct lk_gemm *
        gemms; /* host memory; their workspaces are not used. None may write what another one touches */
    uint32_t count;
    enum lk_gemm_grouping grouping;
    void *workspace;  /* lk_gemm_groups_workspace_bytes(), aligned to 256 bytes */
    uint32_t streams; /* at most, of LK_GROUP_STREAMS; 0: chosen as LK_GROUP_AUTO does */
    uint32_t sms;     /* of each product on a stream or of a batch that says 0 itself */
};

size_t lk_gemm_groups_workspace_bytes(const struct lk_blas *blas);
int lk_gemm_groups_run(struct lk_blas *blas, const struct lk_gemm_groups *groups, void *stream);

/* ---- weights of a norm inside of a matrix ----
 *
 *     folded[j, k] = rounded(weight[j, k] * (gamma[k] + gamma_offset))
 *
 * With it a norm behind which the matrix stands leaves only a factor per row. Worth it when the folded matrix serves for
 * several steps' worth of rows: it costs a pass over the matrix. */
struct lk_fold {
    uint64_t rows, columns;   /* of the matrix; contiguous */
    enum lk_type weight_type; /* LK_FP32 (masters) or LK_BF16 */
    const void *weight;
    enum lk_type gamma_type;
    const void *gamma; /* one per column */
    float gamma_offset;
};

int lk_fold_forward(const struct lk_fold *fold, void *folded, void *stream);

/* From dfolded: dweight[j, k] = dfolded[j, k] * (gamma[k] + gamma_offset), dgamma[k] = sum over j of dfolded[j, k] *
 * weight[j, k] (fp32). dweight may be dfolded itself; either may be NULL. grad_type: LK_FP32 or LK_BF16, of both. Bound:
 * dgamma 2^-14 of the sum of the magnitudes of its terms. */
struct lk_fold_grads {
    enum lk_type grad_type;
    const void *dfolded;
    void *dweight;
    float *dgamma;
    void *workspace; /* lk_fold_workspace_bytes(); not used without dgamma */
};

size_t lk_fold_workspace_bytes(const struct lk_fold *fold);
int lk_fold_backward(const struct lk_fold *fold, const struct lk_fold_grads *grads, void *stream);

/* ---- RMSNorm, SwiGLU, dropout: the multilayer perceptron ----
 *
 *     y = x / sqrt(mean of x^2 + eps) * (gamma + gamma_offset)
 *     z = y gate_up^T,  h = dropout(silu(z[:, 0 .. ffn)) * z[:, ffn .. 2 * ffn))
 *     out = h down^T + add
 *
 * gate_up is (2 * ffn) x hidden, down is hidden x ffn, both contiguous bf16. With gamma NULL the norm has no weight or it
 * is folded into gate_up (lk_fold_forward()): then no normalised tensor exists; z is the product with x itself and its rows'
 * factors are applied by SwiGLU. Otherwise y lives in the workspace. Which one is faster depends on how many rows a folded
 * matrix serves.
 *
 * What backward needs beside x and the weights is saved or made anew, each by the caller's choice (struct lk_saved): with
 * everything NULL nothing is kept but x. z that was made anew has the same bits, h is always made anew, the dropout bits are
 * drawn anew (the rng as in forward). Results do not depend on what was saved.
 *
 * Where a product of `rows` x hidden leaves multiprocessors idle, what does not wait for it is made at the same time, on a
 * stream of the struct lk_blas that is tied to the caller's by events: a folded norm's statistics in lk_mlp_forward(); dweight,
 * dbias and y in lk_norm_linear_backward(), which then takes two workspaces of products and dy beside y. */

struct lk_saved {
    float *rstd; /* rows; NULL: made anew, one pass over x */
    float *mean; /* rows, of LayerNorm only; with rstd or not at all */
    void *
        y; /* rows x hidden, bf16, contiguous; NULL: made anew, beside dx or by one pass over x. Not used if gamma is folded */
    void *
        z; /* rows x (2 * ffn), bf16, contiguous; NULL: made anew, one matrix product. Of lk_mlp only */
};

struct lk_mlp {
    uint64_t rows, hidden, ffn;
    const void *x; /* rows x hidden, bf16 */
    uint64_t x_stride;
    double eps;
    enum lk_type gamma_type;
    const void *gamma;
    float gamma_offset;
    const void *gate_up, *down;
    double drop;
    struct lk_rng rng; /* as in struct lk_swiglu */
    struct lk_saved saved;
    void *workspace; /* lk_mlp_workspace_bytes() */
};

struct lk_mlp_forward {
    const void *add; /* rows x hidden, bf16: x, for a residual connection; NULL: none */
    uint64_t add_stride;
    void *out; /* rows x hidden, bf16; may be add itself, with its stride (but backward needs x) */
    uint64_t out_stride;
};

struct lk_mlp_backward {
    const void *dout; /* rows x hidden, bf16 */
    uint64_t dout_stride;
    const void *dx_add; /* added to dx: dout, if forward's add was x; NULL: none */
    uint64_t dx_add_stride;
    void *dx; /* rows x hidden, bf16; may be dout or dx_add itself, with its stride */
    uint64_t dx_stride;
    enum lk_type grad_type; /* of the two below: LK_BF16 or LK_FP32 */
    void *dgate_up, *ddown; /* contiguous; NULL: not wanted */
    int accumulate;         /* add to them instead of overwriting; dgamma is overwritten */
    float *dgamma;          /* NULL: not wanted, or no gamma */
    int overwrite_z;        /* saved z may be overwritten: saves as much workspace */
};

enum lk_pass {
    LK_FORWARD = 0,
    LK_BACKWARD = 1,
};

/* backward may be NULL for LK_FORWARD. Of the pointers only whether they are NULL matters. 0: too large. */
size_t lk_mlp_workspace_bytes(const struct lk_blas *blas, const struct lk_mlp *mlp,
                              const struct lk_mlp_backward *backward, enum lk_pass pass);
int lk_mlp_forward(struct lk_blas *blas, const struct lk_mlp *mlp,
                   const struct lk_mlp_forward *forward, void *stream);
int lk_mlp_backward(struct lk_blas *blas, const struct lk_mlp *mlp,
                    const struct lk_mlp_backward *backward, void *stream);

/* ---- RMSNorm or LayerNorm, and the projection to queries, keys and values (or any other) ----
 *
 *     y = norm(x) as in struct lk_norm,  out = y weight^T + bias
 *
 * weight is columns x hidden, contiguous bf16. y is made chunk_rows rows at a time, so that it is still in a near cache when
 * the product reads it and takes that much workspace; 0: all rows at once. With y to be saved there is one chunk. */

struct lk_norm_linear {
    uint64_t rows, hidden, columns;
    const void *x; /* rows x hidden, bf16 */
    uint64_t x_stride;
    enum lk_norm_kind kind;
    double eps;
    enum lk_type gamma_type; /* of gamma and beta: LK_FP32 or LK_BF16 */
    const void *gamma;       /* NULL: 1 - gamma_offset */
    const void *beta;        /* NULL: 0 */
    float gamma_offset;
    const void *weight;
    const void *bias; /* columns, bf16; NULL: none */
    uint64_t chunk_rows;
    struct lk_saved saved;
    void *workspace; /* lk_norm_linear_workspace_bytes() */
};

struct lk_norm_linear_backward {
    const void *dout; /* rows x columns, bf16 */
    uint64_t dout_stride;
    const void *dx_add; /* rows x hidden, bf16, added to dx; NULL: none */
    uint64_t dx_add_stride;
    void *dx; /* rows x hidden, bf16; may be dx_add itself, with its stride */
    uint64_t dx_stride;
    enum lk_type grad_type; /* of dweight: LK_BF16 or LK_FP32 */
    void *dweight;          /* contiguous; NULL: not wanted */
    int accumulate;         /* add to dweight instead of overwriting; the others are overwritten */
    float *dbias;           /* columns; NULL: not wanted */
    float *dgamma, *dbeta;  /* hidden; NULL: not wanted */
};

/* To be asked for each shape: fewer rows may need more, since what they leave room for is made beside products. */
size_t lk_norm_linear_workspace_bytes(const struct lk_blas *blas,
                                      const struct lk_norm_linear *block,
                                      const struct lk_norm_linear_backward *backward,
                                      enum lk_pass pass);
int lk_norm_linear_forward(struct lk_blas *blas, const struct lk_norm_linear *block, void *out,
                           uint64_t out_stride, void *stream);
int lk_norm_linear_backward(struct lk_blas *blas, const struct lk_norm_linear *block,
                            const struct lk_norm_linear_backward *backward, void *stream);

#ifdef __cplusplus
}
#endif

#endif
