/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-peers: what a candidate is (a variant of the kernels, or NCCL), and how its calls are made.
 */
#ifndef LC_PERF_KERNELS_PEERS_H
#define LC_PERF_KERNELS_PEERS_H

#include "kernels/loongblocks.h"
#include "kernels/rings.h"
#include "kernels/rings_internal.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RANKS_MAX      8
#define CANDIDATES_MAX 48
#define SAMPLES_MAX    256
#define NCCL           (-1) /* number of that candidate; others are variants */
#define ROW_BYTES      4096 /* of an all-to-all in fp32 */

struct bench_case {
    const char *what;
    size_t bytes; /* of data, a rank */
    enum lk_type type, wire;
    enum lk_variant_kind kind;
    uint32_t zero_rows; /* of `rows` */
    uint32_t rows;      /* 0: ROWS */
    bool together;      /* many of them one behind another, then as many others */
    bool masked;        /* the call is told which they are */
};

/* One candidate with one case. */
struct row {
    const struct bench_case *c;
    size_t bytes; /* of a call; fewer with the host library */
    int number;
    char name[64];
    uint32_t ctas;
    cudaGraphExec_t graphs[RANKS_MAX]; /* `calls` calls each */
    int calls;
    double us[SAMPLES_MAX]; /* of a call */
    int samples;
    bool verified;
};

struct rank {
    int device;
    cudaStream_t stream, other; /* other: what runs beside */
    cudaEvent_t begin, end, other_begin, other_end;
    uint8_t *in, *out;
    uint32_t *mask; /* a bit for each row of `in` that is not zeros */
    struct lk_rings rings;
};

extern struct bench {
    bool cuda;
    uint32_t ranks;
    int devices;
    size_t most; /* bytes of in and of out */
    struct rank of[RANKS_MAX];
    /* peers_library.c */
    __typeof__(lk_rings_variant) *variant;             /* NULL: there is one only */
    __typeof__(lk_rings_variant_kinds) *variant_kinds; /* likewise */
} bench;

/* Ends the process with what failed. */
void bench_must(int err, const char *what);
#define CUDA(call) bench_must((int)(call), #call)
void bench_use(uint32_t rank); /* makes its device the current one */

/* peers_library.c: the kernels library. */
void library_open(const char *path);
void library_make_rings(const struct lk_ring_shape *shape, bool plain_memory);
void library_call(const struct row *row, uint32_t rank, size_t at); /* at byte `at` of in and out */
void library_gemm_open(size_t side); /* products of side x side, on every device */
void library_gemm(uint32_t rank);    /* one of them, on its other stream */

/* peers_nccl.c: ctas 0: as NCCL likes. */
bool nccl_open(const char *path);
void nccl_use(uint32_t ctas);
void nccl_call(const struct row *row, size_t at); /* of all ranks */

/* peers_beside.c: sums of `row` and products beside each other. */
void beside_measure(struct row *row);

#endif
