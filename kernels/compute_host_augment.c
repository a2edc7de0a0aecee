/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_augment.h"
#include "kernels/compute_host.h"

static void use_augment(const struct lk_augment *a)
{
    uint64_t plane = (uint64_t)a->out_height * a->out_width * a->channels;

    host_use(a->images,
             (a->count - 1) * a->image_stride + (a->height - 1) * a->row_stride +
                 (uint64_t)a->width * a->channels,
             false);
    host_use_optional(a->samples, a->count * sizeof(uint64_t), false);
    host_use(a->state, sizeof(*a->state), false);
    host_use(a->out, a->count * plane * (a->out_type == LK_FP32 ? 4 : 2), true);
    host_use_optional(a->choices, a->count * sizeof(*a->choices), true);
}

static struct augment_pixel sample(const struct lk_augment *a, const struct lk_augment_choice *c,
                                   struct augment_ratios ratios, uint64_t image, uint32_t y,
                                   uint32_t x)
{
    struct augment_place row = augment_row(c, ratios, y);
    struct augment_place column = augment_column(a, c, ratios, x);
    struct augment_pixel upper = augment_line(a, image, row.first, &column);
    struct augment_pixel lower = augment_line(a, image, row.second, &column);

    return augment_mix(&upper, &lower, row.part);
}

static void store(const struct lk_augment *a, uint64_t image, uint32_t y, uint32_t x,
                  struct augment_pixel p)
{
    for (uint32_t i = 0; i < a->channels; i++) {
        uint64_t at = ((image * a->channels + i) * a->out_height + y) * a->out_width + x;

        if (a->out_type == LK_FP32)
            ((float *)a->out)[at] = p.v[i];
        else
            ((uint16_t *)a->out)[at] = (uint16_t)(a->out_type == LK_BF16
                                                      ? narrow_bf16(p.v[i], 1, 0, 0)
                                                      : narrow_fp16(p.v[i]));
    }
}

static void augment_image(const struct lk_augment_launch *launch, uint64_t image)
{
    const struct lk_augment *a = &launch->augment;
    struct lk_augment_choice choice = augment_draw(launch, image);
    struct augment_ratios ratios = augment_find_ratios(a, &choice);
    uint32_t steps = augment_steps(a, &choice);
    uint64_t units = 0;

    for (uint32_t y = 0; choice.contrast != 1 && y < a->out_height; y++)
        for (uint32_t x = 0; x < a->out_width; x++)
            units += augment_gray_units(a, &choice, steps, sample(a, &choice, ratios, image, y, x));
    for (uint32_t y = 0; y < a->out_height; y++)
        for (uint32_t x = 0; x < a->out_width; x++)
            store(a, image, y, x,
                  augment_finish(launch, &choice, steps, y, x, augment_mean(a, units),
                                 sample(a, &choice, ratios, image, y, x)));
    if (a->choices)
        a->choices[image] = choice;
}

static void run_augment(void *arg)
{
    const struct lk_augment_launch *launch = arg;

    use_augment(&launch->augment);
    for (uint64_t image = 0; image < launch->augment.count; image++)
        augment_image(launch, image);
}

int lk_run_augment(const struct lk_augment_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_augment_images", run_augment, launch, sizeof(*launch));
}
