/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_internal.h"
#include "kernels/loongkernels_host.h"
#include "kernels/rings.h"
#include "kernels/value_internal.h"

#include <errno.h>
#include <stdlib.h>

/* Written by lk_host_set_ops before any work exists, read by every call and every running piece of work. */
static struct lk_host_ops ops;

LK_API void lk_host_set_ops(const struct lk_host_ops *given)
{
    ops = given ? *given : (struct lk_host_ops){ 0 };
}

LK_API const char *lk_backend(void)
{
    return "host";
}

LK_API const char *lk_error_text(int result)
{
    switch (result) {
    case 0: return "no error";
    case -EINVAL: return "invalid argument or forbidden overlap";
    case -ENOMEM: return "out of memory";
    default: return "error of the enqueue function";
    }
}

LK_API int lk_load_all(void)
{
    return 0;
}

LK_API int lk_rings_load(void)
{
    return 0;
}

LK_API int lk_driver_needed(void)
{
    return 0;
}

LK_API void *lk_runtime_symbol(const char *name)
{
    return NULL;
}

void lk_host_use(uint64_t address, uint64_t bytes, bool write)
{
    if (ops.buffer_use)
        ops.buffer_use((const void *)(uintptr_t)address, bytes, write);
}

float lk_host_scale(float value, uint32_t type, const void *pointer)
{
    if (pointer)
        lk_host_use((uintptr_t)pointer, type == LK_FP32 ? 4 : 2, false);
    return scale_value(value, (enum lk_type)type, pointer);
}

void lk_host_draws_begin(struct lk_host_draws *out, const struct lk_draws *from)
{
    *out = (struct lk_host_draws){ .seed = from->seed, .next = from->index };
    if (from->device_offset) {
        lk_host_use((uintptr_t)from->device_offset, sizeof(uint64_t), false);
        out->next += *from->device_offset;
    }
    philox(out->seed, out->next / 8, out->block);
}

uint32_t lk_host_draw(struct lk_host_draws *draws)
{
    if (draws->next % 8 == 0)
        philox(draws->seed, draws->next / 8, draws->block);
    return random_bits(draws->block, draws->next++ % 8);
}

static void cast_pack_nearest(const struct lk_entry *entry, float scale)
{
    const float *src = (const float *)(uintptr_t)entry->src;
    uint16_t *dst = (uint16_t *)(uintptr_t)entry->dst;

    for (uint32_t i = 0; i < entry->count; i++)
        dst[i] = (uint16_t)narrow_bf16(src[i], scale, 0, 0);
}

static void cast_pack_stochastic(const struct lk_entry *entry, float scale, uint64_t seed,
                                 uint64_t index)
{
    const float *src = (const float *)(uintptr_t)entry->src;
    uint16_t *dst = (uint16_t *)(uintptr_t)entry->dst;
    uint32_t block[4];

    index += entry->dst / 2;
    philox(seed, index / 8, block);
    for (uint32_t i = 0; i < entry->count; i++, index++) {
        if (index % 8 == 0)
            philox(seed, index / 8, block);
        dst[i] = (uint16_t)narrow_bf16(src[i], scale, 1, random_bits(block, index % 8));
    }
}

static void cast_unpack(const struct lk_entry *entry)
{
    const uint16_t *src = (const uint16_t *)(uintptr_t)entry->src;
    uint32_t *dst = (uint32_t *)(uintptr_t)entry->dst;

    for (uint32_t i = 0; i < entry->count; i++)
        dst[i] = (uint32_t)src[i] << 16;
}

static void run_launch(void *arg)
{
    const struct lk_launch *launch = arg;
    const struct lk_head *head = &launch->head;
    bool casts = launch->work == LK_CAST_PACK_NEAREST || launch->work == LK_CAST_PACK_STOCHASTIC;
    bool unpacks = launch->work == LK_CAST_UNPACK;
    uint64_t src_bytes = casts || launch->work == LK_COPY_4 ? 4 : 2;
    uint64_t dst_bytes = unpacks || launch->work == LK_COPY_4 ? 4 : 2;
    float scale = lk_host_scale(head->scale, head->scale_type, head->scale_pointer);
    uint64_t index = head->index;

    if (head->device_offset) {
        lk_host_use((uintptr_t)head->device_offset, sizeof(uint64_t), false);
        index += *head->device_offset;
    }
    for (unsigned int i = 0; i < head->n; i++) {
        const struct lk_entry *entry = &launch->entries[i];

        lk_host_use(entry->src, entry->count * src_bytes, false);
        lk_host_use(entry->dst, entry->count * dst_bytes, true);
        switch (launch->work) {
        case LK_CAST_PACK_NEAREST: cast_pack_nearest(entry, scale); break;
        case LK_CAST_PACK_STOCHASTIC: cast_pack_stochastic(entry, scale, head->seed, index); break;
        case LK_CAST_UNPACK: cast_unpack(entry); break;
        case LK_COPY_2:
        case LK_COPY_4:
            memcpy((void *)(uintptr_t)entry->dst, (const void *)(uintptr_t)entry->src,
                   entry->count * src_bytes);
            break;
        }
    }
}

static uint32_t rounded_sum(const struct lk_sum *sum, float value, struct lk_host_draws *draws)
{
    bool stochastic = sum->rounding == LK_STOCHASTIC;
    uint32_t random = stochastic ? lk_host_draw(draws) : 0;

    return value == value ? narrow_bf16(value, 1, stochastic, random) : LK_BF16_NAN;
}

static void run_sum(void *arg)
{
    const struct lk_sum *sum = arg;
    const uint16_t *shards = sum->shards;
    float scale = lk_host_scale(sum->scale, sum->scale_type, sum->scale_pointer);
    struct lk_host_draws draws;

    lk_host_use((uintptr_t)sum->shards, (sum->stride * (sum->n - 1) + sum->count) * 2, false);
    lk_host_use((uintptr_t)sum->out, sum->count * (sum->out_type == LK_FP32 ? 4 : 2), true);
    lk_host_draws_begin(&draws, &sum->draws);
    for (uint64_t i = 0; i < sum->count; i++) {
        float value = widen_bf16(shards[i]);

        for (uint32_t r = 1; r < sum->n; r++)
            value += widen_bf16(shards[r * sum->stride + i]);
        value = multiply(value, scale);
        if (sum->out_type == LK_FP32)
            ((uint32_t *)sum->out)[i] = value == value ? float_bits(value) : LK_FP32_NAN;
        else
            ((uint16_t *)sum->out)[i] = (uint16_t)rounded_sum(sum, value, &draws);
    }
}

int lk_host_enqueue(void *stream, const char *name, void (*run)(void *arg),
                    void (*release)(void *arg), void *arg)
{
    if (ops.enqueue)
        return ops.enqueue(stream, name, run, release, arg);
    run(arg);
    release(arg);
    return 0;
}

int lk_host_submit(void *stream, const char *name, void (*run)(void *arg), void *arg, size_t bytes)
{
    void *copy;

    if (!ops.enqueue) {
        run(arg);
        return 0;
    }
    copy = malloc(bytes);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, arg, bytes);
    return lk_host_enqueue(stream, name, run, free, copy);
}

int lk_run_launch(struct lk_launch *launch, void *stream)
{
    static const char *const names[] = {
        [LK_CAST_PACK_NEAREST] = "lk_cast_pack",
        [LK_CAST_PACK_STOCHASTIC] = "lk_cast_pack",
        [LK_CAST_UNPACK] = "lk_cast_unpack",
        [LK_COPY_2] = "lk_copy",
        [LK_COPY_4] = "lk_copy",
    };

    return lk_host_submit(stream, names[launch->work], run_launch, launch,
                          offsetof(struct lk_launch, entries) +
                              launch->head.n * sizeof(struct lk_entry));
}

int lk_run_sum(const struct lk_sum *sum, void *stream)
{
    struct lk_sum copy = *sum;

    return lk_host_submit(stream, "lk_sum_shards", run_sum, &copy, sizeof(copy));
}
