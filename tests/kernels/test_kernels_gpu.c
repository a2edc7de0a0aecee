/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA library on a device: the behaviours of the host library, both libraries' bits side by side, graphs, and
 * sizes beyond 2^31. Arguments: libloongkernels.so, libloongkernels-host.so, optionally --small.
 */
#include "tests/kernels/device.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/target.h"

#include <string.h>

/* 300 tensors of a model's sizes, here and on the device, and their packed buffer. */
#define TENSORS 300
struct model {
    size_t total; /* elements of the packed buffer */
    struct lk_tensor near[TENSORS];
    struct lk_tensor far[TENSORS];
    uint32_t *values;
    unsigned char *values_far;
    unsigned char *packed_far;
};

static struct model *make_model(size_t unit)
{
    struct model *model = calloc(1, sizeof(*model));
    uint64_t state = 11;

    CHECK(model);
    for (int i = 0; i < TENSORS; i++) {
        uint64_t count = ref_next(&state) % 8 < 3 ? 512 : unit * (ref_next(&state) % 512);

        model->near[i] = (struct lk_tensor){ NULL, count, model->total };
        model->total += (count + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN * LK_PACK_ALIGN;
    }
    model->values = calloc(model->total, 4);
    CHECK(model->values);
    for (size_t i = 0; i < model->total; i++)
        model->values[i] = (uint32_t)ref_next(&state);
    model->values_far = device_alloc(model->total * 4);
    model->packed_far = device_alloc(model->total * 2);
    for (int i = 0; i < TENSORS; i++) {
        model->far[i] = model->near[i];
        model->far[i].ptr = model->values_far + model->near[i].offset * 4;
        model->near[i].ptr = model->values + model->near[i].offset;
    }
    return model;
}

static void check_widened(const struct model *model, const uint16_t *packed)
{
    uint32_t *back = calloc(model->total, 4);

    CHECK(back);
    device_get(back, model->values_far, model->total * 4);
    for (int k = 0; k < TENSORS; k++) {
        uint64_t end = model->near[k].offset + model->near[k].count;

        for (uint64_t i = model->near[k].offset; i < end; i++)
            CHECK(back[i] == (uint32_t)packed[i] << 16);
    }
    free(back);
}

static void check_same_bits(const struct target *t, const struct target *host,
                            const struct model *model, enum lk_rounding rounding)
{
    struct lk_rng rng = { 42, 4096, NULL };
    struct lk_scale scale = { .value = 0.1375F };
    uint16_t *want = calloc(model->total, 2), *got = calloc(model->total, 2);

    CHECK(want && got);
    device_put(model->values_far, model->values, model->total * 4);
    CUDA(cudaMemset(model->packed_far, 0, model->total * 2));
    CHECK(t->lib.lk_cast_pack(model->far, TENSORS, model->packed_far, &scale, rounding, &rng,
                              NULL) == 0);
    CHECK(host->lib.lk_cast_pack(model->near, TENSORS, want, &scale, rounding, &rng, NULL) == 0);
    device_get(got, model->packed_far, model->total * 2);
    CHECK(memcmp(got, want, model->total * 2) == 0);
    CHECK(t->lib.lk_cast_unpack(model->far, TENSORS, model->packed_far, NULL) == 0);
    check_widened(model, want);
    free(want);
    free(got);
}

static void both_libraries_give_the_same_bits(const struct target *t, const struct target *host)
{
    struct model *model = make_model(t->small ? 1 : 256);

    check_same_bits(t, host, model, LK_NEAREST);
    check_same_bits(t, host, model, LK_STOCHASTIC);
    device_release(model->values_far);
    device_release(model->packed_far);
    free(model->values);
    free(model);
}

#define GRAPH_COUNT ((size_t)70000)

/* Buffers of the test on graphs. */
struct graph_data {
    float *in;
    uint16_t *out;
    float *in_far, *factor_far, *sum_far;
    uint64_t *offset_far;
    uint16_t *out_far;
};

static cudaGraphExec_t capture(const struct target *t, const struct graph_data *data,
                               cudaStream_t stream)
{
    struct lk_tensor tensor = { data->in_far, GRAPH_COUNT, 0 },
                     back = { data->sum_far, GRAPH_COUNT, 0 };
    struct lk_scale scale = { 0, LK_FP32, data->factor_far };
    struct lk_rng rng = { 5, 0, data->offset_far };
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(t->lib.lk_cast_pack(&tensor, 1, data->out_far, &scale, LK_STOCHASTIC, &rng, stream) == 0);
    CHECK(t->lib.lk_cast_unpack(&back, 1, data->out_far, stream) == 0);
    CHECK(t->lib.lk_sum_shards(data->out_far, 2, GRAPH_COUNT / 2, GRAPH_COUNT / 2, data->sum_far,
                               LK_FP32, NULL, NULL, stream) == 0);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void check_replay(const struct graph_data *data, cudaGraphExec_t exec, cudaStream_t stream,
                         unsigned int replay)
{
    uint64_t offset = replay * GRAPH_COUNT;
    float factor = 0.3F * (float)replay, sum;

    device_put(data->offset_far, &offset, 8);
    device_put(data->factor_far, &factor, 4);
    CUDA(cudaGraphLaunch(exec, stream));
    device_get(data->out, data->out_far, GRAPH_COUNT * 2);
    for (size_t i = 0; i < GRAPH_COUNT; i++)
        CHECK(data->out[i] == ref_stochastic(data->in[i], factor, ref_random(5, offset + i)));
    device_get(&sum, data->sum_far + 100, 4);
    CHECK(sum == ref_float((uint32_t)data->out[100] << 16) +
                     ref_float((uint32_t)data->out[GRAPH_COUNT / 2 + 100] << 16));
}

/* Replays read the scalars anew; a capture takes every kind of call. */
static void graphs_replay_with_new_scalars(const struct target *t)
{
    struct graph_data data = {
        .in = malloc(GRAPH_COUNT * 4),
        .out = malloc(GRAPH_COUNT * 2),
        .in_far = device_alloc(GRAPH_COUNT * 4),
        .factor_far = device_alloc(4),
        .sum_far = device_alloc(GRAPH_COUNT * 4),
        .offset_far = device_alloc(8),
        .out_far = device_alloc(GRAPH_COUNT * 2),
    };
    cudaGraphExec_t exec;
    cudaStream_t stream;

    CHECK(data.in && data.out);
    for (size_t i = 0; i < GRAPH_COUNT; i++)
        data.in[i] = 1 + (float)i * 0x1p-20F;
    device_put(data.in_far, data.in, GRAPH_COUNT * 4);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    exec = capture(t, &data, stream);
    for (unsigned int replay = 1; replay <= 3; replay++)
        check_replay(&data, exec, stream, replay);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaStreamDestroy(stream));
    free(data.in);
    free(data.out);
    device_release(data.in_far);
    device_release(data.out_far);
    device_release(data.factor_far);
    device_release(data.offset_far);
    device_release(data.sum_far);
}

#define WINDOW ((size_t)1024)

static float window_value(uint64_t window, size_t i)
{
    return (float)(window % 1000 + i) * 1.01F;
}

static void check_window(const float *in_far, const uint16_t *out_far, uint64_t window)
{
    float widened[WINDOW];
    uint16_t got[WINDOW];

    device_get(got, out_far + window, sizeof(got));
    device_get(widened, in_far + window, sizeof(widened));
    for (size_t i = 0; i < WINDOW; i++) {
        CHECK(got[i] == ref_nearest(window_value(window, i), 1));
        CHECK(ref_bits(widened[i]) == (uint32_t)got[i] << 16);
    }
}

/* One tensor of 2^31 + 12345 elements; windows at the start, around 2^31 and at the end are compared. */
static void more_than_2_31_elements_are_served(const struct target *t)
{
    const uint64_t count = (UINT64_C(1) << 31) + 12345;
    const uint64_t windows[] = { 0, (UINT64_C(1) << 31) - 512, count - WINDOW };
    float *in_far, values[WINDOW];
    uint16_t *out_far, guard;
    struct lk_tensor tensor;

    in_far = device_alloc(count * 4);
    out_far = device_alloc(count * 2 + 2);
    tensor = (struct lk_tensor){ in_far, count, 0 };
    CUDA(cudaMemset(in_far, 0, count * 4));
    CUDA(cudaMemset(out_far, 0xa5, count * 2 + 2));
    for (int w = 0; w < 3; w++) {
        for (size_t i = 0; i < WINDOW; i++)
            values[i] = window_value(windows[w], i);
        device_put(in_far + windows[w], values, sizeof(values));
    }
    CHECK(t->lib.lk_cast_pack(&tensor, 1, out_far, NULL, LK_NEAREST, NULL, NULL) == 0);
    device_get(&guard, out_far + count, 2);
    CHECK(guard == 0xa5a5);
    device_get(&guard, out_far + (UINT64_C(1) << 30), 2);
    CHECK(guard == 0);
    CHECK(t->lib.lk_cast_unpack(&tensor, 1, out_far, NULL) == 0);
    for (int w = 0; w < 3; w++)
        check_window(in_far, out_far, windows[w]);
    device_release(in_far);
    device_release(out_far);
}

int main(int argc, char **argv)
{
    struct target target = { .alloc = device_alloc,
                             .release = device_release,
                             .put = device_put,
                             .get = device_get };
    struct target host = { 0 };
    int err;

    CHECK(argc == 3 || argc == 4);
    target.small = argc == 4 && strcmp(argv[3], "--small") == 0;
    if (device_is_missing())
        return LC_SKIP;
    open_library(&target, argv[1]);
    open_library(&host, argv[2]);
    CHECK(strcmp(target.lib.lk_backend(), "cuda") == 0);
    err = target.lib.lk_load_all();
    if (err)
        fprintf(stderr, "lk_load_all: %s (driver %d needed)\n", target.lib.lk_error_text(err),
                target.lib.lk_driver_needed());
    CHECK(err == 0);
    check_behaviours(&target);
    both_libraries_give_the_same_bits(&target, &host);
    graphs_replay_with_new_scalars(&target);
    if (!target.small && device_has_room((size_t)16 << 30))
        more_than_2_31_elements_are_served(&target);
    else
        printf("more than 2^31 elements: left out\n");
    printf("all kernels tests passed on the device\n");
    return 0;
}
