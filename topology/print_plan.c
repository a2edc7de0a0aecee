/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/plan.h"

#include <errno.h>
#include <string.h>

static void row(FILE *out, const char *who, const struct lc_topo_side_loads *loads)
{
    (void)fprintf(out, "  %-10s %8.2f ms  %-34s %8.2f ms  %-34s %5.1f %%\n", who,
                  loads->all_to_all.ms, loads->all_to_all.link, loads->all_reduce.ms,
                  loads->all_reduce.link, 100 * loads->between_rails);
}

int lc_topo_plan_print(const struct lc_topo_plan *plan, const char *name, FILE *out)
{
    struct lc_topo_side_loads nccl = plan->sides[LC_TOPO_NCCLS].loads;

    (void)fprintf(out, "%s: %d nodes, %d GPUs\n", name, plan->nodes, plan->gpus);
    (void)fprintf(out, "  %-10s %-46s  %-46s  %s\n", "", "all-to-all, most loaded link",
                  "all-reduce, most loaded link", "between rails");
    row(out, "NCCL", &nccl);
    row(out, "loongcomm", &plan->sides[LC_TOPO_OURS].loads);
    if (!plan->setting_count)
        (void)fprintf(out, "  nothing to gain: no setting of NCCL does better\n");
    for (int i = 0; i < plan->setting_count; i++) {
        const struct lc_plan_setting *setting = &plan->settings[i];

        if (*setting->value)
            (void)fprintf(out, "  set %s=%s\n", setting->name, setting->value);
        else
            (void)fprintf(out, "  set %s to a topology file with no port's speed above %lld Mb/s\n",
                          setting->name, (long long)plan->sides[LC_TOPO_OURS].nccl.most_mbps);
    }
    return fflush(out) == 0 && !ferror(out) ? 0 : -EIO;
}

bool lc_topo_is_plannable(const struct lc_topo *topo)
{
    int nets = 0;

    for (int i = lc_topo_next(topo, LC_TOPO_NET, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_NET, i))
        nets += lc_topo_is_counted(topo, i);
    return nets > 1 && lc_topo_next(topo, LC_TOPO_GPU, -1) >= 0 &&
           (lc_topo_next(topo, LC_TOPO_NVLINK, -1) >= 0 ||
            lc_topo_next(topo, LC_TOPO_XGMI, -1) >= 0);
}
