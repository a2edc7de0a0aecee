/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention, forward and backward, with groups of heads that share keys and values, causal or not, for sequences of one
 * length, of several lengths in padded rows, or packed one behind the other. The rules of loongcompute.h hold here, too,
 * with these additions.
 *
 *     s[i, j] = scale * (q[i] . k[j])  where query i sees key j
 *     lse[i] = log(sum over j of exp(s[i, j])),  p[i, j] = exp(s[i, j] - lse[i]),  o[i] = sum over j of p[i, j] v[j]
 *
 * There is no dropout and no bias.
 *
 * The vendor's library. On a GPU attention is left to cuDNN (9.15.1 or a newer 9), which is opened when the first struct
 * lk_attention_library is, not linked. What it does not serve goes to kernels of our own, which take every shape, are many
 * times slower and are counted; lk_attention_why() says why. Fast are depths that are multiples of 8 up to 256 (64 and 128
 * above all), bases aligned to 16 bytes and strides that are multiples of 8. In the host library the arithmetic of our own
 * kernels serves everything.
 *
 * Memory. cuDNN makes a plan for each shape (sizes, strides, type, mask, direction) when it comes for the first time,
 * which takes a tenth of a second or more: lk_attention_workspace_bytes() does it ahead. LK_ATTENTION_PLANS of them are
 * kept, and the one that was used longest ago makes room; those that a graph was captured with are kept, and when all are,
 * new shapes go to our own kernels. A call takes a few hundred bytes of host memory and gives them back.
 *
 * Rows that see no key (a sequence without keys, the first rows under LK_CAUSAL_BOTTOM_RIGHT with more queries than keys)
 * are zeros in o and dq, and their lse is +infinity, with which backward gives them no weight. Rows behind a sequence's
 * length are the same, as are those of dk and dv; what q, k, v and dout hold there has to be finite. Between packed sequences
 * nothing is written.
 *
 * NaN and infinities reach every row that sees them. Through cuDNN a NaN or infinity in a value or key may also reach rows
 * that do not see it, where others of its tile do.
 *
 * Errors: as in loongblocks.h; lk_blas_error() has the text.
 *
 * Bounds, beyond the rounding of the result, with x = 2^-18 times the row's largest |scale| * sum of |q| |k|: forward
 * 2^-7 + 2 x of the sum of the magnitudes of the terms (2^-13 + 2 x by our own kernels), lse 2^-9 + x, backward 2^-6 + 4 x of
 * the sum of the magnitudes of the terms, those of the products within them included.
 * Repeatability: forward always; backward with `deterministic`, or by our own kernels.
 */
#ifndef LOONGATTENTION_H
#define LOONGATTENTION_H

#include "kernels/loongblocks.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_ATTENTION_PLANS 64
#define LK_ATTENTION_DEPTH 1024 /* the most that depth and value_depth may be */

enum lk_attention_flags {
    LK_ATTENTION_GENERAL = 1, /* do without the vendor's library */
};

struct lk_attention_library;

struct lk_attention_counts {
    uint64_t vendor;  /* calls that cuDNN served */
    uint64_t general; /* those of our own kernels */
    uint64_t plans;   /* times that cuDNN was asked for one */
};

/* For the current device. library: path of libcudnn, NULL for the one that the process has or the loader finds. Serves
 * threads and streams at the same time, one call after the other. -ENOSYS, -EIO, -ENOMEM. */
int lk_attention_open(const char *library, uint32_t flags, struct lk_attention_library **out);

/* NULL is allowed. After the last call that uses it has returned, and when no graph that it was captured with runs any more. */
void lk_attention_close(struct lk_attention_library *library);

void lk_attention_counts(const struct lk_attention_library *library,
                         struct lk_attention_counts *out);

/* Why this thread's last call or query was not cuDNN's; empty if it was, or if there is no cuDNN. */
const char *lk_attention_why(void);

enum lk_causal {
    LK_CAUSAL_NONE = 0,
    LK_CAUSAL_TOP_LEFT = 1, /* query i sees keys 0 .. i */
    LK_CAUSAL_BOTTOM_RIGHT =
        2, /* the last query sees all keys, the one before it all but the last, and so on */
};

/* Rows of all heads. Element (sequence, head, row, column) lies at sequence * sequence_stride + head * head_stride + row *
 * row_stride + column. Packed: (offset of the sequence + row) * row_stride + head * head_stride + column. */
struct lk_heads {
    void *base; /* of what is only read, too */
    uint64_t sequence_stride, head_stride, row_stride;
};

struct lk_attention {
    uint32_t sequences;
    uint32_t heads, kv_heads;    /* of queries; of keys and values, a divisor of it */
    uint32_t queries, keys;      /* of the longest sequence */
    uint32_t depth, value_depth; /* columns of q and k; of v and o */
    enum lk_type type;           /* LK_BF16 or LK_FP16, of all heads */
    enum lk_causal causal;       /* counted in each sequence by itself */
    float scale;
    const int32_t *query_lengths, *key_lengths; /* one per sequence; NULL: all are whole */
    const int32_t *query_offsets,
        *key_offsets; /* packed: first rows, one more than sequences; both, and no lengths, or NULL */
    struct lk_heads q, k, v, o;
    float *
        lse; /* sequences x heads x queries, also if packed; NULL: forward does not keep it, backward makes it and o anew, but of packed rows */
    uint64_t most_workspace; /* a plan of cuDNN that needs more is not taken; 0: any */
    void *workspace;         /* lk_attention_workspace_bytes(), aligned to 256 bytes */
};

struct lk_attention_grads {
    struct lk_heads dout;       /* with the strides of o, or cuDNN is not asked */
    struct lk_heads dq, dk, dv; /* none of them may overlap anything else */
    int deterministic; /* same bits every time; costs cuDNN a workspace of 2 * heads * queries * keys bytes per sequence */
};

/* grads: NULL for forward. Of the pointers only alignment and whether they are NULL matters. 0: an argument is wrong. */
size_t lk_attention_workspace_bytes(struct lk_attention_library *library,
                                    const struct lk_attention *attention,
                                    const struct lk_attention_grads *grads);
int lk_attention_forward(struct lk_attention_library *library, const struct lk_attention *attention,
                         void *stream);

/* With o and lse as forward left them; or, to keep neither, with lse NULL: then o.base, which may be NULL, is not read (its
 * strides still say how dout lies), forward runs once more into the workspace, which is as much larger, and both runs are
 * counted. Not of packed rows: where those begin only the device knows, so that nobody can say how long o is. */
int lk_attention_backward(struct lk_attention_library *library,
                          const struct lk_attention *attention,
                          const struct lk_attention_grads *grads, void *stream);

#ifdef __cplusplus
}
#endif

#endif
