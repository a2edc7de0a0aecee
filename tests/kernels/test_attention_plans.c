/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_plans LIBRARY: arguments of attention, and how plans of cuDNN are kept, with what the tests have in its place
 * beneath the library.
 */
#include "tests/check.h"
#include "tests/kernels/compute.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

#define THREADS 4

static struct compute_target target;
static int *live, *plans, *capture, *fails; /* of the fake */
static uint16_t memory[8][64 * 1024] __attribute__((aligned(256)));
static float lse[1024] __attribute__((aligned(256)));
static unsigned char workspace[1 << 20] __attribute__((aligned(256)));

static struct lk_attention call_of(uint32_t queries, uint32_t depth)
{
    struct lk_heads heads = { NULL, (uint64_t)queries * 2 * depth, depth, 2 * (uint64_t)depth };
    struct lk_attention call = { .sequences = 1,
                                 .heads = 2,
                                 .kv_heads = 2,
                                 .queries = queries,
                                 .keys = queries,
                                 .depth = depth,
                                 .value_depth = depth,
                                 .type = LK_BF16,
                                 .scale = 1,
                                 .q = heads,
                                 .k = heads,
                                 .v = heads,
                                 .o = heads,
                                 .lse = lse,
                                 .workspace = workspace };

    call.q.base = memory[0];
    call.k.base = memory[1];
    call.v.base = memory[2];
    call.o.base = memory[3];
    return call;
}

static struct lk_attention_grads grads_of(const struct lk_attention *call)
{
    struct lk_attention_grads grads = { call->o, call->q, call->k, call->v, 0 };

    grads.dout.base = memory[4];
    grads.dq.base = memory[5];
    grads.dk.base = memory[6];
    grads.dv.base = memory[7];
    return grads;
}

static struct lk_attention_library *open_library(void)
{
    struct lk_attention_library *library;

    CHECK(target.lib.lk_attention_open(NULL, 0, &library) == 0);
    return library;
}

static void close_library(struct lk_attention_library *library)
{
    target.lib.lk_attention_close(library);
    CHECK(*live == 0);
}

static void run(struct lk_attention_library *library, uint32_t queries, uint32_t depth)
{
    struct lk_attention call = call_of(queries, depth);
    size_t bytes = target.lib.lk_attention_workspace_bytes(library, &call, NULL);

    CHECK(bytes > 0 && bytes <= sizeof(workspace));
    CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
}

/* ---- arguments ---- */

static void refuses(struct lk_attention_library *library, const struct lk_attention *call,
                    const struct lk_attention_grads *grads, const char *text)
{
    int err = grads ? target.lib.lk_attention_backward(library, call, grads, NULL)
                    : target.lib.lk_attention_forward(library, call, NULL);

    if (err != -EINVAL || !strstr(target.lib.lk_blas_error(), text))
        fprintf(stderr, "%d: %s, not: %s\n", err, target.lib.lk_blas_error(), text);
    CHECK(err == -EINVAL && strstr(target.lib.lk_blas_error(), text));
    if (call && !strstr(text, "workspace"))
        CHECK(target.lib.lk_attention_workspace_bytes(library, call, grads) == 0);
}

static void wrong_arguments_are_named(void)
{
    static const int32_t numbers[4];
    struct lk_attention_library *library = open_library();
    const struct lk_attention good = call_of(8, 16);
    const struct lk_attention_grads good_grads = grads_of(&good);
    struct lk_attention_grads grads = good_grads;
    struct lk_attention call;

#define WRONG(member, value, text) \
    call = good;                   \
    call.member = value;           \
    refuses(library, &call, NULL, text);
    WRONG(type, LK_FP32, "neither bf16 nor fp16")
    WRONG(causal, (enum lk_causal)3, "causal 3 is unknown")
    WRONG(kv_heads, 0, "0 of keys")
    WRONG(heads, 3, "3 heads of queries, 2 of keys")
    WRONG(depth, 0, "depths 0 and 16")
    WRONG(value_depth, 1025, "depths 16 and 1025")
    WRONG(queries, 0x80000000U, "too many")
    WRONG(query_offsets, numbers, "offsets of queries without those of keys")
    WRONG(q.base, NULL, "q is NULL")
    WRONG(v.base, (char *)memory + 1, "v is not aligned")
    WRONG(o.row_stride, 15, "rows or heads of o overlap")
    WRONG(k.head_stride, UINT64_C(1) << 50, "a stride of k is too large")
    WRONG(lse, (float *)(void *)((char *)lse + 2), "lse is misaligned")
    WRONG(workspace, workspace + 1, "the workspace is not aligned")
    call = good;
    call.query_offsets = call.key_offsets = call.key_lengths = numbers;
    refuses(library, &call, NULL, "exclude each other");
    call = good;
    call.sequences = 1;
    call.queries = call.keys = 8;
    call.lse = NULL; /* made anew */
    call.o.row_stride = 15;
    refuses(library, &call, &grads, "rows or heads of o overlap");
    call.o.row_stride = UINT64_C(1) << 61;
    refuses(library, &call, &grads, "strides of o are too large");
    call = good;
    call.lse = NULL;
    call.query_offsets = call.key_offsets = numbers;
    refuses(library, &call, &grads, "lse is NULL, and rows are packed");
    call = good;
    call.lse = NULL;
    call.sequences = 0; /* nothing to make anew */
    CHECK(target.lib.lk_attention_backward(library, &call, &grads, NULL) == 0);
    grads.dk.row_stride = 3;
    refuses(library, &good, &grads, "rows or heads of dk overlap");
    refuses(library, NULL, NULL, "a NULL argument");
    CHECK(target.lib.lk_attention_backward(library, &good, NULL, NULL) == -EINVAL);
    close_library(library);
}

static void a_library_that_is_missing_is_named(void)
{
    struct lk_attention_library *library;

    CHECK(target.lib.lk_attention_open("libnowhere.so.9", 0, &library) == -ENOSYS);
    CHECK(strstr(target.lib.lk_blas_error(), "libnowhere.so.9"));
    CHECK(target.lib.lk_attention_open(NULL, 6, &library) == -EINVAL);
    CHECK(target.lib.lk_attention_open(NULL, 0, NULL) == -EINVAL);
    target.lib.lk_attention_close(NULL);
}

/* ---- plans ---- */

static void a_shape_is_planned_once(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention_counts counts;
    struct lk_attention call = call_of(8, 16);
    struct lk_attention_grads grads = grads_of(&call);

    for (int i = 0; i < 3; i++) {
        run(library, 8, 16);
        CHECK(target.lib.lk_attention_backward(library, &call, &grads, NULL) == 0);
    }
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == 2 && counts.vendor == 6 && counts.general == 0);
    call.scale = 2; /* no part of a plan */
    CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
    call.causal = LK_CAUSAL_TOP_LEFT;
    CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == 3 && counts.vendor == 8);
    CHECK(strcmp(target.lib.lk_attention_why(), "") == 0);
    close_library(library);
}

static void the_plan_used_longest_ago_makes_room(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention_counts counts;
    int most = 0;

    for (uint32_t n = 1; n <= LK_ATTENTION_PLANS; n++)
        run(library, n + 1, 16);
    most = *live;
    run(library, 2, 16); /* now the third one is the oldest */
    run(library, LK_ATTENTION_PLANS + 2, 16);
    CHECK(*live == most);
    run(library, 2, 16);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == LK_ATTENTION_PLANS + 1);
    run(library, 3, 16);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == LK_ATTENTION_PLANS + 2 && counts.general == 0);
    close_library(library);
}

static void a_plan_that_a_graph_has_stays(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention_counts counts;

    *capture = 1;
    for (uint32_t n = 1; n <= LK_ATTENTION_PLANS; n++)
        run(library, n + 1, 16);
    *capture = 0;
    run(library, LK_ATTENTION_PLANS + 2, 16);
    CHECK(strstr(target.lib.lk_attention_why(), "captured graphs"));
    run(library, 2, 16);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == LK_ATTENTION_PLANS && counts.general == 1 &&
          counts.vendor == LK_ATTENTION_PLANS + 1);
    close_library(library);
}

static void what_has_no_engine_is_asked_for_once(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention_counts counts;

    run(library, 8, 24);
    CHECK(strstr(target.lib.lk_attention_why(), "no engine"));
    run(library, 8, 24);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == 1 && counts.general == 2 && counts.vendor == 0);
    close_library(library);
}

static void a_plan_that_needs_too_much_is_not_taken(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention call = call_of(8, 16);
    struct lk_attention_counts counts;

    call.most_workspace = 999; /* the fake wants 1000 */
    CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
    CHECK(strstr(target.lib.lk_attention_why(), "needs 1000 bytes"));
    call.most_workspace = 1000;
    CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.general == 1 && counts.vendor == 1);
    close_library(library);
}

/* Each call of the library fails once. */
static void no_failure_leaks(void)
{
    struct lk_attention call = call_of(8, 16);
    struct lk_attention_grads grads = grads_of(&call);
    int n = 0, errors = 0, left = 0;

    call.causal = LK_CAUSAL_BOTTOM_RIGHT;
    call.keys = 7;
    call.queries = 6;
    do {
        struct lk_attention_library *library = NULL;
        int err;

        *fails = ++n;
        err = target.lib.lk_attention_open(NULL, 0, &library);
        if (!err)
            err = target.lib.lk_attention_forward(library, &call, NULL);
        if (!err)
            err = target.lib.lk_attention_backward(library, &call, &grads, NULL);
        left = *fails;
        *fails = 0;
        CHECK(err == 0 || (err == -EIO && strstr(target.lib.lk_blas_error(), "text of cuDNN")));
        errors += err != 0;
        target.lib.lk_attention_close(library);
        CHECK(*live == 0);
    } while (!left);
    CHECK(n > 100 && errors > 2);
}

static void *run_many(void *library)
{
    for (uint32_t i = 0; i < 30; i++) {
        struct lk_attention call = call_of(2 + i % 5, 16);

        CHECK(target.lib.lk_attention_forward(library, &call, NULL) == 0);
    }
    return NULL;
}

static void threads_may_share_a_library(void)
{
    struct lk_attention_library *library = open_library();
    struct lk_attention_counts counts;
    pthread_t threads[THREADS];

    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, run_many, library) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    target.lib.lk_attention_counts(library, &counts);
    CHECK(counts.plans == 5 && counts.vendor == THREADS * UINT64_C(30) && counts.general == 0);
    close_library(library);
}

int main(int argc, char **argv)
{
    void *fake;

    CHECK(argc == 2);
    compute_open(&target, argv[1]);
    fake = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    CHECK(fake);
    live = dlsym(fake, "fake_cudnn_live");
    plans = dlsym(fake, "fake_cudnn_plans");
    capture = dlsym(fake, "fake_cudnn_capture");
    fails = dlsym(fake, "fake_cudnn_fails");
    CHECK(live && plans && capture && fails);
    wrong_arguments_are_named();
    a_library_that_is_missing_is_named();
    a_shape_is_planned_once();
    the_plan_used_longest_ago_makes_room();
    a_plan_that_a_graph_has_stays();
    what_has_no_engine_is_asked_for_once();
    a_plan_that_needs_too_much_is_not_taken();
    no_failure_leaks();
    threads_may_share_a_library();
    return 0;
}
