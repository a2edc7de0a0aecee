/* SPDX-License-Identifier: Apache-2.0
 *
 * A matrix product that fills the GPU, over and over, with a result that is known: whoever writes where it should not is
 * found here, too. A library of its own, since the program that opens it also runs without CUDA. */
#include <cuda_runtime.h>

#include <new>

#define EDGE 1024
#define TILE 32
#define ROWS 4 /* of a thread */

namespace
{

__global__ void __launch_bounds__(TILE *TILE / ROWS)
    multiply(const float *__restrict__ a, const float *__restrict__ b, float *__restrict__ c)
{
    __shared__ float left[TILE][TILE + 1], right[TILE][TILE + 1];
    unsigned x = threadIdx.x, y = threadIdx.y * ROWS;
    unsigned row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum[ROWS] = {};

    for (unsigned k = 0; k < EDGE; k += TILE) {
        for (unsigned i = 0; i < ROWS; i++) {
            left[y + i][x] = a[(row + i) * EDGE + k + x];
            right[y + i][x] = b[(k + y + i) * EDGE + column];
        }
        __syncthreads();
        for (unsigned j = 0; j < TILE; j++)
            for (unsigned i = 0; i < ROWS; i++)
                sum[i] += left[y + i][j] * right[j][x];
        __syncthreads();
    }
    for (unsigned i = 0; i < ROWS; i++)
        c[(row + i) * EDGE + column] = sum[i];
}

/* All of a row of A, and all of a column of B are alike: small whole numbers. */
__global__ void fill(float *a, float *b, unsigned salt)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;

    a[i] = float((i / EDGE + salt) % 7);
    b[i] = float((i % EDGE + salt) % 5);
}

__global__ void compare(const float *c, unsigned salt, unsigned *wrong)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;

    if (c[i] != float(EDGE * ((i / EDGE + salt) % 7) * ((i % EDGE + salt) % 5)))
        atomicAdd(wrong, 1u);
}

struct load {
    float *a, *b, *c;
    unsigned *wrong, salt;
    cudaStream_t stream;
};

constexpr size_t elements = size_t(EDGE) * EDGE;
constexpr unsigned threads = 256, blocks = elements / threads;

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/* NULL: it cannot. */
EXPORT void *lc_test_load_new(int device, unsigned salt)
{
    load *l = new (std::nothrow) load{};

    if (l && cudaSetDevice(device) == cudaSuccess &&
        cudaMalloc(&l->a, elements * sizeof(float)) == cudaSuccess &&
        cudaMalloc(&l->b, elements * sizeof(float)) == cudaSuccess &&
        cudaMalloc(&l->c, elements * sizeof(float)) == cudaSuccess &&
        cudaMalloc(&l->wrong, sizeof(*l->wrong)) == cudaSuccess &&
        cudaMemset(l->wrong, 0, sizeof(*l->wrong)) == cudaSuccess &&
        cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking) == cudaSuccess) {
        l->salt = salt;
        fill<<<blocks, threads, 0, l->stream>>>(l->a, l->b, salt);
        multiply<<<dim3(EDGE / TILE, EDGE / TILE), dim3(TILE, TILE / ROWS), 0, l->stream>>>(
            l->a, l->b, l->c);
        compare<<<blocks, threads, 0, l->stream>>>(l->c, salt, l->wrong);
        if (cudaStreamSynchronize(l->stream) == cudaSuccess)
            return l;
    }
    delete l;
    return nullptr;
}

/* `stream` NULL: its own. Everywhere the same is computed, so it does not matter who writes it. */
EXPORT int lc_test_load_add(void *handle, cudaStream_t stream, int times)
{
    const load *l = static_cast<load *>(handle);

    for (int i = 0; i < times; i++)
        multiply<<<dim3(EDGE / TILE, EDGE / TILE), dim3(TILE, TILE / ROWS), 0,
                   stream ? stream : l->stream>>>(l->a, l->b, l->c);
    return cudaGetLastError();
}

/* Waits for it; how many elements have ever been wrong. */
EXPORT int lc_test_load_check(void *handle, unsigned *out)
{
    const load *l = static_cast<load *>(handle);

    compare<<<blocks, threads, 0, l->stream>>>(l->c, l->salt, l->wrong);
    if (cudaMemcpyAsync(out, l->wrong, sizeof(*out), cudaMemcpyDeviceToHost, l->stream) !=
        cudaSuccess)
        return cudaGetLastError();
    return cudaStreamSynchronize(l->stream);
}

EXPORT void lc_test_load_free(void *handle)
{
    load *l = static_cast<load *>(handle);

    (void)cudaFree(l->a);
    (void)cudaFree(l->b);
    (void)cudaFree(l->c);
    (void)cudaFree(l->wrong);
    (void)cudaStreamDestroy(l->stream);
    delete l;
}
