/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rules_internal.h"

static bool good_ints(const void *pointer)
{
    return pointer && lk_is_aligned(pointer, 4);
}

/* What every call needs of a routing. */
static int check_routing(const char *call, const struct lk_moe_routing *r)
{
    if (lk_breaks(call, r, "a NULL argument") || lk_breaks(call, r->choices, "no choices") ||
        lk_breaks(call, r->tokens < UINT64_C(1) << 31 && r->tokens * r->choices < UINT64_C(1) << 31,
                  "more than 2^31 slots") ||
        lk_breaks(call, r->rows < UINT64_C(1) << 31, "more than 2^31 rows") ||
        lk_breaks(call, !r->tokens || good_ints(r->row_of_slot),
                  "row_of_slot is NULL or not aligned") ||
        lk_breaks(call, !r->rows || good_ints(r->slot_of_row),
                  "slot_of_row is NULL or not aligned"))
        return -EINVAL;
    return 0;
}

static int check_layout(const char *call, const struct lk_moe_routing *r)
{
    if (lk_breaks(call, r->expert_count && r->expert_count <= LK_MOE_EXPERTS,
                  "expert_count is not from 1 to 1024") ||
        lk_breaks(call, !r->capacity || r->rows == (uint64_t)r->capacity * r->expert_count,
                  "rows are not as many as capacity gives all experts") ||
        lk_breaks(call,
                  r->capacity || (r->align && !(r->align & (r->align - 1)) && r->align <= 4096),
                  "align is no power of two up to 4096"))
        return -EINVAL;
    return 0;
}

LK_API size_t lk_moe_workspace_bytes(const struct lk_moe_routing *routing)
{
    return lk_moe_blocks(routing) * (size_t)routing->expert_count * sizeof(uint32_t);
}

LK_API int lk_moe_route(const struct lk_moe_routing *routing, void *stream)
{
    static const char call[] = "lk_moe_route";
    const struct lk_moe_routing *r = routing;

    if (check_routing(call, r) || check_layout(call, r) ||
        lk_breaks(call, good_ints(r->counts), "counts is NULL or not aligned") ||
        lk_breaks(call, good_ints(r->offsets), "offsets is NULL or not aligned") ||
        lk_breaks(call, lk_is_aligned(r->live, 4), "live is not aligned") ||
        lk_breaks(call, r->workspace && lk_is_aligned(r->workspace, 16),
                  "the workspace is NULL or not aligned to 16 bytes") ||
        lk_breaks(call, !r->tokens || good_ints(r->experts), "experts is NULL or not aligned"))
        return -EINVAL;
    return lk_run_moe_route(routing, stream);
}

static int check_columns(const char *call, uint64_t columns)
{
    if (!columns || columns >= UINT64_C(1) << 32)
        return lk_blas_fail(-EINVAL, "%s: %llu columns", call, (unsigned long long)columns);
    return 0;
}

/* A matrix of bf16; wanted: it may not be NULL. */
static int check_matrix(const char *call, const char *name, const void *base, bool wanted,
                        uint64_t stride, uint64_t columns)
{
    if (!base && wanted)
        return lk_blas_fail(-EINVAL, "%s: %s is NULL", call, name);
    if (!lk_is_aligned(base, 2))
        return lk_blas_fail(-EINVAL, "%s: %s is not aligned to its elements", call, name);
    if (stride < columns || stride >= UINT64_C(1) << 32)
        return lk_blas_fail(-EINVAL, "%s: stride %llu of %s, %llu columns", call,
                            (unsigned long long)stride, name, (unsigned long long)columns);
    return 0;
}

static int make_launch(const char *call, const struct lk_moe_routing *routing,
                       const struct lk_moe_rows *rows, struct lk_moe_launch *out)
{
    uint64_t columns = rows ? rows->columns : 0;

    if (check_routing(call, routing) || lk_breaks(call, rows, "a NULL argument") ||
        check_columns(call, columns) ||
        check_matrix(call, "tokens", rows->tokens, routing->tokens, rows->token_stride, columns) ||
        check_matrix(call, "permuted", rows->permuted, routing->rows, rows->permuted_stride,
                     columns) ||
        lk_breaks(call, lk_is_aligned(rows->weights, 4), "weights is not aligned"))
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
    int err = make_launch("lk_moe_permute", routing, rows, &launch);

    if (err || !routing->rows)
        return err;
    lk_count_call(launch.wide);
    return lk_run_moe_permute(&launch, stream);
}

LK_API int lk_moe_unpermute(const struct lk_moe_routing *routing, const struct lk_moe_rows *rows,
                            void *stream)
{
    struct lk_moe_launch launch;
    int err = make_launch("lk_moe_unpermute", routing, rows, &launch);

    if (err || !routing->tokens)
        return err;
    lk_count_call(launch.wide);
    return lk_run_moe_unpermute(&launch, stream);
}

static int check_grads(const char *call, const struct lk_moe_routing *routing,
                       const struct lk_moe_grads *g)
{
    uint64_t columns = g ? g->columns : 0;

    if (check_routing(call, routing) || lk_breaks(call, g, "a NULL argument") ||
        check_columns(call, columns) ||
        lk_breaks(call, lk_is_aligned(g->weights, 4), "weights is not aligned") ||
        lk_breaks(call, lk_is_aligned(g->dweights, 4), "dweights is not aligned") ||
        lk_breaks(call, !g->permuted == !g->dweights, "permuted or dweights alone is NULL") ||
        lk_breaks(call, !routing->tokens || g->dtokens, "dtokens is NULL"))
        return -EINVAL;
    if ((g->dtokens &&
         check_matrix(call, "dtokens", g->dtokens, true, g->dtoken_stride, columns)) ||
        (g->permuted &&
         check_matrix(call, "permuted", g->permuted, true, g->permuted_stride, columns)) ||
        (g->dpermuted &&
         check_matrix(call, "dpermuted", g->dpermuted, true, g->dpermuted_stride, columns)))
        return -EINVAL;
    return 0;
}

LK_API int lk_moe_unpermute_backward(const struct lk_moe_routing *routing,
                                     const struct lk_moe_grads *grads, void *stream)
{
    struct lk_moe_launch launch = { 0 };
    uintptr_t bases;

    if (check_grads("lk_moe_unpermute_backward", routing, grads))
        return -EINVAL;
    launch.routing = *routing;
    launch.grads = *grads;
    bases = (uintptr_t)grads->dtokens | (uintptr_t)grads->permuted | (uintptr_t)grads->dpermuted;
    launch.wide = bases % 16 == 0 && (grads->columns | grads->dtoken_stride) % LK_VECTOR == 0 &&
                  (!grads->permuted || grads->permuted_stride % LK_VECTOR == 0) &&
                  (!grads->dpermuted || grads->dpermuted_stride % LK_VECTOR == 0);
    lk_count_call(launch.wide);
    return lk_run_moe_unpermute_backward(&launch, stream);
}
