/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_rows.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

struct augment_case {
    const struct compute_target *t;
    struct lk_augment a;
    struct memory images, samples, state, out, choices;
};

static size_t size_of(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

static uint64_t out_elements(const struct lk_augment *a)
{
    return (uint64_t)a->channels * a->out_height * a->out_width;
}

static void set_numbers(struct lk_augment *a)
{
    a->crop_area[0] = 0.2F;
    a->crop_area[1] = 0.5F;
    a->crop_ratio[0] = 0.75F;
    a->crop_ratio[1] = 1.333F;
    a->erase_area[0] = 0.02F;
    a->erase_area[1] = 0.33F;
    a->erase_ratio[0] = 0.3F;
    a->erase_ratio[1] = 3.3F;
    for (int i = 0; i < 3; i++) {
        a->mean[i] = 0.48F - 0.04F * (float)i;
        a->std[i] = 0.229F - 0.003F * (float)i;
        a->erase_value[i] = 1 - 1.5F * (float)i;
    }
}

/* Everything on, for `count` images of that size, each its own but where `pad` is -1: one for all. */
static struct augment_case *make_case(const struct compute_target *t, uint32_t count,
                                      const uint32_t sizes[4], uint32_t channels, enum lk_type type,
                                      int pad)
{
    struct augment_case *c = calloc(1, sizeof(*c));
    uint64_t row = (uint64_t)sizes[1] * channels + (pad > 0 ? (uint64_t)pad : 0);
    uint64_t image = row * sizes[0], state = 101;

    CHECK(c);
    c->t = t;
    c->images = memory_new(t, image * (pad < 0 ? 1 : count), 1);
    for (size_t i = 0; i < c->images.bytes; i++)
        c->images.near[i] = (unsigned char)(ref_next(&state) >> 20);
    c->samples = memory_new(t, count * sizeof(uint64_t), 0);
    for (uint32_t i = 0; i < count; i++)
        ((uint64_t *)c->samples.near)[i] = UINT64_C(0x100000000) + 7 * i;
    c->state = memory_new(t, sizeof(struct lk_augment_state), 0);
    *(struct lk_augment_state *)c->state.near = (struct lk_augment_state){ 1234, 5, 0 };
    c->out = memory_new(t, count * (uint64_t)channels * sizes[2] * sizes[3] * size_of(type), 4);
    c->choices = memory_new(t, count * sizeof(struct lk_augment_choice), 0);
    memory_up(&c->images);
    memory_up(&c->samples);
    memory_up(&c->state);
    memory_up(&c->out);
    memory_up(&c->choices);
    c->a = (struct lk_augment){
        .images = c->images.far,
        .image_stride = pad < 0 ? 0 : image,
        .row_stride = row,
        .count = count,
        .height = sizes[0],
        .width = sizes[1],
        .channels = channels,
        .samples = (uint64_t *)c->samples.far,
        .state = (struct lk_augment_state *)c->state.far,
        .out = c->out.far,
        .out_type = type,
        .out_height = sizes[2],
        .out_width = sizes[3],
        .flip = 0.5F,
        .brightness = 0.4F,
        .contrast = 0.5F,
        .saturation = 1.5F,
        .hue = 0.3F,
        .erase = 0.25F,
        .choices = (struct lk_augment_choice *)c->choices.far,
    };
    set_numbers(&c->a);
    return c;
}

static void drop_case(struct augment_case *c)
{
    memory_free(&c->images);
    memory_free(&c->samples);
    memory_free(&c->state);
    memory_free(&c->out);
    memory_free(&c->choices);
    free(c);
}

static void run(const struct augment_case *c)
{
    CHECK(c->t->lib.lk_augment_images(&c->a, NULL) == 0);
    memory_down(&c->out);
    memory_down(&c->choices);
}

static const struct lk_augment_choice *choice_of(const struct augment_case *c, uint64_t image)
{
    return (struct lk_augment_choice *)c->choices.near + image;
}

/* ---- the same in doubles, steps as they are in books ---- */

static double clamp(double x, double least, double most)
{
    return x < least ? least : x > most ? most : x;
}

static double byte_at(const struct augment_case *c, uint64_t image, uint32_t y, uint32_t x,
                      uint32_t channel)
{
    return c->images.near[image * c->a.image_stride + y * c->a.row_stride +
                          (uint64_t)x * c->a.channels + channel];
}

static void sample(const struct augment_case *c, uint64_t image, uint32_t y, uint32_t x,
                   double out[3])
{
    const struct lk_augment_choice *ch = choice_of(c, image);
    double sy = (y + 0.5) * ch->height / c->a.out_height - 0.5, sx;
    uint32_t y0, y1, x0, x1;

    if (ch->flip)
        x = c->a.out_width - 1 - x;
    sx = (x + 0.5) * ch->width / c->a.out_width - 0.5;
    sy = clamp(sy, 0, ch->height - 1.0);
    sx = clamp(sx, 0, ch->width - 1.0);
    y0 = (uint32_t)sy;
    x0 = (uint32_t)sx;
    y1 = y0 + 1 < ch->height ? y0 + 1 : y0;
    x1 = x0 + 1 < ch->width ? x0 + 1 : x0;
    for (uint32_t i = 0; i < c->a.channels; i++) {
        double upper = byte_at(c, image, ch->top + y0, ch->left + x0, i) * (1 - (sx - x0)) +
                       byte_at(c, image, ch->top + y0, ch->left + x1, i) * (sx - x0);
        double lower = byte_at(c, image, ch->top + y1, ch->left + x0, i) * (1 - (sx - x0)) +
                       byte_at(c, image, ch->top + y1, ch->left + x1, i) * (sx - x0);

        out[i] = (upper * (1 - (sy - y0)) + lower * (sy - y0)) / 255;
    }
}

static double gray_of(const struct augment_case *c, const double p[3])
{
    return c->a.channels == 3 ? 0.2989 * p[0] + 0.587 * p[1] + 0.114 * p[2] : p[0];
}

static void turn(double p[3], double hue)
{
    double most = fmax(p[0], fmax(p[1], p[2])), range = most - fmin(p[0], fmin(p[1], p[2]));
    double h, f, low, falling, rising;

    if (range <= 0)
        return;
    if (most == p[0])
        h = (p[1] - p[2]) / range / 6;
    else if (most == p[1])
        h = (2 + (p[2] - p[0]) / range) / 6;
    else
        h = (4 + (p[0] - p[1]) / range) / 6;
    h += hue;
    h -= floor(h);
    f = 6 * h - floor(6 * h);
    low = most - range;
    falling = most - range * f;
    rising = most - range * (1 - f);
    const double table[6][3] = {
        {most,     rising,  low    },
        { falling, most,    low    },
        { low,     most,    rising },
        { low,     falling, most   },
        { rising,  low,     most   },
        { most,    low,     falling},
    };
    memcpy(p, table[(int)floor(6 * h) % 6], sizeof(table[0]));
}

static void step(const struct augment_case *c, uint64_t image, uint32_t what, double mean,
                 double p[3])
{
    const struct lk_augment_choice *ch = choice_of(c, image);
    double factor[3] = { (double)ch->brightness, (double)ch->contrast, (double)ch->saturation };
    double other[3] = { 0, mean, gray_of(c, p) };

    if (c->a.channels == 1 && what >= 2)
        return;
    if (what == 3) {
        turn(p, (double)ch->hue);
        return;
    }
    for (uint32_t i = 0; i < c->a.channels; i++)
        p[i] = clamp(factor[what] * p[i] + (1 - factor[what]) * other[what], 0, 1);
}

static double mean_at_contrast(const struct augment_case *c, uint64_t image)
{
    double sum = 0;

    for (uint32_t y = 0; y < c->a.out_height; y++) {
        for (uint32_t x = 0; x < c->a.out_width; x++) {
            uint32_t order = choice_of(c, image)->order;
            double p[3] = { 0 };

            sample(c, image, y, x, p);
            for (; order % 4 != 1; order /= 4)
                step(c, image, order % 4, 0, p);
            sum += gray_of(c, p);
        }
    }
    return sum / ((double)c->a.out_height * c->a.out_width);
}

static double get(const struct augment_case *c, uint64_t at)
{
    const uint16_t *half = (uint16_t *)c->out.near;

    if (c->a.out_type == LK_FP32)
        return (double)((float *)c->out.near)[at];
    return c->a.out_type == LK_BF16 ? from_bf16(half[at]) : (double)ref_fp16(half[at]);
}

static double rounding(enum lk_type type)
{
    return type == LK_FP32 ? 0x1p-24 : type == LK_BF16 ? 0x1p-8 : 0x1p-11;
}

static void check_pixel(const struct augment_case *c, uint64_t image, uint32_t y, uint32_t x,
                        double mean)
{
    const struct lk_augment_choice *ch = choice_of(c, image);
    uint64_t plane = (uint64_t)c->a.out_height * c->a.out_width;
    double p[3] = { 0 }, size = 0x1p-21 * (64 + ch->height + ch->width) *
                                fmax(1, (double)ch->brightness) * fmax(1, (double)ch->contrast) *
                                fmax(1, (double)ch->saturation);
    bool erased = y >= ch->erase_top && y < ch->erase_top + ch->erase_height &&
                  x >= ch->erase_left && x < ch->erase_left + ch->erase_width;

    sample(c, image, y, x, p);
    for (uint32_t i = 0, order = ch->order; i < 4; i++, order /= 4)
        step(c, image, order % 4, mean, p);
    for (uint32_t i = 0; i < c->a.channels; i++) {
        double std = (double)c->a.std[i], want = (p[i] - (double)c->a.mean[i]) / std;
        double got = get(c, image * out_elements(&c->a) + i * plane + (uint64_t)y * c->a.out_width +
                                x);

        if (erased)
            CHECK(got == (double)c->a.erase_value[i]);
        else
            CHECK(near_float(got, want, size / std + rounding(c->a.out_type) * fabs(want) + 1e-6));
    }
}

static void check_choice(const struct augment_case *c, uint64_t image)
{
    const struct lk_augment_choice *ch = choice_of(c, image);

    CHECK(ch->height && ch->width && ch->top + ch->height <= c->a.height &&
          ch->left + ch->width <= c->a.width);
    CHECK(ch->erase_top + ch->erase_height <= c->a.out_height &&
          ch->erase_left + ch->erase_width <= c->a.out_width && ch->flip <= 1);
    CHECK(ch->brightness >= 0.6F && ch->brightness <= 1.4F && ch->contrast >= 0.5F &&
          ch->contrast <= 1.5F && ch->saturation >= 0 && ch->saturation <= 2.5F &&
          ch->hue >= -0.3F && ch->hue <= 0.3F);
    CHECK(((1U << ch->order % 4) | (1U << ch->order / 4 % 4) | (1U << ch->order / 16 % 4) |
           (1U << ch->order / 64)) == 15);
}

static void pixels_follow_the_choices(const struct compute_target *t)
{
    static const uint32_t sizes[][4] = {
        {1,   1,   1,  1 },
        { 2,  3,   5,  4 },
        { 37, 53,  24, 24},
        { 64, 64,  64, 64},
        { 90, 301, 17, 33},
    };
    int pad = 0;

    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        for (int kind = 0; kind < 6; kind++) {
            struct augment_case *c = make_case(t, 7, sizes[s], kind & 1 ? 1 : 3,
                                               (enum lk_type)(kind / 2), pad++ % 4);

            run(c);
            for (uint64_t image = 0; image < c->a.count; image++) {
                double mean = mean_at_contrast(c, image);

                check_choice(c, image);
                for (uint32_t y = 0; y < c->a.out_height; y++)
                    for (uint32_t x = 0; x < c->a.out_width; x++)
                        check_pixel(c, image, y, x, mean);
            }
            drop_case(c);
        }
    }
}

/* Nothing drawn: pixels as they are, in every type. */
static void what_is_off_changes_nothing(const struct compute_target *t)
{
    static const uint32_t sizes[4] = { 33, 70, 33, 70 };
    struct augment_case *c = make_case(t, 2, sizes, 3, LK_FP32, 0);

    c->a.crop_area[0] = c->a.crop_area[1] = c->a.flip = c->a.erase = 0;
    c->a.brightness = c->a.contrast = c->a.saturation = c->a.hue = 0;
    for (int i = 0; i < 3; i++) {
        c->a.mean[i] = 0;
        c->a.std[i] = 1;
    }
    c->a.choices = NULL;
    run(c);
    for (uint64_t at = 0; at < 2 * out_elements(&c->a); at++) {
        uint64_t plane = (uint64_t)33 * 70, image = at / (3 * plane), channel = at / plane % 3;

        CHECK(((float *)c->out.near)[at] ==
              (float)c->images.near[(image * plane + at % plane) * 3 + channel] / 255);
    }
    drop_case(c);
}

/* The sample's index alone: not where it lies in which batch. */
static void a_sample_is_the_same_in_every_batch(const struct compute_target *t)
{
    static const uint32_t sizes[4] = { 40, 30, 16, 20 };
    struct augment_case *c = make_case(t, 8, sizes, 3, LK_BF16, 0);
    size_t bytes = out_elements(&c->a) * 2;
    unsigned char *whole = malloc(8 * bytes);
    uint64_t *samples = (uint64_t *)c->samples.near;

    CHECK(whole);
    run(c);
    memcpy(whole, c->out.near, 8 * bytes);
    c->a.count = 3; /* the last three, as another rank has them */
    c->a.images += 5 * c->a.image_stride;
    c->a.samples += 5;
    run(c);
    CHECK(memcmp(whole + 5 * bytes, c->out.near, 3 * bytes) == 0);
    c->a.samples = NULL; /* one after another */
    c->a.first_sample = samples[5];
    run(c);
    CHECK(memcmp(whole + 5 * bytes, c->out.near, bytes) == 0);
    CHECK(memcmp(whole + 6 * bytes, c->out.near + bytes, bytes) != 0);
    c->a.first_sample -= UINT64_C(1) << 32; /* the upper half counts, too */
    run(c);
    CHECK(memcmp(whole + 5 * bytes, c->out.near, bytes) != 0);
    c->a.first_sample = samples[5];
    for (int i = 0; i < 3; i++) { /* back to where it was in the end */
        struct lk_augment_state *state = (struct lk_augment_state *)c->state.near;

        *state = (struct lk_augment_state){ 1234 + (i == 0), 5 + (i == 1), 0 };
        memory_up(&c->state);
        run(c);
        CHECK((memcmp(whole + 5 * bytes, c->out.near, bytes) == 0) == (i == 2));
    }
    free(whole);
    drop_case(c);
}

static void check_share(double share, double want, double deviation, double n)
{
    CHECK(fabs(share - want) < 5 * deviation / sqrt(n));
}

static void draws_are_spread_as_asked_for(const struct compute_target *t)
{
    static const uint32_t sizes[4] = { 64, 64, 32, 32 };
    const uint32_t n = t->small ? 64 : 4096;
    struct augment_case *c = make_case(t, n, sizes, 1, LK_BF16, -1);
    double flips = 0, erased = 0, area = 0, bright = 0, hue = 0, both = 0, place = 0, chi = 0,
           shape = 0, spread = 0;
    uint32_t orders[256] = { 0 };

    c->a.hue = 0.5F;
    c->a.out_height = c->a.out_width = 32;
    run(c);
    for (uint32_t i = 0; i < n; i++) {
        const struct lk_augment_choice *ch = choice_of(c, i), *next = choice_of(c, (i + 1) % n);

        flips += ch->flip;
        erased += ch->erase_height > 0;
        area += (double)ch->height * ch->width / 4096;
        shape += log((double)ch->width / ch->height);
        spread += fabs(log((double)ch->width / ch->height));
        place += ((double)ch->top + 0.5) / (64 - ch->height + 1);
        bright += (double)ch->brightness - 1;
        hue += (double)ch->hue;
        both += (double)ch->hue * (double)next->hue;
        orders[ch->order]++;
    }
    check_share(flips / n, 0.5, 0.5, n);
    check_share(erased / n, 0.25, 0.45, n); /* a rectangle is found nearly always */
    check_share(area / n, 0.35, 0.1, n);    /* uniform in 0.3, and rounding to pixels */
    check_share(shape / n, 0, 0.17, n);
    check_share(spread / n, 0.144, 0.09, n);
    check_share(place / n, 0.5, 0.3, n);
    check_share(bright / n, 0, 0.8 / sqrt(12), n);
    check_share(hue / n, 0, 1 / sqrt(12), n);
    check_share(both / n, 0, 1.0 / 12, n);
    for (int i = 0; i < 256; i++)
        chi += orders[i] ? pow(orders[i] - n / 24.0, 2) / (n / 24.0) : 0;
    CHECK(chi < 70);
    drop_case(c);
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    static const uint32_t sizes[4] = { 4, 5, 6, 7 };
    struct augment_case *c = make_case(t, 1, sizes, 3, LK_FP16, 0);
    struct lk_augment a;

#define REFUSED(change, text)                                 \
    do {                                                      \
        a = c->a;                                             \
        change;                                               \
        CHECK(t->lib.lk_augment_images(&a, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_augment_images", text));      \
    } while (0)
    REFUSED(a.channels = 2, "channels");
    REFUSED(a.height = 0, "height or width");
    REFUSED(a.out_width = 65536, "out_width");
    REFUSED(a.row_stride = 14, "row_stride");
    REFUSED(a.images = NULL, "images is NULL");
    REFUSED(a.state = NULL, "state");
    REFUSED(a.out = (char *)a.out + 1, "out is NULL or not aligned");
    REFUSED(a.out_type = (enum lk_type)3, "out_type");
    REFUSED(a.crop_area[1] = 1.5F, "crop_area");
    REFUSED(a.crop_area[0] = 0.9F, "crop_area");
    REFUSED(a.crop_ratio[0] = 0, "crop_area or crop_ratio");
    REFUSED(a.flip = NAN, "flip");
    REFUSED(a.brightness = -1, "brightness");
    REFUSED(a.hue = 0.6F, "hue");
    REFUSED(a.std[1] = 0, "std");
    REFUSED(a.erase = 2, "erase is not in");
    REFUSED(a.erase_ratio[1] = 0.1F, "erase_ratio");
#undef REFUSED
    a = c->a;
    a.count = 0;
    a.images = NULL;
    CHECK(t->lib.lk_augment_images(&a, NULL) == 0);
    drop_case(c);
}

uint64_t augment_fingerprint(const struct compute_target *t)
{
    static const uint32_t sizes[4] = { 61, 83, 48, 40 };
    uint64_t hash = 0;

    for (int kind = 0; kind < 6; kind++) {
        struct augment_case *c = make_case(t, 40, sizes, 3, (enum lk_type)(kind / 2), 0);

        if (kind & 1) /* without a mean images are spread over blocks */
            c->a.contrast = 0;
        run(c);
        for (size_t i = 0; i < c->out.bytes; i++)
            hash = (hash ^ c->out.near[i]) * UINT64_C(0x100000001b3);
        for (size_t i = 0; i < c->choices.bytes; i++)
            hash = (hash ^ c->choices.near[i]) * UINT64_C(0x100000001b3);
        drop_case(c);
    }
    return hash;
}

void check_augment(const struct compute_target *t)
{
    pixels_follow_the_choices(t);
    what_is_off_changes_nothing(t);
    a_sample_is_the_same_in_every_batch(t);
    draws_are_spread_as_asked_for(t);
    wrong_arguments_are_refused(t);
}
