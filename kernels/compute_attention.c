/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VENDOR_DEPTH 256 /* the most that cuDNN takes in both directions */

/* Counters: any thread writes, any reads, relaxed; they order nothing. The rest is constant after lk_attention_open(). */
struct lk_attention_library {
    struct lk_cudnn *cudnn; /* NULL: only our own kernels */
    uint64_t vendor_calls, general_calls, plans;
};

/* The thread's own. */
static _Thread_local char attention_why[LK_CUDNN_WHY];

LK_API const char *lk_attention_why(void)
{
    return attention_why;
}

LK_API int lk_attention_open(const char *library, uint32_t flags, struct lk_attention_library **out)
{
    struct lk_attention_library *lib;
    int err = 0;

    if (!out)
        return lk_blas_fail(-EINVAL, "lk_attention_open: out is NULL");
    if (flags & ~(uint32_t)LK_ATTENTION_GENERAL)
        return lk_blas_fail(-EINVAL, "lk_attention_open: unknown flags 0x%x", flags);
    lib = calloc(1, sizeof(*lib));
    if (!lib)
        return lk_blas_fail(-ENOMEM, "lk_attention_open: out of memory");
    if (!(flags & LK_ATTENTION_GENERAL))
        err = lk_cudnn_open(library, NULL, &lib->cudnn);
    if (err) {
        free(lib);
        return err;
    }
    *out = lib;
    return 0;
}

LK_API void lk_attention_close(struct lk_attention_library *library)
{
    if (!library)
        return;
    lk_cudnn_close(library->cudnn);
    free(library);
}

static void count(uint64_t *counter)
{
    __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

LK_API void lk_attention_counts(const struct lk_attention_library *library,
                                struct lk_attention_counts *out)
{
    out->vendor = __atomic_load_n(&library->vendor_calls, __ATOMIC_RELAXED);
    out->general = __atomic_load_n(&library->general_calls, __ATOMIC_RELAXED);
    out->plans = __atomic_load_n(&library->plans, __ATOMIC_RELAXED);
}

/* ---- arguments ---- */

static const struct lk_heads *heads_of(const struct lk_attention *a,
                                       const struct lk_attention_grads *g,
                                       enum lk_attention_tensor which)
{
    switch (which) {
    case LK_TENSOR_Q: return &a->q;
    case LK_TENSOR_K: return &a->k;
    case LK_TENSOR_V: return &a->v;
    case LK_TENSOR_O: return &a->o;
    case LK_TENSOR_DOUT: return &g->dout;
    case LK_TENSOR_DQ: return &g->dq;
    case LK_TENSOR_DK: return &g->dk;
    default: return &g->dv;
    }
}

static bool is_written(enum lk_attention_tensor which, const struct lk_attention_grads *g)
{
    return g ? which >= LK_TENSOR_DQ : which == LK_TENSOR_O;
}

static int check_heads(const char *call, const struct lk_attention *a,
                       const struct lk_attention_grads *g, enum lk_attention_tensor which)
{
    static const char *const names[] = { "q", "k", "v", "o", "dout", "dq", "dk", "dv" };
    const struct lk_heads *h = heads_of(a, g, which);
    bool keys = lk_tensor_has_keys(which);
    uint64_t rows = keys ? a->keys : a->queries, columns, heads = keys ? a->kv_heads : a->heads;

    columns = lk_tensor_has_value_depth(which) ? a->value_depth : a->depth;
    if (!rows)
        return 0;
    if (!h->base)
        return lk_blas_fail(-EINVAL, "%s: %s is NULL", call, names[which]);
    if ((uintptr_t)h->base % 2)
        return lk_blas_fail(-EINVAL, "%s: %s is not aligned to its elements", call, names[which]);
    if (h->row_stride >= UINT64_C(1) << 32 || h->head_stride >= UINT64_C(1) << 42 ||
        h->sequence_stride >= UINT64_C(1) << 48)
        return lk_blas_fail(-EINVAL, "%s: a stride of %s is too large", call, names[which]);
    if (is_written(which, g) &&
        ((rows > 1 && h->row_stride < columns) || (heads > 1 && h->head_stride < columns)))
        return lk_blas_fail(-EINVAL, "%s: rows or heads of %s overlap", call, names[which]);
    return 0;
}

static int check_lengths(const char *call, const struct lk_attention *a)
{
    if (!a->query_offsets != !a->key_offsets)
        return lk_blas_fail(-EINVAL, "%s: offsets of queries without those of keys, or vice versa",
                            call);
    if (a->query_offsets && (a->query_lengths || a->key_lengths))
        return lk_blas_fail(-EINVAL, "%s: offsets and lengths exclude each other", call);
    if (((uintptr_t)a->query_offsets | (uintptr_t)a->key_offsets | (uintptr_t)a->query_lengths |
         (uintptr_t)a->key_lengths) %
        4)
        return lk_blas_fail(-EINVAL, "%s: offsets or lengths are not aligned to 4 bytes", call);
    return 0;
}

static int check_sizes(const char *call, const struct lk_attention *a)
{
    uint64_t rows;

    if (a->type != LK_BF16 && a->type != LK_FP16)
        return lk_blas_fail(-EINVAL, "%s: type %d is neither bf16 nor fp16", call, (int)a->type);
    if ((unsigned int)a->causal > LK_CAUSAL_BOTTOM_RIGHT)
        return lk_blas_fail(-EINVAL, "%s: causal %d is unknown", call, (int)a->causal);
    if (!a->heads || !a->kv_heads || a->heads % a->kv_heads)
        return lk_blas_fail(-EINVAL, "%s: %u heads of queries, %u of keys", call, a->heads,
                            a->kv_heads);
    if (!a->depth || !a->value_depth || a->depth > LK_ATTENTION_DEPTH ||
        a->value_depth > LK_ATTENTION_DEPTH)
        return lk_blas_fail(-EINVAL, "%s: depths %u and %u are not within 1 .. %d", call, a->depth,
                            a->value_depth, LK_ATTENTION_DEPTH);
    if (a->queries > INT32_MAX || a->keys > INT32_MAX)
        return lk_blas_fail(-EINVAL, "%s: %u queries, %u keys are too many", call, a->queries,
                            a->keys);
    rows = a->queries > a->keys ? a->queries : a->keys;
    if (__builtin_mul_overflow((uint64_t)a->sequences * a->heads, rows, &rows) ||
        rows >= UINT64_C(1) << 42)
        return lk_blas_fail(-EINVAL, "%s: too many rows", call);
    return 0;
}

static int check(const char *call, const struct lk_attention *a, const struct lk_attention_grads *g)
{
    int err = check_sizes(call, a);

    if (!err)
        err = check_lengths(call, a);
    for (int which = 0; !err && which < (g ? LK_TENSORS : LK_TENSOR_DOUT); which++)
        err = check_heads(call, a, g, (enum lk_attention_tensor)which);
    if (err)
        return err;
    if (a->queries && ((g && !a->lse && a->sequences) || (uintptr_t)a->lse % 4))
        return lk_blas_fail(-EINVAL, "%s: lse is %s", call,
                            a->lse ? "misaligned" : "NULL, and rows are packed");
    return 0;
}

/* ---- what cuDNN is asked for ---- */

static bool refuse(const char *why)
{
    snprintf(attention_why, sizeof(attention_why), "%s", why);
    return false;
}

static bool are_equal(const struct lk_heads *a, const struct lk_heads *b)
{
    return a->sequence_stride == b->sequence_stride && a->head_stride == b->head_stride &&
           a->row_stride == b->row_stride;
}

static bool suits_vendor(const struct lk_attention *a, const struct lk_attention_grads *g)
{
    if (!a->queries || !a->keys || a->depth % 8 || a->value_depth % 8 || a->depth > VENDOR_DEPTH ||
        a->value_depth > VENDOR_DEPTH)
        return refuse("no rows, or depths that are no multiples of 8 up to 256");
    if (!isfinite(a->scale))
        return refuse("scale is not finite");
    if ((uintptr_t)a->lse % 16)
        return refuse("lse is not aligned to 16 bytes");
    for (int which = 0; which < (g ? LK_TENSORS : LK_TENSOR_DOUT); which++) {
        const struct lk_heads *h = heads_of(a, g, (enum lk_attention_tensor)which);

        /* Strides of 0 are left to our own kernels, which read what stands for all rows. */
        if ((uintptr_t)h->base % 16 || h->row_stride % 8 || h->head_stride % 8 || !h->row_stride ||
            !h->head_stride ||
            (!a->query_offsets && (h->sequence_stride % 8 || !h->sequence_stride)))
            return refuse("a base is not aligned to 16 bytes or a stride is no multiple of 8");
    }
    if (g && !are_equal(&g->dout, &a->o))
        return refuse("strides of dout are not those of o");
    /* Known to have failed: NVIDIA's cudnn-frontend refuses the first or reports wrong values. */
    if (a->queries == 1 && (g || a->causal == LK_CAUSAL_TOP_LEFT))
        return refuse("one query, backward or causal from the top left");
    return true;
}

/* The mask, simplified: without keys that are hidden there is none. False: rows might see no key. */
static bool find_mask(const struct lk_attention *a, enum lk_causal *out)
{
    bool lengths = a->query_offsets || a->query_lengths || a->key_lengths;
    bool equal = a->queries == a->keys && a->query_offsets == a->key_offsets &&
                 a->query_lengths == a->key_lengths;

    *out = a->causal;
    if (a->causal != LK_CAUSAL_BOTTOM_RIGHT)
        return true;
    if (equal)
        *out = LK_CAUSAL_TOP_LEFT;
    else if (lengths || a->queries > a->keys)
        return refuse("causal from the bottom right, with rows that might see no key");
    else if (a->queries == 1)
        *out = LK_CAUSAL_NONE;
    return true;
}

static bool make_key(const struct lk_attention *a, const struct lk_attention_grads *g,
                     struct lk_cudnn_key *key)
{
    enum lk_causal causal;

    memset(key, 0, sizeof(*key));
    if (!find_mask(a, &causal) || !suits_vendor(a, g))
        return false;
    key->sequences = a->sequences;
    key->heads = a->heads;
    key->kv_heads = a->kv_heads;
    key->queries = a->queries;
    key->keys = a->keys;
    key->depth = a->depth;
    key->value_depth = a->value_depth;
    for (int which = 0; which < (g ? LK_TENSORS : LK_TENSOR_DOUT); which++) {
        const struct lk_heads *h = heads_of(a, g, (enum lk_attention_tensor)which);
        bool keys = lk_tensor_has_keys((enum lk_attention_tensor)which);

        /* Packed sequences begin where their offsets say. */
        key->strides[which][0] = (int64_t)(a->query_offsets
                                               ? (keys ? a->keys : a->queries) * h->row_stride
                                               : h->sequence_stride);
        key->strides[which][1] = (int64_t)h->head_stride;
        key->strides[which][2] = (int64_t)h->row_stride;
    }
    key->most_workspace = a->most_workspace;
    key->type = (uint8_t)a->type;
    key->causal = (uint8_t)causal;
    key->packed = a->query_offsets != NULL;
    key->lengths = key->packed || a->query_lengths || a->key_lengths;
    key->stats = g || a->lse;
    key->backward = g != NULL;
    key->deterministic = g && g->deterministic;
    return true;
}

/* ---- workspaces ---- */

struct parts {
    void *plan;
    int32_t *lengths[2];
    int64_t *offsets[LK_TENSORS];
    float *dq_sum, *row_sum;
};

static size_t take_parts(void *base, const struct lk_attention *a, const struct lk_cudnn_key *key,
                         uint64_t plan, struct parts *out)
{
    struct lk_arena arena = { .base = base };
    uint64_t rows = (uint64_t)a->sequences * a->heads * a->queries;

    memset(out, 0, sizeof(*out));
    out->plan = lk_take(&arena, true, plan ? plan : 1);
    for (int side = 0; side < 2; side++)
        out->lengths[side] = lk_take(&arena, key->lengths, a->sequences * sizeof(int32_t));
    for (int which = 0; which < (key->backward ? LK_TENSORS : LK_TENSOR_DOUT); which++)
        out->offsets[which] = lk_take(&arena, key->packed,
                                      ((uint64_t)a->sequences + 1) * sizeof(int64_t));
    out->dq_sum = lk_take(&arena, key->backward && !key->deterministic,
                          rows * a->depth * sizeof(float));
    out->row_sum = lk_take(&arena, key->backward, rows * sizeof(float));
    return arena.used;
}

static size_t general_bytes(const struct lk_attention *a, const struct lk_attention_grads *g)
{
    uint64_t rows = (uint64_t)a->sequences * a->heads * a->queries;

    return g ? rows * sizeof(float) : 0;
}

static int plan(struct lk_attention_library *lib, const struct lk_attention *a,
                const struct lk_attention_grads *g, struct lk_cudnn_key *key, uint64_t *bytes)
{
    int planned = 0, err;

    attention_why[0] = 0;
    if (!lib->cudnn || !a->sequences || !make_key(a, g, key))
        return LK_VENDOR_NONE;
    err = lk_cudnn_plan(lib->cudnn, key, bytes, attention_why, &planned);
    if (planned)
        count(&lib->plans);
    return err;
}

/* 0: an argument is wrong. */
static size_t call_bytes(struct lk_attention_library *library, const struct lk_attention *attention,
                         const struct lk_attention_grads *grads, const char *call)
{
    struct lk_cudnn_key key;
    struct parts parts;
    uint64_t bytes = 0;
    size_t general, vendor = 0;

    if (check(call, attention, grads))
        return 0;
    if (!plan(library, attention, grads, &key, &bytes))
        vendor = take_parts(NULL, attention, &key, bytes, &parts);
    general = general_bytes(attention, grads);
    if (general < vendor)
        general = vendor;
    return general ? general : LK_BLOCKS_ALIGN;
}

/* ---- backward without lse ---- */

/* Not of packed rows: where they begin and end only the device knows, so that there is no saying how long o has to be. */
static bool is_forgotten(const struct lk_attention *a, const struct lk_attention_grads *g)
{
    return g && !a->lse && !a->query_offsets && a->sequences && a->queries;
}

/* Elements of o from its first to its last one; false: more than there can be. */
static bool count_o(const struct lk_attention *a, uint64_t *out)
{
    uint64_t sequences, last;

    if (__builtin_mul_overflow(a->sequences - UINT64_C(1), a->o.sequence_stride, &sequences) ||
        __builtin_mul_overflow(a->queries - UINT64_C(1), a->o.row_stride, &last) ||
        __builtin_mul_overflow(a->heads - UINT64_C(1), a->o.head_stride, out))
        return false;
    return !__builtin_add_overflow(last, sequences, &last) &&
           !__builtin_add_overflow(*out, last, out) &&
           !__builtin_add_overflow(*out, a->value_depth, out) && *out < UINT64_C(1) << 60;
}

/* The same with o and lse in the beginning of a workspace, of which *out has the rest. */
static int remember(const char *call, const struct lk_attention *a, void *workspace,
                    struct lk_attention *out)
{
    struct lk_arena arena = { .base = workspace };
    uint64_t elements;

    if (check_sizes(call, a))
        return -EINVAL;
    if (!count_o(a, &elements)) {
        lk_blas_fail(-EINVAL, "%s: strides of o are too large", call);
        return -EINVAL;
    }
    *out = *a;
    out->o.base = lk_take(&arena, true, elements * 2);
    out->lse = lk_take(&arena, true,
                       (uint64_t)a->sequences * a->heads * a->queries * sizeof(float));
    out->workspace = arena.base + arena.used;
    return 0;
}

LK_API size_t lk_attention_workspace_bytes(struct lk_attention_library *library,
                                           const struct lk_attention *attention,
                                           const struct lk_attention_grads *grads)
{
    static const char call[] = "lk_attention_workspace_bytes";
    char *nowhere = (char *)(uintptr_t)
        LK_BLOCKS_ALIGN; /* of pointers only their alignment counts */
    struct lk_attention whole;
    size_t forward, backward;

    if (!library || !attention) {
        lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
        return 0;
    }
    if (!is_forgotten(attention, grads))
        return call_bytes(library, attention, grads, call);
    if (remember(call, attention, nowhere, &whole))
        return 0;
    forward = call_bytes(library, &whole, NULL, call);
    backward = forward ? call_bytes(library, &whole, grads, call) : 0;
    if (!backward)
        return 0;
    return (size_t)((char *)whole.workspace - nowhere) + (forward > backward ? forward : backward);
}

/* ---- calls ---- */

static int fail_launch(const char *call, int err)
{
    return err ? lk_blas_fail(err, "%s: a launch failed: %s", call, lk_error_text(err)) : 0;
}

static int run_vendor(struct lk_attention_library *lib, const struct lk_attention *a,
                      const struct lk_attention_grads *g, const struct lk_cudnn_key *key,
                      uint64_t bytes, const char *call, void *stream)
{
    struct lk_attention_layout layout = { .attention = *a };
    struct lk_cudnn_memory memory = { .lse = a->lse, .scale = a->scale };
    struct parts parts;
    int planned = 0, err = 0;

    take_parts(a->workspace, a, key, bytes, &parts);
    if (g)
        layout.grads = *g;
    for (int which = 0; which < (g ? LK_TENSORS : LK_TENSOR_DOUT); which++) {
        memory.tensors[which] = heads_of(a, g, (enum lk_attention_tensor)which)->base;
        memory.offsets[which] = layout.offsets[which] = parts.offsets[which];
    }
    for (int side = 0; side < 2; side++)
        memory.lengths[side] = layout.lengths[side] = parts.lengths[side];
    memory.dq_sum = parts.dq_sum;
    memory.row_sum = parts.row_sum;
    memory.workspace = parts.plan;
    if (key->lengths)
        err = fail_launch(call, lk_run_attention_prepare(&layout, stream));
    if (!err)
        err = lk_cudnn_run(lib->cudnn, key, &memory, attention_why, &planned, stream);
    if (planned)
        count(&lib->plans);
    if (!err && key->lengths)
        err = fail_launch(call, lk_run_attention_clear(&layout, g != NULL, stream));
    if (!err)
        count(&lib->vendor_calls);
    return err;
}

static bool are_wide(const struct lk_attention *a)
{
    const struct lk_heads *all[] = { &a->q, &a->k, &a->v };
    uint64_t odd = a->depth | a->value_depth;

    for (int i = 0; i < 3; i++)
        odd |= (uintptr_t)all[i]->base / 2 | all[i]->row_stride | all[i]->head_stride |
               (a->query_offsets ? 0 : all[i]->sequence_stride);
    return odd % LK_VECTOR == 0;
}

static int run(struct lk_attention_library *lib, const struct lk_attention *a,
               const struct lk_attention_grads *g, const char *call, void *stream)
{
    struct lk_attention_launch launch = { .attention = *a };
    struct lk_cudnn_key key;
    uint64_t bytes = 0;
    int err = plan(lib, a, g, &key, &bytes);

    if (!err)
        err = run_vendor(lib, a, g, &key, bytes, call, stream);
    if (err != LK_VENDOR_NONE)
        return err;
    count(&lib->general_calls);
    launch.wide = are_wide(a);
    if (!g)
        return fail_launch(call, lk_run_attention_forward(&launch, stream));
    launch.grads = *g;
    launch.delta = a->workspace;
    return fail_launch(call, lk_run_attention_backward(&launch, stream));
}

LK_API int lk_attention_forward(struct lk_attention_library *library,
                                const struct lk_attention *attention, void *stream)
{
    static const char call[] = "lk_attention_forward";
    int err;

    if (!library || !attention)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    err = check(call, attention, NULL);
    if (!err)
        err = lk_check_workspace(call, attention->workspace);
    if (err || !attention->sequences || !attention->queries)
        return err;
    return run(library, attention, NULL, call, stream);
}

LK_API int lk_attention_backward(struct lk_attention_library *library,
                                 const struct lk_attention *attention,
                                 const struct lk_attention_grads *grads, void *stream)
{
    static const char call[] = "lk_attention_backward";
    int err;

    struct lk_attention whole;

    if (!library || !attention || !grads)
        return lk_blas_fail(-EINVAL, "%s: a NULL argument", call);
    if (is_forgotten(attention, grads)) {
        err = lk_check_workspace(call, attention->workspace);
        if (!err)
            err = remember(call, attention, attention->workspace, &whole);
        if (!err)
            err = check(call, &whole, grads);
        if (!err)
            err = lk_attention_forward(library, &whole, stream);
        return err ? err : run(library, &whole, grads, call, stream);
    }
    err = check(call, attention, grads);
    if (!err)
        err = lk_check_workspace(call, attention->workspace);
    if (err || !attention->sequences)
        return err;
    return run(library, attention, grads, call, stream);
}
