/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"

#include <errno.h>
#include <math.h>
#include <string.h>

struct shape {
    uint64_t rows, columns;
    size_t shift;
};

static const struct shape shapes[] = {
    {1,     1,    0},
    { 5,    8,    0},
    { 7,    33,   0},
    { 3,    2064, 0},
    { 1100, 16,   0},
    { 9,    24,   1},
};

struct fold_case {
    struct lk_fold call;
    struct typed weight, gamma, folded, dfolded, dweight, dgamma;
    void *workspace;
};

/* Bits of `variant`: bf16 weight, bf16 gamma, an offset, bf16 gradients. */
static struct fold_case make_case(const struct compute_target *t, const struct shape *s,
                                  unsigned int variant, uint64_t *state)
{
    enum lk_type weight = variant & 1 ? LK_BF16 : LK_FP32, gamma = variant & 2 ? LK_BF16 : LK_FP32;
    enum lk_type grad = variant & 8 ? LK_BF16 : LK_FP32;
    struct fold_case c = {
        .weight = typed_new(t, weight, s->rows, s->columns, s->columns, s->shift),
        .gamma = typed_new(t, gamma, 1, s->columns, s->columns, s->shift),
        .folded = typed_new(t, LK_BF16, s->rows, s->columns, s->columns, s->shift),
        .dfolded = typed_new(t, grad, s->rows, s->columns, s->columns, s->shift),
        .dweight = typed_new(t, grad, s->rows, s->columns, s->columns, s->shift),
        .dgamma = typed_new(t, LK_FP32, 1, s->columns, s->columns, 0),
    };

    typed_fill(&c.weight, 2, state);
    typed_fill(&c.gamma, 2, state);
    typed_fill(&c.folded, 2, state);
    typed_fill(&c.dfolded, 2, state);
    typed_fill(&c.dweight, 2, state);
    typed_fill(&c.dgamma, 2, state);
    c.call = (struct lk_fold){
        .rows = s->rows,
        .columns = s->columns,
        .weight_type = weight,
        .weight = c.weight.memory.far,
        .gamma_type = gamma,
        .gamma = c.gamma.memory.far,
        .gamma_offset = variant & 4 ? 1 : 0,
    };
    c.workspace = workspace_take(t, t->lib.lk_fold_workspace_bytes(&c.call));
    return c;
}

static void drop_case(const struct compute_target *t, struct fold_case *c)
{
    memory_free(&c->weight.memory);
    memory_free(&c->gamma.memory);
    memory_free(&c->folded.memory);
    memory_free(&c->dfolded.memory);
    memory_free(&c->dweight.memory);
    memory_free(&c->dgamma.memory);
    workspace_check(t);
}

static double gamma_at(const struct fold_case *c, uint64_t k)
{
    return typed_get(&c->gamma, 0, k) + (double)c->call.gamma_offset;
}

static struct lk_fold_grads grads_of(const struct fold_case *c)
{
    return (struct lk_fold_grads){
        .grad_type = c->dfolded.type,
        .dfolded = c->dfolded.memory.far,
        .dweight = c->dweight.memory.far,
        .dgamma = (float *)c->dgamma.memory.far,
        .workspace = c->workspace,
    };
}

static void check_case(const struct compute_target *t, struct fold_case *c)
{
    struct lk_fold_grads grads = grads_of(c);

    CHECK(t->lib.lk_fold_forward(&c->call, c->folded.memory.far, NULL) == 0);
    CHECK(t->lib.lk_fold_backward(&c->call, &grads, NULL) == 0);
    memory_down(&c->folded.memory);
    memory_down(&c->dweight.memory);
    memory_down(&c->dgamma.memory);
    for (uint64_t k = 0; k < c->call.columns; k++) {
        double sum = 0, size = 0, gamma = gamma_at(c, k);

        for (uint64_t j = 0; j < c->call.rows; j++) {
            double w = typed_get(&c->weight, j, k), d = typed_get(&c->dfolded, j, k);

            CHECK(typed_near(&c->folded, j, k, w * gamma, 0x1p-22 * fabs(w) * (fabs(gamma) + 1)));
            CHECK(typed_near(&c->dweight, j, k, d * gamma, 0x1p-22 * fabs(d) * (fabs(gamma) + 1)));
            sum += w * d;
            size += fabs(w * d);
        }
        CHECK(typed_near(&c->dgamma, 0, k, sum, 0x1p-14 * size));
    }
}

static void weights_go_in_and_come_out(const struct compute_target *t)
{
    uint64_t state = 101;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        for (unsigned int variant = 0; variant < 16; variant++) {
            struct fold_case c = make_case(t, &shapes[s], variant, &state);

            check_case(t, &c);
            drop_case(t, &c);
        }
    }
}

static void gradients_change_in_place_or_alone(const struct compute_target *t)
{
    uint64_t state = 103;
    struct fold_case c = make_case(t, &shapes[4], 8, &state);
    struct lk_fold_grads grads = grads_of(&c);
    struct typed first = typed_new(t, LK_FP32, 1, c.call.columns, c.call.columns, 0);

    CHECK(t->lib.lk_fold_backward(&c.call, &grads, NULL) == 0);
    memory_down(&c.dweight.memory);
    memory_down(&c.dgamma.memory);
    grads.dweight = NULL;
    typed_fill(&first, 1, &state);
    grads.dgamma = (float *)first.memory.far;
    CHECK(t->lib.lk_fold_backward(&c.call, &grads, NULL) == 0);
    memory_down(&first.memory);
    CHECK(memcmp(first.memory.near, c.dgamma.memory.near, first.memory.bytes) == 0);
    grads = grads_of(&c);
    grads.dgamma = NULL;
    grads.workspace = NULL;
    grads.dweight = c.dfolded.memory.far;
    CHECK(t->lib.lk_fold_backward(&c.call, &grads, NULL) == 0);
    memory_down(&c.dfolded.memory);
    CHECK(memcmp(c.dfolded.memory.near, c.dweight.memory.near, c.dweight.memory.bytes) == 0);
    memory_free(&first.memory);
    drop_case(t, &c);
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    uint64_t state = 107;
    struct fold_case c = make_case(t, &shapes[2], 0, &state);
    struct lk_fold call;
    struct lk_fold_grads grads;

#define REFUSED(change)                                                 \
    do {                                                                \
        call = c.call;                                                  \
        grads = grads_of(&c);                                           \
        change;                                                         \
        CHECK(t->lib.lk_fold_backward(&call, &grads, NULL) == -EINVAL); \
        CHECK(strncmp(t->lib.lk_blas_error(), "lk_fold", 7) == 0);      \
    } while (0)
    REFUSED(call.rows = UINT64_C(1) << 31);
    REFUSED(call.columns = 0);
    CHECK(t->lib.lk_fold_workspace_bytes(&call) == 0);
    REFUSED(call.weight_type = LK_FP16);
    REFUSED(call.weight = NULL);
    REFUSED(call.gamma = NULL);
    REFUSED(call.gamma = (char *)call.gamma + 2);
    REFUSED(grads.dfolded = NULL);
    REFUSED(grads.dweight = (char *)grads.dweight + 2);
    REFUSED(grads.grad_type = LK_FP16);
    REFUSED(grads.workspace = (char *)grads.workspace + 4);
#undef REFUSED
    CHECK(t->lib.lk_fold_forward(&c.call, NULL, NULL) == -EINVAL);
    CHECK(t->lib.lk_fold_forward(NULL, c.folded.memory.far, NULL) == -EINVAL);
    call = c.call;
    call.rows = 0;
    grads = grads_of(&c);
    grads.workspace = NULL;
    CHECK(t->lib.lk_fold_backward(&call, &grads, NULL) == 0);
    memory_down(&c.dgamma.memory);
    for (uint64_t k = 0; k < call.columns; k++)
        CHECK(typed_get(&c.dgamma, 0, k) == 0);
    drop_case(t, &c);
}

void check_fold(const struct compute_target *t)
{
    weights_go_in_and_come_out(t);
    gradients_change_in_place_or_alone(t);
    wrong_arguments_are_refused(t);
}
