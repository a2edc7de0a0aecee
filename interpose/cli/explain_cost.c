/* SPDX-License-Identifier: Apache-2.0
 *
 * How long NCCL's ways take at one size: measured, by the fitted model of costs, and by the wires alone. */
#include "interpose/cli/tune.h"

#include "interpose/cli/topo_library.h"

#include <string.h>
#include <unistd.h>

/* Steps inside a node take so many times as long as over NVLink. Round figures, as all of lc_cost_guess. */
static double slowness(enum lc_topo_path_type type)
{
    switch (type) {
    case LC_TOPO_PATH_PIX:
    case LC_TOPO_PATH_PXB: return 1.5;
    case LC_TOPO_PATH_PHB:
    case LC_TOPO_PATH_SYS:
    case LC_TOPO_PATH_P2C: return 2.5;
    default: return 1;
    }
}

static void take_wires(const struct lc_topo_wires *found, const char *type, const char *name,
                       struct lc_tune_wires *out)
{
    out->wires.inside_us *= slowness(found->type);
    out->wires.inside_gbps = found->inside_gbps;
    out->wires.between_gbps = found->between_gbps;
    out->known = found->inside_gbps > 0 || found->between_gbps > 0;
    if (!found->gpus) {
        (void)snprintf(out->note, sizeof(out->note), "%.400s: no GPUs", name);
        return;
    }
    (void)snprintf(out->note, sizeof(out->note),
                   "%.300s: %d GPU%s, %.0f GB/s (%s) between them; %d port%s, %.1f GB/s together",
                   name, found->gpus, found->gpus == 1 ? "" : "s", found->inside_gbps, type,
                   found->nets, found->nets == 1 ? "" : "s", found->between_gbps);
}

static void find_wires(const char *path, struct lc_tune_wires *out)
{
    struct lc_cli_topo_library library;
    struct lc_topo_routes *routes = NULL;
    struct lc_topo_wires found;
    struct lc_topo_nccl nccl;
    struct lc_topo *topo = NULL;

    *out = (struct lc_tune_wires){ .wires = lc_cost_guess };
    if (lc_cli_topo_open(&library, out->note, sizeof(out->note)) != 0 ||
        library.load(path, &topo, out->note, sizeof(out->note)) != 0)
        return;
    library.nccl_read(lc_cli_nccl_get, &nccl);
    if (library.routes_find(topo, &nccl, &routes) != 0) {
        (void)snprintf(out->note, sizeof(out->note), "%.400s has more than can be planned for",
                       library.name(topo));
    } else {
        library.routes_wires(routes, &found);
        take_wires(&found, library.path_name(found.type), library.name(topo), out);
    }
    if (routes)
        library.routes_free(routes);
    library.free(topo);
}

/* What was measured for these ranks and nodes. False: nothing, and `note` says why. */
static bool load_figures(const struct lc_profile *profile, const char *profile_path,
                         const struct lc_cost_call *call, struct lc_tune_results *out, char *note,
                         size_t size)
{
    char path[PATH_MAX];

    if (!profile) {
        (void)snprintf(note, size, "none, as there is no profile");
        return false;
    }
    if (strlen(profile_path) > PATH_MAX - 64) {
        (void)snprintf(note, size, "none: the profile's path is too long");
        return false;
    }
    lc_tune_figures_path(profile_path, (int)call->ranks, (int)call->nodes, path);
    if (access(path, R_OK) != 0) {
        (void)snprintf(note, size, "none: there is no %.400s", path);
        return false;
    }
    if (lc_tune_load(path, out) != 0) {
        (void)snprintf(note, size, "none: %.400s is not understood", path);
        return false;
    }
    if (strcmp(out->gpu, profile->gpu) != 0 || out->nccl != profile->nccl ||
        out->ranks != (int)call->ranks || out->nodes != (int)call->nodes) {
        (void)snprintf(note, size, "none: %.400s is of another GPU, NCCL or job", path);
        lc_tune_free(out);
        return false;
    }
    (void)snprintf(note, size, "%.400s", path);
    return true;
}

static double best_known(const struct lc_tune_estimate *e)
{
    return e->measured_us > 0 ? e->measured_us : e->fitted_us > 0 ? e->fitted_us : e->wires_us;
}

static bool is_known(const struct lc_tune_estimate *e)
{
    return e->measured_us > 0 || e->fitted_us > 0 || e->wires_us >= 0;
}

static void add(const struct lc_tune_estimate *e, struct lc_tune_costs *out)
{
    int at = out->n++;

    while (at > 0 && best_known(&out->at[at - 1]) > best_known(e)) {
        out->at[at] = out->at[at - 1];
        at--;
    }
    out->at[at] = *e;
}

static struct lc_tune_estimate estimate(int step, const struct lc_cost_call *call,
                                        const struct lc_tune_wires *wires,
                                        const struct lc_tune_results *results)
{
    const struct lc_profile_rule *way = &lc_tune_steps[step].way;
    struct lc_tune_estimate e = { .way = *way,
                                  .is_default = lc_tune_steps[step].kind == LC_TUNE_AGAIN,
                                  .wires_us = -1,
                                  .fitted_us = -1 };
    struct lc_cost_call own = *call;
    struct lc_cost_fit fit;

    own.algorithm = way->algorithm;
    own.protocol = way->protocol;
    own.channels = way->width;
    if (wires->known && !e.is_default)
        e.wires_us = lc_cost_predict(&own, &wires->wires);
    if (!results)
        return e;
    e.measured_us = lc_tune_time_of(results, step, call->bytes);
    if (lc_tune_fit(results, step, &fit) == 0 && call->bytes >= fit.from && call->bytes <= fit.to) {
        e.fitted_us = lc_cost_at(&fit, call->bytes);
        e.error = fit.error;
        e.points = fit.n;
    }
    return e;
}

/* Rules of measured sizes alone begin at one, or behind it, and end at one, or behind it. */
static bool is_measured(const struct lc_tune_results *results, uint8_t op, uint64_t border)
{
    for (size_t i = 0; i < results->n; i++) {
        const struct lc_tune_figure *figure = &results->figures[i];

        if (lc_tune_steps[figure->step].way.op == op &&
            (figure->bytes == border || figure->bytes + 1 == border))
            return true;
    }
    return false;
}

void lc_tune_estimate(const char *topology, const struct lc_profile *profile,
                      const char *profile_path, const struct lc_cost_call *call,
                      const struct lc_profile_rule *rule, struct lc_tune_costs *out)
{
    struct lc_tune_results results = { 0 };
    bool measured;

    out->n = 0;
    find_wires(topology, &out->wires);
    measured = load_figures(profile, profile_path, call, &results, out->figures,
                            sizeof(out->figures));
    out->placed = measured && rule && rule->from > 0 && rule->to != UINT64_MAX &&
                  (!is_measured(&results, call->op, rule->from) ||
                   !is_measured(&results, call->op, rule->to));
    for (int i = 0; i < lc_tune_n_steps; i++) {
        struct lc_tune_estimate e;

        if (!lc_tune_step_is_turn(&lc_tune_steps[i]) || lc_tune_steps[i].way.op != call->op)
            continue;
        e = estimate(i, call, &out->wires, measured ? &results : NULL);
        if (is_known(&e))
            add(&e, out);
    }
    lc_tune_free(&results);
}
