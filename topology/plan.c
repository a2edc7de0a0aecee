/* SPDX-License-Identifier: Apache-2.0
 *
 * What a job's nodes put on their links, by NCCL's settings, and the settings that put the least on the most loaded.
 * GPUs choose by the number of the GPU they send to, not by its node: loads need no look at every pair. */
#include "topology/plan.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define CHANNELS    64
#define GAIN        0.99 /* of NCCL's load: what is not better than that changes nothing */
#define EQUAL       1.0001
#define MAX_SPEEDS  8
#define RAIL_FACTOR 1024 /* ports that one GPU can be the nearest to */

static int real_mbps(const struct lc_topo_net *net)
{
    return net->mbps > 0 ? (int)net->mbps : 10000;
}

/* The GPU that the wires put nearest to a port; speeds do not count, so that nodes that differ in them line up. */
static int rail_gpu(const struct lc_topo_routes *routes, int net)
{
    enum lc_topo_path_type best = LC_TOPO_PATH_DIS;
    int found = 0;

    for (int g = 0; g < routes->gpu_count; g++) {
        enum lc_topo_path_type type =
            lc_topo_path(routes->paths, routes->nets[net], routes->gpus[g]).type;
        int dev = lc_topo_dev(routes, g);

        if (type < best || (type == best && dev < found)) {
            best = type;
            found = dev;
        }
    }
    return found;
}

static int find_rails(struct lc_plan_kind *kind)
{
    kind->rails = calloc((size_t)kind->wires->net_count + 1, sizeof(*kind->rails));
    if (!kind->rails)
        return -ENOMEM;
    for (int n = 0; n < kind->wires->net_count; n++) {
        int rail = rail_gpu(kind->wires, n) * RAIL_FACTOR;

        for (int before = 0; before < n; before++)
            rail += kind->rails[before] / RAIL_FACTOR == rail / RAIL_FACTOR;
        kind->rails[n] = rail;
    }
    return 0;
}

static int dev_index(struct lc_topo_plan *plan, int dev)
{
    for (int i = 0; i < plan->dev_count; i++) {
        if (plan->devs[i] == dev)
            return i;
    }
    if (plan->dev_count == LC_PLAN_MAX_DEVS)
        return -E2BIG;
    plan->devs[plan->dev_count] = dev;
    return plan->dev_count++;
}

static int add_kind(struct lc_topo_plan *plan, const struct lc_topo_kind *given)
{
    struct lc_plan_kind *kind = &plan->kinds[plan->kind_count];
    struct lc_topo_nccl plain;
    int err;

    if (given->nodes < 1 || lc_topo_is_partial(given->topo) ||
        given->nodes > INT_MAX / LC_TOPO_MAX_GPUS / LC_TOPO_MAX_KINDS)
        return -EINVAL;
    plan->kind_count++;
    lc_topo_nccl_read(NULL, &plain);
    kind->nodes = given->nodes;
    err = lc_topo_routes_find(given->topo, &plain, &kind->wires);
    if (err)
        return err;
    if (!kind->wires->gpu_count || !kind->wires->net_count)
        return -EINVAL;
    err = find_rails(kind);
    kind->dev_of = calloc((size_t)kind->wires->gpu_count, sizeof(*kind->dev_of));
    kind->gpu_of = malloc(LC_PLAN_MAX_DEVS * sizeof(*kind->gpu_of));
    if (err || !kind->dev_of || !kind->gpu_of)
        return -ENOMEM;
    memset(kind->gpu_of, 0xff, LC_PLAN_MAX_DEVS * sizeof(*kind->gpu_of));
    kind->first_gpu = plan->gpus;
    plan->gpus += kind->wires->gpu_count * kind->nodes;
    plan->nodes += kind->nodes;
    for (int g = 0; g < kind->wires->gpu_count; g++) {
        int index = dev_index(plan, lc_topo_dev(kind->wires, g));

        if (index < 0)
            return index;
        kind->dev_of[g] = index;
        if (kind->gpu_of[index] >= 0)
            return -EINVAL; /* several machines in one file, or partitions of a GPU */
        kind->gpu_of[index] = g;
    }
    return 0;
}

/* --- one side: routes of every kind under the same settings --- */

static void side_free(struct lc_plan_side *side)
{
    for (int k = 0; k < LC_TOPO_MAX_KINDS; k++) {
        lc_topo_routes_free(side->routes[k]);
        free(side->choices[k]);
    }
    memset(side, 0, sizeof(*side));
}

static int gcd(int a, int b)
{
    while (b) {
        int rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* Channels until every GPU's turns begin anew, or as many as NCCL has. */
static int slots_of(const struct lc_topo_plan *plan, const struct lc_plan_side *side)
{
    int slots = 1;

    for (int k = 0; k < plan->kind_count; k++) {
        for (int g = 0; g < side->routes[k]->gpu_count && slots <= CHANNELS; g++) {
            int turns = lc_topo_net_turns(side->routes[k], g);

            slots = turns ? slots / gcd(slots, turns) * turns : slots;
        }
    }
    return slots <= CHANNELS ? slots : CHANNELS;
}

static int fill_choices(const struct lc_topo_plan *plan, struct lc_plan_side *side, int k)
{
    const struct lc_topo_routes *routes = side->routes[k];
    struct lc_topo_choice *choice = calloc(
        (size_t)routes->gpu_count * (size_t)plan->dev_count * (size_t)side->slots, sizeof(*choice));

    side->choices[k] = choice;
    if (!choice)
        return -ENOMEM;
    for (int g = 0; g < routes->gpu_count; g++) {
        for (int d = 0; d < plan->dev_count; d++) {
            for (int c = 0; c < side->slots; c++)
                *choice++ = lc_topo_choose(routes, g, plan->devs[d], c);
        }
    }
    return 0;
}

static int side_make(const struct lc_topo_plan *plan, const struct lc_topo_nccl *nccl,
                     struct lc_plan_side *side)
{
    int err = 0;

    side->nccl = *nccl;
    for (int k = 0; k < plan->kind_count && !err; k++)
        err = lc_topo_routes_find(plan->kinds[k].wires->topo, nccl, &side->routes[k]);
    if (!err)
        side->slots = slots_of(plan, side);
    for (int k = 0; k < plan->kind_count && !err; k++)
        err = fill_choices(plan, side, k);
    if (!err)
        err = lc_plan_weigh(plan, side);
    if (err)
        side_free(side);
    return err;
}

/* --- what can be expressed --- */

static bool better(const struct lc_plan_side *a, const struct lc_plan_side *than,
                   const struct lc_plan_side *nccl)
{
    const struct lc_topo_side_loads *loads = &a->loads;

    return loads->all_to_all.ms < GAIN * nccl->loads.all_to_all.ms &&
           loads->all_to_all.ms < than->loads.all_to_all.ms / EQUAL &&
           loads->all_reduce.ms <= EQUAL * nccl->loads.all_reduce.ms &&
           loads->between_rails <= nccl->loads.between_rails + 1e-9;
}

static int consider(struct lc_topo_plan *plan, const struct lc_topo_nccl *nccl)
{
    struct lc_plan_side side = { 0 };
    int err = side_make(plan, nccl, &side);

    if (err)
        return err;
    if (better(&side, &plan->sides[LC_TOPO_OURS], &plan->sides[LC_TOPO_NCCLS])) {
        side_free(&plan->sides[LC_TOPO_OURS]);
        plan->sides[LC_TOPO_OURS] = side;
        plan->gains = true;
    } else {
        side_free(&side);
    }
    return 0;
}

static int with_pxn(struct lc_topo_plan *plan, struct lc_topo_nccl nccl)
{
    bool free_level = !nccl.level_given && !nccl.pxn_given;
    int err = consider(plan, &nccl);

    for (int level = 1; level >= 0 && free_level && !err; level--) {
        nccl.p2p_pxn_level = level;
        err = consider(plan, &nccl);
    }
    if (!nccl.pxn_given && !err) {
        nccl.p2p_pxn_level = plan->sides[LC_TOPO_NCCLS].nccl.p2p_pxn_level;
        nccl.pxn_disable = 1;
        err = consider(plan, &nccl);
    }
    return err;
}

static int with_policies(struct lc_topo_plan *plan, struct lc_topo_nccl nccl)
{
    int err = with_pxn(plan, nccl);

    if (nccl.policy_given || err)
        return err;
    nccl.policy = LC_TOPO_POLICY_ALL;
    err = with_pxn(plan, nccl);
    nccl.policy = LC_TOPO_POLICY_MAX;
    for (nccl.nets_per_gpu = 1; nccl.nets_per_gpu <= 4 && !err; nccl.nets_per_gpu *= 2)
        err = with_pxn(plan, nccl);
    return err;
}

/* Speeds below the highest: a topology file may claim them for all that are faster. */
static int lower_speeds(const struct lc_topo_plan *plan, int *out)
{
    int most = 0;
    int count = 0;

    for (int k = 0; k < plan->kind_count; k++) {
        const struct lc_topo_routes *wires = plan->kinds[k].wires;

        for (int n = 0; n < wires->net_count; n++) {
            int mbps = real_mbps(&wires->topo->nodes[wires->nets[n]].net);
            int at = 0;

            most = mbps > most ? mbps : most;
            while (at < count && out[at] != mbps)
                at++;
            if (at == count && count < MAX_SPEEDS)
                out[count++] = mbps;
        }
    }
    for (int i = 0; i < count; i++) {
        if (out[i] == most)
            out[i--] = out[--count];
    }
    return count;
}

static int choose(struct lc_topo_plan *plan)
{
    struct lc_topo_nccl nccl = plan->sides[LC_TOPO_NCCLS].nccl;
    int speeds[MAX_SPEEDS];
    int count = lower_speeds(plan, speeds);
    int err = side_make(plan, &nccl, &plan->sides[LC_TOPO_OURS]);

    if (!err)
        err = with_policies(plan, nccl);
    for (int i = 0; i < count && !nccl.file_given && !err; i++) {
        nccl.most_mbps = speeds[i];
        err = with_policies(plan, nccl);
    }
    return err;
}

__attribute__((format(printf, 3, 4))) static void follow(struct lc_topo_plan *plan,
                                                         const char *name, const char *fmt, ...)
{
    struct lc_plan_setting *setting = &plan->settings[plan->setting_count++];
    va_list ap;

    setting->name = name;
    va_start(ap, fmt);
    (void)vsnprintf(setting->value, sizeof(setting->value), fmt, ap);
    va_end(ap);
}

static void name_settings(struct lc_topo_plan *plan)
{
    const struct lc_topo_nccl *theirs = &plan->sides[LC_TOPO_NCCLS].nccl;
    const struct lc_topo_nccl *ours = &plan->sides[LC_TOPO_OURS].nccl;

    if (ours->pxn_disable != theirs->pxn_disable)
        follow(plan, "NCCL_PXN_DISABLE", "%d", ours->pxn_disable);
    if (ours->p2p_pxn_level != theirs->p2p_pxn_level)
        follow(plan, "NCCL_P2P_PXN_LEVEL", "%d", ours->p2p_pxn_level);
    if (ours->policy == LC_TOPO_POLICY_ALL && theirs->policy != ours->policy)
        follow(plan, "NCCL_NETDEVS_POLICY", "ALL");
    if (ours->policy == LC_TOPO_POLICY_MAX && theirs->policy != ours->policy)
        follow(plan, "NCCL_NETDEVS_POLICY", "MAX:%d", ours->nets_per_gpu);
    if (ours->most_mbps)
        follow(plan, "NCCL_TOPO_FILE", "%s", "");
}

int lc_topo_plan_make(const struct lc_topo_kind *kinds, int count, lc_topo_getter *get,
                      struct lc_topo_plan **out)
{
    struct lc_topo_plan *plan = calloc(1, sizeof(*plan));
    struct lc_topo_nccl nccl;
    int err = count >= 1 && count <= LC_TOPO_MAX_KINDS ? 0 : -EINVAL;

    if (!plan)
        return -ENOMEM;
    for (int k = 0; k < count && !err; k++)
        err = add_kind(plan, &kinds[k]);
    if (!err && plan->nodes < 2)
        err = -EINVAL;
    lc_topo_nccl_read(get, &nccl);
    if (!err)
        err = side_make(plan, &nccl, &plan->sides[LC_TOPO_NCCLS]);
    if (!err)
        err = choose(plan);
    if (err) {
        lc_topo_plan_free(plan);
        return err;
    }
    name_settings(plan);
    *out = plan;
    return 0;
}

void lc_topo_plan_free(struct lc_topo_plan *plan)
{
    if (!plan)
        return;
    side_free(&plan->sides[LC_TOPO_NCCLS]);
    side_free(&plan->sides[LC_TOPO_OURS]);
    for (int k = 0; k < plan->kind_count; k++) {
        lc_topo_routes_free(plan->kinds[k].wires);
        free(plan->kinds[k].rails);
        free(plan->kinds[k].dev_of);
        free(plan->kinds[k].gpu_of);
    }
    free(plan);
}

struct lc_topo_side_loads lc_topo_plan_loads(const struct lc_topo_plan *plan,
                                             enum lc_topo_side side)
{
    return plan->sides[side].loads;
}

int lc_topo_plan_gpus(const struct lc_topo_plan *plan)
{
    return plan->gpus;
}

int lc_topo_plan_setting_count(const struct lc_topo_plan *plan)
{
    return plan->setting_count;
}

struct lc_topo_setting lc_topo_plan_setting(const struct lc_topo_plan *plan, int number)
{
    return (struct lc_topo_setting){ plan->settings[number].name, plan->settings[number].value };
}

int64_t lc_topo_plan_most_mbps(const struct lc_topo_plan *plan)
{
    return plan->sides[LC_TOPO_OURS].nccl.most_mbps;
}

/* Kind, and GPU by place; the node through *node. */
static int kind_of(const struct lc_topo_plan *plan, int gpu, int *node, int *place)
{
    int k = plan->kind_count - 1;
    int each;

    while (k > 0 && plan->kinds[k].first_gpu > gpu)
        k--;
    each = plan->kinds[k].wires->gpu_count;
    *node = (gpu - plan->kinds[k].first_gpu) / each;
    *place = (gpu - plan->kinds[k].first_gpu) % each;
    return k;
}

struct lc_topo_hop lc_topo_plan_hop(const struct lc_topo_plan *plan, enum lc_topo_side which,
                                    int from, int to, int channel)
{
    const struct lc_plan_side *side = &plan->sides[which];
    struct lc_topo_hop hop = { .net = -1, .relay = -1, .remote_net = -1 };
    int node[2];
    int place[2];
    int a = kind_of(plan, from, &node[0], &place[0]);
    int b = kind_of(plan, to, &node[1], &place[1]);
    int slot = channel % side->slots;
    const struct lc_topo_choice *choice;

    if (a == b && node[0] == node[1])
        return hop;
    choice = lc_plan_choice(plan, side, a, place[0], plan->kinds[b].dev_of[place[1]], slot);
    hop.net = choice->net;
    hop.relay = choice->relay;
    hop.remote_net = lc_topo_own_net(side->routes[b], place[1], slot);
    hop.same_rail = hop.net >= 0 && hop.remote_net >= 0 &&
                    plan->kinds[a].rails[hop.net] == plan->kinds[b].rails[hop.remote_net];
    return hop;
}
