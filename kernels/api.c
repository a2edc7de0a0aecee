/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/list_internal.h"

#include <errno.h>
#include <stdbool.h>

_Static_assert(sizeof(struct lk_entry) == 24, "the size of a tensor in kernel arguments is agreed");
_Static_assert(sizeof(struct lk_head) == 40, "the head has no padding");
_Static_assert(LK_MAX_ENTRIES < UINT16_MAX, "head.n counts all entries");

/* One call on a list. Tensors are the sources of a packing call and the destinations of an unpacking one. */
struct list_call {
    const struct lk_tensor *tensors;
    size_t n;
    uint64_t packed;
    enum lk_work work;
    bool packing;
    unsigned int tensor_bytes; /* an element in a tensor, a power of two */
    unsigned int packed_bytes; /* an element in the packed buffer */
};

struct range {
    uint64_t begin;
    uint64_t end;
};

static bool overlaps(struct range a, struct range b)
{
    return a.begin < b.end && b.begin < a.end;
}

static bool good_scale(const struct lk_scale *scale)
{
    unsigned int mask = scale && scale->type == LK_FP32 ? 3 : 1;

    if (!scale || !scale->device_value)
        return true;
    return (unsigned int)scale->type <= LK_FP16 && !((uintptr_t)scale->device_value & mask);
}

static bool good_rounding(enum lk_rounding rounding, const struct lk_rng *rng)
{
    if (rounding != LK_STOCHASTIC)
        return rounding == LK_NEAREST;
    return rng && !((uintptr_t)rng->device_offset & 7);
}

static struct lk_draws draws_of(enum lk_rounding rounding, const struct lk_rng *rng)
{
    if (rounding != LK_STOCHASTIC)
        return (struct lk_draws){ 0 };
    return (struct lk_draws){ rng->seed, rng->offset, rng->device_offset };
}

/* [begin, begin + (first + count) * bytes) without wrapping. */
static bool make_range(uint64_t begin, uint64_t first, uint64_t count, unsigned int bytes,
                       struct range *out)
{
    uint64_t end;

    if (__builtin_add_overflow(first, count, &end) || __builtin_mul_overflow(end, bytes, &end) ||
        __builtin_add_overflow(end, begin, &end))
        return false;
    out->begin = begin + first * bytes;
    out->end = end;
    return true;
}

static int check_list(const struct list_call *call)
{
    struct range packed = { UINT64_MAX, 0 };
    struct range range;

    if ((!call->tensors && call->n) || call->packed & (call->packed_bytes - 1))
        return -EINVAL;
    for (size_t i = 0; i < call->n; i++) {
        const struct lk_tensor *tensor = &call->tensors[i];

        if (!tensor->count)
            continue;
        if (!tensor->ptr || !call->packed || (uintptr_t)tensor->ptr & (call->tensor_bytes - 1))
            return -EINVAL;
        if (!make_range(call->packed, tensor->offset, tensor->count, call->packed_bytes, &range))
            return -EINVAL;
        packed.begin = range.begin < packed.begin ? range.begin : packed.begin;
        packed.end = range.end > packed.end ? range.end : packed.end;
    }
    for (size_t i = 0; i < call->n; i++) {
        const struct lk_tensor *tensor = &call->tensors[i];

        if (!tensor->count)
            continue;
        if (!make_range((uintptr_t)tensor->ptr, 0, tensor->count, call->tensor_bytes, &range))
            return -EINVAL;
        if (overlaps(range, packed))
            return -EINVAL;
    }
    return 0;
}

/* Cuts the list at entry numbers that follow from the counts alone, so that all ranks cut alike. */
static int run_list(const struct list_call *call, struct lk_launch *launch, void *stream)
{
    int err = check_list(call);

    if (err)
        return err;
    launch->work = call->work;
    launch->head.n = 0;
    for (size_t i = 0; i < call->n; i++) {
        const struct lk_tensor *tensor = &call->tensors[i];

        for (uint64_t done = 0; done < tensor->count; done += LK_ENTRY_ELEMENTS) {
            uint64_t left = tensor->count - done;
            uint64_t apart = (uintptr_t)tensor->ptr + done * call->tensor_bytes;
            uint64_t packed = call->packed + (tensor->offset + done) * call->packed_bytes;

            if (launch->head.n == LK_MAX_ENTRIES) {
                err = lk_run_launch(launch, stream);
                if (err)
                    return err;
                launch->head.n = 0;
            }
            launch->entries[launch->head.n++] = (struct lk_entry){
                .src = call->packing ? apart : packed,
                .dst = call->packing ? packed : apart,
                .count = (uint32_t)(left < LK_ENTRY_ELEMENTS ? left : LK_ENTRY_ELEMENTS),
            };
        }
    }
    return launch->head.n ? lk_run_launch(launch, stream) : 0;
}

LK_API int lk_abi_version(void)
{
    return LK_ABI_VERSION;
}

LK_API int lk_cast_pack(const struct lk_tensor *tensors, size_t n, void *packed,
                        const struct lk_scale *scale, enum lk_rounding rounding,
                        const struct lk_rng *rng, void *stream)
{
    struct lk_launch launch;
    struct list_call call = {
        .tensors = tensors,
        .n = n,
        .packed = (uintptr_t)packed,
        .work = rounding == LK_STOCHASTIC ? LK_CAST_PACK_STOCHASTIC : LK_CAST_PACK_NEAREST,
        .packing = true,
        .tensor_bytes = 4,
        .packed_bytes = 2,
    };

    if (!good_rounding(rounding, rng) || !good_scale(scale))
        return -EINVAL;
    launch.head = (struct lk_head){ .scale = 1 };
    if (scale) {
        launch.head.scale = scale->value;
        launch.head.scale_pointer = scale->device_value;
        launch.head.scale_type = (uint16_t)scale->type;
    }
    if (rounding == LK_STOCHASTIC) {
        launch.head.seed = rng->seed;
        launch.head.index = rng->offset - (uintptr_t)packed / 2;
        launch.head.device_offset = rng->device_offset;
    }
    return run_list(&call, &launch, stream);
}

LK_API int lk_cast_unpack(const struct lk_tensor *tensors, size_t n, const void *packed,
                          void *stream)
{
    struct lk_launch launch;
    struct list_call call = {
        .tensors = tensors,
        .n = n,
        .packed = (uintptr_t)packed,
        .work = LK_CAST_UNPACK,
        .tensor_bytes = 4,
        .packed_bytes = 2,
    };

    launch.head = (struct lk_head){ .scale = 1 };
    return run_list(&call, &launch, stream);
}

static int copy_list(const struct lk_tensor *tensors, size_t n, const void *packed,
                     enum lk_type type, bool packing, void *stream)
{
    unsigned int bytes = type == LK_FP32 ? 4 : 2;
    struct lk_launch launch;
    struct list_call call = {
        .tensors = tensors,
        .n = n,
        .packed = (uintptr_t)packed,
        .work = bytes == 4 ? LK_COPY_4 : LK_COPY_2,
        .packing = packing,
        .tensor_bytes = bytes,
        .packed_bytes = bytes,
    };

    if ((unsigned int)type > LK_FP16)
        return -EINVAL;
    launch.head = (struct lk_head){ .scale = 1 };
    return run_list(&call, &launch, stream);
}

LK_API int lk_pack(const struct lk_tensor *tensors, size_t n, void *packed, enum lk_type type,
                   void *stream)
{
    return copy_list(tensors, n, packed, type, true, stream);
}

LK_API int lk_unpack(const struct lk_tensor *tensors, size_t n, const void *packed,
                     enum lk_type type, void *stream)
{
    return copy_list(tensors, n, packed, type, false, stream);
}

/* True if out, which overlaps the shards, is one of them, to be replaced by the sum. */
static bool is_shard(const struct lk_sum *sum)
{
    uint64_t distance = ((uintptr_t)sum->out - (uintptr_t)sum->shards) / 2;

    if (sum->out_type != LK_BF16 || sum->out < sum->shards)
        return false;
    return sum->n == 1 ? distance == 0 : distance % sum->stride == 0;
}

static int check_sum(const struct lk_sum *sum)
{
    unsigned int out_bytes = sum->out_type == LK_FP32 ? 4 : 2;
    struct range in, out;
    uint64_t last;

    if (!sum->shards || !sum->out || (uintptr_t)sum->shards & 1 ||
        (uintptr_t)sum->out & (out_bytes - 1))
        return -EINVAL;
    if (sum->n > 1 && sum->stride < sum->count)
        return -EINVAL;
    if (__builtin_mul_overflow(sum->stride, sum->n - 1, &last))
        return -EINVAL;
    if (!make_range((uintptr_t)sum->shards, last, sum->count, 2, &in) ||
        !make_range((uintptr_t)sum->out, 0, sum->count, out_bytes, &out))
        return -EINVAL;
    in.begin = (uintptr_t)sum->shards;
    return overlaps(in, out) && !is_shard(sum) ? -EINVAL : 0;
}

LK_API int lk_sum_shards(const void *shards, size_t n, uint64_t stride, uint64_t count, void *out,
                         enum lk_type out_type, const struct lk_scale *scale,
                         const struct lk_rng *rng, void *stream)
{
    enum lk_rounding rounding = rng && out_type == LK_BF16 ? LK_STOCHASTIC : LK_NEAREST;
    struct lk_sum sum = {
        .shards = shards,
        .out = out,
        .stride = n == 1 ? 0 : stride,
        .count = count,
        .scale = scale ? scale->value : 1,
        .scale_pointer = scale ? scale->device_value : NULL,
        .scale_type = scale ? (uint16_t)scale->type : LK_FP32,
        .out_type = (uint16_t)out_type,
        .n = (uint32_t)n,
        .rounding = rounding,
    };
    int err;

    if (n < 1 || n > UINT32_MAX || (out_type != LK_BF16 && out_type != LK_FP32) ||
        !good_scale(scale) || !good_rounding(rounding, rng))
        return -EINVAL;
    sum.draws = draws_of(rounding, rng);
    if (!count)
        return 0;
    err = check_sum(&sum);
    return err ? err : lk_run_sum(&sum, stream);
}

LK_API int lk_compare(const void *got, const void *want, uint64_t count, enum lk_type type,
                      void *work, struct lk_difference *out, void *stream)
{
    const struct lk_comparison comparison = { got, want, count, work, out, type };
    unsigned int mask = type == LK_FP32 ? 3 : 1;

    if ((unsigned int)type > LK_FP16 || !work || (uintptr_t)work & 15 || !out ||
        (uintptr_t)out & 7 || (count && (!got || !want)) ||
        ((uintptr_t)got | (uintptr_t)want) & mask)
        return -EINVAL;
    return lk_run_compare(&comparison, stream);
}

LK_API int lk_cast_feedback(const float *in, uint64_t count, void *packed, float *residual,
                            const struct lk_scale *scale, enum lk_rounding rounding,
                            const struct lk_rng *rng, void *stream)
{
    struct lk_feedback feedback = {
        .in = in,
        .packed = packed,
        .residual = residual,
        .count = count,
        .scale = scale ? scale->value : 1,
        .scale_pointer = scale ? scale->device_value : NULL,
        .scale_type = scale ? scale->type : LK_FP32,
        .rounding = rounding,
    };
    struct range from, to, kept;

    if (!good_scale(scale) || !good_rounding(rounding, rng))
        return -EINVAL;
    feedback.draws = draws_of(rounding, rng);
    if (!count)
        return 0;
    if (!in || !packed || !residual || ((uintptr_t)in | (uintptr_t)residual) & 3 ||
        (uintptr_t)packed & 1 || !make_range((uintptr_t)in, 0, count, 4, &from) ||
        !make_range((uintptr_t)packed, 0, count, 2, &to) ||
        !make_range((uintptr_t)residual, 0, count, 4, &kept) || overlaps(from, to) ||
        overlaps(from, kept) || overlaps(to, kept))
        return -EINVAL;
    return lk_run_feedback(&feedback, stream);
}

LK_API int lk_count_up(uint64_t *word, uint64_t by, void *stream)
{
    const struct lk_count count = { word, by };

    return word && !((uintptr_t)word & 7) ? lk_run_count(&count, stream) : -EINVAL;
}
