/* SPDX-License-Identifier: Apache-2.0
 *
 * rings_together [N]: the first N of the cases (all) with the ranks of each in one grid (rank = blockIdx.y), for tools that
 * let one kernel run at a time, such as ncu and compute-sanitizer. Linked with rings_api.c, whose launches are gathered
 * here instead of run.
 */
#include "kernels/cuda_rings_lines.cuh"
#include "tests/check.h"
#include "tests/kernels/rings_cases.h"

#include <cerrno>
#include <cstring>

#define CUDA(call)                                                                            \
    do {                                                                                      \
        cudaError_t cuda_err = (call);                                                        \
        if (cuda_err != cudaSuccess)                                                          \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cuda_err)); \
        CHECK(cuda_err == cudaSuccess);                                                       \
    } while (0)

using namespace lk_rings_device;

namespace
{

using roles = warp_roles<4, 6, 2>;
using every_launch = ring_args<LK_RING_MAX>;

template <class V>
__global__ void __launch_bounds__(roles::threads, roles::residents)
    lk_together_kernel(const every_launch *launches)
{
    __shared__ pipeline pipelines[ROLES];
    const every_launch &args = launches[blockIdx.y];

    if (blockIdx.x >= args.head.ctas)
        return;
    if (args.head.work != LK_WORK_LINES)
        run_cta<V, roles>(args, pipelines, blockIdx.x, args.head.ctas);
    else if constexpr (sizeof(typename V::element) * V::pack == LK_PACK_BYTES)
        run_lines<V, 4>(args, blockIdx.x, args.head.ctas, blockDim.x);
}

using kernel = void (*)(const every_launch *launches);

kernel find_kernel(const lk_ring_head &h)
{
    if (h.wire == h.type)
        return h.type == LK_FP32   ? lk_together_kernel<value_fp32>
               : h.type == LK_BF16 ? lk_together_kernel<value_16<false>>
                                   : lk_together_kernel<value_16<true>>;
    if (h.residual)
        return h.rounding == LK_STOCHASTIC ? lk_together_kernel<value_fp32_bf16_fed<true>>
                                           : lk_together_kernel<value_fp32_bf16_fed<false>>;
    return h.rounding == LK_STOCHASTIC ? lk_together_kernel<value_fp32_bf16<true>>
                                       : lk_together_kernel<value_fp32_bf16<false>>;
}

every_launch *gathered; /* on the device, in the order of the ranks */
uint32_t ranks_gathered;
lk_ring_head head; /* of the rank gathered last */

void *device_zeroed(size_t bytes)
{
    void *ptr;

    CUDA(cudaMalloc(&ptr, bytes));
    CUDA(cudaMemset(ptr, 0, bytes));
    return ptr;
}

/* What one rank has on the device. */
struct memory {
    uint8_t *in, *out;
    void *state;
    float *residual;
};

int call(const rings_data *data, const lk_rings &view, const memory &m, lk_buffers *list)
{
    const rings_case *c = data->c;
    lk_scale scale;
    lk_reduction how = rings_reduction(data, view.rank, &scale, m.residual);
    uint32_t ctas = c->ctas[view.rank % 3];

    for (uint32_t i = 0; i < data->n; i++) {
        list[i] = data->ranks[view.rank].list[i];
        list[i].in = m.in + reinterpret_cast<uintptr_t>(list[i].in);
        list[i].out = m.out + reinterpret_cast<uintptr_t>(list[i].out);
    }
    if (c->op == RINGS_ALL_REDUCE)
        return lk_rings_all_reduce(&view, &how, list, data->n, ctas, nullptr);
    if (c->op == RINGS_REDUCE_SCATTER)
        return lk_rings_reduce_scatter(&view, &how, list, data->n, ctas, nullptr);
    return lk_lines_all_reduce(&view, &how, list, data->n, ctas, nullptr);
}

void run_grid(const rings_case *c)
{
    uint32_t most = c->ctas[0] > c->ctas[1] ? c->ctas[0] : c->ctas[1];

    CHECK(ranks_gathered == (1U << c->shape.ranks) - 1);
    most = c->ctas[2] > most ? c->ctas[2] : most;
    find_kernel(head)<<<dim3(most, c->shape.ranks), roles::threads>>>(gathered);
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
}

void check_rank(const rings_data *data, uint32_t r, const memory &m)
{
    const rings_rank &rank = data->ranks[r];
    size_t bytes = rank.out ? rank.out_bytes : rank.in_bytes;
    uint8_t *got = static_cast<uint8_t *>(malloc(bytes));

    CHECK(got);
    CUDA(cudaMemcpy(got, m.out, bytes, cudaMemcpyDeviceToHost));
    rings_compare(data, r, got);
    free(got);
    got = static_cast<uint8_t *>(malloc(data->residual_bytes + 1));
    CHECK(got);
    CUDA(cudaMemcpy(got, m.residual, data->residual_bytes, cudaMemcpyDeviceToHost));
    rings_compare_residual(data, r, reinterpret_cast<float *>(got));
    free(got);
}

void run_case(const rings_case *c)
{
    rings_data *data = rings_data_make(c);
    lk_buffers *list = static_cast<lk_buffers *>(calloc(data->n, sizeof(*list)));
    lk_rings view = {};
    memory memories[LK_DEVICE_RANKS] = {};

    CHECK(list);
    view.shape = c->shape;
    view.abort = static_cast<uint32_t *>(device_zeroed(sizeof(uint32_t)));
    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        view.segments[r] = device_zeroed(lk_ring_bytes(&c->shape));
        memories[r].state = device_zeroed(lk_ring_state_bytes(&c->shape));
    }
    ranks_gathered = 0;
    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        const rings_rank &rank = data->ranks[r];
        memory &m = memories[r];

        m.in = static_cast<uint8_t *>(device_zeroed(rank.in_bytes));
        m.out = rank.out ? static_cast<uint8_t *>(device_zeroed(rank.out_bytes)) : m.in;
        CUDA(cudaMemcpy(m.in, rank.in, rank.in_bytes, cudaMemcpyHostToDevice));
        if (rank.out)
            CUDA(cudaMemcpy(m.out, rank.out, rank.out_bytes, cudaMemcpyHostToDevice));
        m.residual = static_cast<float *>(device_zeroed(data->residual_bytes + 1));
        CUDA(cudaMemcpy(m.residual, rank.residual, data->residual_bytes, cudaMemcpyHostToDevice));
        view.rank = r;
        view.state = m.state;
        CHECK(call(data, view, m, list) == 0);
    }
    run_grid(c);
    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        check_rank(data, r, memories[r]);
        CUDA(cudaFree(memories[r].in));
        if (memories[r].out != memories[r].in)
            CUDA(cudaFree(memories[r].out));
        CUDA(cudaFree(memories[r].state));
        CUDA(cudaFree(memories[r].residual));
        CUDA(cudaFree(view.segments[r]));
    }
    CUDA(cudaFree(const_cast<uint32_t *>(view.abort)));
    free(list);
    rings_data_free(data);
}

} // namespace

extern "C" const uint32_t lk_backend_ranks = LK_DEVICE_RANKS;

/* A call whose list is cut has more launches than one for each rank: not here. */
extern "C" int lk_run_rings(const lk_ring_launch *launch, void *)
{
    const every_launch *all = reinterpret_cast<const every_launch *>(&launch->head);

    head = launch->head;
    if (ranks_gathered & 1U << head.rings.rank)
        return -E2BIG;
    ranks_gathered |= 1U << head.rings.rank;
    return cudaMemcpy(&gathered[head.rings.rank], all, sizeof(*all), cudaMemcpyHostToDevice);
}

int main(int argc, char **argv)
{
    size_t most = argc > 1 ? strtoul(argv[1], nullptr, 10) : rings_case_count;
    int devices = 0;

    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
        printf("SKIPPED: no GPU on this machine\n");
        return LC_SKIP;
    }
    gathered = static_cast<every_launch *>(device_zeroed(LK_DEVICE_RANKS * sizeof(*gathered)));
    for (size_t i = 0; i < rings_case_count && i < most; i++) {
        char text[400];

        rings_describe(&rings_cases[i], text, sizeof(text));
        printf("%s\n", text);
        fflush(stdout);
        run_case(&rings_cases[i]);
    }
    printf("passed\n");
    return 0;
}
