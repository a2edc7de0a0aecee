/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels library uses of cuDNN, on this processor: graphs of attention are run operation by operation in single
 * precision, every tensor as its description says. Attributes are kept as they are set; what is read has to be there, and
 * what is referred to has to be finalised. Lengths that stand for sizes of products, and offsets, are obeyed: what lies
 * beyond is neither read nor written. There are two engines; the first one's bits vary, it says. Graphs whose heads have
 * 24 columns have none.
 */
#include "kernels/cudnn_internal.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/value_internal.h"

#define MOST_ATTRIBUTES 16
#define BAD             2000

struct attribute {
    int name, type;
    int64_t count;
    void *values;
};

struct descriptor {
    int kind;
    bool finished;
    struct attribute attributes[MOST_ATTRIBUTES];
    int n;
    float *data;               /* of a tensor while a plan runs: contiguous, as fp32 */
    struct descriptor *engine; /* of a choice: which it is */
    int varies;
    int users; /* plans keep what they need alive, as the library does */
};

/* Of the tests' only thread, as all below. */
int fake_cudnn_live;    /* descriptors and handles that exist */
int fake_cudnn_plans;   /* that were made */
int fake_cudnn_capture; /* what cudaStreamIsCapturing() says */
int fake_cudnn_fails;   /* of this many calls from now the last one fails; 0: none */

void cudnnGetLastErrorString(char *text, size_t room)
{
    strncpy(text, "text of cuDNN", room - 1);
    text[room - 1] = 0;
}

const char *cudnnGetErrorString(int status)
{
    return "name of a status";
}

size_t cudnnGetVersion(void)
{
    return 91900;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out)
{
    *out = fake_cudnn_capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

static bool fails_now(void)
{
    return fake_cudnn_fails && !--fake_cudnn_fails;
}

int cudnnCreate(void **handle)
{
    if (fails_now())
        return BAD;
    *handle = malloc(1);
    fake_cudnn_live++;
    return *handle ? 0 : BAD;
}

int cudnnDestroy(void *handle)
{
    free(handle);
    fake_cudnn_live--;
    return 0;
}

int cudnnSetStream(void *handle, void *stream)
{
    return handle && !fails_now() ? 0 : BAD;
}

/* ---- descriptors ---- */

int cudnnBackendCreateDescriptor(int type, void **out)
{
    struct descriptor *d;

    if (fails_now())
        return BAD;
    d = calloc(1, sizeof(*d));
    if (!d)
        return BAD;
    d->kind = type;
    d->users = 1;
    fake_cudnn_live++;
    *out = d;
    return 0;
}

static struct attribute *find(const struct descriptor *d, int name)
{
    for (int i = 0; i < d->n; i++)
        if (d->attributes[i].name == name)
            return (struct attribute *)&d->attributes[i];
    return NULL;
}

static void hold(struct descriptor *d, int by);

static void hold_values(const struct attribute *a, int by)
{
    for (int64_t i = 0; a->type == LK_CUDNN_TYPE_BACKEND_DESCRIPTOR && i < a->count; i++)
        hold(((struct descriptor **)a->values)[i], by);
}

/* One user more or less. */
static void hold(struct descriptor *d, int by)
{
    d->users += by;
    if (d->users)
        return;
    for (int i = 0; i < d->n; i++) {
        hold_values(&d->attributes[i], -1);
        free(d->attributes[i].values);
    }
    free(d->data);
    free(d);
    fake_cudnn_live--;
}

int cudnnBackendDestroyDescriptor(void *descriptor)
{
    hold(descriptor, -1);
    return 0;
}

static size_t size_of(int type)
{
    switch (type) {
    case LK_CUDNN_TYPE_BOOLEAN:
    case LK_CUDNN_TYPE_CHAR: return 1;
    case LK_CUDNN_TYPE_HANDLE:
    case LK_CUDNN_TYPE_INT64:
    case LK_CUDNN_TYPE_VOID_PTR:
    case LK_CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
    }
}

int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count,
                             const void *values)
{
    struct descriptor *d = descriptor;
    struct attribute *a;

    if (d->finished || d->n == MOST_ATTRIBUTES || find(d, name) || fails_now())
        return BAD;
    for (int64_t i = 0; type == LK_CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; i++)
        if (!((struct descriptor *const *)values)[i]->finished)
            return BAD;
    a = &d->attributes[d->n++];
    *a = (struct attribute){ name, type, count, malloc(size_of(type) * (size_t)count + 1) };
    memcpy(a->values, values, size_of(type) * (size_t)count);
    hold_values(a, 1);
    return 0;
}

static int64_t get_number(const struct descriptor *d, int name, int64_t otherwise)
{
    const struct attribute *a = find(d, name);
    int number;

    if (!a)
        return otherwise;
    if (size_of(a->type) == 8)
        return *(int64_t *)a->values;
    if (size_of(a->type) == 1)
        return *(bool *)a->values;
    memcpy(&number, a->values, sizeof(number));
    return number;
}

static struct descriptor *get_other(const struct descriptor *d, int name)
{
    const struct attribute *a = find(d, name);

    return a ? *(struct descriptor **)a->values : NULL;
}

static const int64_t *get_list(const struct descriptor *d, int name)
{
    return find(d, name)->values;
}

static bool is_served(const struct descriptor *graph)
{
    const struct attribute *operations = find(graph, LK_CUDNN_ATTR_OPERATIONGRAPH_OPS);

    for (int64_t i = 0; operations && i < operations->count; i++) {
        const struct descriptor *operation = ((struct descriptor **)operations->values)[i];
        const struct descriptor *a = get_other(operation, LK_CUDNN_ATTR_OPERATION_MATMUL_ADESC);

        if (a)
            return get_list(a, LK_CUDNN_ATTR_TENSOR_DIMENSIONS)[3] != 24;
    }
    return false;
}

static int find_engines(const struct descriptor *heuristics, int64_t room, int64_t *count,
                        void **out)
{
    const struct descriptor *graph = get_other(heuristics,
                                               LK_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);

    *count = 0;
    if (get_number(heuristics, LK_CUDNN_ATTR_ENGINEHEUR_MODE, -1) != LK_CUDNN_HEUR_MODE_A ||
        room < 2 || !graph || !is_served(graph))
        return 0;
    for (int i = 0; i < 2; i++) {
        struct descriptor *choice = out[i];

        if (cudnnBackendSetAttribute(choice, LK_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
                                     LK_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph))
            return BAD;
        choice->varies = i == 0;
        choice->finished = true;
    }
    *count = 2;
    return 0;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count,
                             void *values)
{
    struct descriptor *d = descriptor;

    if (fails_now())
        return BAD;
    *count = 1;
    if (name == LK_CUDNN_ATTR_ENGINEHEUR_RESULTS && d->finished)
        return find_engines(d, room, count, values);
    if (name == LK_CUDNN_ATTR_ENGINECFG_ENGINE && d->finished) {
        (*(struct descriptor **)values)->varies = d->varies;
        return 0;
    }
    if (name == LK_CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && room) {
        *(int *)values = d->varies ? LK_CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC : 0;
        return 0;
    }
    if (name == LK_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && d->finished) {
        *(int64_t *)values = 1000;
        return 0;
    }
    return BAD;
}

int cudnnBackendFinalize(void *descriptor)
{
    struct descriptor *d = descriptor;

    if (d->finished || fails_now())
        return BAD;
    d->finished = true;
    if (d->kind == LK_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        fake_cudnn_plans++;
    return 0;
}

/* ---- tensors ---- */

struct run {
    const struct descriptor *pack;
    int wrong;
    float shake; /* of what is written: the first engine's bits vary */
};

struct shape {
    int64_t dims[4], strides[4];
};

static struct shape shape_of(const struct descriptor *tensor)
{
    struct shape s;

    memcpy(s.dims, get_list(tensor, LK_CUDNN_ATTR_TENSOR_DIMENSIONS), sizeof(s.dims));
    memcpy(s.strides, get_list(tensor, LK_CUDNN_ATTR_TENSOR_STRIDES), sizeof(s.strides));
    return s;
}

static int64_t elements(const struct shape *s)
{
    return s->dims[0] * s->dims[1] * s->dims[2] * s->dims[3];
}

static void *pointer_of(struct run *run, const struct descriptor *tensor)
{
    const struct attribute *names = find(run->pack, LK_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    int64_t name = get_number(tensor, LK_CUDNN_ATTR_TENSOR_UNIQUE_ID, -1);

    for (int64_t i = 0; i < names->count; i++)
        if (((int64_t *)names->values)[i] == name)
            return ((void **)find(run->pack, LK_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS)->values)[i];
    run->wrong = 1;
    return NULL;
}

/* Where a sequence begins, and how many of its rows there are. */
struct stretch {
    int64_t begin, rows;
};

/* Keys and values may be given as their transposes. */
static bool is_turned(const struct shape *s)
{
    return s->strides[2] == 1 && s->strides[3] != 1;
}

static struct stretch stretch_of(struct run *run, const struct descriptor *tensor, int64_t sequence)
{
    const struct descriptor *offsets = get_other(tensor, LK_CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC);
    struct shape s = shape_of(tensor);
    int64_t row = is_turned(&s) ? 3 : 2;
    const int64_t *at;

    if (!offsets)
        return (struct stretch){ sequence * s.strides[0], s.dims[row] };
    at = pointer_of(run, offsets);
    if (!at || get_number(offsets, LK_CUDNN_ATTR_TENSOR_DATA_TYPE, -1) != LK_CUDNN_DATA_INT64)
        return (struct stretch){ 0, 0 };
    return (struct stretch){ at[sequence], (at[sequence + 1] - at[sequence]) / s.strides[row] };
}

static float read_one(const void *memory, int64_t type, int64_t at)
{
    switch (type) {
    case LK_CUDNN_DATA_BFLOAT16: return widen_bf16(((const uint16_t *)memory)[at]);
    case LK_CUDNN_DATA_HALF: return widen_fp16(((const uint16_t *)memory)[at]);
    case LK_CUDNN_DATA_INT32: return (float)((const int32_t *)memory)[at];
    default: return ((const float *)memory)[at];
    }
}

static float round_to(int64_t type, float x)
{
    if (type == LK_CUDNN_DATA_BFLOAT16)
        return widen_bf16(narrow_bf16(x, 1, 0, 0));
    return type == LK_CUDNN_DATA_HALF ? widen_fp16(narrow_fp16(x)) : x;
}

static void write_one(void *memory, int64_t type, int64_t at, float x)
{
    if (type == LK_CUDNN_DATA_BFLOAT16)
        ((uint16_t *)memory)[at] = (uint16_t)narrow_bf16(x, 1, 0, 0);
    else if (type == LK_CUDNN_DATA_HALF)
        ((uint16_t *)memory)[at] = (uint16_t)narrow_fp16(x);
    else
        ((float *)memory)[at] = x;
}

/* Calls for each element that is there, with its place in memory. */
static void walk(struct run *run, struct descriptor *t, void *memory, bool write)
{
    struct shape s = shape_of(t);
    int64_t type = get_number(t, LK_CUDNN_ATTR_TENSOR_DATA_TYPE, -1), i = 0;
    bool turned = is_turned(&s);

    for (int64_t a = 0; a < s.dims[0]; a++) {
        struct stretch stretch = stretch_of(run, t, a);

        for (int64_t b = 0; b < s.dims[1]; b++)
            for (int64_t c = 0; c < s.dims[2]; c++)
                for (int64_t d = 0; d < s.dims[3]; d++, i++) {
                    int64_t at = stretch.begin + b * s.strides[1] + c * s.strides[2] +
                                 d * s.strides[3];
                    bool there = (turned ? d : c) < stretch.rows;

                    if (write && there)
                        write_one(memory, type, at, t->data[i]);
                    else if (!write)
                        t->data[i] = there ? read_one(memory, type, at) : NAN;
                }
    }
}

static bool is_virtual(const struct descriptor *t)
{
    return get_number(t, LK_CUDNN_ATTR_TENSOR_IS_VIRTUAL, 0) != 0;
}

/* The tensor's values; read where it lies in memory and nothing has made it yet. */
static float *values_of(struct run *run, struct descriptor *t)
{
    struct shape s = shape_of(t);
    void *memory;

    if (t->data)
        return t->data;
    t->data = calloc((size_t)elements(&s) + 1, sizeof(float));
    if (is_virtual(t)) {
        run->wrong = 1; /* used before it was made */
        return t->data;
    }
    memory = pointer_of(run, t);
    if (!memory || (!get_number(t, LK_CUDNN_ATTR_TENSOR_IS_BY_VALUE, 0) && (uintptr_t)memory % 16))
        run->wrong = 1;
    else
        walk(run, t, memory, false);
    return t->data;
}

static float *room_of(struct descriptor *t)
{
    struct shape s = shape_of(t);

    if (!t->data)
        t->data = calloc((size_t)elements(&s) + 1, sizeof(float));
    return t->data;
}

static void made(struct run *run, struct descriptor *t)
{
    struct shape s = shape_of(t);
    int64_t type = get_number(t, LK_CUDNN_ATTR_TENSOR_DATA_TYPE, -1);
    void *memory;

    for (int64_t i = 0; i < elements(&s); i++)
        t->data[i] = round_to(type, t->data[i]);
    if (is_virtual(t))
        return;
    memory = pointer_of(run, t);
    if (memory)
        walk(run, t, memory, true);
}

/* ---- operations ---- */

static int64_t index4(const struct shape *s, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return ((a % s->dims[0] * s->dims[1] + b % s->dims[1]) * s->dims[2] + c % s->dims[2]) *
               s->dims[3] +
           d % s->dims[3];
}

static int64_t limit(struct run *run, const struct descriptor *o, int name, int64_t sequence,
                     int64_t most)
{
    struct descriptor *lengths = get_other(o, name);
    int64_t n = lengths ? (int64_t)values_of(run, lengths)[sequence] : most;

    return n < most ? n : most;
}

/* Heads of b that are fewer than those of a are shared. What lies behind a length is NaN: nobody may rely on it. */
static void run_product(struct run *run, struct descriptor *o)
{
    struct descriptor *a = get_other(o, LK_CUDNN_ATTR_OPERATION_MATMUL_ADESC);
    struct descriptor *b = get_other(o, LK_CUDNN_ATTR_OPERATION_MATMUL_BDESC);
    struct descriptor *c = get_other(o, LK_CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    struct shape as = shape_of(a), bs = shape_of(b), cs = shape_of(c);
    const float *av = values_of(run, a), *bv = values_of(run, b);
    float *cv = room_of(c);

    if (as.dims[3] != bs.dims[2] || cs.dims[2] != as.dims[2] || cs.dims[3] != bs.dims[3] ||
        cs.dims[1] % bs.dims[1])
        run->wrong = 1;
    for (int64_t i = 0; i < elements(&cs); i++)
        cv[i] = NAN;
    for (int64_t s = 0; s < cs.dims[0] && !run->wrong; s++) {
        int64_t m = limit(run, o, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, s,
                          cs.dims[2]);
        int64_t n = limit(run, o, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, s,
                          cs.dims[3]);
        int64_t k = limit(run, o, LK_CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, s,
                          as.dims[3]);

        if (m && !n) /* what becomes of rows that see nothing nobody knows */
            run->wrong = 1;
        for (int64_t h = 0; h < cs.dims[1]; h++)
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++) {
                    int64_t shared = h / (cs.dims[1] / bs.dims[1]);
                    float sum = 0;

                    for (int64_t l = 0; l < k; l++)
                        sum += av[index4(&as, s, h, i, l)] * bv[index4(&bs, s, shared, l, j)];
                    cv[index4(&cs, s, h, i, j)] = is_virtual(c) ? sum : sum * run->shake;
                }
    }
    made(run, c);
}

static float combined(struct run *run, int64_t mode, float x, float b, float t)
{
    switch (mode) {
    case LK_CUDNN_POINTWISE_ADD: return x + b;
    case LK_CUDNN_POINTWISE_SUB: return x - b;
    case LK_CUDNN_POINTWISE_MUL: return x * b;
    case LK_CUDNN_POINTWISE_DIV: return x / b;
    case LK_CUDNN_POINTWISE_EXP: return expf(x);
    case LK_CUDNN_POINTWISE_LOG: return logf(x);
    case LK_CUDNN_POINTWISE_IDENTITY: return x;
    case LK_CUDNN_POINTWISE_CMP_GE: return x >= b ? 1 : 0;
    case LK_CUDNN_POINTWISE_CMP_LT: return x < b ? 1 : 0;
    case LK_CUDNN_POINTWISE_LOGICAL_AND: return x != 0 && b != 0 ? 1 : 0;
    case LK_CUDNN_POINTWISE_BINARY_SELECT: return t != 0 ? x : b;
    default: run->wrong = 1; return 0;
    }
}

static void run_pointwise(struct run *run, struct descriptor *o)
{
    struct descriptor *how = get_other(o, LK_CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    struct descriptor *x = get_other(o, LK_CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
    struct descriptor *b = get_other(o, LK_CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
    struct descriptor *t = get_other(o, LK_CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
    struct descriptor *y = get_other(o, LK_CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    int64_t mode = get_number(how, LK_CUDNN_ATTR_POINTWISE_MODE, -1);
    int64_t axis = get_number(how, LK_CUDNN_ATTR_POINTWISE_AXIS, -1), at = 0;
    struct shape ys = shape_of(y), xs = shape_of(x), bs = shape_of(b ? b : x),
                 ts = shape_of(t ? t : x);
    const float *xv = values_of(run, x), *bv = values_of(run, b ? b : x),
                *tv = values_of(run, t ? t : x);
    float *yv = room_of(y);

    for (int64_t s = 0; s < ys.dims[0]; s++)
        for (int64_t h = 0; h < ys.dims[1]; h++)
            for (int64_t i = 0; i < ys.dims[2]; i++)
                for (int64_t j = 0; j < ys.dims[3]; j++, at++)
                    yv[at] = mode == LK_CUDNN_POINTWISE_GEN_INDEX
                                 ? (float)(axis == 2 ? i : j)
                                 : combined(run, mode, xv[index4(&xs, s, h, i, j)],
                                            bv[index4(&bs, s, h, i, j)],
                                            tv[index4(&ts, s, h, i, j)]);
    made(run, y);
}

/* Along columns, or over the heads that share one. */
static void run_reduction(struct run *run, struct descriptor *o)
{
    struct descriptor *how = get_other(o, LK_CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    struct descriptor *x = get_other(o, LK_CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
    struct descriptor *y = get_other(o, LK_CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    bool most = get_number(how, LK_CUDNN_ATTR_REDUCTION_OPERATOR, -1) == LK_CUDNN_REDUCE_TENSOR_MAX;
    struct shape xs = shape_of(x), ys = shape_of(y);
    const float *xv = values_of(run, x);
    float *yv = room_of(y);
    int64_t group = xs.dims[1] / ys.dims[1], at = 0;

    for (int64_t i = 0; i < elements(&ys); i++)
        yv[i] = most ? -INFINITY : 0;
    for (int64_t s = 0; s < xs.dims[0]; s++)
        for (int64_t h = 0; h < xs.dims[1]; h++)
            for (int64_t i = 0; i < xs.dims[2]; i++)
                for (int64_t j = 0; j < xs.dims[3]; j++, at++) {
                    float *to = &yv[index4(&ys, s, h / group, i, j)];

                    *to = most ? fmaxf(*to, xv[at]) : *to + xv[at];
                }
    made(run, y);
}

static void run_transpose(struct run *run, struct descriptor *o)
{
    struct descriptor *x = get_other(o, LK_CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
    struct descriptor *y = get_other(o, LK_CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    struct shape xs = shape_of(x), ys = shape_of(y);
    const float *xv = values_of(run, x);
    float *yv = room_of(y);

    if (xs.dims[2] != ys.dims[3] || xs.dims[3] != ys.dims[2])
        run->wrong = 1;
    for (int64_t s = 0; s < ys.dims[0] && !run->wrong; s++)
        for (int64_t h = 0; h < ys.dims[1]; h++)
            for (int64_t i = 0; i < ys.dims[2]; i++)
                for (int64_t j = 0; j < ys.dims[3]; j++)
                    yv[index4(&ys, s, h, i, j)] = xv[index4(&xs, s, h, j, i)];
    made(run, y);
}

static void forget(struct descriptor *operation)
{
    for (int i = 0; i < operation->n; i++) {
        struct attribute *a = &operation->attributes[i];

        if (a->type != LK_CUDNN_TYPE_BACKEND_DESCRIPTOR)
            continue;
        free((*(struct descriptor **)a->values)->data);
        (*(struct descriptor **)a->values)->data = NULL;
    }
}

int cudnnBackendExecute(void *handle, void *plan, void *pack)
{
    const struct descriptor *choice = get_other(plan, LK_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    const struct descriptor *graph = get_other(choice, LK_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    const struct attribute *operations = find(graph, LK_CUDNN_ATTR_OPERATIONGRAPH_OPS);
    static int runs;
    struct run run = { .pack = pack, .shake = choice->varies && runs++ % 2 ? 1 + 0x1p-9F : 1 };

    if (!handle || !((struct descriptor *)pack)->finished || fails_now())
        return BAD;
    memset(*(void **)find(run.pack, LK_CUDNN_ATTR_VARIANT_PACK_WORKSPACE)->values, 0xff, 1000);
    for (int64_t i = 0; i < operations->count && !run.wrong; i++) {
        struct descriptor *operation = ((struct descriptor **)operations->values)[i];

        if (operation->kind == LK_CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
            run_product(&run, operation);
        else if (operation->kind == LK_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
            run_pointwise(&run, operation);
        else if (operation->kind == LK_CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
            run_reduction(&run, operation);
        else
            run_transpose(&run, operation);
    }
    for (int64_t i = 0; i < operations->count; i++)
        forget(((struct descriptor **)operations->values)[i]);
    return run.wrong ? BAD : 0;
}
