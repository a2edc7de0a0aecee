/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_gpu LIBRARY [--small]: attention on a device, through cuDNN and by our own kernels, and groups of products.
 * Every case that fails is named and the next one is run. --small: few cases, and our own kernels only, for runs under a
 * checker.
 */
#include "tests/kernels/compute_attention.h"
#include "tests/kernels/device.h"

#include <string.h>

enum {
    ROWS = 256,
    DEPTH = 64,
    COUNT = ROWS * 2 * DEPTH
};

static struct lk_attention make_call(const struct compute_target *t)
{
    struct lk_heads heads = { random_bf16(t, COUNT, 17), COUNT, DEPTH, 2 * (uint64_t)DEPTH };
    struct lk_attention call = { .sequences = 1,
                                 .heads = 2,
                                 .kv_heads = 2,
                                 .queries = ROWS,
                                 .keys = ROWS,
                                 .depth = DEPTH,
                                 .value_depth = DEPTH,
                                 .type = LK_BF16,
                                 .causal = LK_CAUSAL_TOP_LEFT,
                                 .scale = 0.125F,
                                 .q = heads,
                                 .k = heads,
                                 .v = heads,
                                 .o = heads };

    call.o.base = device_alloc(COUNT * 2);
    call.lse = device_alloc((size_t)ROWS * 2 * 4);
    return call;
}

/* Captures the call and replays it once; what the call gave. */
static int replay(const struct compute_target *t, struct lk_attention_library *library,
                  const struct lk_attention *call, cudaStream_t stream)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;
    int err;

    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    err = t->lib.lk_attention_forward(library, call, stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    device_clear(call->o.base, COUNT * 2);
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    return err;
}

/* Eager calls and a graph give the same bits. */
static int a_graph_replays_attention(const struct compute_target *t)
{
    static uint16_t eager[COUNT], replayed[COUNT];
    struct lk_attention_library *library;
    struct lk_attention call = make_call(t);
    cudaStream_t stream;
    int err = t->lib.lk_attention_open(NULL, 0, &library), failed;

    if (err) {
        printf("FAILED: a graph: %s\n", t->lib.lk_blas_error());
        return 1;
    }
    call.workspace = device_alloc(t->lib.lk_attention_workspace_bytes(library, &call, NULL));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(t->lib.lk_attention_forward(library, &call, stream) == 0);
    device_get(eager, call.o.base, sizeof(eager));
    err = replay(t, library, &call, stream);
    device_get(replayed, call.o.base, sizeof(replayed));
    failed = err || memcmp(eager, replayed, sizeof(eager)) != 0;
    printf("%s: a graph replays attention%s%s\n", failed ? "FAILED" : "passed", err ? ": " : "",
           err ? t->lib.lk_blas_error() : "");
    CUDA(cudaStreamDestroy(stream));
    t->lib.lk_attention_close(library);
    device_release(call.workspace);
    device_release(call.lse);
    device_release(call.o.base);
    device_release(call.q.base);
    return failed;
}

/* Products of experts with 8, 16, 24 ... tokens, side by side. */
enum {
    EXPERTS = 12,
    TOKENS = 8 * EXPERTS * (EXPERTS + 1) / 2,
    HIDDEN = 256,
    FFN = 320
};

struct products {
    const struct compute_target *t;
    struct lk_blas *blas;
    uint16_t *x, *weights, *out;
    void *workspace;
};

static int run_products(const struct products *p, enum lk_gemm_grouping way, cudaStream_t stream)
{
    struct lk_gemm gemms[EXPERTS];
    struct lk_gemm_groups groups = { .gemms = gemms,
                                     .count = EXPERTS,
                                     .grouping = way,
                                     .streams = way == LK_GROUP_STREAMS ? 5 : 0,
                                     .workspace = p->workspace };
    size_t first = 0;

    for (size_t e = 0; e < EXPERTS; e++) {
        gemms[e] = (struct lk_gemm){ .rows = 8 * (e + 1),
                                     .columns = FFN,
                                     .depth = HIDDEN,
                                     .type = LK_BF16,
                                     .out_type = LK_BF16,
                                     .a = p->x + first * HIDDEN,
                                     .b = p->weights + e * FFN * HIDDEN,
                                     .a_stride = HIDDEN,
                                     .b_stride = HIDDEN,
                                     .b_transposed = 1,
                                     .alpha = 1,
                                     .d = p->out + first * FFN,
                                     .d_stride = FFN };
        first += gemms[e].rows;
    }
    return p->t->lib.lk_gemm_groups_run(p->blas, &groups, stream);
}

/* The results of one way: at once, by a graph, and at once on another stream while that graph is captured. */
static int check_products(const struct products *p, enum lk_gemm_grouping way,
                          cudaStream_t streams[2])
{
    static uint16_t eager[TOKENS * FFN], beside[TOKENS * FFN], replayed[TOKENS * FFN];
    int errs[3], failed;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    device_clear(p->out, sizeof(eager));
    errs[0] = run_products(p, way, streams[0]);
    device_get(eager, p->out, sizeof(eager));
    device_clear(p->out, sizeof(eager));
    CUDA(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    errs[1] = run_products(p, way, streams[0]);
    errs[2] = run_products(p, way, streams[1]);
    CUDA(cudaStreamEndCapture(streams[0], &graph));
    device_get(beside, p->out, sizeof(beside));
    device_clear(p->out, sizeof(eager));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, streams[0]));
    device_get(replayed, p->out, sizeof(replayed));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    failed = errs[0] || errs[1] || errs[2] || memcmp(eager, replayed, sizeof(eager)) != 0 ||
             memcmp(eager, beside, sizeof(eager)) != 0;
    printf(
        "%s: a graph replays groups, way %d: errors %d %d %d%s%s, the same bits: %d by the graph, %d beside it\n",
        failed ? "FAILED" : "passed", (int)way, errs[0], errs[1], errs[2], failed ? ": " : "",
        failed ? p->t->lib.lk_blas_error() : "", memcmp(eager, replayed, sizeof(eager)) == 0,
        memcmp(eager, beside, sizeof(eager)) == 0);
    return failed;
}

static int a_graph_replays_groups(const struct compute_target *t)
{
    struct products p = { .t = t,
                          .x = random_bf16(t, (size_t)TOKENS * HIDDEN, 3),
                          .weights = random_bf16(t, (size_t)EXPERTS * FFN * HIDDEN, 5),
                          .out = device_alloc((size_t)TOKENS * FFN * 2) };
    cudaStream_t streams[2];
    int failed = 0;

    if (t->lib.lk_blas_open(NULL, 0, &p.blas)) {
        printf("FAILED: a graph of groups: %s\n", t->lib.lk_blas_error());
        return 1;
    }
    p.workspace = device_alloc(t->lib.lk_gemm_groups_workspace_bytes(p.blas));
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    failed += check_products(&p, LK_GROUP_NEVER, streams);
    failed += check_products(&p, LK_GROUP_STREAMS, streams);
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamDestroy(streams[i]));
    t->lib.lk_blas_close(p.blas);
    device_release(p.workspace);
    device_release(p.out);
    device_release(p.weights);
    device_release(p.x);
    return failed;
}

int main(int argc, char **argv)
{
    struct compute_target target = { .alloc = device_alloc,
                                     .release = device_release,
                                     .put = device_put,
                                     .get = device_get };
    int failed;

    CHECK(argc == 2 || argc == 3);
    target.small = argc == 3 && strcmp(argv[2], "--small") == 0;
    if (device_is_missing())
        return LC_SKIP;
    compute_open(&target, argv[1]);
    CHECK(target.lib.lk_compute_load_all() == 0 && strcmp(target.lib.lk_backend(), "cuda") == 0);
    failed = check_attention(&target, target.small ? BY_OUR_KERNELS : BY_OUR_KERNELS | BY_CUDNN);
    if (!target.small)
        failed += check_grouped(&target);
    if (!target.small)
        failed += a_graph_replays_attention(&target);
    if (!target.small)
        failed += a_graph_replays_groups(&target);
    printf("attention and groups on the device: %d failed\n", failed);
    return failed ? 1 : 0;
}
