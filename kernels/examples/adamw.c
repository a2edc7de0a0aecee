/* SPDX-License-Identifier: Apache-2.0
 *
 * Moves 100000 parameters to a target by AdamW with clipping. Linked with libloongkernels.so it runs on the current CUDA
 * device, with libloongkernels-host.so on the processor:
 *     cc adamw.c $(pkg-config --cflags --libs loongkernels)
 */
#include <kernels/loongcompute.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT ((size_t)100000)

/* The device's memory, by the runtime that the library carries; plain memory with the host library. Kinds of copies are
 * cudaMemcpyHostToDevice and cudaMemcpyDeviceToHost. */
enum {
    TO_DEVICE = 1,
    FROM_DEVICE = 2,
};

static void check(int result, const char *what)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s: %s\n", what, lk_error_text(result));
    exit(1);
}

static void *device_alloc(size_t bytes)
{
    int (*alloc)(void **out, size_t bytes);
    void *out = NULL;

    *(void **)&alloc = lk_runtime_symbol("cudaMalloc");
    if (!alloc)
        return aligned_alloc(256, (bytes + 255) / 256 * 256);
    check(alloc(&out, bytes), "cudaMalloc");
    return out;
}

/* Pageable memory: the copy is over when it returns. */
static void device_copy(void *to, const void *from, size_t bytes, int kind)
{
    int (*copy)(void *to, const void *from, size_t bytes, int kind, void *stream);

    *(void **)&copy = lk_runtime_symbol("cudaMemcpyAsync");
    if (copy)
        check(copy(to, from, bytes, kind, NULL), "cudaMemcpyAsync");
    else
        memcpy(to, from, bytes);
}

static void *device_zeros(size_t bytes)
{
    void *zeros = calloc(1, bytes), *out = device_alloc(bytes);

    if (!zeros || !out)
        exit(1);
    device_copy(out, zeros, bytes, TO_DEVICE);
    free(zeros);
    return out;
}

int main(void)
{
    struct lk_adamw_tensor tensor = {
        .param = device_zeros(COUNT * sizeof(float)),
        .grad = device_zeros(COUNT * sizeof(float)),
        .m = device_zeros(COUNT * sizeof(float)),
        .v = device_zeros(COUNT * sizeof(float)),
        .count = COUNT,
        .lr_factor = 1,
    };
    struct lk_adamw_plan plan = { .bytes = lk_adamw_table_bytes(&tensor, 1) };
    struct lk_adamw adamw = { .lr = { .value = 0.05F },
                              .loss_scale = { .value = 1 },
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .max_norm = 1 };
    float *param = calloc(COUNT, sizeof(float)), *grad = calloc(COUNT, sizeof(float));
    struct lk_adamw_state state;
    void *table;
    float worst = 0;

    check(lk_compute_load_all(), "lk_compute_load_all");
    plan.table = aligned_alloc(16, (plan.bytes + 15) / 16 * 16);
    if (!plan.table || !param || !grad)
        return 1;
    check(lk_adamw_plan(&tensor, 1, &plan), "lk_adamw_plan");
    table = device_alloc(plan.bytes);
    device_copy(table, plan.table, plan.bytes, TO_DEVICE);
    plan.device_table = table;
    adamw.state = device_zeros(sizeof(state));
    adamw.workspace = device_alloc(lk_adamw_workspace_bytes(&plan));

    for (int step = 0; step < 200; step++) {
        for (size_t i = 0; i < COUNT; i++) /* of the squared distance to 1 */
            grad[i] = 2 * (param[i] - 1);
        device_copy((void *)tensor.grad, grad, COUNT * sizeof(float), TO_DEVICE);
        check(lk_adamw_step(&plan, &adamw, NULL), "lk_adamw_step");
        device_copy(param, tensor.param, COUNT * sizeof(float), FROM_DEVICE);
    }
    device_copy(&state, adamw.state, sizeof(state), FROM_DEVICE);
    for (size_t i = 0; i < COUNT; i++)
        worst = fmaxf(worst, fabsf(param[i] - 1));
    printf("%s: %llu steps, the last gradient's norm %.3g, largest distance %.3g\n", lk_backend(),
           (unsigned long long)state.step, state.norm, (double)worst);
    return !(state.step == 200 && worst < 0.1F);
}
