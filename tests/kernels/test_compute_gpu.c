/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute kernels on a device: the behaviours of the host library, both libraries' bits where they are to be equal,
 * graphs. Arguments: libloongkernels.so, libloongkernels-host.so, optionally --small, --products (these and what is made
 * of them alone), --graphs (these alone) or --races (every kernel that shares memory, for the checker of races). What fails is named, and the rest is run.
 */
#include "tests/kernels/compute_cases.h"
#include "tests/kernels/compute_matrix.h"
#include "tests/kernels/device.h"
#include "tests/kernels/host.h"

#include <string.h>

/* One tensor of `count` elements on the device, zero but for gradients of 1. */
struct adamw_case {
    float *param, *grad, *m, *v, *lr;
    struct lk_adamw_plan plan;
    struct lk_adamw adamw;
};

static void make_case(const struct compute_target *t, uint64_t count, struct adamw_case *out)
{
    struct lk_adamw_tensor tensor = { .count = count, .lr_factor = 1 };
    void *table;

    out->param = device_alloc(count * 4);
    out->grad = device_alloc(count * 4);
    out->m = device_alloc(count * 4);
    out->v = device_alloc(count * 4);
    out->lr = device_alloc(4);
    device_clear(out->param, count * 4);
    device_clear(out->grad, count * 4);
    device_clear(out->m, count * 4);
    device_clear(out->v, count * 4);
    tensor.param = out->param;
    tensor.grad = out->grad;
    tensor.m = out->m;
    tensor.v = out->v;
    out->plan = (struct lk_adamw_plan){ .bytes = t->lib.lk_adamw_table_bytes(&tensor, 1) };
    out->plan.table = host_alloc(out->plan.bytes);
    CHECK(out->plan.table && t->lib.lk_adamw_plan(&tensor, 1, &out->plan) == 0);
    table = device_alloc(out->plan.bytes);
    device_put(table, out->plan.table, out->plan.bytes);
    out->plan.device_table = table;
    out->adamw = (struct lk_adamw){
        .lr = {0,        LK_FP32, out->lr },
        .loss_scale = { .value = 1},
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .state = device_alloc(sizeof(struct lk_adamw_state)),
        .workspace = device_alloc(t->lib.lk_adamw_workspace_bytes(&out->plan)),
    };
    device_clear(out->adamw.state, sizeof(struct lk_adamw_state));
}

static void drop_case(struct adamw_case *data)
{
    device_release(data->param);
    device_release(data->grad);
    device_release(data->m);
    device_release(data->v);
    device_release(data->lr);
    device_release((void *)data->plan.device_table);
    device_release(data->adamw.state);
    device_release(data->adamw.workspace);
    free(data->plan.table);
}

static void set_float(float *far, float value)
{
    device_put(far, &value, 4);
}

static float get_float(const float *far)
{
    float value;

    device_get(&value, far, 4);
    return value;
}

static bool near_to(float got, float want)
{
    return got > want - 1e-5F && got < want + 1e-5F;
}

/* The learning rate and the step come from the device, so that a graph goes on from where it was. */
static void a_graph_replays_steps(const struct compute_target *t)
{
    struct adamw_case data;
    struct lk_adamw_state state;
    cudaGraphExec_t exec;
    cudaStream_t stream;
    cudaGraph_t graph;

    make_case(t, 100000, &data);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(t->lib.lk_adamw_step(&data.plan, &data.adamw, stream) == 0);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    set_float(data.grad + 77777, 2);
    for (int step = 1; step <= 3; step++) {
        set_float(data.lr, (float)step);
        CUDA(cudaGraphLaunch(exec, stream));
        device_get(&state, data.adamw.state, sizeof(state));
        CHECK(state.step == (uint64_t)step && state.norm == 2 && state.applied);
    }
    /* equal gradients: m / sqrt(v) is 1 after the correction of the bias */
    CHECK(near_to(get_float(data.param + 77777), -6));
    CHECK(get_float(data.param + 77776) == 0);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    drop_case(&data);
}

static void fill_bf16(void *far, uint64_t count, uint16_t value)
{
    uint16_t *near = host_alloc(count * 2);

    CHECK(near);
    for (uint64_t i = 0; i < count; i++)
        near[i] = value;
    device_put(far, near, count * 2);
    free(near);
}

static void fill_floats(float *far, uint64_t count, float value)
{
    float *near = host_alloc(count * 4);

    CHECK(near);
    for (uint64_t i = 0; i < count; i++)
        near[i] = value;
    device_put(far, near, count * 4);
    free(near);
}

static bool all_are(const char *what, const float *far, uint64_t count, float want)
{
    float *near = host_alloc(count * 4);
    uint64_t wrong = 0;

    CHECK(near);
    device_get(near, far, count * 4);
    for (uint64_t i = 0; i < count; i++)
        if (near[i] != want && wrong++ == 0)
            fprintf(stderr, "%s[%llu] is %.9g, wanted %.9g\n", what, (unsigned long long)i,
                    (double)near[i], (double)want);
    if (wrong)
        fprintf(stderr, "%s: %llu of %llu are wrong\n", what, (unsigned long long)wrong,
                (unsigned long long)count);
    free(near);
    return wrong == 0;
}

struct backward_case {
    const struct compute_target *t;
    uint64_t columns;
    bool layer, graph;
};

static void launch_backward(const struct backward_case *c, const struct lk_norm *norm,
                            const struct lk_norm_backward *backward, cudaStream_t stream,
                            cudaGraphExec_t exec)
{
    if (exec)
        CUDA(cudaGraphLaunch(exec, stream));
    else
        CHECK(c->t->lib.lk_norm_backward(norm, backward, stream) == 0);
    CUDA(cudaStreamSynchronize(stream));
}

static cudaGraphExec_t capture_backward(const struct backward_case *c, const struct lk_norm *norm,
                                        const struct lk_norm_backward *backward,
                                        cudaStream_t stream)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(c->t->lib.lk_norm_backward(norm, backward, stream) == 0);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* The launch that adds up the columns may begin before the one in front of it has ended: it waits for its sums. Rows of
 * ones, whose sums are exact. */
static void columns_are_summed_behind_the_rows(void *arg)
{
    const struct backward_case *c = arg;
    const uint64_t rows = 2000, count = rows * c->columns;
    struct lk_norm norm = { .kind = c->layer ? LK_LAYER_NORM : LK_RMS_NORM,
                            .rows = rows,
                            .columns = c->columns,
                            .mean = device_alloc(rows * 4),
                            .rstd = device_alloc(rows * 4) };
    struct lk_norm_backward backward = {
        .s = device_alloc(count * 2),
        .s_stride = c->columns,
        .dy = device_alloc(count * 2),
        .dy_stride = c->columns,
        .dx = device_alloc(count * 2),
        .dx_stride = c->columns,
        .dgamma = device_alloc(c->columns * 4),
        .dbeta = c->layer ? device_alloc(c->columns * 4) : NULL,
        .workspace = device_alloc(c->t->lib.lk_norm_workspace_bytes(&norm)),
    };
    cudaGraphExec_t exec = NULL;
    cudaStream_t stream;
    bool good = true;

    fill_floats(norm.rstd, rows, 1);
    fill_floats(norm.mean, rows, 0);
    fill_bf16((void *)backward.s, count, to_bf16(1));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (c->graph)
        exec = capture_backward(c, &norm, &backward, stream);
    for (int step = 1; step <= 3; step++) {
        fill_bf16((void *)backward.dy, count, to_bf16(step));
        launch_backward(c, &norm, &backward, stream, exec);
        good &= all_are("dgamma", backward.dgamma, c->columns, (float)step * (float)rows);
        if (backward.dbeta)
            good &= all_are("dbeta", backward.dbeta, c->columns, (float)step * (float)rows);
    }
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaStreamDestroy(stream));
    device_release(norm.mean);
    device_release(norm.rstd);
    device_release((void *)backward.s);
    device_release((void *)backward.dy);
    device_release(backward.dx);
    device_release(backward.dgamma);
    if (backward.dbeta)
        device_release(backward.dbeta);
    device_release(backward.workspace);
    CHECK(good);
}

static void check_backwards(const struct compute_target *t)
{
    static const uint64_t columns[] = { 256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 1001 };

    for (size_t i = 0; i < sizeof(columns) / sizeof(*columns); i++)
        for (int way = 0; way < 4; way++) {
            struct backward_case c = { t, columns[i], way & 1, way & 2 };

            run_case(columns_are_summed_behind_the_rows, &c, "backward of %s of 2000 x %llu, %s",
                     c.layer ? "LayerNorm" : "RMSNorm", (unsigned long long)c.columns,
                     c.graph ? "in a graph" : "at once");
        }
}

/* ---- norms one behind another ---- */

enum {
    CHAIN_ROWS = 2000,
    CHAIN_STEPS = 20
};

struct chain_memory {
    uint16_t *begin, *zeros, *ones, *dy, *dx, *y;
    float *rstd, *own_rstd;
};

/* dx is dy, as s is zeros and rstd 1; then dy becomes dx + 1. */
static void launch_step(const struct backward_case *c, const struct chain_memory *m,
                        cudaStream_t stream)
{
    struct lk_norm norm = { .kind = LK_RMS_NORM,
                            .rows = CHAIN_ROWS,
                            .columns = c->columns,
                            .rstd = m->rstd };
    const struct lk_norm_backward backward = { .s = m->zeros,
                                               .s_stride = c->columns,
                                               .dy = m->dy,
                                               .dy_stride = c->columns,
                                               .dx = m->dx,
                                               .dx_stride = c->columns };
    const struct lk_norm_forward forward = { .x = m->dx,
                                             .x_stride = c->columns,
                                             .residual = m->ones,
                                             .residual_stride = c->columns,
                                             .sum = m->dy,
                                             .sum_stride = c->columns,
                                             .y = m->y,
                                             .y_stride = c->columns };

    CHECK(c->t->lib.lk_norm_backward(&norm, &backward, stream) == 0);
    norm.rstd = m->own_rstd;
    CHECK(c->t->lib.lk_norm_forward(&norm, &forward, stream) == 0);
}

/* The first step is behind a copy on this stream and one on another. */
static void launch_chain(const struct backward_case *c, const struct chain_memory *m,
                         const cudaStream_t streams[2], const cudaEvent_t events[2])
{
    const size_t bytes = CHAIN_ROWS * c->columns * 2;

    CUDA(cudaEventRecord(events[0], streams[0]));
    CUDA(cudaStreamWaitEvent(streams[1], events[0], 0));
    CUDA(cudaMemcpyAsync(m->dx, m->begin, bytes, cudaMemcpyDeviceToDevice, streams[1]));
    CUDA(cudaMemcpyAsync(m->dy, m->begin, bytes, cudaMemcpyDeviceToDevice, streams[0]));
    CUDA(cudaEventRecord(events[1], streams[1]));
    CUDA(cudaStreamWaitEvent(streams[0], events[1], 0));
    for (int step = 0; step < CHAIN_STEPS; step++)
        launch_step(c, m, streams[0]);
}

static void check_chain(const struct chain_memory *m, uint64_t count)
{
    uint16_t *near = host_alloc(count * 2);

    CHECK(near);
    device_get(near, m->dy, count * 2);
    for (uint64_t i = 0; i < count; i++)
        CHECK(from_bf16(near[i]) == 1 + CHAIN_STEPS);
    free(near);
}

/* A kernel may be launched before the one in front of it has ended: it waits for what that one writes. */
static void norms_wait_for_each_other(void *arg)
{
    const struct backward_case *c = arg;
    const uint64_t count = CHAIN_ROWS * c->columns;
    uint16_t *all = device_alloc(6 * count * 2);
    float *scales = device_alloc(2 * CHAIN_ROWS * sizeof(float));
    const struct chain_memory m = { all,
                                    all + count,
                                    all + 2 * count,
                                    all + 3 * count,
                                    all + 4 * count,
                                    all + 5 * count,
                                    scales,
                                    scales + CHAIN_ROWS };
    cudaStream_t streams[2];
    cudaEvent_t events[2];
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph;

    fill_bf16(m.begin, count, to_bf16(1));
    fill_bf16(m.zeros, count, 0);
    fill_bf16(m.ones, count, to_bf16(1));
    fill_floats(m.rstd, CHAIN_ROWS, 1);
    for (int i = 0; i < 2; i++) {
        CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    }
    if (c->graph) {
        CUDA(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal));
        launch_chain(c, &m, streams, events);
        CUDA(cudaStreamEndCapture(streams[0], &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    for (int times = 0; times < 3; times++) {
        if (exec)
            CUDA(cudaGraphLaunch(exec, streams[0]));
        else
            launch_chain(c, &m, streams, events);
    }
    CUDA(cudaStreamSynchronize(streams[0]));
    check_chain(&m, count);
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    for (int i = 0; i < 2; i++) {
        CUDA(cudaStreamDestroy(streams[i]));
        CUDA(cudaEventDestroy(events[i]));
    }
    device_release(all);
    device_release(scales);
}

static void check_chains(const struct compute_target *t)
{
    static const uint64_t columns[] = { 1024, 2048, 4096, 5120, 8192, 16384, 1001 };

    for (size_t i = 0; i < sizeof(columns) / sizeof(*columns); i++)
        for (int graph = 0; graph < 2; graph++) {
            struct backward_case c = { .t = t, .columns = columns[i], .graph = graph };

            run_case(norms_wait_for_each_other, &c, "norms of %d x %llu in a row, %s", CHAIN_ROWS,
                     (unsigned long long)c.columns, c.graph ? "in a graph" : "at once");
        }
}

static void more_than_2_31_elements_are_updated(const struct compute_target *t)
{
    const uint64_t count = (UINT64_C(1) << 31) + 70001;
    const uint64_t places[] = { 0, (UINT64_C(1) << 30) + 1, (UINT64_C(1) << 31) + 3, count - 1 };
    struct adamw_case data;
    struct lk_adamw_state state;

    make_case(t, count, &data);
    set_float(data.lr, 1);
    for (int i = 0; i < 4; i++)
        set_float(data.grad + places[i], 1);
    CHECK(t->lib.lk_adamw_step(&data.plan, &data.adamw, NULL) == 0);
    device_get(&state, data.adamw.state, sizeof(state));
    CHECK(state.norm == 2 && state.applied);
    for (int i = 0; i < 4; i++)
        CHECK(near_to(get_float(data.param + places[i]), -1));
    CHECK(get_float(data.param + places[2] - 1) == 0);
    drop_case(&data);
}

/* ---- norms of many rows ---- */

/* More rows than the blocks that stay take in some rounds, and not a whole number of rounds; by SOME_ROWS at a time other
 * kernels serve. */
struct many_case {
    const struct compute_target *t;
    uint64_t columns, rows;
    bool layer, residual;
    uint16_t *x, *other;
};

enum {
    SOME_ROWS = 65
};

struct many_memory {
    uint16_t *x, *residual, *sum, *y;
    float *mean, *rstd;
};

static void forward_rows(const struct many_case *c, const struct many_memory *m, uint64_t at,
                         uint64_t rows)
{
    const struct lk_norm norm = { .kind = c->layer ? LK_LAYER_NORM : LK_RMS_NORM,
                                  .rows = rows,
                                  .columns = c->columns,
                                  .eps = 1e-5,
                                  .mean = m->mean + at,
                                  .rstd = m->rstd + at };
    const struct lk_norm_forward forward = {
        .x = m->x + at * c->columns,
        .x_stride = c->columns,
        .residual = c->residual ? m->residual + at * c->columns : NULL,
        .residual_stride = c->columns,
        .sum = c->residual ? m->sum + at * c->columns : NULL,
        .sum_stride = c->columns,
        .y = m->y + at * c->columns,
        .y_stride = c->columns,
    };

    CHECK(c->t->lib.lk_norm_forward(&norm, &forward, NULL) == 0);
}

/* As far as two roundings to bf16 of sums in another order are apart. */
static void values_are_near(const uint16_t *got, const uint16_t *want, uint64_t count)
{
    uint16_t *near[2] = { host_alloc(count * 2), host_alloc(count * 2) };

    CHECK(near[0] && near[1]);
    device_get(near[0], got, count * 2);
    device_get(near[1], want, count * 2);
    for (uint64_t i = 0; i < count; i++) {
        double a = from_bf16(near[0][i]), b = from_bf16(near[1][i]);
        double bound = 0x1p-7 * (b < 0 ? -b : b) + 1e-6;
        bool good = a - b <= bound && b - a <= bound;

        if (!good)
            fprintf(stderr, "element %llu is %g, and %g by some rows at a time\n",
                    (unsigned long long)i, a, b);
        CHECK(good);
    }
    free(near[0]);
    free(near[1]);
}

static void many_rows_are_as_some(void *arg)
{
    const struct many_case *c = arg;
    const uint64_t count = c->rows * c->columns;
    struct many_memory m = { .x = c->x,
                             .residual = c->other,
                             .sum = device_alloc(count * 2),
                             .y = device_alloc(count * 2),
                             .mean = device_alloc(c->rows * 4),
                             .rstd = device_alloc(c->rows * 4) };
    struct many_memory other = m;

    other.sum = device_alloc(count * 2);
    other.y = device_alloc(count * 2);
    forward_rows(c, &m, 0, c->rows);
    for (uint64_t at = 0; at < c->rows; at += SOME_ROWS)
        forward_rows(c, &other, at, c->rows - at < SOME_ROWS ? c->rows - at : SOME_ROWS);
    values_are_near(m.y, other.y, count);
    if (c->residual)
        values_are_near(m.sum, other.sum, count);
    device_release(m.sum);
    device_release(m.y);
    device_release(m.mean);
    device_release(m.rstd);
    device_release(other.sum);
    device_release(other.y);
}

static void check_many_rows(const struct compute_target *t)
{
    static const uint64_t shapes[][2] = {
        {9001,  1024},
        { 2601, 2048},
        { 2601, 4096},
        { 2601, 5120},
        { 1201, 8192},
    };

    for (size_t i = 0; !t->small && i < sizeof(shapes) / sizeof(*shapes); i++) {
        const uint64_t rows = shapes[i][0], columns = shapes[i][1];
        struct many_case c = { .t = t,
                               .columns = columns,
                               .rows = rows,
                               .x = random_bf16(t, rows * columns, 11),
                               .other = random_bf16(t, rows * columns, 13) };

        for (int way = 0; way < 4; way++) {
            c.layer = way & 1;
            c.residual = way & 2;
            run_case(many_rows_are_as_some, &c, "%s of %llu x %llu%s",
                     c.layer ? "LayerNorm" : "RMSNorm", (unsigned long long)rows,
                     (unsigned long long)columns, c.residual ? ", with a residual" : "");
        }
        device_release(c.x);
        device_release(c.other);
    }
}

/* ---- parts ---- */

struct part {
    const char *name;
    void (*run)(const struct compute_target *t);
    bool product, graph; /* of the runs with --products, with --graphs */
};

static void products_are_right(const struct compute_target *t)
{
    CHECK(check_gemm(t) == 0);
}

static void graphs_replay(const struct compute_target *t)
{
    a_graph_replays_steps(t);
    check_backwards(t);
    check_chains(t);
}

static void large_tensors(const struct compute_target *t)
{
    if (!t->small && device_has_room((size_t)40 << 30))
        more_than_2_31_elements_are_updated(t);
    else
        printf("more than 2^31 elements: left out\n");
}

static const struct part parts[] = {
    {"AdamW",                         check_adamw,        false, false},
    { "SwiGLU",                       check_swiglu,       false, false},
    { "norms",                        check_norm,         false, false},
    { "norms of many rows",           check_many_rows,    false, false},
    { "rows to experts",              check_moe,          false, false},
    { "products",                     products_are_right, true,  false},
    { "the perceptron",               check_mlp,          true,  false},
    { "a norm and the matrix behind", check_norm_linear,  true,  false},
    { "folded weights",               check_fold,         false, false},
    { "augmentation",                 check_augment,      false, false},
    { "graphs",                       graphs_replay,      false, true },
    { "more than 2^31 elements",      large_tensors,      false, false},
};

struct job {
    const struct part *part;
    const struct compute_target *t;
};

static void run_part(void *arg)
{
    const struct job *job = arg;

    job->part->run(job->t);
}

static void run_parts(const struct compute_target *t, const char *only)
{
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        struct job job = { &parts[i], t };

        if ((strcmp(only, "--products") == 0 && !job.part->product) ||
            (strcmp(only, "--graphs") == 0 && !job.part->graph))
            continue;
        run_case(run_part, &job, "%s", job.part->name);
    }
}

struct both {
    const struct compute_target *device, *host;
};

static void adamw_gives_the_host_s_bits(void *arg)
{
    const struct both *both = arg;

    CHECK(adamw_fingerprint(both->device) == adamw_fingerprint(both->host));
}

static void moe_gives_the_host_s_bits(void *arg)
{
    const struct both *both = arg;

    CHECK(moe_fingerprint(both->device) == moe_fingerprint(both->host));
}

static void augmentation_gives_the_host_s_bits(void *arg)
{
    const struct both *both = arg;

    CHECK(augment_fingerprint(both->device) == augment_fingerprint(both->host));
}

int main(int argc, char **argv)
{
    struct compute_target target = { .alloc = device_alloc,
                                     .release = device_release,
                                     .put = device_put,
                                     .get = device_get };
    struct compute_target host = { .alloc = host_alloc,
                                   .release = free,
                                   .put = host_copy,
                                   .get = host_copy };
    struct both both = { &target, &host };
    const char *only = argc == 4 ? argv[3] : "";
    int err, failed;

    CHECK(argc == 3 || argc == 4);
    target.small = strcmp(only, "--small") == 0;
    if (device_is_missing())
        return LC_SKIP;
    compute_open(&target, argv[1]);
    compute_open(&host, argv[2]);
    err = target.lib.lk_compute_load_all();
    if (err)
        fprintf(stderr, "lk_compute_load_all: %s\n", target.lib.lk_error_text(err));
    CHECK(err == 0 && strcmp(target.lib.lk_backend(), "cuda") == 0);
    if (strcmp(only, "--races") == 0)
        check_races(&target);
    else
        run_parts(&target, only);
    if (!*only || target.small) {
        run_case(adamw_gives_the_host_s_bits, &both, "AdamW's bits");
        run_case(moe_gives_the_host_s_bits, &both, "bits of rows to experts");
        run_case(augmentation_gives_the_host_s_bits, &both, "augmentation's bits");
    }
    failed = cases_failed() + matrix_errors();
    printf(failed ? "compute kernels on the device: %d failed\n"
                  : "all compute kernels passed on the device\n",
           failed);
    return failed ? 1 : 0;
}
