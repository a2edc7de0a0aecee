/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of every compute kernel whose threads share memory, for the checker of races: each once or twice, with as few rows
 * as have it take its rounds. What they write is checked elsewhere; here it is to be finite, which nothing of it is before.
 */
#include "tests/check.h"
#include "tests/kernels/compute_cases.h"
#include "tests/kernels/compute_rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rows by which kernels whose blocks stay go through their rounds more than twice; the host has no rounds. */
static uint64_t many(const struct compute_target *t, uint64_t rows)
{
    return strcmp(t->lib.lk_backend(), "host") == 0 ? 3 : rows;
}

/* Memory of 0xff: NaN as bf16 and fp32, -1 as an integer. */
static void *unset(const struct compute_target *t, uint64_t bytes)
{
    void *near = malloc(bytes), *far = t->alloc(bytes);

    CHECK(near && far);
    memset(near, 0xff, bytes);
    t->put(far, near, bytes);
    free(near);
    return far;
}

/* Every 97th of so many elements, and the last ones. */
static void are_finite(const struct compute_target *t, const void *far, uint64_t count, bool wide)
{
    size_t bytes = count * (wide ? 4 : 2);
    char *near = malloc(bytes);

    CHECK(near);
    t->get(near, far, bytes);
    for (uint64_t i = 0; i < count; i += i + 98 < count ? 97 : 1) {
        float value = 0;
        uint16_t half = 0;

        memcpy(wide ? (void *)&value : (void *)&half, near + i * (wide ? 4 : 2), wide ? 4 : 2);
        CHECK(isfinite(wide ? (double)value : from_bf16(half)));
    }
    free(near);
}

/* ---- norms ---- */

struct norm_shape {
    uint64_t rows, columns, shift; /* elements by which matrices are not aligned */
};

struct norm_race {
    const struct compute_target *t;
    struct norm_shape shape;
    bool layer, residual;
};

struct norm_matrices {
    uint16_t *x, *other, *gamma, *sum, *y;
    float *mean, *rstd, *dgamma, *dbeta;
};

static void run_norm(const struct norm_race *race, const struct norm_matrices *m)
{
    const struct compute_target *t = race->t;
    uint64_t n = race->shape.columns, at = race->shape.shift;
    struct lk_norm norm = { .kind = race->layer ? LK_LAYER_NORM : LK_RMS_NORM,
                            .rows = race->shape.rows,
                            .columns = n,
                            .eps = 1e-5,
                            .weight_type = LK_BF16,
                            .gamma = m->gamma,
                            .mean = race->layer ? m->mean : NULL,
                            .rstd = m->rstd };
    const struct lk_norm_forward forward = { .x = m->x + at,
                                             .x_stride = n,
                                             .residual = race->residual ? m->other + at : NULL,
                                             .residual_stride = n,
                                             .sum = race->residual ? m->sum + at : NULL,
                                             .sum_stride = n,
                                             .y = m->y + at,
                                             .y_stride = n };
    struct lk_norm_backward backward = { .s = m->x + at,
                                         .s_stride = n,
                                         .dy = m->other + at,
                                         .dy_stride = n,
                                         .ds = race->residual ? m->other + at : NULL,
                                         .ds_stride = n,
                                         .dx = m->sum + at,
                                         .dx_stride = n,
                                         .dgamma = m->dgamma,
                                         .dbeta = race->layer ? m->dbeta : NULL };

    backward.workspace = t->alloc(t->lib.lk_norm_workspace_bytes(&norm));
    CHECK(backward.workspace && t->lib.lk_norm_forward(&norm, &forward, NULL) == 0);
    are_finite(t, forward.y, norm.rows * n, false);
    CHECK(t->lib.lk_norm_backward(&norm, &backward, NULL) == 0);
    are_finite(t, backward.dx, norm.rows * n, false);
    are_finite(t, m->dgamma, n, true);
    if (race->layer)
        are_finite(t, m->dbeta, n, true);
    t->release(backward.workspace);
}

static void norm_does_not_race(void *arg)
{
    const struct norm_race *race = arg;
    const struct compute_target *t = race->t;
    uint64_t count = race->shape.rows * race->shape.columns + 8, columns = race->shape.columns;
    const struct norm_matrices m = { .x = random_bf16(t, count, 3),
                                     .other = random_bf16(t, count, 5),
                                     .gamma = random_bf16(t, columns, 7),
                                     .sum = unset(t, count * 2),
                                     .y = unset(t, count * 2),
                                     .mean = unset(t, race->shape.rows * 4),
                                     .rstd = unset(t, race->shape.rows * 4),
                                     .dgamma = unset(t, columns * 4),
                                     .dbeta = unset(t, columns * 4) };

    run_norm(race, &m);
    t->release(m.x);
    t->release(m.other);
    t->release(m.gamma);
    t->release(m.sum);
    t->release(m.y);
    t->release(m.mean);
    t->release(m.rstd);
    t->release(m.dgamma);
    t->release(m.dbeta);
}

/* Each class of aligned rows by few and by many, then those that the other kernels serve. Aligned ones are a multiple of 16, so that
 * all teams of a block go through as many rounds: where they do not, each meets at a barrier of its own a different number of
 * times, and the checker then takes what __syncthreads() separates behind that for races, of that one block. */
static void norms_do_not_race(const struct compute_target *t)
{
    static const struct norm_shape shapes[] = {
        {9000,  256,   0},
        { 70,   512,   0},
        { 80,   1024,  0},
        { 3296, 1024,  0},
        { 80,   2048,  0},
        { 2208, 2048,  0},
        { 912,  4096,  0},
        { 1104, 5120,  0},
        { 1104, 8192,  0},
        { 300,  16384, 0},
        { 1100, 1001,  0},
        { 300,  2001,  0},
        { 300,  1024,  1},
        { 270,  17000, 0},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        for (unsigned int way = 0; way < 4; way++) {
            struct norm_race race = { t, shapes[i], way & 1, way & 2 };

            race.shape.rows = many(t, race.shape.rows);
            run_case(norm_does_not_race, &race, "races of a norm of %llu x %llu, way %u",
                     (unsigned long long)race.shape.rows, (unsigned long long)race.shape.columns,
                     way);
        }
}

/* ---- the others ---- */

static void adamw_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    const uint64_t count = many(t, 300000);
    float *floats = unset(t, 4 * count * 4);
    struct lk_adamw_tensor tensor = { .param = floats,
                                      .grad = random_bf16(t, count, 3),
                                      .m = floats + count,
                                      .v = floats + 2 * count,
                                      .count = count,
                                      .param_type = LK_FP32,
                                      .grad_type = LK_BF16,
                                      .lr_factor = 1 };
    struct lk_adamw_plan plan = { .bytes = t->lib.lk_adamw_table_bytes(&tensor, 1) };
    struct lk_adamw_state state = { 0 };
    struct lk_adamw adamw = { .lr = { .value = 1e-3F },
                              .loss_scale = { .value = 1 },
                              .beta1 = 0.9,
                              .beta2 = 0.999,
                              .eps = 1e-8,
                              .max_norm = 1 };
    float *zeros = calloc(3 * count, 4);

    CHECK(zeros);
    t->put(floats, zeros, 3 * count * 4);
    plan.table = aligned_alloc(16, (plan.bytes + 15) / 16 * 16);
    CHECK(plan.table && t->lib.lk_adamw_plan(&tensor, 1, &plan) == 0);
    plan.device_table = t->alloc(plan.bytes);
    t->put((void *)plan.device_table, plan.table, plan.bytes);
    adamw.state = t->alloc(sizeof(state));
    t->put(adamw.state, &state, sizeof(state));
    adamw.workspace = t->alloc(t->lib.lk_adamw_workspace_bytes(&plan));
    CHECK(t->lib.lk_adamw_step(&plan, &adamw, NULL) == 0);
    are_finite(t, floats, count, true);
    t->release(floats);
    t->release((void *)tensor.grad);
    t->release((void *)plan.device_table);
    t->release(adamw.state);
    t->release(adamw.workspace);
    free(plan.table);
    free(zeros);
}

static void swiglu_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    enum {
        ROWS = 40,
        COLUMNS = 1032
    };
    float *scale = t->alloc(ROWS * 4), ones[ROWS];
    struct lk_swiglu swiglu = { .z = random_bf16(t, (size_t)2 * ROWS * COLUMNS, 3),
                                .z_stride = (uint64_t)2 * COLUMNS,
                                .row_scale = scale,
                                .rows = ROWS,
                                .columns = COLUMNS };
    struct lk_swiglu_grads grads = { .dh = random_bf16(t, (size_t)ROWS * COLUMNS, 5),
                                     .dh_stride = COLUMNS,
                                     .dz = unset(t, (uint64_t)4 * ROWS * COLUMNS),
                                     .dz_stride = (uint64_t)2 * COLUMNS,
                                     .row_dot = unset(t, ROWS * 4) };

    for (int i = 0; i < ROWS; i++)
        ones[i] = 1;
    t->put(scale, ones, sizeof(ones));
    CHECK(t->lib.lk_swiglu_backward(&swiglu, &grads, NULL) == 0);
    are_finite(t, grads.dz, (uint64_t)2 * ROWS * COLUMNS, false);
    are_finite(t, grads.row_dot, ROWS, true);
    t->release(scale);
    t->release((void *)swiglu.z);
    t->release((void *)grads.dh);
    t->release(grads.dz);
    t->release(grads.row_dot);
}

/* Routing alone: the kernels that move rows share nothing. */
static void routing_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    enum {
        TOKENS = 3000,
        CHOICES = 4,
        EXPERTS = 130,
        SLOTS = TOKENS * CHOICES
    };
    int32_t *experts = malloc(SLOTS * 4), *rows = malloc(SLOTS * 4);
    struct lk_moe_routing routing = { .experts = t->alloc(SLOTS * 4),
                                      .tokens = TOKENS,
                                      .choices = CHOICES,
                                      .expert_count = EXPERTS,
                                      .align = 1,
                                      .rows = SLOTS,
                                      .row_of_slot = unset(t, SLOTS * 4),
                                      .slot_of_row = unset(t, SLOTS * 4),
                                      .counts = unset(t, EXPERTS * 4),
                                      .offsets = unset(t, (EXPERTS + 1) * 4),
                                      .live = unset(t, (SLOTS + 31) / 32 * 4) };

    CHECK(experts && rows);
    for (int i = 0; i < SLOTS; i++)
        experts[i] = (int32_t)((uint32_t)i * 2654435761U % EXPERTS);
    t->put((void *)routing.experts, experts, SLOTS * 4);
    routing.workspace = t->alloc(t->lib.lk_moe_workspace_bytes(&routing));
    CHECK(t->lib.lk_moe_route(&routing, NULL) == 0);
    t->get(rows, routing.slot_of_row, SLOTS * 4);
    for (int i = 0; i < SLOTS; i++)
        CHECK(rows[i] >= 0 && (!i || experts[rows[i - 1]] <= experts[rows[i]]));
    t->release((void *)routing.experts);
    t->release(routing.row_of_slot);
    t->release(routing.slot_of_row);
    t->release(routing.counts);
    t->release(routing.offsets);
    t->release(routing.live);
    t->release(routing.workspace);
    free(experts);
    free(rows);
}

static void folding_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    const uint64_t rows = many(t, 400), columns = 520;
    const struct lk_fold fold = { .rows = rows,
                                  .columns = columns,
                                  .weight_type = LK_BF16,
                                  .weight = random_bf16(t, rows * columns, 3),
                                  .gamma_type = LK_BF16,
                                  .gamma = random_bf16(t, columns, 5) };
    const struct lk_fold_grads grads = { .grad_type = LK_BF16,
                                         .dfolded = fold.weight,
                                         .dweight = unset(t, rows * columns * 2),
                                         .dgamma = unset(t, columns * 4),
                                         .workspace = t->alloc(
                                             t->lib.lk_fold_workspace_bytes(&fold)) };

    CHECK(t->lib.lk_fold_backward(&fold, &grads, NULL) == 0);
    are_finite(t, grads.dgamma, columns, true);
    t->release((void *)fold.weight);
    t->release((void *)fold.gamma);
    t->release(grads.dweight);
    t->release(grads.dgamma);
    t->release(grads.workspace);
}

/* A projection by the kernel of our own: products, y made anew beside the sums of dout, and the norm's backward. */
static void projection_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    enum {
        ROWS = 130,
        HIDDEN = 256,
        COLUMNS = 136
    };
    struct lk_norm_linear block = {
        .rows = ROWS,
        .hidden = HIDDEN,
        .columns = COLUMNS,
        .x = random_bf16(t, (size_t)ROWS * HIDDEN, 3),
        .x_stride = HIDDEN,
        .kind = LK_LAYER_NORM,
        .eps = 1e-5,
        .weight = random_bf16(t, (size_t)COLUMNS * HIDDEN, 5),
        .saved = {.rstd = unset(t, ROWS * 4), .mean = unset(t, ROWS * 4)}
    };
    uint16_t *out = unset(t, (uint64_t)ROWS * COLUMNS * 2), *dx = unset(t, ROWS * HIDDEN * 2);
    struct lk_norm_linear_backward backward = { .dout = out,
                                                .dout_stride = COLUMNS,
                                                .dx = dx,
                                                .dx_stride = HIDDEN,
                                                .dweight = unset(t, COLUMNS * HIDDEN * 2),
                                                .dbias = unset(t, COLUMNS * 4),
                                                .dgamma = unset(t, HIDDEN * 4),
                                                .dbeta = unset(t, HIDDEN * 4) };
    struct lk_blas *blas;

    CHECK(t->lib.lk_blas_open(NULL, LK_BLAS_GENERAL, &blas) == 0);
    for (int pass = 0; pass < 2; pass++) {
        enum lk_pass which = pass ? LK_BACKWARD : LK_FORWARD;

        backward.grad_type = LK_BF16;
        block.workspace = t->alloc(
            t->lib.lk_norm_linear_workspace_bytes(blas, &block, pass ? &backward : NULL, which));
        CHECK((pass ? t->lib.lk_norm_linear_backward(blas, &block, &backward, NULL)
                    : t->lib.lk_norm_linear_forward(blas, &block, out, COLUMNS, NULL)) == 0);
        are_finite(t, pass ? dx : out, (uint64_t)ROWS * (pass ? HIDDEN : COLUMNS), false);
        t->release(block.workspace);
    }
    are_finite(t, backward.dbias, COLUMNS, true);
    t->lib.lk_blas_close(blas);
    t->release((void *)block.x);
    t->release((void *)block.weight);
    t->release(block.saved.rstd);
    t->release(block.saved.mean);
    t->release(out);
    t->release(dx);
    t->release(backward.dweight);
    t->release(backward.dbias);
    t->release(backward.dgamma);
    t->release(backward.dbeta);
}

static void augmentation_does_not_race(void *arg)
{
    const struct compute_target *t = arg;
    enum {
        COUNT = 3,
        SIDE = 40,
        OUT = 32
    };
    const struct lk_augment_state near = { .seed = 5 };
    struct lk_augment_state *state = t->alloc(sizeof(near));
    struct lk_augment augment = {
        .images = unset(t, (uint64_t)COUNT * SIDE * SIDE * 3),
        .image_stride = (uint64_t)SIDE * SIDE * 3,
        .row_stride = (uint64_t)SIDE * 3,
        .count = COUNT,
        .height = SIDE,
        .width = SIDE,
        .channels = 3,
        .state = state,
        .out = unset(t, (uint64_t)COUNT * 3 * OUT * OUT * 2),
        .out_type = LK_BF16,
        .out_height = OUT,
        .out_width = OUT,
        .crop_area = {0.2F,   1},
        .crop_ratio = { 0.75F, 1.33F},
        .flip = 0.5F,
        .brightness = 0.4F,
        .contrast = 0.4F,
        .saturation = 0.4F,
        .hue = 0.1F,
        .std = { 1,     1,     1 }
    };

    t->put(state, &near, sizeof(near));
    CHECK(t->lib.lk_augment_images(&augment, NULL) == 0);
    are_finite(t, augment.out, (uint64_t)COUNT * 3 * OUT * OUT, false);
    t->release(state);
    t->release((void *)augment.images);
    t->release(augment.out);
}

void check_races(const struct compute_target *t)
{
    static void (*const bodies[])(void *arg) = {
        adamw_does_not_race,   swiglu_does_not_race,     routing_does_not_race,
        folding_does_not_race, projection_does_not_race, augmentation_does_not_race,
    };

    for (size_t i = 0; i < sizeof(bodies) / sizeof(*bodies); i++)
        run_case(bodies[i], (void *)t, "races, body %zu", i);
    norms_do_not_race(t);
}
