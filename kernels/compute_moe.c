/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_internal.h"

#include <errno.h>
#include <stdbool.h>

static bool good_ints(const void *pointer)
{
    return pointer && (uintptr_t)pointer % 4 == 0;
}

/* What every call needs of a routing. */
static bool good_shape(const struct lk_moe_routing *r)
{
    return r && r->choices && r->tokens < UINT64_C(1) << 31 &&
           r->tokens * r->choices < UINT64_C(1) << 31 && r->rows < UINT64_C(1) << 31 &&
           (!r->tokens || good_ints(r->row_of_slot)) && (!r->rows || good_ints(r->slot_of_row));
}

static bool good_layout(const struct lk_moe_routing *r)
{
    if (!r->expert_count || r->expert_count > LK_MOE_EXPERTS)
        return false;
    if (r->capacity)
        return r->rows == (uint64_t)r->capacity * r->expert_count;
    return r->align && !(r->align & (r->align - 1)) && r->align <= 4096;
}

LK_API size_t lk_moe_workspace_bytes(const struct lk_moe_routing *routing)
{
    return lk_moe_blocks(routing) * (size_t)routing->expert_count * sizeof(uint32_t);
}

LK_API int lk_moe_route(const struct lk_moe_routing *routing, void *stream)
{
    if (!good_shape(routing) || !good_layout(routing) || !good_ints(routing->counts) ||
        !good_ints(routing->offsets) || (uintptr_t)routing->live % 4 || !routing->workspace ||
        (uintptr_t)routing->workspace % 16 || (routing->tokens && !good_ints(routing->experts)))
        return -EINVAL;
    return lk_run_moe_route(routing, stream);
}

static int make_launch(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                       struct lk_moe_launch *out)
{
    uint64_t columns;

    if (!good_shape(routing) || !rows || !rows->columns || rows->columns >= UINT64_C(1) << 32)
        return -EINVAL;
    columns = rows->columns;
    if ((routing->tokens && !rows->tokens) || (routing->rows && !rows->permuted) ||
        ((uintptr_t)rows->tokens | (uintptr_t)rows->permuted) % 2 || (uintptr_t)rows->weights % 4)
        return -EINVAL;
    if (rows->token_stride < columns || rows->permuted_stride < columns ||
        rows->token_stride >= UINT64_C(1) << 32 || rows->permuted_stride >= UINT64_C(1) << 32)
        return -EINVAL;
    *out = (struct lk_moe_launch){
        .routing = *routing,
        .rows = *rows,
        .wide = (((uintptr_t)rows->tokens | (uintptr_t)rows->permuted) % 16 == 0) &&
                (columns | rows->token_stride | rows->permuted_stride) % LK_VECTOR == 0,
    };
    return 0;
}

LK_API int lk_moe_permute(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                          void *stream)
{
    struct lk_moe_launch launch;
    int err = make_launch(routing, rows, &launch);

    if (err || !routing->rows)
        return err;
    return lk_run_moe_permute(&launch, stream);
}

LK_API int lk_moe_unpermute(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                            void *stream)
{
    struct lk_moe_launch launch;
    int err = make_launch(routing, rows, &launch);

    if (err || !routing->tokens)
        return err;
    return lk_run_moe_unpermute(&launch, stream);
}

/* A matrix of bf16 that may be left out. */
static bool good_rows(const void *base, uint64_t stride, uint64_t columns)
{
    return !base || ((uintptr_t)base % 2 == 0 && stride >= columns && stride < UINT64_C(1) << 32);
}

LK_API int lk_moe_unpermute_backward(const struct lk_moe_routing *routing,
                                     const struct lk_moe_grads *grads, void *stream)
{
    struct lk_moe_launch launch = { 0 };
    uintptr_t bases;

    if (!good_shape(routing) || !grads || !grads->columns || grads->columns >= UINT64_C(1) << 32 ||
        ((uintptr_t)grads->weights | (uintptr_t)grads->dweights) % 4 ||
        !grads->permuted != !grads->dweights || (routing->tokens && !grads->dtokens) ||
        !good_rows(grads->dtokens, grads->dtoken_stride, grads->columns) ||
        !good_rows(grads->permuted, grads->permuted_stride, grads->columns) ||
        !good_rows(grads->dpermuted, grads->dpermuted_stride, grads->columns))
        return -EINVAL;
    launch.routing = *routing;
    launch.grads = *grads;
    bases = (uintptr_t)grads->dtokens | (uintptr_t)grads->permuted | (uintptr_t)grads->dpermuted;
    launch.wide = bases % 16 == 0 && (grads->columns | grads->dtoken_stride) % LK_VECTOR == 0 &&
                  (!grads->permuted || grads->permuted_stride % LK_VECTOR == 0) &&
                  (!grads->dpermuted || grads->dpermuted_stride % LK_VECTOR == 0);
    return lk_run_moe_unpermute_backward(&launch, stream);
}
