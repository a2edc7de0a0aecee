/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define FORWARD_ERROR  4e-3
#define BACKWARD_ERROR 6e-3

struct shape {
    uint64_t rows, hidden, columns;
    uint64_t pad;   /* added to strides */
    uint64_t chunk; /* rows */
    size_t shift;
};

static const struct shape shapes[] = {
    {1,   8,   8,   0, 0,  0},
    { 7,  24,  40,  8, 3,  0},
    { 5,  33,  17,  0, 1,  0},
    { 64, 64,  192, 0, 16, 0},
    { 6,  136, 9,   3, 4,  1},
};

enum traits {
    LAYER = 1,       /* LayerNorm, with beta */
    BIAS = 2,        /* and its gradient */
    RESIDUAL = 4,    /* something is added to dx */
    ACCUMULATE = 8,  /* onto what is there */
    UNWEIGHTED = 16, /* no gamma, no beta */
    TRAITS = 32,
};

struct block_case {
    unsigned int traits;
    struct lk_norm_linear call;
    struct typed x, weight, bias, gamma, beta, out, dout, add, dx, dweight, dbias, dgamma, dbeta;
    struct typed rstd, mean, y;
};

/* The same in double precision. */
struct wanted {
    struct dense out, dx, dweight, dbias, dgamma, dbeta;
};

static struct block_case make_case(const struct compute_target *t, const struct shape *s,
                                   unsigned int traits, uint64_t *state)
{
    uint64_t stride = s->hidden + s->pad, out_stride = s->columns + s->pad;
    struct block_case c = {
        .traits = traits,
        .x = typed_new(t, LK_BF16, s->rows, s->hidden, stride, s->shift),
        .weight = typed_new(t, LK_BF16, s->columns, s->hidden, s->hidden, s->shift),
        .bias = typed_new(t, LK_BF16, 1, s->columns, s->columns, 0),
        .gamma = typed_new(t, LK_FP32, 1, s->hidden, s->hidden, 0),
        .beta = typed_new(t, LK_FP32, 1, s->hidden, s->hidden, 0),
        .out = typed_new(t, LK_BF16, s->rows, s->columns, out_stride, s->shift),
        .dout = typed_new(t, LK_BF16, s->rows, s->columns, out_stride, s->shift),
        .add = typed_new(t, LK_BF16, s->rows, s->hidden, stride, 0),
        .dx = typed_new(t, LK_BF16, s->rows, s->hidden, stride, s->shift),
        .dweight = typed_new(t, LK_FP32, s->columns, s->hidden, s->hidden, 0),
        .dbias = typed_new(t, LK_FP32, 1, s->columns, s->columns, 0),
        .dgamma = typed_new(t, LK_FP32, 1, s->hidden, s->hidden, 0),
        .dbeta = typed_new(t, LK_FP32, 1, s->hidden, s->hidden, 0),
        .rstd = typed_new(t, LK_FP32, s->rows, 1, 1, 0),
        .mean = typed_new(t, LK_FP32, s->rows, 1, 1, 0),
        .y = typed_new(t, LK_BF16, s->rows, s->hidden, s->hidden, 0),
    };
    struct typed *all[] = { &c.x,     &c.weight, &c.bias, &c.gamma,   &c.beta,  &c.out,
                            &c.dout,  &c.add,    &c.dx,   &c.dweight, &c.dbias, &c.dgamma,
                            &c.dbeta, &c.rstd,   &c.mean, &c.y };

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        typed_fill(all[i], 2, state);
    c.call = (struct lk_norm_linear){
        .rows = s->rows,
        .hidden = s->hidden,
        .columns = s->columns,
        .x = c.x.memory.far,
        .x_stride = stride,
        .kind = traits & LAYER ? LK_LAYER_NORM : LK_RMS_NORM,
        .eps = 1e-5,
        .gamma_type = LK_FP32,
        .gamma = traits & UNWEIGHTED ? NULL : c.gamma.memory.far,
        .beta = traits & LAYER && !(traits & UNWEIGHTED) ? c.beta.memory.far : NULL,
        .gamma_offset = 0.5F,
        .weight = c.weight.memory.far,
        .bias = traits & BIAS ? c.bias.memory.far : NULL,
        .chunk_rows = s->chunk,
    };
    return c;
}

static void drop_case(struct block_case *c)
{
    struct typed *all[] = { &c->x,     &c->weight, &c->bias, &c->gamma,   &c->beta,  &c->out,
                            &c->dout,  &c->add,    &c->dx,   &c->dweight, &c->dbias, &c->dgamma,
                            &c->dbeta, &c->rstd,   &c->mean, &c->y };

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        memory_free(&all[i]->memory);
}

static double gamma_at(const struct block_case *c, uint64_t k)
{
    return c->call.gamma ? typed_get(&c->gamma, 0, k) + 0.5 : 1;
}

/* The normalised rows, and 1 / deviation. */
static struct dense want_hat(const struct block_case *c, struct dense *rstd)
{
    struct dense hat = dense_of(&c->x);

    *rstd = dense_new(hat.rows, 1);
    for (uint64_t r = 0; r < hat.rows; r++) {
        double mean = 0, squares = 0, n = (double)hat.columns;

        for (uint64_t k = 0; c->traits & LAYER && k < hat.columns; k++)
            mean += *dense_at(&hat, r, k) / n;
        for (uint64_t k = 0; k < hat.columns; k++)
            squares += pow(*dense_at(&hat, r, k) - mean, 2) / n;
        *dense_at(rstd, r, 0) = 1 / sqrt(squares + 1e-5);
        for (uint64_t k = 0; k < hat.columns; k++)
            *dense_at(&hat, r, k) = (*dense_at(&hat, r, k) - mean) * *dense_at(rstd, r, 0);
    }
    return hat;
}

static void want_dx(const struct block_case *c, const struct dense *hat, const struct dense *dy,
                    double rstd, uint64_t r, struct wanted *out)
{
    double plain = 0, product = 0, n = (double)hat->columns;

    for (uint64_t k = 0; k < hat->columns; k++) {
        double d = *dense_at(dy, r, k) * gamma_at(c, k);

        plain += c->traits & LAYER ? d / n : 0;
        product += d * *dense_at(hat, r, k) / n;
        *dense_at(&out->dgamma, 0, k) += *dense_at(dy, r, k) * *dense_at(hat, r, k);
        *dense_at(&out->dbeta, 0, k) += *dense_at(dy, r, k);
    }
    for (uint64_t k = 0; k < hat->columns; k++) {
        double d = *dense_at(dy, r, k) * gamma_at(c, k) - plain - *dense_at(hat, r, k) * product;

        *dense_at(&out->dx, r, k) = rstd * d +
                                    (c->traits & RESIDUAL ? typed_get(&c->add, r, k) : 0);
    }
}

static struct wanted want(const struct block_case *c)
{
    struct dense rstd, hat = want_hat(c, &rstd), y = dense_new(hat.rows, hat.columns);
    struct dense weight = dense_of(&c->weight), dout = dense_of(&c->dout), dy;
    struct wanted out = { .dx = dense_new(hat.rows, hat.columns),
                          .dbias = dense_new(1, c->call.columns),
                          .dgamma = dense_new(1, hat.columns),
                          .dbeta = dense_new(1, hat.columns) };

    for (uint64_t r = 0; r < hat.rows; r++)
        for (uint64_t k = 0; k < hat.columns; k++)
            *dense_at(&y, r, k) = *dense_at(&hat, r, k) * gamma_at(c, k) +
                                  (c->call.beta ? typed_get(&c->beta, 0, k) : 0);
    out.out = dense_product(&y, false, &weight, true);
    out.dweight = dense_product(&dout, true, &y, false);
    for (uint64_t j = 0; j < c->call.columns; j++) {
        for (uint64_t r = 0; r < hat.rows; r++) {
            *dense_at(&out.out, r, j) += c->traits & BIAS ? typed_get(&c->bias, 0, j) : 0;
            *dense_at(&out.dbias, 0, j) += *dense_at(&dout, r, j);
        }
        for (uint64_t k = 0; c->traits & ACCUMULATE && k < hat.columns; k++)
            *dense_at(&out.dweight, j, k) += typed_get(&c->dweight, j, k);
    }
    dy = dense_product(&dout, false, &weight, false);
    for (uint64_t r = 0; r < hat.rows; r++)
        want_dx(c, &hat, &dy, *dense_at(&rstd, r, 0), r, &out);
    dense_free(&rstd);
    dense_free(&hat);
    dense_free(&y);
    dense_free(&weight);
    dense_free(&dout);
    dense_free(&dy);
    return out;
}

static void drop_wanted(struct wanted *wanted)
{
    dense_free(&wanted->out);
    dense_free(&wanted->dx);
    dense_free(&wanted->dweight);
    dense_free(&wanted->dbias);
    dense_free(&wanted->dgamma);
    dense_free(&wanted->dbeta);
}

static struct lk_norm_linear_backward backward_of(const struct block_case *c)
{
    return (struct lk_norm_linear_backward){
        .dout = c->dout.memory.far,
        .dout_stride = c->dout.stride,
        .dx_add = c->traits & RESIDUAL ? c->add.memory.far : NULL,
        .dx_add_stride = c->add.stride,
        .dx = c->dx.memory.far,
        .dx_stride = c->dx.stride,
        .grad_type = LK_FP32,
        .dweight = c->dweight.memory.far,
        .accumulate = c->traits & ACCUMULATE ? 1 : 0,
        .dbias = c->traits & BIAS ? (float *)c->dbias.memory.far : NULL,
        .dgamma = c->call.gamma ? (float *)c->dgamma.memory.far : NULL,
        .dbeta = c->call.beta ? (float *)c->dbeta.memory.far : NULL,
    };
}

static int forward(const struct compute_target *t, struct lk_blas *blas, struct block_case *c)
{
    int err;

    c->call.workspace = workspace_take(
        t, t->lib.lk_norm_linear_workspace_bytes(blas, &c->call, NULL, LK_FORWARD));
    err = t->lib.lk_norm_linear_forward(blas, &c->call, c->out.memory.far, c->out.stride, NULL);
    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    memory_down(&c->out.memory);
    workspace_check(t);
    return err;
}

static int backward(const struct compute_target *t, struct lk_blas *blas, struct block_case *c,
                    const struct lk_norm_linear_backward *b)
{
    int err;

    c->call.workspace = workspace_take(
        t, t->lib.lk_norm_linear_workspace_bytes(blas, &c->call, b, LK_BACKWARD));
    err = t->lib.lk_norm_linear_backward(blas, &c->call, b, NULL);
    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    memory_down(&c->dx.memory);
    memory_down(&c->dweight.memory);
    memory_down(&c->dbias.memory);
    memory_down(&c->dgamma.memory);
    memory_down(&c->dbeta.memory);
    workspace_check(t);
    return err;
}

static void check_case(const struct compute_target *t, struct lk_blas *blas, struct block_case *c)
{
    struct wanted wanted = want(c);
    struct lk_norm_linear_backward b = backward_of(c);

    CHECK(forward(t, blas, c) == 0);
    check_error("out", &c->out, &wanted.out, FORWARD_ERROR);
    CHECK(backward(t, blas, c, &b) == 0);
    check_error("dx", &c->dx, &wanted.dx, BACKWARD_ERROR);
    check_error("dweight", &c->dweight, &wanted.dweight, BACKWARD_ERROR);
    if (b.dbias)
        check_error("dbias", &c->dbias, &wanted.dbias, 1e-6);
    if (b.dgamma)
        check_error("dgamma", &c->dgamma, &wanted.dgamma, BACKWARD_ERROR);
    if (b.dbeta)
        check_error("dbeta", &c->dbeta, &wanted.dbeta, BACKWARD_ERROR);
    drop_wanted(&wanted);
}

static void results_follow_the_formula(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 167;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        bool large = shapes[s].rows >= 64; /* some traits do for those */

        for (unsigned int traits = 0; traits < TRAITS; traits += t->small || large ? 5 : 1) {
            struct block_case c = make_case(t, &shapes[s], traits, &state);

            check_case(t, blas, &c);
            drop_case(&c);
        }
    }
}

#define BLOCK_CASE     struct block_case
#define BLOCK_BACKWARD struct lk_norm_linear_backward
#include "tests/kernels/compute_block_inputs.h"

static void same_bits(const struct typed *a, const struct typed *b)
{
    for (uint64_t r = 0; r < a->rows; r++)
        for (uint64_t k = 0; k < a->columns; k++)
            CHECK(typed_get(a, r, k) == typed_get(b, r, k));
}

/* Bit 0 of `saved`: the statistics; bit 1: y. */
static void save(struct block_case *c, unsigned int saved)
{
    c->call.saved = (struct lk_saved){
        .rstd = saved & 1 ? (float *)c->rstd.memory.far : NULL,
        .mean = saved & 1 && c->traits & LAYER ? (float *)c->mean.memory.far : NULL,
        .y = saved & 2 ? c->y.memory.far : NULL,
    };
}

/* On a GPU the library may choose another method for another number of rows: there chunks are left out. */
static void results_of_shape_do_not_depend_on_what_was_saved(const struct compute_target *t,
                                                             struct lk_blas *blas,
                                                             const struct shape *shape)
{
    for (unsigned int traits = 0; traits<ACCUMULATE; traits += shape->rows> 1000 ? 3 : 1) {
        uint64_t state = 173;
        struct block_case first = make_case(t, shape, traits, &state);
        struct lk_norm_linear_backward b = backward_of(&first);

        if (strcmp(t->lib.lk_backend(), "host") != 0)
            first.call.chunk_rows = 0;
        CHECK(forward(t, blas, &first) == 0 && backward(t, blas, &first, &b) == 0);
        for (unsigned int saved = 1; saved < 4; saved++) {
            struct block_case c;

            state = 173;
            c = make_case(t, shape, traits, &state);
            c.call.chunk_rows = first.call.chunk_rows;
            save(&c, saved);
            b = backward_of(&c);
            CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
            same_bits(&c.out, &first.out);
            same_bits(&c.dx, &first.dx);
            same_bits(&c.dweight, &first.dweight);
            same_bits(&c.dgamma, &first.dgamma);
            drop_case(&c);
        }
        drop_case(&first);
    }
}

static void results_do_not_depend_on_what_was_saved(const struct compute_target *t,
                                                    struct lk_blas *blas)
{
    static const struct shape many = { 2200, 2048, 16, 0, 0, 0 };

    results_of_shape_do_not_depend_on_what_was_saved(t, blas, &shapes[1]);
    if (strcmp(t->lib.lk_backend(), "host") != 0 && !t->small) /* other kernels serve it there */
        results_of_shape_do_not_depend_on_what_was_saved(t, blas, &many);
}

/* What is added to dx is dout, and dx takes its place: dweight is not to be made of what is there then. */
static void dx_may_take_the_place_of_dout(const struct compute_target *t, struct lk_blas *blas)
{
    static const struct shape square = { 40, 64, 64, 0, 0, 0 };

    for (unsigned int traits = 0; traits < 2; traits++) {
        uint64_t state = 197;
        struct block_case apart = make_case(t, &square, traits, &state), c;
        struct lk_norm_linear_backward b = backward_of(&apart);

        save(&apart, 1);
        b.dx_add = b.dout;
        b.dx_add_stride = b.dout_stride;
        CHECK(forward(t, blas, &apart) == 0 && backward(t, blas, &apart, &b) == 0);
        state = 197;
        c = make_case(t, &square, traits, &state);
        save(&c, 1);
        b = backward_of(&c);
        b.dx_add = b.dx = c.dout.memory.far;
        b.dx_add_stride = b.dx_stride = b.dout_stride;
        CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
        memory_down(&c.dout.memory);
        same_bits(&c.dout, &apart.dx);
        same_bits(&c.dweight, &apart.dweight);
        drop_case(&c);
        drop_case(&apart);
    }
}

/* Without the gradient of the matrix backward has no use for y, and takes the statistics as they were saved. */
static void saved_statistics_serve_backward(const struct compute_target *t, struct lk_blas *blas)
{
    for (unsigned int traits = 0; traits < 2; traits++) {
        uint64_t state = 193;
        struct block_case first = make_case(t, &shapes[1], traits, &state), c;
        struct lk_norm_linear_backward b = backward_of(&first);

        b.dweight = NULL;
        CHECK(backward(t, blas, &first, &b) == 0);
        state = 193;
        c = make_case(t, &shapes[1], traits, &state);
        save(&c, 1);
        b = backward_of(&c);
        b.dweight = NULL;
        CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
        same_bits(&c.dx, &first.dx);
        same_bits(&c.dgamma, &first.dgamma);
        drop_case(&first);
        drop_case(&c);
    }
}

static void chunks_take_less_workspace(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 179;
    struct block_case c = make_case(t, &shapes[3], 0, &state);
    size_t chunks = t->lib.lk_norm_linear_workspace_bytes(blas, &c.call, NULL, LK_FORWARD), whole;

    c.call.chunk_rows = 0;
    whole = t->lib.lk_norm_linear_workspace_bytes(blas, &c.call, NULL, LK_FORWARD);
    CHECK(whole == chunks + 48 * 64 * 2);
    CHECK(t->lib.lk_norm_linear_workspace_bytes(blas, &c.call, NULL, LK_BACKWARD) == 0);
    drop_case(&c);
}

static void no_rows_leave_zeros(const struct compute_target *t, struct lk_blas *blas)
{
    const struct shape shape = { 0, 16, 8, 0, 0, 0 };
    uint64_t state = 181;
    struct block_case c = make_case(t, &shape, BIAS | LAYER, &state);
    struct lk_norm_linear_backward b = backward_of(&c);

    CHECK(forward(t, blas, &c) == 0 && backward(t, blas, &c, &b) == 0);
    for (uint64_t j = 0; j < 8; j++) {
        CHECK(typed_get(&c.dbias, 0, j) == 0);
        for (uint64_t k = 0; k < 16; k++)
            CHECK(typed_get(&c.dweight, j, k) == 0);
    }
    drop_case(&c);
}

static void wrong_arguments_are_named(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 191;
    struct block_case c = make_case(t, &shapes[1], LAYER | BIAS, &state);
    const struct lk_norm_linear good = c.call;
    struct lk_norm_linear_backward b = backward_of(&c);

#define REFUSED(change, word)                                                            \
    do {                                                                                 \
        c.call = good;                                                                   \
        b = backward_of(&c);                                                             \
        c.call.workspace = c.y.memory.far - (uintptr_t)c.y.memory.far % 256;             \
        change;                                                                          \
        CHECK(t->lib.lk_norm_linear_backward(blas, &c.call, &b, NULL) == -EINVAL);       \
        CHECK(strstr(t->lib.lk_blas_error(), "lk_norm_linear_backward: " word) != NULL); \
    } while (0)
    REFUSED(c.call.x = NULL, "x is NULL");
    REFUSED(c.call.weight = (const char *)good.weight + 1, "weight is not aligned");
    REFUSED(c.call.columns = 0, "7 rows of 24, 0 columns");
    REFUSED(c.call.kind = (enum lk_norm_kind)2, "kind or eps");
    REFUSED(c.call.gamma_type = LK_FP16, "gamma_type");
    REFUSED(c.call.saved.rstd = (float *)c.rstd.memory.far, "rstd and mean");
    REFUSED(c.call.workspace = NULL, "the workspace");
    REFUSED(b.dout = NULL, "dout is NULL");
    REFUSED(b.dx_stride = 23, "rows of dx overlap");
    REFUSED(b.grad_type = LK_FP16, "grad_type");
    REFUSED(b.dbias = (float *)((char *)b.dbias + 2), "dbias is not aligned");
#undef REFUSED
    CHECK(t->lib.lk_norm_linear_forward(blas, &good, NULL, 40, NULL) == -EINVAL);
    CHECK(t->lib.lk_norm_linear_forward(NULL, &good, c.out.memory.far, 48, NULL) == -EINVAL);
    drop_case(&c);
}

void check_norm_linear(const struct compute_target *t)
{
    /* under a checker only kernels of our own */
    for (uint32_t flags = t->small ? LK_BLAS_GENERAL : 0; flags <= LK_BLAS_GENERAL; flags++) {
        struct lk_blas *blas = open_blas(t, flags);

        results_follow_the_formula(t, blas);
        hard_inputs_follow_the_formula(t, blas);
        what_is_not_finite_stays_in_its_row(t, blas);
        results_do_not_depend_on_what_was_saved(t, blas);
        saved_statistics_serve_backward(t, blas);
        dx_may_take_the_place_of_dout(t, blas);
        chunks_take_less_workspace(t, blas);
        no_rows_leave_zeros(t, blas);
        wrong_arguments_are_named(t, blas);
        t->lib.lk_blas_close(blas);
        if (strcmp(t->lib.lk_backend(), "host") == 0)
            return; /* there both are the same */
    }
}
