/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernel of image augmentation draws and computes. Nothing here but what IEEE 754 rounds in one way, so that both
 * libraries and all devices agree on every bit.
 */
#ifndef LK_COMPUTE_AUGMENT_H
#define LK_COMPUTE_AUGMENT_H

#include "kernels/compute_internal.h"
#include "kernels/value_internal.h"

#include <math.h>

#define AUGMENT_TRIES 10 /* to find a rectangle that fits */

/* What word 3 of the counter counts. */
enum augment_draw {
    AUGMENT_CROP = 0,
    AUGMENT_FLIP = AUGMENT_TRIES, /* and the order of steps, brightness, contrast */
    AUGMENT_COLOUR,               /* saturation, hue, whether to erase */
    AUGMENT_ERASE,
};

struct augment_generator {
    uint64_t seed, sample;
    uint32_t epoch;
};

LK_INLINE void augment_words(const struct augment_generator *g, uint32_t draw, uint32_t out[4])
{
    uint32_t counter[4] = { (uint32_t)g->sample, (uint32_t)(g->sample >> 32), g->epoch,
                            LK_AUGMENT_STREAM + draw };

    philox_words(g->seed, counter, out);
}

/* In [0, 1), and in [least, most]. */
LK_INLINE float augment_unit(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24F;
}

LK_INLINE float augment_between(uint32_t word, float least, float most)
{
    return least + augment_unit(word) * (most - least);
}

/* In [0, n). */
LK_INLINE uint32_t augment_below(uint32_t word, uint32_t n)
{
    return (uint32_t)((uint64_t)word * n >> 32);
}

/* 2^x within 2^-20 of itself, for x in [-126, 127). */
LK_INLINE float augment_exp2(float x)
{
    float whole = floorf(x + 0.5F), r = (x - whole) * 0.693147181F;
    float sum = 1 + r * (1.0F / 7);

    sum = 1 + r * (1.0F / 6) * sum;
    sum = 1 + r * (1.0F / 5) * sum;
    sum = 1 + r * (1.0F / 4) * sum;
    sum = 1 + r * (1.0F / 3) * sum;
    sum = 1 + r * 0.5F * sum;
    sum = 1 + r * sum;
    return sum * bits_float((uint32_t)((int32_t)whole + 127) << 23);
}

struct augment_rectangle {
    uint32_t top, left, height, width;
};

/* A rectangle of `height` x `width` of which one dimension may be full only if `full`. Height 0: none was found. */
LK_INLINE struct augment_rectangle augment_find(const struct augment_generator *g, uint32_t draw,
                                                uint32_t height, uint32_t width,
                                                const float area[2], const float ratio_log[2],
                                                int full)
{
    struct augment_rectangle out = { 0, 0, 0, 0 };

    for (uint32_t t = 0; t < AUGMENT_TRIES; t++) {
        uint32_t words[4];
        float pixels, ratio, w, h;

        augment_words(g, draw + t, words);
        pixels = (float)height * (float)width * augment_between(words[0], area[0], area[1]);
        ratio = augment_exp2(ratio_log[0] + augment_unit(words[1]) * ratio_log[1]);
        w = floorf(sqrtf(pixels * ratio) + 0.5F);
        h = floorf(sqrtf(pixels / ratio) + 0.5F);
        if (!(w >= 1 && h >= 1 && w < (float)width + (float)full &&
              h < (float)height + (float)full))
            continue;
        out.height = (uint32_t)h;
        out.width = (uint32_t)w;
        out.top = augment_below(words[2], height - out.height + 1);
        out.left = augment_below(words[3], width - out.width + 1);
        return out;
    }
    return out;
}

/* In the middle, as much as the ratios allow. */
LK_INLINE struct augment_rectangle augment_middle(const struct lk_augment *a)
{
    struct augment_rectangle out = { 0, 0, a->height, a->width };
    float ratio = (float)a->width / (float)a->height;

    if (ratio < a->crop_ratio[0])
        out.height = (uint32_t)floorf((float)a->width / a->crop_ratio[0] + 0.5F);
    else if (ratio > a->crop_ratio[1])
        out.width = (uint32_t)floorf((float)a->height * a->crop_ratio[1] + 0.5F);
    out.height = out.height < 1 ? 1 : out.height < a->height ? out.height : a->height;
    out.width = out.width < 1 ? 1 : out.width < a->width ? out.width : a->width;
    out.top = (a->height - out.height) / 2;
    out.left = (a->width - out.width) / 2;
    return out;
}

/* The n-th of the 24 orders of four steps. */
LK_INLINE uint32_t augment_order(uint32_t n)
{
    uint32_t left = 0xe4, order = 0; /* 3, 2, 1, 0: two bits each */

    for (uint32_t i = 0; i < 4; i++) {
        uint32_t at = 2 * (n % (4 - i)), low = left & ((1U << at) - 1);

        order |= (left >> at & 3U) << 2 * i;
        left = low | left >> (at + 2) << at;
        n /= 4 - i;
    }
    return order;
}

LK_INLINE float augment_factor(uint32_t word, float most)
{
    return augment_between(word, most < 1 ? 1 - most : 0, 1 + most);
}

LK_INLINE struct lk_augment_choice augment_draw(const struct lk_augment_launch *launch,
                                                uint64_t image)
{
    const struct lk_augment *a = &launch->augment;
    struct augment_generator g = { a->state->seed,
                                   a->samples ? a->samples[image] : a->first_sample + image,
                                   a->state->epoch };
    struct augment_rectangle crop = { 0, 0, a->height, a->width }, erased = { 0, 0, 0, 0 };
    struct lk_augment_choice out;
    uint32_t first[4], second[4];

    augment_words(&g, AUGMENT_FLIP, first);
    augment_words(&g, AUGMENT_COLOUR, second);
    if (a->crop_area[1] > 0) {
        crop = augment_find(&g, AUGMENT_CROP, a->height, a->width, a->crop_area, launch->crop_log,
                            1);
        if (!crop.height)
            crop = augment_middle(a);
    }
    if (augment_unit(second[2]) < a->erase)
        erased = augment_find(&g, AUGMENT_ERASE, a->out_height, a->out_width, a->erase_area,
                              launch->erase_log, 0);
    out.top = crop.top;
    out.left = crop.left;
    out.height = crop.height;
    out.width = crop.width;
    out.erase_top = erased.top;
    out.erase_left = erased.left;
    out.erase_height = erased.height;
    out.erase_width = erased.width;
    out.flip = augment_unit(first[0]) < a->flip;
    out.order = augment_order(augment_below(first[1], 24));
    out.brightness = augment_factor(first[2], a->brightness);
    out.contrast = augment_factor(first[3], a->contrast);
    out.saturation = augment_factor(second[0], a->saturation);
    out.hue = augment_between(second[1], -a->hue, a->hue);
    return out;
}

/* ---- pixels, with values in [0, 1] ---- */

struct augment_pixel {
    float v[3];
};

/* Where an output pixel's centre lies in the crop: the first of two lines, and how far to the second. */
struct augment_place {
    uint32_t first, second;
    float part;
};

/* Lines of the crop for one of the output. */
struct augment_ratios {
    float rows, columns;
};

LK_INLINE struct augment_ratios augment_find_ratios(const struct lk_augment *a,
                                                    const struct lk_augment_choice *c)
{
    struct augment_ratios out = { (float)c->height / (float)a->out_height,
                                  (float)c->width / (float)a->out_width };

    return out;
}

LK_INLINE struct augment_place augment_at(uint32_t at, float ratio, uint32_t begin, uint32_t size)
{
    float x = ((float)at + 0.5F) * ratio - 0.5F;
    struct augment_place place;

    x = x < 0 ? 0 : x > (float)(size - 1) ? (float)(size - 1) : x;
    place.first = (uint32_t)x;
    place.second = place.first + 1 < size ? place.first + 1 : place.first;
    place.part = x - (float)place.first;
    place.first += begin;
    place.second += begin;
    return place;
}

/* x / 255 for x in [0, 256]. The device has three operations for it, which round as a division does: all x were tried. */
LK_INLINE float augment_part(float x)
{
#ifdef __CUDA_ARCH__
    const float inverse = 1.0F / 255;
    float quotient = x * inverse;

    return fmaf(fmaf(-quotient, 255, x), inverse, quotient);
#else
    return x / 255;
#endif
}

LK_INLINE struct augment_place augment_row(const struct lk_augment_choice *c,
                                           struct augment_ratios ratios, uint32_t y)
{
    return augment_at(y, ratios.rows, c->top, c->height);
}

LK_INLINE struct augment_place augment_column(const struct lk_augment *a,
                                              const struct lk_augment_choice *c,
                                              struct augment_ratios ratios, uint32_t x)
{
    return augment_at(c->flip ? a->out_width - 1 - x : x, ratios.columns, c->left, c->width);
}

/* A byte, without the conversion, of which the device makes few at a time. */
LK_INLINE float augment_byte(uint8_t x)
{
    return bits_float(0x4b000000U | x) - 0x1p23F;
}

/* What a line of the image has at a column of the output, in [0, 255]. */
LK_INLINE struct augment_pixel augment_line(const struct lk_augment *a, uint64_t image,
                                            uint32_t line, const struct augment_place *column)
{
    const uint8_t *row = a->images + image * a->image_stride + line * a->row_stride;
    const uint8_t *left = row + (size_t)(column->first * a->channels);
    const uint8_t *right = row + (size_t)(column->second * a->channels);
    struct augment_pixel out = { { 0 } };

    for (uint32_t i = 0; i < 3; i++) {
        if (i < a->channels) {
            float first = augment_byte(left[i]);

            out.v[i] = first + (augment_byte(right[i]) - first) * column->part;
        } else {
            out.v[i] = out.v[0];
        }
    }
    return out;
}

/* A pixel between two lines. */
LK_INLINE struct augment_pixel augment_mix(const struct augment_pixel *upper,
                                           const struct augment_pixel *lower, float part)
{
    struct augment_pixel out;

    for (uint32_t i = 0; i < 3; i++)
        out.v[i] = augment_part(upper->v[i] + (lower->v[i] - upper->v[i]) * part);
    return out;
}

/* Of a number that is neither a NaN nor -0. */
LK_INLINE float augment_clamp(float x)
{
#ifdef __CUDA_ARCH__
    return __saturatef(x);
#else
    return x < 0 ? 0 : x > 1 ? 1 : x;
#endif
}

LK_INLINE float augment_gray(const struct augment_pixel *p)
{
    return 0.2989F * p->v[0] + 0.587F * p->v[1] + 0.114F * p->v[2];
}

/* From `other` (factor 0) to the pixel (1) and beyond. */
LK_INLINE void augment_blend(struct augment_pixel *p, float factor, float other)
{
    for (int i = 0; i < 3; i++)
        p->v[i] = augment_clamp(factor * p->v[i] + (1 - factor) * other);
}

LK_INLINE float augment_third(float h, float v, float s, float third)
{
    float k = h + third; /* in [0, 24) */
    float away;          /* from the channel's own colour, in sixths of a turn */

    k -= k < 12 ? (k < 6 ? 0.0F : 6.0F) : (k < 18 ? 12.0F : 18.0F);
    away = k < 4 - k ? k : 4 - k;
    return v - v * s * augment_clamp(away);
}

/* Turns the colour by `hue` of a circle: to hue, saturation and value, and back by the formula without cases, in which
 * red, green and blue lie 5, 3 and 1 sixths ahead. */
LK_INLINE void augment_turn(struct augment_pixel *p, float hue)
{
    float r = p->v[0], g = p->v[1], b = p->v[2];
    float most = r > g ? r : g, least = r < g ? r : g, range, s, h;

    most = most > b ? most : b;
    least = least < b ? least : b;
    range = most - least;
    if (!(range > 0))
        return;
    h = (most == r ? g - b : most == g ? b - r : r - g) / range;
    h += most == r ? 0.0F : most == g ? 2.0F : 4.0F;
    h += 6 * hue + 6; /* positive */
    s = range / most;
    p->v[0] = augment_third(h, most, s, 5);
    p->v[1] = augment_third(h, most, s, 3);
    p->v[2] = augment_third(h, most, s, 1);
}

enum augment_step {
    AUGMENT_BRIGHTNESS = 0,
    AUGMENT_CONTRAST = 1,
    AUGMENT_SATURATION = 2,
    AUGMENT_HUE = 3,
};

/* The steps in their order, three bits each, the first lowest, as their numbers + 1; without those that leave everything as
 * it is. Gray has no saturation and no hue. */
LK_INLINE uint32_t augment_steps(const struct lk_augment *a, const struct lk_augment_choice *c)
{
    uint32_t steps = 0, bits = 0;

    for (uint32_t i = 0; i < 4; i++) {
        uint32_t step = c->order >> 2 * i & 3U;
        int colour = a->channels == 3;

        if ((step == AUGMENT_BRIGHTNESS && c->brightness != 1) ||
            (step == AUGMENT_CONTRAST && c->contrast != 1) ||
            (step == AUGMENT_SATURATION && colour && c->saturation != 1) ||
            (step == AUGMENT_HUE && colour && c->hue != 0)) {
            steps |= (step + 1) << bits;
            bits += 3;
        }
    }
    return steps;
}

/* The first of `steps`. */
LK_INLINE void augment_step(const struct lk_augment_choice *c, uint32_t steps, float mean,
                            struct augment_pixel *p)
{
    uint32_t step = (steps & 7U) - 1;

    if (step == AUGMENT_BRIGHTNESS)
        augment_blend(p, c->brightness, 0);
    else if (step == AUGMENT_CONTRAST)
        augment_blend(p, c->contrast, mean);
    else if (step == AUGMENT_SATURATION)
        augment_blend(p, c->saturation, augment_gray(p));
    else
        augment_turn(p, c->hue);
}

/* A pixel's part of the mean of gray at the step of contrast, which is one of `steps`, in units of 2^-20: whole numbers have
 * one sum in any order. */
LK_INLINE uint32_t augment_gray_units(const struct lk_augment *a, const struct lk_augment_choice *c,
                                      uint32_t steps, struct augment_pixel p)
{
    for (; (steps & 7U) != AUGMENT_CONTRAST + 1; steps >>= 3)
        augment_step(c, steps, 0, &p);
    return (uint32_t)((a->channels == 3 ? augment_gray(&p) : p.v[0]) * 0x1p20F + 0.5F);
}

LK_INLINE float augment_mean(const struct lk_augment *a, uint64_t units)
{
    return (float)((double)units / ((double)a->out_height * (double)a->out_width * 0x1p20));
}

/* What a sampled pixel becomes in the output, all channels. mean: of gray at the step of contrast. */
LK_INLINE struct augment_pixel augment_finish(const struct lk_augment_launch *launch,
                                              const struct lk_augment_choice *c, uint32_t steps,
                                              uint32_t y, uint32_t x, float mean,
                                              struct augment_pixel p)
{
    const struct lk_augment *a = &launch->augment;
    int erased = y - c->erase_top < c->erase_height && x - c->erase_left < c->erase_width;

    for (; steps; steps >>= 3)
        augment_step(c, steps, mean, &p);
    for (uint32_t i = 0; i < 3; i++)
        p.v[i] = erased ? a->erase_value[i] : (p.v[i] - a->mean[i]) * launch->inverse_std[i];
    return p;
}

#endif
