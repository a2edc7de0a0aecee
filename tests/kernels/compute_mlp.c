/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

/* Relative errors of whole results: three roundings to bf16 on the way forward, five on the way back. */
#define FORWARD_ERROR  6e-3
#define BACKWARD_ERROR 9e-3

struct shape {
    uint64_t rows, hidden, ffn;
    uint64_t pad; /* added to strides */
    size_t shift;
};

static const struct shape shapes[] = {
    {1,   64,  96, 0, 0},
    { 7,  24,  40, 8, 0},
    { 5,  33,  17, 0, 0},
    { 64, 64,  48, 0, 0},
    { 3,  136, 9,  3, 1},
    { 70, 16,  72, 0, 0},
};

enum traits {
    WEIGHTED = 1,    /* gamma, with its own product */
    DROPPED = 2,     /* dropout */
    RESIDUAL = 4,    /* x is added to the result, dout to dx */
    GRAD16 = 8,      /* bf16 gradients of the weights */
    ACCUMULATE = 16, /* onto what is there */
    TRAITS = 32,
};

struct mlp_case {
    unsigned int traits;
    struct lk_mlp call;
    struct typed x, gate_up, down, gamma, out, dout, dx, dgate_up, ddown, dgamma, rstd, y, z;
    struct memory offset;
};

/* The same in double precision. */
struct wanted {
    struct dense out, dx, dgate_up, ddown, dgamma;
};

static struct mlp_case make_case(const struct compute_target *t, const struct shape *s,
                                 unsigned int traits, uint64_t *state)
{
    enum lk_type grad = traits & GRAD16 ? LK_BF16 : LK_FP32;
    enum lk_type gamma = traits & DROPPED ? LK_FP32 : LK_BF16;
    uint64_t stride = s->hidden + s->pad;
    struct mlp_case c = {
        .traits = traits,
        .x = typed_new(t, LK_BF16, s->rows, s->hidden, stride, s->shift),
        .gate_up = typed_new(t, LK_BF16, 2 * s->ffn, s->hidden, s->hidden, 0),
        .down = typed_new(t, LK_BF16, s->hidden, s->ffn, s->ffn, s->shift),
        .gamma = typed_new(t, gamma, 1, s->hidden, s->hidden, 0),
        .out = typed_new(t, LK_BF16, s->rows, s->hidden, stride, s->shift),
        .dout = typed_new(t, LK_BF16, s->rows, s->hidden, stride, 0),
        .dx = typed_new(t, LK_BF16, s->rows, s->hidden, stride, s->shift),
        .dgate_up = typed_new(t, grad, 2 * s->ffn, s->hidden, s->hidden, 0),
        .ddown = typed_new(t, grad, s->hidden, s->ffn, s->ffn, s->shift),
        .dgamma = typed_new(t, LK_FP32, 1, s->hidden, s->hidden, 0),
        .rstd = typed_new(t, LK_FP32, s->rows, 1, 1, 0),
        .y = typed_new(t, LK_BF16, s->rows, s->hidden, s->hidden, 0),
        .z = typed_new(t, LK_BF16, s->rows, 2 * s->ffn, 2 * s->ffn, 0),
        .offset = memory_new(t, 8, 0),
    };

    typed_fill(&c.x, 3, state);
    typed_fill(&c.gate_up, 4 / sqrt((double)s->hidden), state);
    typed_fill(&c.down, 1, state);
    typed_fill(&c.gamma, 0.5, state);
    typed_fill(&c.out, 1, state);
    typed_fill(&c.dout, 1, state);
    typed_fill(&c.dx, 1, state);
    typed_fill(&c.dgate_up, 1, state);
    typed_fill(&c.ddown, 1, state);
    typed_fill(&c.dgamma, 1, state);
    typed_fill(&c.rstd, 1, state);
    typed_fill(&c.y, 1, state);
    typed_fill(&c.z, 1, state);
    *(uint64_t *)c.offset.near = 16;
    memory_up(&c.offset);
    c.call = (struct lk_mlp){
        .rows = s->rows,
        .hidden = s->hidden,
        .ffn = s->ffn,
        .x = c.x.memory.far,
        .x_stride = stride,
        .eps = 1e-5,
        .gamma_type = gamma,
        .gamma = traits & WEIGHTED ? c.gamma.memory.far : NULL,
        .gamma_offset = 1,
        .gate_up = c.gate_up.memory.far,
        .down = c.down.memory.far,
        .drop = traits & DROPPED ? 0.25 : 0,
        .rng = {11, 1024, (uint64_t *)c.offset.far},
    };
    return c;
}

static void drop_case(struct mlp_case *c)
{
    struct typed *all[] = { &c->x,    &c->gate_up, &c->down,     &c->gamma, &c->out,
                            &c->dout, &c->dx,      &c->dgate_up, &c->ddown, &c->dgamma,
                            &c->rstd, &c->y,       &c->z };

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        memory_free(&all[i]->memory);
    memory_free(&c->offset);
}

/* ---- in double precision ---- */

/* What is left of element (r, j) of h; 0 if it is dropped. */
static double factor(const struct mlp_case *c, uint64_t r, uint64_t j)
{
    uint64_t padded = (c->call.ffn + 7) / 8 * 8;

    if (!(c->traits & DROPPED))
        return 1;
    return ref_random(11, 1040 + r * padded + j) < 16384 ? 0 : 4.0 / 3;
}

static double gamma_at(const struct mlp_case *c, uint64_t k)
{
    return c->traits & WEIGHTED ? typed_get(&c->gamma, 0, k) + 1 : 1;
}

static double rstd_of(const struct mlp_case *c, uint64_t r)
{
    double squares = 0;

    for (uint64_t k = 0; k < c->call.hidden; k++)
        squares += typed_get(&c->x, r, k) * typed_get(&c->x, r, k);
    return 1 / sqrt(squares / (double)c->call.hidden + c->call.eps);
}

/* dx of one row and its part of dgamma. */
static void want_norm_back(const struct mlp_case *c, const struct dense *dy, uint64_t r,
                           struct wanted *out)
{
    double mean = 0, rstd = rstd_of(c, r);

    for (uint64_t k = 0; k < c->call.hidden; k++) {
        double hat = typed_get(&c->x, r, k) * rstd;

        mean += *dense_at(dy, r, k) * gamma_at(c, k) * hat / (double)c->call.hidden;
        *dense_at(&out->dgamma, 0, k) += *dense_at(dy, r, k) * hat;
    }
    for (uint64_t k = 0; k < c->call.hidden; k++) {
        double d = *dense_at(dy, r, k) * gamma_at(c, k) - typed_get(&c->x, r, k) * rstd * mean;

        *dense_at(&out->dx, r, k) = rstd * d +
                                    (c->traits & RESIDUAL ? typed_get(&c->dout, r, k) : 0);
    }
}

/* h from z, and in place of z its gradients from those of h. */
static void want_swiglu(const struct mlp_case *c, struct dense *z, struct dense *h,
                        const struct dense *dh)
{
    for (uint64_t r = 0; r < h->rows; r++) {
        for (uint64_t j = 0; j < h->columns; j++) {
            double g = *dense_at(z, r, j), u = *dense_at(z, r, h->columns + j);
            double s = 1 / (1 + exp(-g)), f = factor(c, r, j), d = *dense_at(dh, r, j) * f;

            *dense_at(h, r, j) = g * s * u * f;
            *dense_at(z, r, j) = d * u * s * (1 + g * (1 - s));
            *dense_at(z, r, h->columns + j) = d * g * s;
        }
    }
}

static void add_present(const struct mlp_case *c, const struct typed *present, struct dense *sum)
{
    for (uint64_t r = 0; c->traits & ACCUMULATE && r < sum->rows; r++)
        for (uint64_t k = 0; k < sum->columns; k++)
            *dense_at(sum, r, k) += typed_get(present, r, k);
}

static struct wanted want(const struct mlp_case *c)
{
    struct wanted out = { .dx = dense_new(c->call.rows, c->call.hidden),
                          .dgamma = dense_new(1, c->call.hidden) };
    struct dense y = dense_of(&c->x), gate_up = dense_of(&c->gate_up), down = dense_of(&c->down);
    struct dense dout = dense_of(&c->dout), h = dense_new(c->call.rows, c->call.ffn), z, dh, dy;

    for (uint64_t r = 0; r < y.rows; r++) {
        double rstd = rstd_of(c, r);

        for (uint64_t k = 0; k < y.columns; k++)
            *dense_at(&y, r, k) *= rstd * gamma_at(c, k);
    }
    z = dense_product(&y, false, &gate_up, true);
    dh = dense_product(&dout, false, &down, false);
    want_swiglu(c, &z, &h, &dh);
    out.out = dense_product(&h, false, &down, true);
    for (uint64_t r = 0; c->traits & RESIDUAL && r < y.rows; r++)
        for (uint64_t k = 0; k < y.columns; k++)
            *dense_at(&out.out, r, k) += typed_get(&c->x, r, k);
    out.ddown = dense_product(&dout, true, &h, false);
    out.dgate_up = dense_product(&z, true, &y, false);
    dy = dense_product(&z, false, &gate_up, false);
    for (uint64_t r = 0; r < y.rows; r++)
        want_norm_back(c, &dy, r, &out);
    add_present(c, &c->ddown, &out.ddown);
    add_present(c, &c->dgate_up, &out.dgate_up);
    dense_free(&y);
    dense_free(&gate_up);
    dense_free(&down);
    dense_free(&dout);
    dense_free(&h);
    dense_free(&z);
    dense_free(&dh);
    dense_free(&dy);
    return out;
}

static void drop_wanted(struct wanted *wanted)
{
    dense_free(&wanted->out);
    dense_free(&wanted->dx);
    dense_free(&wanted->dgate_up);
    dense_free(&wanted->ddown);
    dense_free(&wanted->dgamma);
}

/* ---- calls ---- */

static struct lk_mlp_backward backward_of(const struct mlp_case *c)
{
    return (struct lk_mlp_backward){
        .dout = c->dout.memory.far,
        .dout_stride = c->dout.stride,
        .dx_add = c->traits & RESIDUAL ? c->dout.memory.far : NULL,
        .dx_add_stride = c->dout.stride,
        .dx = c->dx.memory.far,
        .dx_stride = c->dx.stride,
        .grad_type = c->ddown.type,
        .dgate_up = c->dgate_up.memory.far,
        .ddown = c->ddown.memory.far,
        .accumulate = c->traits & ACCUMULATE ? 1 : 0,
        .dgamma = c->traits & WEIGHTED ? (float *)c->dgamma.memory.far : NULL,
    };
}

static int forward(const struct compute_target *t, struct lk_blas *blas, struct mlp_case *c)
{
    const struct lk_mlp_forward f = {
        .add = c->traits & RESIDUAL ? c->x.memory.far : NULL,
        .add_stride = c->x.stride,
        .out = c->out.memory.far,
        .out_stride = c->out.stride,
    };
    int err;

    c->call.workspace = workspace_take(
        t, t->lib.lk_mlp_workspace_bytes(blas, &c->call, NULL, LK_FORWARD));
    err = t->lib.lk_mlp_forward(blas, &c->call, &f, NULL);
    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    memory_down(&c->out.memory);
    workspace_check(t);
    return err;
}

/* With gradients of the weights as they were made. */
static int backward(const struct compute_target *t, struct lk_blas *blas, struct mlp_case *c,
                    const struct lk_mlp_backward *b)
{
    int err;

    c->call.workspace = workspace_take(
        t, t->lib.lk_mlp_workspace_bytes(blas, &c->call, b, LK_BACKWARD));
    err = t->lib.lk_mlp_backward(blas, &c->call, b, NULL);
    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    memory_down(&c->dx.memory);
    memory_down(&c->dgate_up.memory);
    memory_down(&c->ddown.memory);
    memory_down(&c->dgamma.memory);
    workspace_check(t);
    return err;
}

static void check_case(const struct compute_target *t, struct lk_blas *blas, struct mlp_case *c)
{
    struct wanted wanted = want(c);
    struct lk_mlp_backward b = backward_of(c);

    CHECK(forward(t, blas, c) == 0);
    check_error("out", &c->out, &wanted.out, FORWARD_ERROR);
    CHECK(backward(t, blas, c, &b) == 0);
    check_error("dx", &c->dx, &wanted.dx, BACKWARD_ERROR);
    check_error("dgate_up", &c->dgate_up, &wanted.dgate_up, BACKWARD_ERROR);
    check_error("ddown", &c->ddown, &wanted.ddown, BACKWARD_ERROR);
    if (c->traits & WEIGHTED)
        check_error("dgamma", &c->dgamma, &wanted.dgamma, BACKWARD_ERROR);
    drop_wanted(&wanted);
}

static void results_follow_the_formula(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 113;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        bool large = shapes[s].rows >= 64; /* some traits do for those */

        for (unsigned int traits = 0; traits < TRAITS; traits += t->small || large ? 5 : 1) {
            struct mlp_case c = make_case(t, &shapes[s], traits, &state);

            check_case(t, blas, &c);
            drop_case(&c);
        }
    }
}

#define BLOCK_CASE     struct mlp_case
#define BLOCK_BACKWARD struct lk_mlp_backward
#include "tests/kernels/compute_block_inputs.h"

/* ---- what is saved ---- */

static void same_bits(const struct typed *a, const struct typed *b)
{
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t k = 0; k < a->columns; k++)
            CHECK(typed_get(a, r, k) == typed_get(b, r, k));
}

/* Bits of `saved`: rstd, y, z. */
static void save(struct mlp_case *c, unsigned int saved)
{
    c->call.saved = (struct lk_saved){
        .rstd = saved & 1 ? (float *)c->rstd.memory.far : NULL,
        .y = saved & 2 ? c->y.memory.far : NULL,
        .z = saved & 4 ? c->z.memory.far : NULL,
    };
}

static void results_do_not_depend_on_what_was_saved(const struct compute_target *t,
                                                    struct lk_blas *blas)
{
    for (unsigned int traits = 0; traits < 4; traits++) {
        uint64_t state = 127;
        struct mlp_case first = make_case(t, &shapes[1], traits, &state);
        struct lk_mlp_backward b = backward_of(&first);

        CHECK(forward(t, blas, &first) == 0 && backward(t, blas, &first, &b) == 0);
        for (unsigned int saved = 1; saved < 8; saved++) {
            struct mlp_case c;

            state = 127;
            c = make_case(t, &shapes[1], traits, &state);
            save(&c, saved);
            b = backward_of(&c);
            b.overwrite_z = saved == 7;
            CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
            same_bits(&c.out, &first.out);
            same_bits(&c.dx, &first.dx);
            same_bits(&c.dgate_up, &first.dgate_up);
            same_bits(&c.ddown, &first.ddown);
            same_bits(&c.dgamma, &first.dgamma);
            drop_case(&c);
        }
        drop_case(&first);
    }
}

static void saved_tensors_are_left_alone(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 131;
    struct mlp_case c = make_case(t, &shapes[1], WEIGHTED, &state);
    struct lk_mlp_backward b = backward_of(&c);
    void *y = malloc(c.y.memory.bytes), *z = malloc(c.z.memory.bytes);

    CHECK(y && z);
    save(&c, 7);
    CHECK(forward(t, blas, &c) == 0);
    memory_down(&c.y.memory);
    memory_down(&c.z.memory);
    memcpy(y, c.y.memory.near, c.y.memory.bytes);
    memcpy(z, c.z.memory.near, c.z.memory.bytes);
    CHECK(backward(t, blas, &c, &b) == 0);
    memory_down(&c.y.memory);
    memory_down(&c.z.memory);
    CHECK(memcmp(y, c.y.memory.near, c.y.memory.bytes) == 0);
    CHECK(memcmp(z, c.z.memory.near, c.z.memory.bytes) == 0);
    free(y);
    free(z);
    drop_case(&c);
}

static void saving_more_takes_less_workspace(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 137;
    struct mlp_case c = make_case(t, &shapes[3], WEIGHTED, &state);
    struct lk_mlp_backward b = backward_of(&c);
    size_t nothing = t->lib.lk_mlp_workspace_bytes(blas, &c.call, &b, LK_BACKWARD), all;

    save(&c, 7);
    all = t->lib.lk_mlp_workspace_bytes(blas, &c.call, &b, LK_BACKWARD);
    b.overwrite_z = 1;
    CHECK(nothing >= t->lib.lk_mlp_workspace_bytes(blas, &c.call, &b, LK_BACKWARD) + 64 * 96 * 2);
    CHECK(all == t->lib.lk_mlp_workspace_bytes(blas, &c.call, &b, LK_BACKWARD) + 64 * 96 * 2);
    CHECK(t->lib.lk_mlp_workspace_bytes(blas, &c.call, NULL, LK_BACKWARD) == 0);
    CHECK(t->lib.lk_mlp_workspace_bytes(blas, NULL, NULL, LK_FORWARD) == 0);
    drop_case(&c);
}

/* ---- corners ---- */

static void gradients_that_are_not_wanted_are_left_out(const struct compute_target *t,
                                                       struct lk_blas *blas)
{
    for (unsigned int traits = 0; traits < 2; traits++) {
        uint64_t state = 139;
        struct mlp_case c = make_case(t, &shapes[1], traits, &state);
        struct typed dx = typed_new(t, LK_BF16, c.dx.rows, c.dx.columns, c.dx.stride, 0);
        struct lk_mlp_backward b = backward_of(&c);

        CHECK(backward(t, blas, &c, &b) == 0);
        typed_fill(&dx, 1, &state);
        b.dgate_up = NULL;
        b.ddown = NULL;
        b.dgamma = NULL;
        b.dx = dx.memory.far;
        CHECK(backward(t, blas, &c, &b) == 0);
        memory_down(&dx.memory);
        same_bits(&dx, &c.dx);
        memory_free(&dx.memory);
        drop_case(&c);
    }
}

static void dx_may_replace_what_is_added(const struct compute_target *t, struct lk_blas *blas)
{
    for (unsigned int traits = RESIDUAL; traits < RESIDUAL + 2; traits++) {
        uint64_t state = 149;
        struct mlp_case c = make_case(t, &shapes[1], traits, &state);
        struct lk_mlp_backward b = backward_of(&c);

        CHECK(backward(t, blas, &c, &b) == 0);
        b.dx = c.dout.memory.far;
        CHECK(backward(t, blas, &c, &b) == 0);
        memory_down(&c.dout.memory);
        same_bits(&c.dout, &c.dx);
        drop_case(&c);
    }
}

static void one_row_of_gradients_may_stand_for_all(const struct compute_target *t,
                                                   struct lk_blas *blas)
{
    uint64_t state = 151;
    struct mlp_case c = make_case(t, &shapes[1], RESIDUAL, &state);

    c.dout.stride = 0;
    check_case(t, blas, &c);
    drop_case(&c);
}

static void no_rows_leave_zeros(const struct compute_target *t, struct lk_blas *blas)
{
    for (unsigned int traits = 0; traits < TRAITS; traits += 1 + ACCUMULATE) {
        const struct shape shape = { 0, 16, 8, 0, 0 };
        uint64_t state = 157;
        struct mlp_case c = make_case(t, &shape, traits, &state);
        struct dense before = dense_of(&c.ddown);
        struct lk_mlp_backward b = backward_of(&c);

        CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
        for (uint64_t r = 0; r < c.ddown.rows; r++)
            for (uint64_t k = 0; k < c.ddown.columns; k++)
                CHECK(typed_get(&c.ddown, r, k) ==
                      (traits & ACCUMULATE ? *dense_at(&before, r, k) : 0));
        dense_free(&before);
        drop_case(&c);
    }
}

static void wrong_arguments_are_named(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 163;
    struct mlp_case c = make_case(t, &shapes[1], WEIGHTED, &state);
    const struct lk_mlp good = c.call;
    struct lk_mlp_backward b = backward_of(&c);

#define REFUSED(change, word)                                                    \
    do {                                                                         \
        c.call = good;                                                           \
        b = backward_of(&c);                                                     \
        c.call.workspace = c.z.memory.far - (uintptr_t)c.z.memory.far % 256;     \
        change;                                                                  \
        CHECK(t->lib.lk_mlp_backward(blas, &c.call, &b, NULL) == -EINVAL);       \
        CHECK(strstr(t->lib.lk_blas_error(), "lk_mlp_backward: " word) != NULL); \
    } while (0)
    REFUSED(c.call.x = NULL, "x is NULL");
    REFUSED(c.call.gate_up = (const char *)good.gate_up + 1, "gate_up is not aligned");
    REFUSED(c.call.down = NULL, "down is NULL");
    REFUSED(c.call.ffn = 0, "7 rows of 24, ffn of 0");
    REFUSED(c.call.drop = 1, "eps, drop or rng");
    REFUSED(c.call.eps = NAN, "eps, drop or rng");
    REFUSED(c.call.gamma_type = LK_FP16, "gamma_type");
    REFUSED(c.call.gamma = NULL, "dgamma without gamma");
    REFUSED(c.call.saved.rstd = (float *)((char *)c.rstd.memory.far + 2), "saved.rstd");
    REFUSED(c.call.workspace = NULL, "the workspace");
    REFUSED(c.call.workspace = (char *)c.call.workspace + 16, "the workspace");
    REFUSED(b.dout = NULL, "dout is NULL");
    REFUSED(b.dx_stride = 23, "rows of dx overlap");
    REFUSED(b.grad_type = LK_FP16, "grad_type");
    REFUSED(b.ddown = (char *)b.ddown + 2, "ddown is not aligned");
#undef REFUSED
    CHECK(t->lib.lk_mlp_backward(blas, NULL, &b, NULL) == -EINVAL);
    CHECK(t->lib.lk_mlp_forward(NULL, &good, NULL, NULL) == -EINVAL);
    memory_down(&c.dx.memory); /* nothing was written */
    drop_case(&c);
}

void check_mlp(const struct compute_target *t)
{
    /* under a checker only kernels of our own */
    for (uint32_t flags = t->small ? LK_BLAS_GENERAL : 0; flags <= LK_BLAS_GENERAL; flags++) {
        struct lk_blas *blas = open_blas(t, flags);

        results_follow_the_formula(t, blas);
        hard_inputs_follow_the_formula(t, blas);
        what_is_not_finite_stays_in_its_row(t, blas);
        results_do_not_depend_on_what_was_saved(t, blas);
        saved_tensors_are_left_alone(t, blas);
        saving_more_takes_less_workspace(t, blas);
        gradients_that_are_not_wanted_are_left_out(t, blas);
        dx_may_replace_what_is_added(t, blas);
        one_row_of_gradients_may_stand_for_all(t, blas);
        no_rows_leave_zeros(t, blas);
        wrong_arguments_are_named(t, blas);
        t->lib.lk_blas_close(blas);
        if (strcmp(t->lib.lk_backend(), "host") == 0)
            return; /* there both are the same */
    }
}
