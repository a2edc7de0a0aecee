/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_rows.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

struct shape {
    uint64_t rows, columns;
    uint64_t pad; /* added to strides */
    size_t shift;
};

static const struct shape shapes[] = {
    {1,    1,    0,  0},
    { 3,   8,    0,  0},
    { 5,   257,  0,  0},
    { 7,   264,  8,  0},
    { 2,   2048, 0,  0},
    { 3,   2056, 0,  1},
    { 2,   5000, 24, 0},
    { 4,   64,   3,  0},
    { 300, 16,   0,  0},
};

/* One call: what it reads and writes, and what it was told. */
struct swiglu_case {
    struct lk_swiglu call;
    struct rows z, dh, dz, h, again;
    struct memory scale, dot, offset;
};

static double row_scale(const struct swiglu_case *c, uint64_t r)
{
    return c->call.row_scale ? (double)((float *)c->scale.near)[r] : 1;
}

static struct swiglu_case make_case(const struct compute_target *t, const struct shape *shape,
                                    enum filling filling, double drop, uint64_t *state)
{
    struct swiglu_case c = { 0 };
    uint64_t n = shape->columns;

    c.z = rows_new(t, shape->rows, 2 * n, 2 * n + shape->pad, shape->shift);
    /* every other time one row of gradients for all rows */
    c.dh = rows_new(t, shape->rows, n, shape->rows % 2 ? 0 : n + shape->pad, shape->shift);
    c.dz = rows_new(t, shape->rows, 2 * n, 2 * n + shape->pad, shape->shift);
    c.h = rows_new(t, shape->rows, n, n + shape->pad, shape->shift);
    c.again = rows_new(t, shape->rows, n, n + shape->pad, shape->shift);
    c.scale = memory_new(t, shape->rows * 4, 0);
    c.dot = memory_new(t, shape->rows * 4, 0);
    c.offset = memory_new(t, 8, 0);
    rows_fill(&c.z, filling, state);
    rows_fill(&c.dh, FILL_RANDOM, state);
    memory_up(&c.dz.memory);
    memory_up(&c.h.memory);
    memory_up(&c.again.memory);
    memory_up(&c.dot);
    for (uint64_t r = 0; r < shape->rows; r++)
        ((float *)c.scale.near)[r] = (float)(1 + random_unit(state) / 2);
    memory_up(&c.scale);
    *(uint64_t *)c.offset.near = 5;
    memory_up(&c.offset);
    c.call = (struct lk_swiglu){
        .z = c.z.memory.far,
        .z_stride = c.z.stride,
        .row_scale = shape->rows % 3 ? (float *)c.scale.far : NULL,
        .rows = shape->rows,
        .columns = n,
        .drop = drop,
        .rng = {7, 1000004, (uint64_t *)c.offset.far},
    };
    return c;
}

static void drop_case(struct swiglu_case *c)
{
    memory_free(&c->z.memory);
    memory_free(&c->dh.memory);
    memory_free(&c->dz.memory);
    memory_free(&c->h.memory);
    memory_free(&c->again.memory);
    memory_free(&c->scale);
    memory_free(&c->dot);
    memory_free(&c->offset);
}

/* What element (r, j) is multiplied by; 0 if it is dropped. */
static double factor(const struct swiglu_case *c, uint64_t r, uint64_t j)
{
    double threshold = rint(65536 * c->call.drop);
    uint64_t padded = (c->call.columns + 7) / 8 * 8;
    unsigned int random = ref_random(7, (1000004 + 5) / 8 * 8 + r * padded + j);

    if (threshold == 0)
        return 1;
    return random < threshold ? 0 : 65536 / (65536 - threshold);
}

static void check_forward(const struct swiglu_case *c)
{
    for (uint64_t r = 0; r < c->call.rows; r++) {
        for (uint64_t j = 0; j < c->call.columns; j++) {
            double g = rows_get(&c->z, r, j) * row_scale(c, r);
            double u = rows_get(&c->z, r, c->call.columns + j) * row_scale(c, r);
            double f = factor(c, r, j), h = f == 0 ? 0 : g / (1 + exp(-g)) * u * f;

            CHECK(near_bf16(rows_get(&c->h, r, j), h,
                            0x1p-16 * fabs(h) + 0x1p-126 * fabs(g * u * f)));
            CHECK(f != 0 || rows_get(&c->h, r, j) == 0);
        }
    }
}

/* One row's gradients; gives back the sum for row_dot, and the sum of its terms' magnitudes. */
static double check_gradients(const struct swiglu_case *c, uint64_t r, double *size)
{
    uint64_t n = c->call.columns;
    double dot = 0, scale = row_scale(c, r);

    *size = 0;
    for (uint64_t j = 0; j < n; j++) {
        double z0 = rows_get(&c->z, r, j), z1 = rows_get(&c->z, r, n + j);
        double g = z0 * scale, u = z1 * scale, s = 1 / (1 + exp(-g)), f = factor(c, r, j);
        double d = rows_get(&c->dh, r, j) * f;
        double dg = f == 0 ? 0 : d * u * s * (1 + g * (1 - s)), du = f == 0 ? 0 : d * g * s;
        double dg_size = fabs(d * u * s) * (1 + fabs(g));

        CHECK(near_bf16(rows_get(&c->dz, r, j), dg * scale, 0x1p-14 * dg_size * scale + 0x1p-110));
        CHECK(near_bf16(rows_get(&c->dz, r, n + j), du * scale,
                        0x1p-14 * fabs(du * scale) + 0x1p-110));
        dot += f == 0 ? 0 : dg * z0 + du * z1;
        *size += fabs(dg_size * z0) + fabs(du * z1);
    }
    return dot;
}

static void check_case(const struct compute_target *t, struct swiglu_case *c)
{
    struct lk_swiglu_grads grads = {
        .dh = c->dh.memory.far,
        .dh_stride = c->dh.stride,
        .dz = c->dz.memory.far,
        .dz_stride = c->dz.stride,
        .h = c->again.memory.far,
        .h_stride = c->again.stride,
        .row_dot = (float *)c->dot.far,
    };

    CHECK(t->lib.lk_swiglu_forward(&c->call, c->h.memory.far, c->h.stride, NULL) == 0);
    memory_down(&c->h.memory);
    check_forward(c);
    CHECK(t->lib.lk_swiglu_backward(&c->call, &grads, NULL) == 0);
    memory_down(&c->dz.memory);
    memory_down(&c->again.memory);
    memory_down(&c->dot);
    CHECK(memcmp(c->again.memory.near, c->h.memory.near, c->h.memory.bytes) == 0);
    for (uint64_t r = 0; r < c->call.rows; r++) {
        double size, dot = check_gradients(c, r, &size);

        CHECK(near_float((double)((float *)c->dot.near)[r], dot, 0x1p-14 * size + 0x1p-100));
    }
    for (uint64_t r = 0; r + 1 < c->call.rows; r++) /* what lies between rows is left alone */
        for (uint64_t j = c->call.columns; j < c->h.stride; j++)
            CHECK(rows_at(&c->h, r)[j] == 0xa5a5);
}

static void results_follow_the_formula(const struct compute_target *t)
{
    uint64_t state = 41;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        for (int filling = 0; filling < FILLINGS; filling++) {
            double drop = filling % 2 ? 0.3 : 0;
            struct swiglu_case c = make_case(t, &shapes[s], (enum filling)filling, drop, &state);

            check_case(t, &c);
            drop_case(&c);
        }
    }
}

static void gradients_may_replace_what_they_come_from(const struct compute_target *t)
{
    uint64_t state = 43;
    struct swiglu_case c = make_case(t, &shapes[3], FILL_RANDOM, 0.5, &state);
    struct lk_swiglu_grads grads = { .dh = c.dh.memory.far,
                                     .dh_stride = c.dh.stride,
                                     .dz = c.dz.memory.far,
                                     .dz_stride = c.dz.stride };

    CHECK(t->lib.lk_swiglu_backward(&c.call, &grads, NULL) == 0);
    grads.dz = c.z.memory.far;
    CHECK(t->lib.lk_swiglu_backward(&c.call, &grads, NULL) == 0);
    memory_down(&c.z.memory);
    memory_down(&c.dz.memory);
    CHECK(memcmp(c.z.memory.near, c.dz.memory.near, c.z.memory.bytes) == 0);
    drop_case(&c);
}

static void what_is_not_finite_stays_in_its_place(const struct compute_target *t)
{
    uint64_t state = 47;
    struct swiglu_case c = make_case(t, &shapes[3], FILL_RANDOM, 0, &state);

    rows_at(&c.z, 1)[5] = 0x7fc0;                  /* gate NaN */
    rows_at(&c.z, 2)[c.call.columns + 9] = 0x7fc0; /* up NaN */
    rows_at(&c.z, 3)[20] = 0x7f80;                 /* gate infinite */
    rows_at(&c.z, 3)[c.call.columns + 20] = to_bf16(2);
    memory_up(&c.z.memory);
    CHECK(t->lib.lk_swiglu_forward(&c.call, c.h.memory.far, c.h.stride, NULL) == 0);
    memory_down(&c.h.memory);
    check_forward(&c);
    CHECK(isnan(rows_get(&c.h, 1, 5)) && isnan(rows_get(&c.h, 2, 9)) &&
          isinf(rows_get(&c.h, 3, 20)));
    drop_case(&c);
}

static void as_many_are_dropped_as_asked_for(const struct compute_target *t)
{
    const struct shape shape = { 64, 4096, 0, 0 };
    uint64_t state = 53, dropped = 0, n = shape.rows * shape.columns;
    struct swiglu_case c = make_case(t, &shape, FILL_EQUAL, 0.1, &state);
    double sigma = sqrt((double)n * 0.1 * 0.9);

    CHECK(t->lib.lk_swiglu_forward(&c.call, c.h.memory.far, c.h.stride, NULL) == 0);
    memory_down(&c.h.memory);
    for (uint64_t i = 0; i < n; i++)
        dropped += ((uint16_t *)c.h.memory.near)[i] == 0;
    CHECK(fabs((double)dropped - 0.1 * (double)n) < 4 * sigma);
    drop_case(&c);
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    uint64_t state = 59;
    struct swiglu_case c = make_case(t, &shapes[3], FILL_RANDOM, 0.5, &state);
    struct lk_swiglu call = c.call;

#define REFUSED(change, text)                                                                \
    do {                                                                                     \
        call = c.call;                                                                       \
        change;                                                                              \
        CHECK(t->lib.lk_swiglu_forward(&call, c.h.memory.far, c.h.stride, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_swiglu_forward", text));                                     \
    } while (0)
    REFUSED(call.z = NULL, "z is NULL");
    REFUSED(call.z = (char *)call.z + 1, "z is not aligned");
    REFUSED(call.row_scale = (float *)((char *)c.scale.far + 2), "row_scale");
    REFUSED(call.drop = 1, "drop is not in");
    REFUSED(call.drop = 0.9999999, "nothing is kept");
    REFUSED(call.drop = -0.1, "drop is not in");
    REFUSED(call.drop = NAN, "drop is not in");
    REFUSED(call.rows = UINT64_C(1) << 31, "2147483648 rows");
    REFUSED(call.columns = 0, "of 0 columns");
    REFUSED(call.columns = UINT64_C(1) << 60, "columns");
    REFUSED(call.rng.device_offset = (uint64_t *)((char *)c.offset.far + 4), "rng");
#undef REFUSED
    CHECK(t->lib.lk_swiglu_forward(&c.call, NULL, c.h.stride, NULL) == -EINVAL);
    CHECK(t->lib.lk_swiglu_forward(&c.call, c.h.memory.far, c.call.columns - 1, NULL) == -EINVAL);
    call = c.call;
    call.rows = 0;
    CHECK(t->lib.lk_swiglu_forward(&call, c.h.memory.far, c.h.stride, NULL) == 0);
    drop_case(&c);
}

void check_swiglu(const struct compute_target *t)
{
    results_follow_the_formula(t);
    gradients_may_replace_what_they_come_from(t);
    what_is_not_finite_stays_in_its_place(t);
    as_many_are_dropped_as_asked_for(t);
    wrong_arguments_are_refused(t);
}
