/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute kernels on a device: the behaviours of the host library, both libraries' bits where they are to be equal,
 * graphs. Arguments: libloongkernels.so, libloongkernels-host.so, optionally --small or --products (these and what is made
 * of them alone).
 */
#include "tests/kernels/compute_matrix.h"
#include "tests/kernels/device.h"

#include <string.h>

static void *host_alloc(size_t bytes)
{
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}

static void host_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

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
    CUDA(cudaMemset(out->param, 0, count * 4));
    CUDA(cudaMemset(out->grad, 0, count * 4));
    CUDA(cudaMemset(out->m, 0, count * 4));
    CUDA(cudaMemset(out->v, 0, count * 4));
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
    CUDA(cudaMemset(out->adamw.state, 0, sizeof(struct lk_adamw_state)));
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

/* The launch that adds up the columns may begin before the one in front of it has ended: it waits for its sums, in a
 * graph too. */
static void a_graph_replays_the_backward_of_a_norm(const struct compute_target *t, uint64_t columns)
{
    const uint64_t rows = 2000;
    struct lk_norm norm = { .kind = LK_RMS_NORM,
                            .rows = rows,
                            .columns = columns,
                            .rstd = device_alloc(rows * 4) };
    struct lk_norm_backward backward = {
        .s = device_alloc(rows * columns * 2),
        .s_stride = columns,
        .dy = device_alloc(rows * columns * 2),
        .dy_stride = columns,
        .dx = device_alloc(rows * columns * 2),
        .dx_stride = columns,
        .dgamma = device_alloc(columns * 4),
        .workspace = device_alloc(t->lib.lk_norm_workspace_bytes(&norm)),
    };
    cudaGraphExec_t exec;
    cudaStream_t stream;
    cudaGraph_t graph;

    for (uint64_t r = 0; r < rows; r++)
        set_float(norm.rstd + r, 1);
    fill_bf16((void *)backward.s, rows * columns, to_bf16(1));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(t->lib.lk_norm_backward(&norm, &backward, stream) == 0);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int step = 1; step <= 3; step++) {
        fill_bf16((void *)backward.dy, rows * columns, to_bf16(step));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaStreamSynchronize(stream));
        for (uint64_t j = 0; j < columns; j += 11)
            CHECK(get_float(backward.dgamma + j) == (float)step * (float)rows);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    device_release(norm.rstd);
    device_release((void *)backward.s);
    device_release((void *)backward.dy);
    device_release(backward.dx);
    device_release(backward.dgamma);
    device_release(backward.workspace);
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

static int end(int failed)
{
    failed += matrix_errors();
    if (failed)
        printf("compute kernels on the device: %d failed\n", failed);
    else
        printf("all compute kernels passed on the device\n");
    return failed ? 1 : 0;
}

static int check_products(const struct compute_target *t)
{
    int failed = check_gemm(t);

    check_mlp(t);
    check_norm_linear(t);
    return failed;
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
    int err, failed;

    CHECK(argc == 3 || argc == 4);
    target.small = argc == 4 && strcmp(argv[3], "--small") == 0;
    if (device_is_missing())
        return LC_SKIP;
    compute_open(&target, argv[1]);
    compute_open(&host, argv[2]);
    err = target.lib.lk_compute_load_all();
    if (err)
        fprintf(stderr, "lk_compute_load_all: %s\n", target.lib.lk_error_text(err));
    CHECK(err == 0 && strcmp(target.lib.lk_backend(), "cuda") == 0);
    if (argc == 4 && strcmp(argv[3], "--products") == 0)
        return end(check_products(&target));
    check_adamw(&target);
    check_swiglu(&target);
    check_norm(&target);
    check_moe(&target);
    failed = check_products(&target);
    check_fold(&target);
    check_augment(&target);
    CHECK(adamw_fingerprint(&target) == adamw_fingerprint(&host));
    CHECK(moe_fingerprint(&target) == moe_fingerprint(&host));
    CHECK(augment_fingerprint(&target) == augment_fingerprint(&host));
    a_graph_replays_steps(&target);
    a_graph_replays_the_backward_of_a_norm(&target, 1024);
    a_graph_replays_the_backward_of_a_norm(&target, 4096);
    a_graph_replays_the_backward_of_a_norm(&target, 8192);
    if (!target.small && device_has_room((size_t)40 << 30))
        more_than_2_31_elements_are_updated(&target);
    else
        printf("more than 2^31 elements: left out\n");
    return end(failed);
}
