/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_host.h"
#include "kernels/compute_moe.h"

static uint64_t slots_of(const struct lk_moe_routing *r)
{
    return r->tokens * r->choices;
}

static void use_routing(const struct lk_moe_routing *r, bool write)
{
    host_use(r->row_of_slot, slots_of(r) * 4, write);
    host_use(r->slot_of_row, r->rows * 4, write);
}

static bool is_routed(const struct lk_moe_routing *r, int32_t expert)
{
    return (uint32_t)expert < r->expert_count; /* negative ones are large */
}

static void place_experts(const struct lk_moe_routing *r)
{
    uint64_t first = 0;

    for (uint32_t e = 0; e < r->expert_count; e++) {
        r->offsets[e] = (int32_t)moe_first_row(r, e, first);
        first = moe_next_row(r, e, first, (uint32_t)r->counts[e]);
        r->counts[e] = (int32_t)moe_filled(r, (uint64_t)r->offsets[e], (uint32_t)r->counts[e]);
    }
    r->offsets[r->expert_count] = (int32_t)moe_first_row(r, r->expert_count, first);
}

static void run_route(void *arg)
{
    const struct lk_moe_routing *r = arg;
    int32_t next[LK_MOE_EXPERTS] = { 0 };

    host_use(r->experts, slots_of(r) * 4, false);
    use_routing(r, true);
    host_use(r->counts, r->expert_count * sizeof(int32_t), true);
    host_use(r->offsets, (r->expert_count + 1) * sizeof(int32_t), true);
    host_use_optional(r->live, (r->rows + 31) / 32 * 4, true);
    host_use(r->workspace, lk_moe_workspace_bytes(r), true);
    memset(r->counts, 0, r->expert_count * sizeof(int32_t));
    for (uint64_t row = 0; row < r->rows; row++)
        r->slot_of_row[row] = -1;
    for (uint64_t slot = 0; slot < slots_of(r); slot++)
        if (is_routed(r, r->experts[slot]))
            r->counts[r->experts[slot]]++;
    place_experts(r);
    for (uint64_t slot = 0; slot < slots_of(r); slot++) {
        int32_t expert = r->experts[slot];

        r->row_of_slot[slot] = -1;
        if (!is_routed(r, expert) || next[expert] >= r->counts[expert])
            continue;
        r->row_of_slot[slot] = r->offsets[expert] + next[expert]++;
        r->slot_of_row[r->row_of_slot[slot]] = (int32_t)slot;
    }
    for (uint64_t word = 0; r->live && word < (r->rows + 31) / 32; word++) {
        r->live[word] = 0;
        for (uint64_t row = 32 * word; row < r->rows && row < 32 * (word + 1); row++)
            r->live[word] |= (uint32_t)(r->slot_of_row[row] >= 0) << row % 32;
    }
}

static void use_rows(const struct lk_moe_launch *launch, bool permuting)
{
    const struct lk_moe_rows *m = &launch->rows;
    const struct lk_moe_routing *r = &launch->routing;

    use_routing(r, false);
    host_use_optional(m->weights, slots_of(r) * 4, false);
    if (r->tokens)
        host_use(m->tokens, ((r->tokens - 1) * m->token_stride + m->columns) * 2, !permuting);
    if (r->rows)
        host_use(m->permuted, ((r->rows - 1) * m->permuted_stride + m->columns) * 2, permuting);
}

static enum lk_width width_of(const struct lk_moe_launch *launch)
{
    return launch->wide ? LK_WHOLE : LK_SINGLE;
}

static void fill(const struct lk_moe_launch *launch, void *matrix, uint64_t stride,
                 uint64_t columns)
{
    for (uint64_t row = 0; row < launch->routing.rows; row++)
        for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
            moe_fill_lane(&launch->routing, matrix, stride, columns, row, lane, width_of(launch));
}

static void run_permute(void *arg)
{
    const struct lk_moe_launch *launch = arg;
    const struct lk_moe_rows *rows = &launch->rows;

    use_rows(launch, true);
    for (uint64_t token = 0; token < launch->routing.tokens; token++)
        for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
            moe_scatter_lane(launch, token, lane, width_of(launch));
    if (rows->fill)
        fill(launch, rows->permuted, rows->permuted_stride, rows->columns);
}

static void run_unpermute(void *arg)
{
    const struct lk_moe_launch *launch = arg;

    use_rows(launch, false);
    for (uint64_t token = 0; token < launch->routing.tokens; token++)
        for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
            moe_combine_lane(launch, token, lane, width_of(launch), 1, LK_MOE_LOADS);
}

static void use_matrix(const void *base, uint64_t rows, uint64_t stride, uint64_t columns,
                       bool write)
{
    if (base && rows)
        host_use(base, ((rows - 1) * stride + columns) * 2, write);
}

/* Gradients of the weights of a batch of choices: lanes are added as the device's shuffles do. */
static void add_lanes(const struct lk_moe_launch *launch, uint64_t token, uint64_t first,
                      float dots[LK_MOE_LANES][LK_MOE_LOADS])
{
    const struct lk_moe_routing *r = &launch->routing;

    for (uint64_t half = LK_MOE_LANES / 2; half; half /= 2)
        for (uint64_t lane = 0; lane < half; lane++)
            for (uint64_t k = 0; k < LK_MOE_LOADS; k++)
                dots[lane][k] += dots[lane + half][k];
    for (uint64_t k = 0; k < LK_MOE_LOADS && first + k < r->choices; k++) {
        uint64_t slot = token * r->choices + first + k;

        launch->grads.dweights[slot] = r->row_of_slot[slot] < 0 ? 0 : dots[0][k];
    }
}

static void run_unpermute_backward(void *arg)
{
    const struct lk_moe_launch *launch = arg;
    const struct lk_moe_routing *r = &launch->routing;
    const struct lk_moe_grads *g = &launch->grads;
    float dots[LK_MOE_LANES][LK_MOE_LOADS];

    use_routing(r, false);
    host_use_optional(g->weights, slots_of(r) * 4, false);
    host_use_optional(g->dweights, slots_of(r) * 4, true);
    use_matrix(g->dtokens, r->tokens, g->dtoken_stride, g->columns, false);
    use_matrix(g->permuted, r->rows, g->permuted_stride, g->columns, false);
    use_matrix(g->dpermuted, r->rows, g->dpermuted_stride, g->columns, true);
    for (uint64_t token = 0; token < r->tokens; token++) {
        for (uint64_t first = 0; first < r->choices; first += LK_MOE_LOADS) {
            for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
                moe_backward_lane(launch, token, first, lane, width_of(launch), 1, LK_MOE_LOADS,
                                  dots[lane]);
            if (g->dweights)
                add_lanes(launch, token, first, dots);
        }
    }
    if (g->dpermuted && g->fill)
        fill(launch, g->dpermuted, g->dpermuted_stride, g->columns);
}

int lk_run_moe_route(const struct lk_moe_routing *routing, void *stream)
{
    return lk_compute_submit(stream, "lk_moe_route", run_route, routing, sizeof(*routing));
}

int lk_run_moe_permute(const struct lk_moe_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_moe_permute", run_permute, launch, sizeof(*launch));
}

int lk_run_moe_unpermute(const struct lk_moe_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_moe_unpermute", run_unpermute, launch, sizeof(*launch));
}

int lk_run_moe_unpermute_backward(const struct lk_moe_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_moe_unpermute_backward", run_unpermute_backward, launch,
                             sizeof(*launch));
}
