/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused compute kernels of the kernels library, beside the communication kernels of loongkernels.h, whose rules on
 * calls, results and thread safety hold here, too: ordered by the stream, nothing allocated, nothing waited for, fit for
 * graphs after lk_compute_load_all(), 0 or a negative errno or a cudaError_t (lk_error_text()).
 *
 * Memory. All pointers are device memory unless it says otherwise; workspaces are the caller's, aligned to 16 bytes, of
 * the size that the query returns, with any contents, and may be used by the next call of the same stream. Structures
 * are read during the call.
 *
 * Shapes. Every shape is served. Rows whose length is a multiple of LK_VECTOR elements, with pointers aligned to 16
 * bytes, take wide accesses; others are served by the same kernels element by element. Sizes may exceed 2^31.
 *
 * Repeatability. Every function gives the same bits when it is repeated on the same device: sums are added in an order
 * that follows from the shape alone, never by atomic additions. What is said to be exact gives the same bits in both
 * libraries; the rest keeps within the bounds that are stated, of the result in exact arithmetic.
 */
#ifndef LOONGCOMPUTE_H
#define LOONGCOMPUTE_H

#include "kernels/loongkernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_VECTOR 8 /* elements */

/* lk_load_all() for the functions below. */
int lk_compute_load_all(void);

/* What made the last function that returned -EINVAL in this thread do so: the call and the argument. An empty string before
 * one has. */
const char *lk_compute_error(void);

/* Calls of this process, on rows of SwiGLU, norms, experts and folded weights, by how they were served. Those without rows
 * are not counted. */
struct lk_compute_counts {
    uint64_t wide; /* by wide accesses */
    uint64_t
        general; /* element by element: a length or a stride is no multiple of LK_VECTOR, or an address of 16 */
};

void lk_compute_counts(struct lk_compute_counts *out);

/* ---- AdamW over many tensors, with clipping by the global norm and a check for what is not finite ----
 *
 * lk_adamw_step() does, in two launches, for all tensors of a plan:
 *     norm = sqrt(sum of (grad / loss_scale)^2)
 *     if a gradient, the norm or loss_scale is not finite (or it is not positive): skipped += 1, and nothing else is written; else
 *     step += 1;  clip = min(1, max_norm / (norm + 1e-6));  g = clip * grad / loss_scale
 *     m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
 *     param -= lr * weight_decay * param + lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 * which is torch's AdamW after clip_grad_norm_ and GradScaler. Exact between the libraries. One step's change of a
 * parameter is within 2^-22 * (|param| + |change|) of exact arithmetic; the norm within 1e-6 of itself. */

struct lk_adamw_tensor {
    void *param;      /* fp32, or bf16 with a master */
    const void *grad; /* of grad_type */
    float *
        master; /* fp32 value of a bf16 parameter, which is its rounded copy; NULL for an fp32 parameter */
    float *m, *v;
    uint64_t count;          /* 0: skipped, whatever else the entry holds */
    enum lk_type param_type; /* LK_FP32 or LK_BF16 */
    enum lk_type grad_type;  /* LK_FP32 or LK_BF16 */
    float lr_factor;         /* of this tensor's group; usually 1 */
    float weight_decay;      /* of this tensor's group */
};

/* A list of tensors, prepared once on the host. The caller copies `bytes` bytes of `table` (host) to the device and sets
 * `device_table` (aligned to 16 bytes) before the plan is used. Pointers, not values, are in it: it serves until a tensor
 * moves. In the host library both may be the same memory. */
struct lk_adamw_plan {
    void *table; /* host memory of the caller, aligned to 16 bytes */
    size_t bytes;
    const void *device_table;
    uint64_t elements; /* filled in, as is what follows */
    uint32_t tensors, chunks;
};

/* Bytes of the table and of the workspace for this list; 0 if it is too long (2^31 chunks of 16384 elements). */
size_t lk_adamw_table_bytes(const struct lk_adamw_tensor *tensors, size_t n);
size_t lk_adamw_workspace_bytes(const struct lk_adamw_plan *plan);

/* Fills plan->table. -EINVAL: no room, a NULL or misaligned pointer, an unknown type, a bf16 parameter without master or
 * an fp32 one with one. */
int lk_adamw_plan(const struct lk_adamw_tensor *tensors, size_t n, struct lk_adamw_plan *plan);

/* Device memory, aligned to 16 bytes. Zero at the start, or with `step` of a checkpoint. */
struct lk_adamw_state {
    uint64_t step;       /* updates applied */
    uint64_t skipped;    /* updates left out */
    double sum_squares;  /* of the gradients as they lie there; infinite or NaN if one of them is */
    double norm;         /* of the last call, after the division by loss_scale, before clipping */
    float clip;          /* factor of the last call; 0 if it was left out */
    uint32_t applied;    /* 1 if the last call was applied */
    uint32_t tickets[2]; /* for the kernels: 0 between calls */
};

struct lk_adamw {
    struct lk_scale lr;         /* device_value: what a graph reads anew each time */
    struct lk_scale loss_scale; /* gradients are divided by it; positive */
    double beta1, beta2, eps;
    double max_norm; /* 0: no clipping */
    struct lk_adamw_state *state;
    void *workspace;
};

int lk_adamw_step(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);

/* The two halves, one launch each, for gradients that are spread over ranks: the first writes state->sum_squares, which
 * the caller then adds up over the ranks (one fp64 sum), the second does the rest with that sum. */
int lk_adamw_norm(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);
int lk_adamw_update(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);

/* ---- rows ----
 *
 * The functions below work on matrices of bf16 whose rows are contiguous; a stride counts elements from row to row. The
 * stride of what is only read may be 0 (one row for all). rows < 2^31; columns > 0. Results are rounded to bf16 once,
 * from fp32; bounds say what comes on top of that rounding. NaN and infinities propagate as they do in the formula. */

/* ---- SwiGLU with dropout, behind one matrix product for gate and up ----
 *
 *     g = row_scale * z[:, 0 .. columns), u = row_scale * z[:, columns .. 2 * columns)
 *     h = silu(g) * u * keep / (1 - drop)
 *
 * row_scale is what a folded RMSNorm leaves over: with the norm's weight in the matrix and z = x W, the normalised tensor
 * is never written. Dropout: threshold = rint(65536 * drop), from which drop is meant; element (i, j) is kept if the 16
 * random bits that struct lk_rng gives to its element i * round_up(columns, 8) + j are at least the threshold. The sum of
 * offset and *device_offset is rounded down to a multiple of 8. Backward draws the same bits again: no mask is stored. Which
 * elements are kept is exact. Bounds: forward 2^-16 * |h| + 2^-126 * |g * u| / (1 - drop);
 * backward 2^-14 of the sum of the magnitudes of the terms of the derivative (and as much below 2^-110). */

struct lk_swiglu {
    const void *z; /* rows x (2 * columns) */
    uint64_t z_stride;
    const float *row_scale; /* one per row; NULL: 1 */
    uint64_t rows, columns;
    double drop; /* in [0, 1); 0: none, rng is not used */
    struct lk_rng rng;
};

struct lk_swiglu_grads {
    const void *dh; /* rows x columns */
    uint64_t dh_stride;
    void *dz; /* rows x (2 * columns): row_scale times the gradient of (g, u); may be z itself */
    uint64_t dz_stride;
    void *h; /* rows x columns: the forward result once more; NULL: not wanted */
    uint64_t h_stride;
    float *
        row_dot; /* per row the sum of gradient of (g, u) times z, that is, of row_scale; NULL: not wanted */
};

int lk_swiglu_forward(const struct lk_swiglu *swiglu, void *h, uint64_t h_stride, void *stream);
int lk_swiglu_backward(const struct lk_swiglu *swiglu, const struct lk_swiglu_grads *grads,
                       void *stream);

/* ---- RMSNorm and LayerNorm ----
 *
 *     s = x + residual (rounded to bf16, as it is stored)
 *     LayerNorm: mean = mean of s, rstd = 1 / sqrt(mean of (s - mean)^2 + eps); RMSNorm: mean = 0
 *     y = (s - mean) * rstd * (gamma + gamma_offset) + beta
 *
 * Forward can stop at the statistics (y NULL), which is what a norm that is folded into a matrix product needs. Sums of
 * LayerNorm are taken around the row's first element, those of the variance around the mean: equal elements and a mean
 * far beyond the deviation lose nothing. Backward takes s, mean and rstd of forward; sums over rows are added in a fixed
 * order in two stages. Bounds: rstd 2^-18 of itself; the normalised value e = 2^-18 of itself + (LayerNorm) 2^-22 *
 * (|mean| + |first element - mean|) * rstd, which the others inherit with 2^-14 of the sum of the magnitudes of their terms. */

enum lk_norm_kind {
    LK_RMS_NORM = 0,
    LK_LAYER_NORM = 1,
};

struct lk_norm {
    enum lk_norm_kind kind;
    uint64_t rows, columns;
    double eps;               /* taken as fp32 */
    enum lk_type weight_type; /* of gamma and beta: LK_FP32 or LK_BF16 */
    const void *gamma;        /* NULL: 1 - gamma_offset */
    const void *beta;         /* NULL: 0 */
    float gamma_offset;       /* 1 for weights that are stored around 0 */
    float *mean;              /* per row; NULL for RMSNorm */
    float *rstd;              /* per row */
};

struct lk_norm_forward {
    const void *x;
    uint64_t x_stride;
    const void *residual; /* NULL: none */
    uint64_t residual_stride;
    void *sum; /* s; NULL only without residual; may be x or residual itself */
    uint64_t sum_stride;
    void *y; /* NULL: statistics only */
    uint64_t y_stride;
};

struct lk_norm_backward {
    const void *s; /* what was normalised */
    uint64_t s_stride;
    const void *dy;
    uint64_t dy_stride;
    const void *ds; /* gradient that reaches s by another way, added to dx; NULL: none */
    uint64_t ds_stride;
    void *dx; /* may be dy or ds itself */
    uint64_t dx_stride;
    float *dgamma, *dbeta; /* fp32, overwritten; NULL: not wanted */
    void *workspace;       /* lk_norm_workspace_bytes(); not used if neither is wanted */
};

size_t lk_norm_workspace_bytes(const struct lk_norm *norm);
int lk_norm_forward(const struct lk_norm *norm, const struct lk_norm_forward *forward,
                    void *stream);
int lk_norm_backward(const struct lk_norm *norm, const struct lk_norm_backward *backward,
                     void *stream);

/* ---- rows of tokens to experts and back, on one device ----
 *
 * A slot is one choice of one token: slot = token * choices + choice. Routing gives every slot whose expert is in
 * [0, experts) a row of the permuted matrix; rows of an expert lie together, in the order of slots. With capacity 0 each
 * expert's rows begin where those of the one before it end, rounded up to a multiple of `align`; else expert e has rows
 * [e * capacity, (e + 1) * capacity), and slots beyond that are dropped (row -1), the last ones first. All of it is exact.
 * Equal experts of one token are slots like any other. */

struct lk_moe_routing {
    const int32_t
        *experts; /* per slot; what is not in [0, experts) has no row: another rank's, or none */
    uint64_t tokens;
    uint32_t choices;      /* per token, >= 1 */
    uint32_t expert_count; /* 1 to LK_MOE_EXPERTS */
    uint32_t capacity;     /* rows of each expert; 0: as many as it gets */
    uint32_t align;        /* with capacity 0: a power of two; 1 packs */
    uint64_t
        rows; /* of the permuted matrix. capacity 0: those beyond it are dropped; else expert_count * capacity */
    int32_t *row_of_slot; /* tokens * choices; -1: none */
    int32_t *slot_of_row; /* rows; -1: nobody fills it */
    int32_t *counts;      /* per expert: rows filled */
    int32_t *offsets; /* per expert and one more: its first row; last: the end of the last one's */
    uint32_t *
        live; /* a bit per row, 1: filled; ceil(rows / 32) words, as loongcommSetMask() takes it; or NULL */
    void *workspace; /* lk_moe_workspace_bytes(); for lk_moe_route() alone */
};

#define LK_MOE_EXPERTS 1024

size_t lk_moe_workspace_bytes(const struct lk_moe_routing *routing);

/* Two launches. tokens * choices < 2^31, rows < 2^31. */
int lk_moe_route(const struct lk_moe_routing *routing, void *stream);

struct lk_moe_rows {
    void *tokens; /* bf16, tokens x columns */
    uint64_t token_stride;
    void *permuted; /* bf16, rows x columns */
    uint64_t permuted_stride;
    uint64_t columns;
    const float *weights; /* per slot; NULL: 1 */
    int fill;             /* lk_moe_permute: write zeros to rows that nobody fills */
};

/* permuted[row] = weights[slot] * tokens[token of slot]; exact without weights. Rows that nobody fills are left as they
 * are (those that `live` masks out need no contents) or zeroed. */
int lk_moe_permute(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                   void *stream);

/* tokens[token] = sum over its choices, in their order, of weights[slot] * permuted[row of slot], in fp32, rounded once.
 * Exact between the libraries. A token without rows becomes 0. With the same weights it is the backward of
 * lk_moe_permute(). */
int lk_moe_unpermute(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                     void *stream);

/* The backward of lk_moe_unpermute(), with the gradient of the routing's probabilities, which reads every row once:
 *     dpermuted[row] = weights[slot] * dtokens[token of slot], as lk_moe_permute() does;
 *     dweights[slot] = sum over columns of dtokens[token of slot] * permuted[row of slot], 0 where the slot has no row.
 * Of lk_moe_permute() with weights, dweights is the same sum over its tokens and the gradient of its rows: given as
 * `dtokens` and `permuted`. dpermuted is exact; dweights is exact between the libraries and within 2^-14 of the sum of
 * the magnitudes of its terms. */
struct lk_moe_grads {
    const void *dtokens; /* bf16, tokens x columns */
    uint64_t dtoken_stride;
    const void *permuted; /* bf16, rows x columns; NULL: dweights is not wanted */
    uint64_t permuted_stride;
    void *dpermuted; /* bf16, rows x columns; may be permuted itself; NULL: not wanted */
    uint64_t dpermuted_stride;
    uint64_t columns;
    const float *weights; /* per slot; NULL: 1 */
    float *dweights;      /* per slot; NULL with permuted */
    int fill;             /* write zeros to rows of dpermuted that nobody fills */
};

int lk_moe_unpermute_backward(const struct lk_moe_routing *routing,
                              const struct lk_moe_grads *grads, void *stream);

/* ---- augmentation of images ----
 *
 * One launch makes a batch of training samples of a batch of images: a crop of random place and size is scaled to the
 * output (bilinear between pixel centres, without a filter for what is made smaller, edges repeated), mirrored, its
 * colours are changed, it is normalised, and a random rectangle is erased. As torchvision's RandomResizedCrop,
 * RandomHorizontalFlip, ColorJitter (on floats, clamped to [0, 1] after each of its steps, in a drawn order), Normalize and
 * RandomErasing do it, but with numbers of their own: Philox4x32-10 with the key `seed` and a counter that holds the
 * sample's index in the data set (words 0 and 1), the epoch (2) and LK_AUGMENT_STREAM + what is drawn (3). What becomes of
 * a sample follows from these alone: not from its batch, the number of ranks, or where a job was resumed; and no number
 * is one that dropout or stochastic rounding takes, whose word 3 is 0.
 *
 * Exact between the libraries. Beside exact arithmetic with the numbers that `choices` reports, a value is within
 * 2^-21 * (64 + height + width of the crop) * the factors above 1 / std before it is rounded to the output's type. */

#define LK_AUGMENT_STREAM UINT32_C(0x41554700)

/* Device memory, read in the order of the stream: a graph's replays follow it. All there is to save and restore. */
struct lk_augment_state {
    uint64_t seed;
    uint32_t epoch;
    uint32_t reserved;
};

/* What was drawn for an image, for those who treat a mask or boxes alike. */
struct lk_augment_choice {
    uint32_t top, left, height, width;                         /* of the crop */
    uint32_t erase_top, erase_left, erase_height, erase_width; /* of the output; 0 x 0: nothing */
    uint32_t flip;
    uint32_t
        order; /* four times two bits, the first step lowest: 0 brightness, 1 contrast, 2 saturation, 3 hue */
    float brightness, contrast, saturation; /* factors: 1 leaves as it is */
    float hue;                              /* part of a turn */
};

/* Ratios are width / height. Chances are in [0, 1]. */
struct lk_augment {
    const uint8_t *images;             /* count x height x width x channels */
    uint64_t image_stride, row_stride; /* bytes */
    uint32_t count, height, width;     /* fewer than 65536 rows and columns */
    uint32_t channels;                 /* 1 or 3 (red, green, blue) */
    const uint64_t *samples;           /* device: of each image; NULL: first_sample on */
    uint64_t first_sample;
    const struct lk_augment_state *state;
    void *out; /* count x channels x out_height x out_width, packed */
    enum lk_type out_type;
    uint32_t out_height, out_width; /* fewer than 65536 */
    float crop_area[2],
        crop_ratio[2]; /* least and most; area as part of the image. Both 0: the whole image */
    float flip;        /* chance */
    float brightness, contrast, saturation; /* factors are in [max(0, 1 - x), 1 + x] */
    float hue;                              /* in [-x, x], x <= 0.5 */
    float mean[3], std[3];
    float erase; /* chance */
    float erase_area[2], erase_ratio[2];
    float erase_value[3];              /* behind normalising */
    struct lk_augment_choice *choices; /* device: of each image; NULL: not wanted */
};

int lk_augment_images(const struct lk_augment *augment, void *stream);

#ifdef __cplusplus
}
#endif

#endif
