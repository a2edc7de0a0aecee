/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define MAX_TENSORS 16

/* One tensor of a model: what the library works on, and how it is called. */
struct tensor {
    size_t count;
    bool half;   /* bf16 parameter with a master */
    bool half_g; /* bf16 gradient */
    float lr_factor, weight_decay;
    struct memory param, master, grad, m, v;
};

struct model {
    const struct compute_target *t;
    size_t n;
    struct tensor tensors[MAX_TENSORS];
    struct lk_adamw_tensor list[MAX_TENSORS];
    struct lk_adamw_plan plan;
    struct memory table, state, workspace, scalars; /* scalars: lr, loss_scale */
    struct lk_adamw adamw;
};

/* Elements, then the distance of all pointers from an aligned address, in elements. */
struct shape {
    size_t count;
    size_t shift;
};

static void fill_parameters(struct tensor *tensor, uint64_t *state)
{
    CHECK(tensor->param.near && tensor->master.near);
    for (size_t i = 0; i < tensor->count; i++) {
        float value = (float)random_unit(state);

        if (tensor->half) {
            ((float *)tensor->master.near)[i] = value;
            ((uint16_t *)tensor->param.near)[i] = to_bf16((double)value);
        } else {
            ((float *)tensor->param.near)[i] = value;
        }
        ((float *)tensor->m.near)[i] = 0;
        ((float *)tensor->v.near)[i] = 0;
    }
}

static void upload_tensor(const struct tensor *tensor)
{
    memory_up(&tensor->param);
    memory_up(&tensor->master);
    memory_up(&tensor->grad);
    memory_up(&tensor->m);
    memory_up(&tensor->v);
}

static void add_tensor(struct model *model, struct shape shape, unsigned int kind, uint64_t *state)
{
    struct tensor *tensor = &model->tensors[model->n];
    const struct compute_target *t = model->t;

    *tensor = (struct tensor){
        .count = shape.count,
        .half = kind & 1,
        .half_g = kind & 2,
        .lr_factor = kind & 4 ? 0.5F : 1,
        .weight_decay = kind & 8 ? 0 : 0.1F,
    };
    tensor->param = memory_new(t, shape.count * (tensor->half ? 2 : 4),
                               shape.shift * (tensor->half ? 2 : 4));
    tensor->master = memory_new(t, tensor->half ? shape.count * 4 : 0, shape.shift * 4);
    tensor->grad = memory_new(t, shape.count * (tensor->half_g ? 2 : 4),
                              shape.shift * (tensor->half_g ? 2 : 4));
    tensor->m = memory_new(t, shape.count * 4, shape.shift * 4);
    tensor->v = memory_new(t, shape.count * 4, shape.shift * 4);
    fill_parameters(tensor, state);
    upload_tensor(tensor);
    model->list[model->n++] = (struct lk_adamw_tensor){
        .param = tensor->param.far,
        .grad = tensor->grad.far,
        .master = tensor->half ? (float *)tensor->master.far : NULL,
        .m = (float *)tensor->m.far,
        .v = (float *)tensor->v.far,
        .count = shape.count,
        .param_type = tensor->half ? LK_BF16 : LK_FP32,
        .grad_type = tensor->half_g ? LK_BF16 : LK_FP32,
        .lr_factor = tensor->lr_factor,
        .weight_decay = tensor->weight_decay,
    };
}

static void make_plan(struct model *model)
{
    const struct compute_target *t = model->t;
    size_t bytes = t->lib.lk_adamw_table_bytes(model->list, model->n);

    CHECK(bytes);
    model->table = memory_new(t, bytes, 0);
    model->plan = (struct lk_adamw_plan){ .table = model->table.near, .bytes = bytes };
    CHECK(t->lib.lk_adamw_plan(model->list, model->n, &model->plan) == 0);
    model->plan.device_table = model->table.far;
    memory_up(&model->table);
    model->workspace = memory_new(t, t->lib.lk_adamw_workspace_bytes(&model->plan), 0);
    model->state = memory_new(t, sizeof(struct lk_adamw_state), 0);
    memset(model->state.near, 0, sizeof(struct lk_adamw_state));
    memory_up(&model->state);
    model->scalars = memory_new(t, 8, 0);
    model->adamw = (struct lk_adamw){
        .lr = {77,  LK_FP32, model->scalars.far    },
        .loss_scale = { 77, LK_FP32, model->scalars.far + 4},
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .max_norm = 1,
        .state = (struct lk_adamw_state *)model->state.far,
        .workspace = model->workspace.far,
    };
}

static void set_scalars(struct model *model, float lr, float loss_scale)
{
    ((float *)model->scalars.near)[0] = lr;
    ((float *)model->scalars.near)[1] = loss_scale;
    memory_up(&model->scalars);
}

static struct model *make_model(const struct compute_target *t, const struct shape *shapes,
                                size_t n)
{
    struct model *model = calloc(1, sizeof(*model));
    uint64_t state = 5;

    CHECK(model && n <= MAX_TENSORS);
    model->t = t;
    for (size_t i = 0; i < n; i++)
        add_tensor(model, shapes[i], (unsigned int)i, &state);
    make_plan(model);
    set_scalars(model, 1e-3F, 1);
    return model;
}

static void drop_model(struct model *model)
{
    for (size_t i = 0; i < model->n; i++) {
        memory_free(&model->tensors[i].param);
        memory_free(&model->tensors[i].master);
        memory_free(&model->tensors[i].grad);
        memory_free(&model->tensors[i].m);
        memory_free(&model->tensors[i].v);
    }
    memory_free(&model->table);
    memory_free(&model->state);
    memory_free(&model->workspace);
    memory_free(&model->scalars);
    free(model);
}

static double gradient(const struct tensor *tensor, size_t i)
{
    return tensor->half_g ? from_bf16(((uint16_t *)tensor->grad.near)[i])
                          : (double)((float *)tensor->grad.near)[i];
}

static void set_gradient(const struct tensor *tensor, size_t i, double value)
{
    if (tensor->half_g)
        ((uint16_t *)tensor->grad.near)[i] = to_bf16(value);
    else
        ((float *)tensor->grad.near)[i] = (float)value;
}

/* Random values of this size; `equal`: one value. */
static void fill_gradients(struct model *model, double size, bool equal, uint64_t *state)
{
    for (size_t k = 0; k < model->n; k++) {
        for (size_t i = 0; i < model->tensors[k].count; i++)
            set_gradient(&model->tensors[k], i, equal ? size : size * random_unit(state));
        memory_up(&model->tensors[k].grad);
    }
}

static void fetch_state(const struct model *model, struct lk_adamw_state *out)
{
    memory_down(&model->state);
    memcpy(out, model->state.near, sizeof(*out));
    CHECK(out->tickets[0] == 0 && out->tickets[1] == 0);
}

static double reference_norm(const struct model *model, double loss_scale)
{
    double sum = 0;

    for (size_t k = 0; k < model->n; k++)
        for (size_t i = 0; i < model->tensors[k].count; i++)
            sum += pow(gradient(&model->tensors[k], i), 2);
    return sqrt(sum) / loss_scale;
}

static bool close_to(double got, double want, double bound)
{
    return fabs(got - want) <= bound;
}

/* One tensor after a step, against doubles, from what it was before. */
static void check_tensor(const struct tensor *tensor, const struct lk_adamw *adamw, double lr,
                         double factor, double step)
{
    const struct memory *values = tensor->half ? &tensor->master : &tensor->param;
    float *param = malloc(tensor->count * 4), *m = malloc(tensor->count * 4),
          *v = malloc(tensor->count * 4);

    CHECK(param && m && v);
    memcpy(param, values->near, tensor->count * 4);
    memcpy(m, tensor->m.near, tensor->count * 4);
    memcpy(v, tensor->v.near, tensor->count * 4);
    memory_down(&tensor->param);
    memory_down(&tensor->master);
    memory_down(&tensor->m);
    memory_down(&tensor->v);
    lr *= (double)tensor->lr_factor;
    for (size_t i = 0; i < tensor->count; i++) {
        double g = factor * gradient(tensor, i);
        double new_m = adamw->beta1 * (double)m[i] + (1 - adamw->beta1) * g;
        double new_v = adamw->beta2 * (double)v[i] + (1 - adamw->beta2) * g * g;
        double change = lr / (1 - pow(adamw->beta1, step)) * new_m /
                        (sqrt(new_v) / sqrt(1 - pow(adamw->beta2, step)) + adamw->eps);
        double p = (double)param[i] * (1 - lr * (double)tensor->weight_decay) - change;
        float got = ((float *)values->near)[i];

        CHECK(close_to((double)((float *)tensor->m.near)[i], new_m,
                       0x1p-22 * (fabs((double)m[i]) + fabs(g)) + 1e-44));
        CHECK(close_to((double)((float *)tensor->v.near)[i], new_v,
                       0x1p-21 * ((double)v[i] + g * g) + 1e-44));
        CHECK(close_to((double)got, p,
                       0x1p-22 *
                           (fabs((double)param[i]) +
                            lr / (1 - pow(adamw->beta1, step)) *
                                (fabs(adamw->beta1 * (double)m[i]) + fabs(0.1 * g)) /
                                (sqrt(new_v) / sqrt(1 - pow(adamw->beta2, step)) + adamw->eps))));
        if (tensor->half)
            CHECK(((uint16_t *)tensor->param.near)[i] == to_bf16((double)got));
    }
    free(param);
    free(m);
    free(v);
}

/* Takes a step and checks everything that it is to do. */
static void step_and_check(struct model *model, double lr, double loss_scale, double step)
{
    double norm = reference_norm(model, loss_scale), clip = 1;
    struct lk_adamw_state state;

    set_scalars(model, (float)lr, (float)loss_scale);
    CHECK(model->t->lib.lk_adamw_step(&model->plan, &model->adamw, NULL) == 0);
    fetch_state(model, &state);
    if (model->adamw.max_norm > 0)
        clip = fmin(1, model->adamw.max_norm / (norm + 1e-6));
    CHECK(close_to(state.norm, norm, 1e-6 * norm));
    CHECK(close_to((double)state.clip, clip, 2e-6 * clip));
    CHECK(state.applied == 1 && state.step == (uint64_t)step && state.skipped == 0);
    /* the norm's own error is not part of the update's bound */
    if (model->adamw.max_norm > 0)
        clip = fmin(1, model->adamw.max_norm / (state.norm + 1e-6));
    for (size_t k = 0; k < model->n; k++)
        check_tensor(&model->tensors[k], &model->adamw, (double)(float)lr, clip / loss_scale, step);
}

static const struct shape shapes[] = {
    {0,      0},
    { 1,     0},
    { 3,     1},
    { 7,     0},
    { 8,     0},
    { 255,   3},
    { 17000, 0},
    { 500,   2},
    { 16384, 0},
    { 40000, 0},
    { 20000, 1},
    { 33000, 0},
    { 16385, 0},
    { 9,     0}
};
#define SHAPES (sizeof(shapes) / sizeof(*shapes))

static void steps_follow_the_formula(const struct compute_target *t)
{
    struct model *model = make_model(t, shapes, SHAPES);
    uint64_t state = 17;

    for (int step = 1; step <= (t->small ? 2 : 8); step++) {
        model->adamw.max_norm = step % 3 == 2 ? 0 : step; /* without clipping, too */
        fill_gradients(model, step % 4 == 1 ? 1e-4 : 0.3, step == 4, &state);
        step_and_check(model, 1e-3 / step, step % 2 ? 1 : 1024, step);
    }
    drop_model(model);
}

/* Squares beyond fp32's range on either side. */
static void sizes_of_gradients_do_not_matter(const struct compute_target *t)
{
    static const double sizes[] = { 1e30, 3e38, 1e-30, 1e-38, 0 };
    uint64_t state = 19;

    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        struct model *model = make_model(t, shapes, SHAPES);
        struct lk_adamw_state got;
        double norm;

        fill_gradients(model, sizes[s], false, &state);
        norm = reference_norm(model, 1);
        CHECK(t->lib.lk_adamw_norm(&model->plan, &model->adamw, NULL) == 0);
        fetch_state(model, &got);
        CHECK(close_to(sqrt(got.sum_squares), norm, 1e-6 * norm) && got.step == 0);
        CHECK(t->lib.lk_adamw_update(&model->plan, &model->adamw, NULL) == 0);
        fetch_state(model, &got);
        CHECK(got.applied && got.step == 1 && close_to(got.norm, norm, 1e-6 * norm));
        drop_model(model);
    }
}

/* Its square is below fp32's range, and everything else is zero. */
static void one_small_gradient_is_found(const struct compute_target *t)
{
    struct model *model = make_model(t, shapes, SHAPES);
    uint64_t state = 21;

    fill_gradients(model, 0, false, &state);
    set_gradient(&model->tensors[9], 30000, 1e-30);
    memory_up(&model->tensors[9].grad);
    CHECK(t->lib.lk_adamw_norm(&model->plan, &model->adamw, NULL) == 0);
    memory_down(&model->state);
    CHECK(close_to(sqrt(((struct lk_adamw_state *)model->state.near)->sum_squares), 1e-30, 1e-36));
    drop_model(model);
}

static void check_untouched(const struct memory *memory)
{
    unsigned char *before = malloc(memory->bytes + 1);

    CHECK(before);
    memcpy(before, memory->near, memory->bytes);
    memory_down(memory);
    CHECK(memcmp(before, memory->near, memory->bytes) == 0);
    free(before);
}

static void check_skipped(struct model *model, uint64_t skipped)
{
    struct lk_adamw_state state;

    CHECK(model->t->lib.lk_adamw_step(&model->plan, &model->adamw, NULL) == 0);
    fetch_state(model, &state);
    CHECK(!state.applied && state.step == 0 && state.skipped == skipped && state.clip == 0);
    for (size_t k = 0; k < model->n; k++) {
        check_untouched(&model->tensors[k].param);
        check_untouched(&model->tensors[k].master);
        check_untouched(&model->tensors[k].m);
        check_untouched(&model->tensors[k].v);
    }
}

static void what_is_not_finite_changes_nothing(const struct compute_target *t)
{
    static const double bad[] = { INFINITY, -INFINITY, NAN };
    struct model *model = make_model(t, shapes, SHAPES);
    uint64_t state = 23, skipped = 0;

    fill_gradients(model, 1, false, &state);
    for (size_t k = 1; k < SHAPES; k += t->small ? 5 : 1) {
        struct tensor *tensor = &model->tensors[k];
        double was = gradient(tensor, tensor->count - 1);

        set_gradient(tensor, tensor->count - 1, bad[k % 3]);
        memory_up(&tensor->grad);
        check_skipped(model, ++skipped);
        set_gradient(tensor, tensor->count - 1, was);
        memory_up(&tensor->grad);
    }
    set_scalars(model, 1, 0); /* a loss scale that nothing can be divided by */
    check_skipped(model, ++skipped);
    set_scalars(model, 1, 1e-40F); /* its reciprocal is beyond fp32 */
    model->adamw.max_norm = 0;
    check_skipped(model, ++skipped);
    set_scalars(model, 1, -1);
    check_skipped(model, ++skipped);
    set_scalars(model, 1, NAN);
    check_skipped(model, ++skipped);
    set_scalars(model, 1e-3F, 1);
    CHECK(t->lib.lk_adamw_step(&model->plan, &model->adamw, NULL) == 0);
    memory_down(&model->state);
    CHECK(((struct lk_adamw_state *)model->state.near)->step == 1);
    drop_model(model);
}

/* Tensors in another order, and one cut in two: the same bits but for the norm, which stays out of it here. */
static void cutting_a_list_otherwise_gives_the_same_bits(const struct compute_target *t)
{
    static const struct shape whole = { 40000, 0 };
    struct model *one = make_model(t, &whole, 1), *two = make_model(t, &whole, 1);
    const size_t cut = 12340;
    uint64_t state = 29;

    fill_gradients(one, 1, false, &state);
    memcpy(two->tensors[0].grad.near, one->tensors[0].grad.near, whole.count * 4);
    memory_up(&two->tensors[0].grad);
    two->list[1] = two->list[0];
    two->list[0].count = cut;
    two->list[1].count -= cut;
    two->list[1].param = two->tensors[0].param.far + cut * 4;
    two->list[1].grad = two->tensors[0].grad.far + cut * 4;
    two->list[1].m += cut;
    two->list[1].v += cut;
    two->list[2] = two->list[0];
    two->list[0] = two->list[1];
    two->list[1] = two->list[2];
    two->n = 2;
    memory_free(&two->table);
    memory_free(&two->state);
    memory_free(&two->workspace);
    memory_free(&two->scalars);
    make_plan(two);
    two->n = 1;
    set_scalars(two, 1e-3F, 1);
    one->adamw.max_norm = 0;
    two->adamw.max_norm = 0;
    CHECK(t->lib.lk_adamw_step(&one->plan, &one->adamw, NULL) == 0);
    CHECK(t->lib.lk_adamw_step(&two->plan, &two->adamw, NULL) == 0);
    memory_down(&one->tensors[0].param);
    memory_down(&two->tensors[0].param);
    CHECK(memcmp(one->tensors[0].param.near, two->tensors[0].param.near, whole.count * 4) == 0);
    drop_model(one);
    drop_model(two);
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    struct model *model = make_model(t, shapes, SHAPES);
    struct lk_adamw_plan plan = model->plan;
    struct lk_adamw_tensor list[2] = { model->list[1], model->list[2] };
    struct lk_adamw adamw = model->adamw;

    CHECK(t->lib.lk_adamw_plan(list, 2, &plan) == 0);
#define REFUSED(change, text)                                   \
    do {                                                        \
        list[1] = model->list[2];                               \
        plan = model->plan;                                     \
        change;                                                 \
        CHECK(t->lib.lk_adamw_plan(list, 2, &plan) == -EINVAL); \
        CHECK(error_says(t, "lk_adamw_plan", text));            \
    } while (0)
    REFUSED(list[1].param_type = LK_FP16, "tensor 1: param_type");
    REFUSED(list[1].grad_type = LK_FP16, "grad_type");
    REFUSED(list[1].master = list[1].m, "master");
    REFUSED(list[1].param_type = LK_BF16, "master is NULL");
    REFUSED(list[1].m = NULL, "tensor 1: m is NULL");
    REFUSED(list[1].v = (float *)((char *)list[1].v + 2), "v is NULL or not aligned");
    REFUSED(list[1].grad = (char *)list[1].grad + 1, "grad");
    REFUSED(plan.bytes = 100, "too small");
    REFUSED(plan.table = NULL, "table");
#undef REFUSED
#define REFUSED(change, text)                                        \
    do {                                                             \
        adamw = model->adamw;                                        \
        plan = model->plan;                                          \
        change;                                                      \
        CHECK(t->lib.lk_adamw_step(&plan, &adamw, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_adamw", text));                      \
    } while (0)
    REFUSED(adamw.state = NULL, "state");
    REFUSED(adamw.workspace = (char *)adamw.workspace + 8, "workspace");
    REFUSED(adamw.beta1 = 1, "beta1");
    REFUSED(adamw.beta2 = NAN, "beta2");
    REFUSED(adamw.eps = -1, "eps");
    REFUSED(adamw.max_norm = NAN, "max_norm");
    REFUSED(adamw.lr.type = (enum lk_type)3, "lr");
    REFUSED(plan.device_table = NULL, "device_table");
#undef REFUSED
    CHECK(strstr(t->lib.lk_error_text(-EINVAL), "invalid argument"));
    list[0].count = UINT64_C(1) << 46;
    CHECK(t->lib.lk_adamw_table_bytes(list, 1) == 0);
    drop_model(model);
}

static void an_empty_list_is_a_step(const struct compute_target *t)
{
    struct model *model = make_model(t, shapes, 1);
    struct lk_adamw_state state;

    CHECK(t->lib.lk_adamw_step(&model->plan, &model->adamw, NULL) == 0);
    fetch_state(model, &state);
    CHECK(state.step == 1 && state.norm == 0 && state.clip == 1);
    drop_model(model);
}

static uint64_t mix(uint64_t hash, const struct memory *memory)
{
    memory_down(memory);
    for (size_t i = 0; i < memory->bytes; i++)
        hash = (hash ^ memory->near[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t adamw_fingerprint(const struct compute_target *t)
{
    struct model *model = make_model(t, shapes, SHAPES);
    uint64_t state = 31, hash = 1;

    for (int step = 0; step < 3; step++) {
        fill_gradients(model, 0.1, false, &state);
        CHECK(t->lib.lk_adamw_step(&model->plan, &model->adamw, NULL) == 0);
        hash = mix(hash, &model->state);
    }
    for (size_t k = 0; k < model->n; k++) {
        hash = mix(mix(hash, &model->tensors[k].param), &model->tensors[k].master);
        hash = mix(mix(hash, &model->tensors[k].m), &model->tensors[k].v);
    }
    drop_model(model);
    return hash;
}

void check_adamw(const struct compute_target *t)
{
    steps_follow_the_formula(t);
    sizes_of_gradients_do_not_matter(t);
    one_small_gradient_is_found(t);
    what_is_not_finite_changes_nothing(t);
    cutting_a_list_otherwise_gives_the_same_bits(t);
    wrong_arguments_are_refused(t);
    an_empty_list_is_a_step(t);
    CHECK(adamw_fingerprint(t) == adamw_fingerprint(t));
}
