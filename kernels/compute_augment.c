/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_internal.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
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

static bool good_images(const struct lk_augment *a)
{
    uint64_t row = (uint64_t)a->width * a->channels, whole;

    if ((a->channels != 1 && a->channels != 3) || !a->height || !a->width || a->height > 65535 ||
        a->width > 65535 || !a->out_height || !a->out_width || a->out_height > 65535 ||
        a->out_width > 65535 || a->count > INT32_MAX)
        return false;
    return a->row_stride >= row && a->row_stride < UINT64_C(1) << 32 &&
           !__builtin_mul_overflow((uint64_t)a->count, a->image_stride, &whole) &&
           whole < UINT64_C(1) << 62;
}

static bool good_outputs(const struct lk_augment *a)
{
    uintptr_t mask = a->out_type == LK_FP32 ? 3 : 1;

    if (a->out_type != LK_FP32 && a->out_type != LK_BF16 && a->out_type != LK_FP16)
        return false;
    return a->images && a->out && a->state && ((uintptr_t)a->out & mask) == 0 &&
           ((uintptr_t)a->state | (uintptr_t)a->samples) % 8 == 0 && (uintptr_t)a->choices % 4 == 0;
}

static bool good_chances(const struct lk_augment *a)
{
    if (!is_between(a->flip, 0, 1) || !is_between(a->erase, 0, 1) || !is_between(a->hue, 0, 0.5F) ||
        !is_between(a->brightness, 0, 1000) || !is_between(a->contrast, 0, 1000) ||
        !is_between(a->saturation, 0, 1000))
        return false;
    for (uint32_t i = 0; i < a->channels; i++)
        if (!(a->std[i] > 0) || !isfinite(a->std[i]) || !isfinite(a->mean[i]))
            return false;
    if (a->erase > 0 && !good_ranges(a->erase_area, a->erase_ratio))
        return false;
    return (a->crop_area[0] == 0 && a->crop_area[1] == 0) ||
           good_ranges(a->crop_area, a->crop_ratio);
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

    if (!augment || !good_images(augment) || !good_chances(augment))
        return -EINVAL;
    if (!augment->count)
        return 0;
    if (!good_outputs(augment))
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
