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

static void run_permute(void *arg)
{
    const struct lk_moe_launch *launch = arg;

    use_rows(launch, true);
    for (uint64_t row = 0; row < launch->routing.rows; row++)
        for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
            moe_gather_lane(launch, row, lane, launch->wide ? LK_WHOLE : LK_SINGLE);
}

static void run_unpermute(void *arg)
{
    const struct lk_moe_launch *launch = arg;

    use_rows(launch, false);
    for (uint64_t token = 0; token < launch->routing.tokens; token++)
        for (uint64_t lane = 0; lane < LK_MOE_LANES; lane++)
            moe_combine_lane(launch, token, lane, launch->wide ? LK_WHOLE : LK_SINGLE);
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
