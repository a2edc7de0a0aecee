/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/kernels/peers.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
#define LK_SYM(name) __typeof__(name) *name;
#define FUNCTIONS                   \
    LK_SYM(lk_backend)              \
    LK_SYM(lk_error_text)           \
    LK_SYM(lk_rings_load)           \
    LK_SYM(lk_ring_bytes)           \
    LK_SYM(lk_ring_state_bytes)     \
    LK_SYM(lk_segment_new)          \
    LK_SYM(lk_segment_map)          \
    LK_SYM(lk_rings_all_reduce)     \
    LK_SYM(lk_lines_all_reduce)     \
    LK_SYM(lk_rings_exchange)       \
    LK_SYM(lk_blas_open)            \
    LK_SYM(lk_blas_error)           \
    LK_SYM(lk_gemm_workspace_bytes) \
    LK_SYM(lk_gemm_run)
    FUNCTIONS
#undef LK_SYM
} lib;

static struct {
    struct lk_blas *blas[RANKS_MAX];
    struct lk_gemm gemm[RANKS_MAX];
} products;

void bench_must(int err, const char *what)
{
    if (!err)
        return;
    fprintf(stderr, "%s: %s\n", what,
            bench.cuda && err > 0 ? cudaGetErrorString((cudaError_t)err) : lib.lk_error_text(err));
    exit(1);
}

void library_open(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    bool whole = handle != NULL;

#define LK_SYM(name)                                                                  \
    lib.name = handle ? (__typeof__(lib.name))(uintptr_t)dlsym(handle, #name) : NULL; \
    whole = whole && lib.name;
    FUNCTIONS
#undef LK_SYM
    if (!whole) {
        fprintf(stderr, "%s: %s\n", path, handle ? "no kernels library with rings" : dlerror());
        exit(1);
    }
    bench.variant = (__typeof__(bench.variant))(uintptr_t)dlsym(handle, "lk_rings_variant");
    bench.variant_kinds = (__typeof__(bench.variant_kinds))(uintptr_t)dlsym(
        handle, "lk_rings_variant_kinds");
    bench.cuda = strcmp(lib.lk_backend(), "cuda") == 0;
}

static void *zeroed(size_t bytes)
{
    void *ptr = bench.cuda ? NULL : aligned_alloc(128, (bytes + 127) / 128 * 128);

    if (bench.cuda) {
        CUDA(cudaMalloc(&ptr, bytes));
        CUDA(cudaMemset(ptr, 0, bytes));
    } else if (!ptr) {
        exit(1);
    } else {
        memset(ptr, 0, bytes);
    }
    return ptr;
}

/* A rank's segment as all others see it, at [other]. */
static void share(uint32_t rank, size_t bytes, bool plain_memory)
{
    struct rank *r = &bench.of[rank];
    void *segment;
    int fd = -1;

    bench_use(rank);
    if (plain_memory)
        segment = zeroed(bytes);
    else
        bench_must(lib.lk_segment_new(bytes, r->stream, &segment, &fd), "lk_segment_new");
    for (uint32_t to = 0; to < bench.ranks; to++) {
        bench_use(to);
        if (plain_memory || bench.of[to].device == r->device)
            bench.of[to].rings.segments[rank] = segment;
        else
            bench_must(lib.lk_segment_map(fd, bytes, &bench.of[to].rings.segments[rank]),
                       "lk_segment_map");
    }
    if (fd >= 0)
        close(fd);
}

/* One set for all candidates. */
void library_make_rings(const struct lk_ring_shape *shape, bool plain_memory)
{
    for (uint32_t i = 0; i < bench.ranks; i++) {
        struct rank *r = &bench.of[i];

        bench_use(i);
        bench_must(lib.lk_rings_load(), "lk_rings_load");
        r->rings.shape = *shape;
        r->rings.rank = i;
        r->rings.state = zeroed(lib.lk_ring_state_bytes(shape));
        r->rings.abort = zeroed(sizeof(uint32_t));
        for (int other = 0; plain_memory && other < bench.devices; other++)
            if (other != r->device && i < (uint32_t)bench.devices)
                CUDA(cudaDeviceEnablePeerAccess(other, 0));
    }
    for (uint32_t i = 0; i < bench.ranks; i++)
        share(i, lib.lk_ring_bytes(shape), plain_memory && bench.cuda);
    for (uint32_t i = 0; bench.cuda && i < bench.ranks; i++) {
        bench_use(i);
        CUDA(cudaDeviceSynchronize());
    }
}

static int exchange(const struct row *row, const struct rank *r, size_t at)
{
    struct lk_message sends[RANKS_MAX], recvs[RANKS_MAX];
    size_t part = row->bytes / bench.ranks;
    struct lk_row_mask mask = { r->in, r->mask, bench.most / ROW_BYTES, ROW_BYTES };

    for (uint32_t p = 0; p < bench.ranks; p++) {
        sends[p] = (struct lk_message){ r->in + at + p * part, part, p, 1 };
        recvs[p] = (struct lk_message){ r->out + at + p * part, part, p, 0 };
    }
    return lib.lk_rings_exchange(&r->rings, sends, bench.ranks, recvs, bench.ranks,
                                 row->c->masked ? &mask : NULL, row->ctas, r->stream);
}

void library_call(const struct row *row, uint32_t rank, size_t at)
{
    const struct bench_case *c = row->c;
    const struct rank *r = &bench.of[rank];
    struct lk_reduction how = { .type = c->type, .wire = c->wire, .post = 1 };
    struct lk_buffers one = { r->in + at, r->out + at, row->bytes / (c->type == LK_FP32 ? 4 : 2) };

    bench_use(rank);
    bench_must(c->kind == LK_KIND_EXCHANGE ? exchange(row, r, at)
               : c->kind == LK_KIND_LINES
                   ? lib.lk_lines_all_reduce(&r->rings, &how, &one, 1, row->ctas, r->stream)
                   : lib.lk_rings_all_reduce(&r->rings, &how, &one, 1, row->ctas, r->stream),
               c->what);
}

/* What is multiplied does not matter, but that its bits differ. */
void library_gemm_open(size_t side)
{
    for (uint32_t i = 0; i < bench.ranks; i++) {
        struct lk_gemm *g = &products.gemm[i];
        uint8_t *memory;

        bench_use(i);
        if (lib.lk_blas_open(NULL, 0, &products.blas[i])) {
            fprintf(stderr, "products: %s\n", lib.lk_blas_error());
            exit(1);
        }
        *g = (struct lk_gemm){ .rows = side,
                               .columns = side,
                               .depth = side,
                               .type = LK_BF16,
                               .out_type = LK_BF16,
                               .a_stride = side,
                               .b_stride = side,
                               .d_stride = side,
                               .b_transposed = 1,
                               .alpha = 1 };
        g->workspace_bytes = lib.lk_gemm_workspace_bytes(products.blas[i]);
        memory = zeroed(6 * side * side + g->workspace_bytes);
        CUDA(cudaMemcpy(memory, bench.of[i].in,
                        4 * side * side < bench.most ? 4 * side * side : bench.most,
                        cudaMemcpyDeviceToDevice));
        g->a = memory;
        g->b = memory + 2 * side * side;
        g->d = memory + 4 * side * side;
        g->workspace = memory + 6 * side * side;
    }
}

void library_gemm(uint32_t rank)
{
    bench_use(rank);
    if (lib.lk_gemm_run(products.blas[rank], &products.gemm[rank], bench.of[rank].other)) {
        fprintf(stderr, "product: %s\n", lib.lk_blas_error());
        exit(1);
    }
}
