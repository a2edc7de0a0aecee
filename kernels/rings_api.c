/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/list_internal.h"
#include "kernels/rings_internal.h"

#include <errno.h>
#include <stdbool.h>

_Static_assert(sizeof(struct lk_ring_entry) == 24, "the size of a tensor in kernel arguments");
_Static_assert(sizeof(struct lk_ring_head) % 8 == 0, "entries follow the head without a gap");
_Static_assert(LK_RING_MAX < UINT16_MAX, "head.n counts all entries");
_Static_assert(LK_RANKS_MAX * 8 <= LK_DOORBELL_OFFSET, "nonces end before the doorbell");
_Static_assert(LK_EXCHANGE_SLOTS_MAX * 8 <= LK_WORD_BLOCK, "the words of a unit fill one block");
_Static_assert(LK_SLOT_GRANULES == 32, "a slot word has a bit for each granule");

static bool good_shape(const struct lk_ring_shape *s)
{
    return s->ranks >= 2 && s->ranks <= lk_backend_ranks && s->channels >= 1 &&
           s->channels <= LK_CHANNELS_MAX && s->slots >= 1 && s->slots <= LK_SLOTS_MAX &&
           s->line_bytes <= LK_LINES_MAX && s->line_bytes % LK_GRANULE == 0 &&
           s->short_bytes <= LK_SHORT_MAX;
}

LK_API size_t lk_ring_bytes(const struct lk_ring_shape *shape)
{
    return good_shape(shape) ? lk_slot_offset(shape, LK_EXCHANGE, shape->ranks, 0, 0) : 0;
}

LK_API size_t lk_ring_state_bytes(const struct lk_ring_shape *shape)
{
    return good_shape(shape) ? LK_STATE_HEADER + 2 * lk_units(shape) * sizeof(uint64_t) : 0;
}

bool lk_good_rings(const struct lk_rings *rings)
{
    if (!good_shape(&rings->shape) || rings->rank >= rings->shape.ranks || !rings->state ||
        (uintptr_t)rings->state & 15 || !rings->abort || (uintptr_t)rings->abort & 3)
        return false;
    for (uint32_t r = 0; r < rings->shape.ranks; r++) {
        if (!rings->segments[r] || (uintptr_t)rings->segments[r] & (LK_SEGMENT_ALIGN - 1))
            return false;
    }
    return true;
}

static bool good_reduction(const struct lk_reduction *how)
{
    const struct lk_scale *pre = how->pre;
    bool narrows = how->type == LK_FP32 && how->wire == LK_BF16;

    if ((unsigned int)how->type > LK_FP16 || (how->wire != how->type && !narrows))
        return false;
    if (how->rounding != LK_NEAREST && how->rounding != LK_STOCHASTIC)
        return false;
    if (how->rounding == LK_STOCHASTIC && (!how->rng || (uintptr_t)how->rng->device_offset & 7))
        return false;
    if ((uintptr_t)how->residual & 31)
        return false;
    return !pre || !pre->device_value ||
           ((unsigned int)pre->type <= LK_FP16 &&
            !((uintptr_t)pre->device_value & (pre->type == LK_FP32 ? 3 : 1)));
}

/* [begin, begin + parts * count * bytes) ends within the address space. */
static bool good_range(const void *begin, uint64_t parts, uint64_t count, unsigned int bytes)
{
    uint64_t size, end;

    return begin && !((uintptr_t)begin & (bytes - 1)) &&
           !__builtin_mul_overflow(count, parts * bytes, &size) &&
           !__builtin_add_overflow((uintptr_t)begin, size, &end);
}

static bool good_list(const struct lk_buffers *list, size_t n, uint64_t parts, enum lk_type type)
{
    unsigned int bytes = type == LK_FP32 ? 4 : 2;

    if (!list && n)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (list[i].count && (!good_range(list[i].in, parts, list[i].count, bytes) ||
                              !good_range(list[i].out, 1, list[i].count, bytes)))
            return false;
    }
    return true;
}

static void make_head(struct lk_ring_head *head, const struct lk_rings *rings,
                      const struct lk_reduction *how, enum lk_ring_work work, uint32_t ctas)
{
    *head = (struct lk_ring_head){
        .rings = *rings,
        .pre = how->pre ? how->pre->value : 1,
        .pre_pointer = how->pre ? how->pre->device_value : NULL,
        .pre_type = how->pre ? (uint8_t)how->pre->type : LK_FP32,
        .post = how->post,
        .ctas = ctas < rings->shape.channels ? ctas : rings->shape.channels,
        .work = (uint8_t)work,
        .type = (uint8_t)how->type,
        .wire = (uint8_t)how->wire,
        .rounding = LK_NEAREST,
        .residual = how->wire != how->type ? how->residual : NULL,
    };
    if (how->rounding == LK_STOCHASTIC && how->wire != how->type) {
        head->rounding = LK_STOCHASTIC;
        head->seed = how->rng->seed;
        head->index = how->rng->offset;
        head->device_offset = how->rng->device_offset;
    }
}

/* Runs what has been gathered, if anything, and makes the launch ready for what follows in the call's tile space. */
static int flush(struct lk_ring_launch *launch, void *stream)
{
    struct lk_ring_head *head = &launch->head;
    uint64_t parts = head->work == LK_WORK_REDUCE_SCATTER ? head->rings.shape.ranks : 1;
    uint64_t granules = ((uint64_t)head->packs * LK_PACK_BYTES + LK_GRANULE - 1) / LK_GRANULE;
    int err;

    if (!head->n)
        return 0;
    head->tile_granules = lk_tile_granules(&head->rings.shape, parts * granules);
    err = lk_run_rings(launch, stream);
    head->index += (uint64_t)head->packs * lk_pack_elements(head->wire);
    if (head->residual)
        head->residual += parts * head->packs * lk_pack_elements(head->wire);
    head->n = 0;
    head->packs = 0;
    head->stride = 0;
    return err;
}

/* Where a list is cut follows from counts, types and the shape alone. */
static int run_list(struct lk_ring_launch *launch, const struct lk_buffers *list, size_t n,
                    void *stream)
{
    struct lk_ring_head *head = &launch->head;
    unsigned int bytes = head->type == LK_FP32 ? 4 : 2;
    int err = 0;

    for (size_t i = 0; i < n; i++) {
        bool cut = list[i].count > LK_RING_ELEMENTS;

        for (uint64_t done = 0; done < list[i].count && !err; done += LK_RING_ELEMENTS) {
            uint64_t left = list[i].count - done;
            uint32_t count = (uint32_t)(left < LK_RING_ELEMENTS ? left : LK_RING_ELEMENTS);
            uint64_t packs = lk_packs(count, head->wire);
            uint64_t first = lk_place(head->work, head->packs, packs);

            /* Parts of a piece are not as far apart as the piece is long: it runs alone. */
            if (cut || head->n == LK_RING_MAX || first + packs > LK_RING_PACKS) {
                err = flush(launch, stream);
                first = 0;
            }
            launch->entries[head->n++] = (struct lk_ring_entry){
                .in = (uintptr_t)list[i].in + done * bytes,
                .out = (uintptr_t)list[i].out + done * bytes,
                .count = count,
                .first = (uint32_t)first,
            };
            head->packs = (uint32_t)(first + packs);
            head->stride = cut ? list[i].count : 0;
            if (cut && !err)
                err = flush(launch, stream);
        }
        if (err)
            return err;
    }
    return flush(launch, stream);
}

static int run(const struct lk_rings *rings, const struct lk_reduction *how,
               const struct lk_buffers *list, size_t n, uint32_t ctas, enum lk_ring_work work,
               void *stream)
{
    uint64_t parts = work == LK_WORK_REDUCE_SCATTER ? rings->shape.ranks : 1;
    struct lk_ring_launch launch;

    if (!ctas || !lk_good_rings(rings) || !good_reduction(how) ||
        !good_list(list, n, parts, how->type))
        return -EINVAL;
    make_head(&launch.head, rings, how, work, ctas);
    return run_list(&launch, list, n, stream);
}

LK_API int lk_rings_all_reduce(const struct lk_rings *rings, const struct lk_reduction *how,
                               const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream)
{
    return run(rings, how, list, n, ctas, LK_WORK_ALL_REDUCE, stream);
}

LK_API int lk_rings_reduce_scatter(const struct lk_rings *rings, const struct lk_reduction *how,
                                   const struct lk_buffers *list, size_t n, uint32_t ctas,
                                   void *stream)
{
    return run(rings, how, list, n, ctas, LK_WORK_REDUCE_SCATTER, stream);
}

/* Wherever the list is cut. */
LK_API uint64_t lk_rings_elements(const struct lk_reduction *how, const struct lk_buffers *list,
                                  size_t n)
{
    uint64_t packs = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t own = lk_packs(list[i].count, how->wire);

        packs += own + (own < LK_LARGE_PACKS ? 0 : LK_GRANULE / LK_PACK_BYTES - 1);
    }
    return packs * lk_pack_elements(how->wire);
}

LK_API size_t lk_lines_bytes(const struct lk_reduction *how, const struct lk_buffers *list,
                             size_t n)
{
    size_t bytes = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t packs = lk_packs(list[i].count, how->wire);

        if (packs > (SIZE_MAX - bytes) / LK_PACK_BYTES)
            return SIZE_MAX;
        bytes += packs * LK_PACK_BYTES;
    }
    return bytes;
}

LK_API int lk_lines_all_reduce(const struct lk_rings *rings, const struct lk_reduction *how,
                               const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream)
{
    if (how->wire != how->type || (!list && n) ||
        lk_lines_bytes(how, list, n) > rings->shape.line_bytes)
        return -EINVAL;
    return run(rings, how, list, n, ctas, LK_WORK_LINES, stream);
}
