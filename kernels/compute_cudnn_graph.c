/* SPDX-License-Identifier: Apache-2.0
 *
 * The graphs of attention and the choice of a plan for them.
 */
#include "kernels/cudnn_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAX_DESCRIPTORS 192
#define MAX_OPERATIONS  48
#define MAX_CHOICES     8 /* engines that are tried in each mode */

/* A graph as it grows. After the first failure nothing more is done; everything that was created is destroyed at the end,
 * but for the plan. */
struct graph {
    const struct lk_cudnn_api *api;
    const struct lk_cudnn_key *key;
    void *created[MAX_DESCRIPTORS];
    void *operations[MAX_OPERATIONS];
    int64_t n_created, n_operations;
    int64_t next_name;
    int status;          /* the vendor's */
    const char *failing; /* what it belongs to */
    void *lengths[2];
    void *minus_infinity;
};

struct extent {
    int64_t dims[4], strides[4];
};

/* ---- descriptors ---- */

static void note(struct graph *g, int status, const char *what)
{
    if (status == LK_CUDNN_STATUS_SUCCESS || g->status != LK_CUDNN_STATUS_SUCCESS)
        return;
    g->status = status;
    g->failing = what;
}

static void *create(struct graph *g, int type, const char *what)
{
    void *descriptor = NULL;

    if (g->status != LK_CUDNN_STATUS_SUCCESS)
        return NULL;
    if (g->n_created == MAX_DESCRIPTORS) {
        note(g, -1, what);
        return NULL;
    }
    note(g, g->api->cudnnBackendCreateDescriptor(type, &descriptor), what);
    if (g->status == LK_CUDNN_STATUS_SUCCESS)
        g->created[g->n_created++] = descriptor;
    return descriptor;
}

static void set(struct graph *g, void *descriptor, int name, int type, int64_t count,
                const void *values, const char *what)
{
    if (g->status == LK_CUDNN_STATUS_SUCCESS)
        note(g, g->api->cudnnBackendSetAttribute(descriptor, name, type, count, values), what);
}

static void set_int(struct graph *g, void *descriptor, int name, int type, int value,
                    const char *what)
{
    set(g, descriptor, name, type, 1, &value, what);
}

static void set_descriptor(struct graph *g, void *descriptor, int name, void *value,
                           const char *what)
{
    if (value)
        set(g, descriptor, name, LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, (const void *)&value, what);
}

static void finish(struct graph *g, void *descriptor, const char *what)
{
    if (g->status == LK_CUDNN_STATUS_SUCCESS)
        note(g, g->api->cudnnBackendFinalize(descriptor), what);
}

/* ---- tensors ---- */

static struct extent contiguous(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (struct extent){
        {a,          b,     c, d},
        { b * c * d, c * d, d, 1}
    };
}

/* As its transpose in the last two dimensions. */
static struct extent transposed(struct extent e)
{
    int64_t dim = e.dims[2], stride = e.strides[2];

    e.dims[2] = e.dims[3];
    e.dims[3] = dim;
    e.strides[2] = e.strides[3];
    e.strides[3] = stride;
    return e;
}

enum place {
    PLACE_MEMORY,
    PLACE_VIRTUAL,
    PLACE_VALUE
};

static void *tensor(struct graph *g, int64_t name, int type, enum place place, struct extent extent,
                    void *offsets)
{
    static const char what[] = "a tensor";
    void *t = create(g, LK_CUDNN_BACKEND_TENSOR_DESCRIPTOR, what);
    const int64_t alignment = 16;
    const bool yes = true;

    set_int(g, t, LK_CUDNN_ATTR_TENSOR_DATA_TYPE, LK_CUDNN_TYPE_DATA_TYPE, type, what);
    set(g, t, LK_CUDNN_ATTR_TENSOR_DIMENSIONS, LK_CUDNN_TYPE_INT64, 4, extent.dims, what);
    set(g, t, LK_CUDNN_ATTR_TENSOR_STRIDES, LK_CUDNN_TYPE_INT64, 4, extent.strides, what);
    set(g, t, LK_CUDNN_ATTR_TENSOR_UNIQUE_ID, LK_CUDNN_TYPE_INT64, 1, &name, what);
    set(g, t, LK_CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, LK_CUDNN_TYPE_INT64, 1, &alignment, what);
    if (place == PLACE_VIRTUAL)
        set(g, t, LK_CUDNN_ATTR_TENSOR_IS_VIRTUAL, LK_CUDNN_TYPE_BOOLEAN, 1, &yes, what);
    if (place == PLACE_VALUE)
        set(g, t, LK_CUDNN_ATTR_TENSOR_IS_BY_VALUE, LK_CUDNN_TYPE_BOOLEAN, 1, &yes, what);
    set_descriptor(g, t, LK_CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, offsets, what);
    finish(g, t, what);
    return t;
}

static void *between(struct graph *g, int type, struct extent extent)
{
    return tensor(g, g->next_name++, type, PLACE_VIRTUAL, extent, NULL);
}

static void *scalar(struct graph *g, int64_t name, int type)
{
    return tensor(g, name, type, PLACE_VALUE, contiguous(1, 1, 1, 1), NULL);
}

static int data_type(const struct graph *g)
{
    return g->key->type == LK_BF16 ? LK_CUDNN_DATA_BFLOAT16 : LK_CUDNN_DATA_HALF;
}

static struct extent extent_of(const struct lk_cudnn_key *key, enum lk_attention_tensor which)
{
    bool keys = lk_tensor_has_keys(which);
    const int64_t *strides = key->strides[which];

    return (struct extent){
        {key->sequences, keys ? key->kv_heads : key->heads, keys ? key->keys : key->queries,
         lk_tensor_has_value_depth(which) ? key->value_depth : key->depth                     },
        { strides[0],    strides[1],                        strides[2],                      1}
    };
}

/* One of the caller's; turned: as its transpose. */
static void *given(struct graph *g, enum lk_attention_tensor which, bool turned, void **offsets)
{
    struct extent extent = extent_of(g->key, which);
    void *ragged = NULL;

    if (g->key->packed)
        ragged = tensor(g, LK_NAME_OFFSETS + which, LK_CUDNN_DATA_INT64, PLACE_MEMORY,
                        contiguous(g->key->sequences + 1, 1, 1, 1), NULL);
    if (offsets)
        *offsets = ragged;
    return tensor(g, LK_NAME_TENSORS + which, data_type(g), PLACE_MEMORY,
                  turned ? transposed(extent) : extent, ragged);
}

/* ---- operations ---- */

static void add(struct graph *g, void *operation, const char *what)
{
    finish(g, operation, what);
    if (g->status != LK_CUDNN_STATUS_SUCCESS)
        return;
    if (g->n_operations == MAX_OPERATIONS)
        note(g, -1, what);
    else
        g->operations[g->n_operations++] = operation;
}

/* Which sizes of a product the sequence's length stands for. */
enum over {
    NOT_OVER = -1,
    OVER_QUERIES = 0,
    OVER_KEYS = 1
};

static void multiply(struct graph *g, void *a, void *b, void *c, enum over m, enum over n,
                     enum over k)
{
    static const char what[] = "a product";
    void *how = create(g, LK_CUDNN_BACKEND_MATMUL_DESCRIPTOR, what);
    void *operation;

    set_int(g, how, LK_CUDNN_ATTR_MATMUL_COMP_TYPE, LK_CUDNN_TYPE_DATA_TYPE, LK_CUDNN_DATA_FLOAT,
            what);
    finish(g, how, what);
    operation = create(g, LK_CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_ADESC, a, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_BDESC, b, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_CDESC, c, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_DESC, how, what);
    if (m != NOT_OVER)
        set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
                       g->lengths[m], what);
    if (n != NOT_OVER)
        set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
                       g->lengths[n], what);
    if (k != NOT_OVER)
        set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC,
                       g->lengths[k], what);
    add(g, operation, what);
}

/* y = x MODE b, or t ? x : b. axis -1: none. */
static void combine_along(struct graph *g, int mode, int type, int64_t axis, void *x, void *b,
                          void *t, void *y)
{
    static const char what[] = "an operation on elements";
    void *how = create(g, LK_CUDNN_BACKEND_POINTWISE_DESCRIPTOR, what);
    void *operation;

    set_int(g, how, LK_CUDNN_ATTR_POINTWISE_MODE, LK_CUDNN_TYPE_POINTWISE_MODE, mode, what);
    set_int(g, how, LK_CUDNN_ATTR_POINTWISE_MATH_PREC, LK_CUDNN_TYPE_DATA_TYPE, type, what);
    if (axis >= 0)
        set(g, how, LK_CUDNN_ATTR_POINTWISE_AXIS, LK_CUDNN_TYPE_INT64, 1, &axis, what);
    finish(g, how, what);
    operation = create(g, LK_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y, what);
    add(g, operation, what);
}

static void combine(struct graph *g, int mode, void *x, void *b, void *y)
{
    combine_along(g, mode, LK_CUDNN_DATA_FLOAT, -1, x, b, NULL, y);
}

static void reduce(struct graph *g, int mode, void *x, void *y)
{
    static const char what[] = "a reduction";
    void *how = create(g, LK_CUDNN_BACKEND_REDUCTION_DESCRIPTOR, what);
    void *operation;

    set_int(g, how, LK_CUDNN_ATTR_REDUCTION_COMP_TYPE, LK_CUDNN_TYPE_DATA_TYPE, LK_CUDNN_DATA_FLOAT,
            what);
    set_int(g, how, LK_CUDNN_ATTR_REDUCTION_OPERATOR, LK_CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, mode,
            what);
    finish(g, how, what);
    operation = create(g, LK_CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_REDUCTION_DESC, how, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y, what);
    add(g, operation, what);
}

static void reshape(struct graph *g, void *x, void *y)
{
    static const char what[] = "a transpose";
    void *operation = create(g, LK_CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, what);

    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x, what);
    set_descriptor(g, operation, LK_CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y, what);
    add(g, operation, what);
}

/* ---- masks ---- */

static struct extent scores_extent(const struct graph *g)
{
    return contiguous(g->key->sequences, g->key->heads, g->key->queries, g->key->keys);
}

static struct extent rows_extent(const struct graph *g)
{
    return contiguous(g->key->sequences, g->key->heads, g->key->queries, 1);
}

/* Of the rows (axis 2) or columns (3) of the scores. */
static void *index_of(struct graph *g, void *scores, int64_t axis, int type)
{
    void *index = between(g, LK_CUDNN_DATA_INT32, scores_extent(g));

    combine_along(g, LK_CUDNN_POINTWISE_GEN_INDEX, type, axis, scores, NULL, NULL, index);
    return index;
}

static void *compare(struct graph *g, int mode, void *x, void *b)
{
    void *mask = between(g, LK_CUDNN_DATA_BOOLEAN, scores_extent(g));

    combine_along(g, mode, LK_CUDNN_DATA_BOOLEAN, -1, x, b, NULL, mask);
    return mask;
}

static void *keep_where(struct graph *g, void *scores, void *mask)
{
    void *kept = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));

    combine_along(g, LK_CUDNN_POINTWISE_BINARY_SELECT, LK_CUDNN_DATA_FLOAT, -1, scores,
                  g->minus_infinity, mask, kept);
    return kept;
}

static void *mask_lengths(struct graph *g, void *scores)
{
    void *row = index_of(g, scores, 2, LK_CUDNN_DATA_INT32);
    void *column = index_of(g, scores, 3, LK_CUDNN_DATA_INT32);
    void *row_is_there = compare(g, LK_CUDNN_POINTWISE_CMP_LT, row, g->lengths[0]);
    void *column_is_there = compare(g, LK_CUDNN_POINTWISE_CMP_LT, column, g->lengths[1]);

    return keep_where(g, scores,
                      compare(g, LK_CUDNN_POINTWISE_LOGICAL_AND, row_is_there, column_is_there));
}

static void *shift_rows(struct graph *g, void *row, int mode, void *by)
{
    void *shifted = between(g, LK_CUDNN_DATA_INT32, scores_extent(g));

    combine_along(g, mode, LK_CUDNN_DATA_INT32, 3, row, by, NULL, shifted);
    return shifted;
}

static void *mask_future(struct graph *g, void *scores)
{
    void *row = index_of(g, scores, 2, LK_CUDNN_DATA_FLOAT);
    void *column = index_of(g, scores, 3, LK_CUDNN_DATA_FLOAT);

    if (g->key->causal == LK_CAUSAL_BOTTOM_RIGHT) {
        row = shift_rows(g, row, LK_CUDNN_POINTWISE_ADD,
                         g->lengths[1] ? g->lengths[1]
                                       : scalar(g, LK_NAME_SIZES + 1, LK_CUDNN_DATA_INT32));
        row = shift_rows(g, row, LK_CUDNN_POINTWISE_SUB,
                         g->lengths[0] ? g->lengths[0]
                                       : scalar(g, LK_NAME_SIZES, LK_CUDNN_DATA_INT32));
    }
    return keep_where(g, scores, compare(g, LK_CUDNN_POINTWISE_CMP_GE, row, column));
}

/* ---- forward ---- */

static void make_common(struct graph *g)
{
    g->minus_infinity = scalar(g, LK_NAME_MINUS_INFINITY, LK_CUDNN_DATA_FLOAT);
    for (int side = 0; side < 2 && g->key->lengths; side++)
        g->lengths[side] = tensor(g, LK_NAME_LENGTHS + side, LK_CUDNN_DATA_INT32, PLACE_MEMORY,
                                  contiguous(g->key->sequences, 1, 1, 1), NULL);
}

static void *scores(struct graph *g, void *q, void *k_turned, void *scale)
{
    void *raw = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *scaled = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));

    multiply(g, q, k_turned, raw, OVER_QUERIES, OVER_KEYS, NOT_OVER);
    combine(g, LK_CUDNN_POINTWISE_MUL, raw, scale, scaled);
    return scaled;
}

static void *lse_tensor(struct graph *g)
{
    return tensor(g, LK_NAME_LSE, LK_CUDNN_DATA_FLOAT, PLACE_MEMORY, rows_extent(g), NULL);
}

/* The probabilities, in the type of v. */
static void *softmax(struct graph *g, void *s)
{
    void *most = between(g, LK_CUDNN_DATA_FLOAT, rows_extent(g));
    void *below = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *power = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *sum = between(g, LK_CUDNN_DATA_FLOAT, rows_extent(g));
    void *p = between(g, data_type(g), scores_extent(g));

    reduce(g, LK_CUDNN_REDUCE_TENSOR_MAX, s, most);
    combine(g, LK_CUDNN_POINTWISE_SUB, s, most, below);
    combine(g, LK_CUDNN_POINTWISE_EXP, below, NULL, power);
    reduce(g, LK_CUDNN_REDUCE_TENSOR_ADD, power, sum);
    if (g->key->stats) {
        void *log = between(g, LK_CUDNN_DATA_FLOAT, rows_extent(g));

        combine(g, LK_CUDNN_POINTWISE_LOG, sum, NULL, log);
        combine(g, LK_CUDNN_POINTWISE_ADD, most, log, lse_tensor(g));
    }
    combine(g, LK_CUDNN_POINTWISE_DIV, power, sum, p);
    return p;
}

static void make_forward(struct graph *g)
{
    void *q = given(g, LK_TENSOR_Q, false, NULL), *k = given(g, LK_TENSOR_K, true, NULL);
    void *s = scores(g, q, k, scalar(g, LK_NAME_SCALE, LK_CUDNN_DATA_FLOAT)), *p;

    if (g->key->lengths)
        s = mask_lengths(g, s);
    if (g->key->causal)
        s = mask_future(g, s);
    p = softmax(g, s);
    multiply(g, p, given(g, LK_TENSOR_V, false, NULL), given(g, LK_TENSOR_O, false, NULL),
             OVER_QUERIES, NOT_OVER, OVER_KEYS);
}

/* ---- backward ---- */

/* For each row the sum over dout * o, which lies in memory: cuDNN makes it in a kernel of its own. */
static void *row_sums(struct graph *g, void *dout)
{
    const struct lk_cudnn_key *key = g->key;
    void *o = given(g, LK_TENSOR_O, false, NULL);
    void *products = between(
        g, LK_CUDNN_DATA_FLOAT,
        contiguous(key->sequences, key->heads, key->queries, key->value_depth));
    void *sum = between(g, LK_CUDNN_DATA_FLOAT, rows_extent(g));
    void *kept = tensor(g, LK_NAME_ROW_SUM, LK_CUDNN_DATA_FLOAT, PLACE_MEMORY, rows_extent(g),
                        NULL);

    combine(g, LK_CUDNN_POINTWISE_MUL, dout, o, products);
    reduce(g, LK_CUDNN_REDUCE_TENSOR_ADD, products, sum);
    combine(g, LK_CUDNN_POINTWISE_MUL, sum, scalar(g, LK_NAME_ONE, LK_CUDNN_DATA_FLOAT), kept);
    return kept;
}

/* The transpose of scores times rows of the queries' side, into keys or values; summed over the heads that share them. */
static void multiply_turned(struct graph *g, void *s, void *rows, enum lk_attention_tensor out)
{
    const struct lk_cudnn_key *key = g->key;
    void *turned = between(g, data_type(g), transposed(scores_extent(g)));
    void *all, *into = given(g, out, false, NULL);

    reshape(g, s, turned);
    if (key->heads == key->kv_heads) {
        multiply(g, turned, rows, into, OVER_KEYS, NOT_OVER, OVER_QUERIES);
        return;
    }
    all = between(g, data_type(g),
                  contiguous(key->sequences, key->heads, key->keys,
                             out == LK_TENSOR_DV ? key->value_depth : key->depth));
    multiply(g, turned, rows, all, OVER_KEYS, NOT_OVER, OVER_QUERIES);
    reduce(g, LK_CUDNN_REDUCE_TENSOR_ADD, all, into);
}

static void make_dq(struct graph *g, void *ds, void *k_turned, void *k_offsets)
{
    const struct lk_cudnn_key *key = g->key;
    void *k = tensor(g, g->next_name++, data_type(g), PLACE_VIRTUAL, extent_of(key, LK_TENSOR_K),
                     k_offsets);
    void *dq = given(g, LK_TENSOR_DQ, false, NULL), *sum = dq;

    reshape(g, k_turned, k);
    /* Added up in memory in any order, or, that the order be fixed, made from scores that lie in the workspace. */
    if (!key->deterministic)
        sum = tensor(g, LK_NAME_DQ_SUM, LK_CUDNN_DATA_FLOAT, PLACE_MEMORY,
                     contiguous(key->sequences, key->heads, key->queries, key->depth), NULL);
    multiply(g, ds, k, sum, OVER_QUERIES, NOT_OVER, OVER_KEYS);
    if (sum != dq)
        combine(g, LK_CUDNN_POINTWISE_IDENTITY, sum, NULL, dq);
}

static void make_backward(struct graph *g)
{
    void *k_offsets, *q = given(g, LK_TENSOR_Q, false, NULL);
    void *k = given(g, LK_TENSOR_K, true, &k_offsets), *v = given(g, LK_TENSOR_V, true, NULL);
    void *dout = given(g, LK_TENSOR_DOUT, false, NULL), *sums = row_sums(g, dout);
    void *scale = scalar(g, LK_NAME_SCALE, LK_CUDNN_DATA_FLOAT);
    void *s = scores(g, q, k, scale);
    void *below = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *p = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *dp = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *centred = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *weighed = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));
    void *ds = between(g, LK_CUDNN_DATA_FLOAT, scores_extent(g));

    combine(g, LK_CUDNN_POINTWISE_SUB, s, lse_tensor(g), below);
    if (g->key->lengths)
        below = mask_lengths(g, below);
    if (g->key->causal)
        below = mask_future(g, below);
    combine(g, LK_CUDNN_POINTWISE_EXP, below, NULL, p);
    multiply_turned(g, p, dout, LK_TENSOR_DV);
    multiply(g, dout, v, dp, OVER_QUERIES, OVER_KEYS, NOT_OVER);
    combine(g, LK_CUDNN_POINTWISE_SUB, dp, sums, centred);
    combine(g, LK_CUDNN_POINTWISE_MUL, centred, p, weighed);
    combine(g, LK_CUDNN_POINTWISE_MUL, weighed, scale, ds);
    multiply_turned(g, ds, q, LK_TENSOR_DK);
    make_dq(g, ds, k, k_offsets);
}

/* ---- plans ---- */

static void *make_operations(struct graph *g, void *handle)
{
    static const char what[] = "the graph";
    void *all;

    make_common(g);
    if (g->key->backward)
        make_backward(g);
    else
        make_forward(g);
    all = create(g, LK_CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, what);
    set(g, all, LK_CUDNN_ATTR_OPERATIONGRAPH_OPS, LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_operations,
        (const void *)g->operations, what);
    if (handle)
        set(g, all, LK_CUDNN_ATTR_OPERATIONGRAPH_HANDLE, LK_CUDNN_TYPE_HANDLE, 1,
            (const void *)&handle, what);
    finish(g, all, what);
    return all;
}

/* Does the engine of this choice say that its bits differ from run to run? */
static bool varies(const struct graph *g, void *choice, void *engine)
{
    const struct lk_cudnn_api *api = g->api;
    int notes[16];
    int64_t n = 0;

    if (api->cudnnBackendGetAttribute(choice, LK_CUDNN_ATTR_ENGINECFG_ENGINE,
                                      LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n,
                                      (void *)&engine) != LK_CUDNN_STATUS_SUCCESS)
        return false;
    if (api->cudnnBackendGetAttribute(engine, LK_CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                      LK_CUDNN_TYPE_NUMERICAL_NOTE, 16, &n,
                                      notes) != LK_CUDNN_STATUS_SUCCESS)
        return false;
    for (int64_t i = 0; i < n && i < 16; i++)
        if (notes[i] == LK_CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)
            return true;
    return false;
}

/* A plan of this choice of the library; NULL if it cannot be made, of which the library's text says why. */
static void *make_plan(const struct graph *g, void *choice, void *handle, void *device,
                       uint64_t *workspace)
{
    const struct lk_cudnn_api *api = g->api;
    void *plan = NULL;
    int64_t bytes = 0, n = 0;
    int status = api->cudnnBackendCreateDescriptor(LK_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
                                                   &plan);

    if (status != LK_CUDNN_STATUS_SUCCESS)
        return NULL;
    if (handle)
        status = api->cudnnBackendSetAttribute(plan, LK_CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
                                               LK_CUDNN_TYPE_HANDLE, 1, (const void *)&handle);
    if (status == LK_CUDNN_STATUS_SUCCESS && device)
        status = api->cudnnBackendSetAttribute(plan, LK_CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                                               LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                               (const void *)&device);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendSetAttribute(plan, LK_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                                               LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                               (const void *)&choice);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendFinalize(plan);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendGetAttribute(plan, LK_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                               LK_CUDNN_TYPE_INT64, 1, &n, &bytes);
    if (status == LK_CUDNN_STATUS_SUCCESS && bytes >= 0) {
        *workspace = (uint64_t)bytes;
        return plan;
    }
    api->cudnnBackendDestroyDescriptor(plan);
    return NULL;
}

static int choices(struct graph *g, void *operations, void *device, int mode, void **out)
{
    static const char what[] = "the heuristics";
    void *heuristics = create(g, LK_CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, what);
    int64_t n = 0;

    set_descriptor(g, heuristics, LK_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations, what);
    set_int(g, heuristics, LK_CUDNN_ATTR_ENGINEHEUR_MODE, LK_CUDNN_TYPE_HEUR_MODE, mode, what);
    set_descriptor(g, heuristics, LK_CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device, what);
    finish(g, heuristics, what);
    for (int i = 0; i < MAX_CHOICES; i++)
        out[i] = create(g, LK_CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, what);
    if (g->status == LK_CUDNN_STATUS_SUCCESS)
        note(g,
             g->api->cudnnBackendGetAttribute(heuristics, LK_CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                              LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CHOICES, &n,
                                              (void *)out),
             what);
    return g->status == LK_CUDNN_STATUS_SUCCESS ? (int)n : 0;
}

static void explain(const struct graph *g, const char *what, char why[LK_CUDNN_WHY])
{
    char text[LK_CUDNN_WHY - 64] = "";

    g->api->cudnnGetLastErrorString(text, sizeof(text));
    text[strcspn(text, "\n")] = 0;
    snprintf(why, LK_CUDNN_WHY, "%s: %.*s", what, (int)sizeof(text) - 1, text);
}

/* The first choice of the library that can be made and keeps within the limits. */
static int choose(struct graph *g, void *operations, void *handle, void *device,
                  char why[LK_CUDNN_WHY], struct lk_cudnn_made *out)
{
    static const int modes[] = { LK_CUDNN_HEUR_MODE_A, LK_CUDNN_HEUR_MODE_FALLBACK };
    void *engine = create(g, LK_CUDNN_BACKEND_ENGINE_DESCRIPTOR, "an engine");

    snprintf(why, LK_CUDNN_WHY, "no engine");
    for (int mode = 0; mode < 2; mode++) {
        void *found[MAX_CHOICES];
        int n = choices(g, operations, device, modes[mode], found);

        for (int i = 0; i < n; i++) {
            struct lk_cudnn_made made = { .plan = NULL };

            if (g->key->deterministic && varies(g, found[i], engine)) {
                snprintf(why, LK_CUDNN_WHY, "no engine whose bits do not vary");
                continue;
            }
            made.plan = make_plan(g, found[i], handle, device, &made.workspace);
            if (!made.plan) {
                explain(g, "no plan", why);
                continue;
            }
            if (!g->key->most_workspace || made.workspace <= g->key->most_workspace) {
                *out = made;
                why[0] = 0;
                return 0;
            }
            snprintf(why, LK_CUDNN_WHY, "a plan needs %llu bytes of workspace",
                     (unsigned long long)made.workspace);
            g->api->cudnnBackendDestroyDescriptor(made.plan);
        }
        if (g->status != LK_CUDNN_STATUS_SUCCESS)
            explain(g, g->failing, why);
        if (g->failing && strcmp(g->failing, "the heuristics") == 0)
            g->status = LK_CUDNN_STATUS_SUCCESS; /* the other mode may know one */
    }
    return LK_VENDOR_NONE;
}

int lk_cudnn_make(const struct lk_cudnn_api *api, void *handle, void *device,
                  const struct lk_cudnn_key *key, char why[LK_CUDNN_WHY], struct lk_cudnn_made *out)
{
    struct graph g = { .api = api, .key = key, .next_name = LK_NAME_VIRTUAL };
    void *operations = make_operations(&g, handle);
    int err = LK_VENDOR_NONE;

    if (g.status == LK_CUDNN_STATUS_SUCCESS)
        err = choose(&g, operations, handle, device, why, out);
    else
        explain(&g, g.failing, why);
    while (g.n_created > 0)
        api->cudnnBackendDestroyDescriptor(g.created[--g.n_created]);
    return err;
}
