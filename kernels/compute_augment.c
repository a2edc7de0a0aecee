/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rules_internal.h"

#include <math.h>
#include <string.h>

static bool is_between(float x, float least, float most)
{
    return x >= least && x <= most; /* not a NaN */
}

/* Least and most of an area and of a ratio. Ratios stay where powers of 2 are plain numbers. */
static bool good_ranges(const float area[2], const float ratio[2])
{
    return is_between(area[0], 0, area[1]) && is_between(area[1], 0, 1) && area[1] > 0 &&
           is_between(ratio[0], 0x1p-16F, ratio[1]) && ratio[1] <= 0x1p16F;
}

static const char call[] = "lk_augment_images";

static bool good_size(uint32_t height, uint32_t width)
{
    return height && width && height <= 65535 && width <= 65535;
}

static int check_images(const struct lk_augment *a)
{
    uint64_t row = (uint64_t)a->width * a->channels, whole;

    if (lk_breaks(call, a->channels == 1 || a->channels == 3, "channels are neither 1 nor 3") ||
        lk_breaks(call, good_size(a->height, a->width), "height or width is not from 1 to 65535") ||
        lk_breaks(call, good_size(a->out_height, a->out_width),
                  "out_height or out_width is not from 1 to 65535") ||
        lk_breaks(call, a->count <= INT32_MAX, "count is not below 2^31") ||
        lk_breaks(call, a->row_stride >= row && a->row_stride < UINT64_C(1) << 32,
                  "row_stride is less than a row, or beyond 2^32") ||
        lk_breaks(call,
                  !__builtin_mul_overflow((uint64_t)a->count, a->image_stride, &whole) &&
                      whole < UINT64_C(1) << 62,
                  "image_stride is too large"))
        return -EINVAL;
    return 0;
}

static int check_outputs(const struct lk_augment *a)
{
    if (lk_breaks(call, a->out_type == LK_FP32 || a->out_type == LK_BF16 || a->out_type == LK_FP16,
                  "unknown out_type") ||
        lk_breaks(call, a->images, "images is NULL") ||
        lk_breaks(call, a->out && lk_is_aligned(a->out, a->out_type == LK_FP32 ? 4 : 2),
                  "out is NULL or not aligned to its elements") ||
        lk_breaks(call, a->state && lk_is_aligned(a->state, 8), "state is NULL or not aligned") ||
        lk_breaks(call, lk_is_aligned(a->samples, 8), "samples is not aligned") ||
        lk_breaks(call, lk_is_aligned(a->choices, 4), "choices is not aligned"))
        return -EINVAL;
    return 0;
}

static int check_chances(const struct lk_augment *a)
{
    bool whole = a->crop_area[0] == 0 && a->crop_area[1] == 0;

    if (lk_breaks(call, is_between(a->flip, 0, 1), "flip is not in [0, 1]") ||
        lk_breaks(call, is_between(a->erase, 0, 1), "erase is not in [0, 1]") ||
        lk_breaks(call, is_between(a->hue, 0, 0.5F), "hue is not in [0, 0.5]") ||
        lk_breaks(call, is_between(a->brightness, 0, 1000), "brightness is not in [0, 1000]") ||
        lk_breaks(call, is_between(a->contrast, 0, 1000), "contrast is not in [0, 1000]") ||
        lk_breaks(call, is_between(a->saturation, 0, 1000), "saturation is not in [0, 1000]"))
        return -EINVAL;
    for (uint32_t i = 0; i < a->channels; i++)
        if (lk_breaks(call, a->std[i] > 0 && isfinite(a->std[i]) && isfinite(a->mean[i]),
                      "mean or std is not finite, or std not positive"))
            return -EINVAL;
    if (lk_breaks(call, !(a->erase > 0) || good_ranges(a->erase_area, a->erase_ratio),
                  "erase_area or erase_ratio is no range that can be drawn from") ||
        lk_breaks(call, whole || good_ranges(a->crop_area, a->crop_ratio),
                  "crop_area or crop_ratio is no range that can be drawn from"))
        return -EINVAL;
    return 0;
}

/* Of a plain number, by what every processor and C library rounds alike. */
static double log2_of(float x)
{
    uint32_t bits;
    double rest, power, sum = 0;
    float fraction;
    int exponent;

    memcpy(&bits, &x, sizeof(bits));
    exponent = (int)(bits >> 23) - 127;
    bits = (bits & 0x7fffffU) | 0x3f800000U;
    memcpy(&fraction, &bits, sizeof(fraction));
    rest = ((double)fraction - 1) /
           ((double)fraction + 1); /* of the hyperbolic tangent's inverse */
    power = rest;
    for (int i = 1; i < 40; i += 2) {
        sum += power / i;
        power *= rest * rest;
    }
    return exponent + 2 * sum / 0.693147180559945309;
}

static void set_logs(const float ratio[2], float out[2])
{
    out[0] = (float)log2_of(ratio[0]);
    out[1] = (float)(log2_of(ratio[1]) - log2_of(ratio[0]));
}

LK_API int lk_augment_images(const struct lk_augment *augment, void *stream)
{
    struct lk_augment_launch launch = { 0 };

    if (lk_breaks(call, augment, "a NULL argument") || check_images(augment) ||
        check_chances(augment))
        return -EINVAL;
    if (!augment->count)
        return 0;
    if (check_outputs(augment))
        return -EINVAL;
    launch.augment = *augment;
    if (augment->crop_area[1] > 0)
        set_logs(augment->crop_ratio, launch.crop_log);
    if (augment->erase > 0)
        set_logs(augment->erase_ratio, launch.erase_log);
    for (uint32_t i = 0; i < augment->channels; i++)
        launch.inverse_std[i] = 1 / augment->std[i];
    return lk_run_augment(&launch, stream);
}
