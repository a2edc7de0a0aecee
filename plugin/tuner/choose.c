/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/tuner/choose.h"

#include <stdbool.h>

#define COLLNET_DIRECT 2
#define COLLNET_CHAIN  3

const struct lc_profile_rule *lc_tuner_rule(const struct lc_profile *profile, size_t ranks,
                                            size_t nodes, int op, size_t bytes)
{
    if (op < 0)
        return NULL;
    return lc_profile_nccl(profile, (unsigned)op, ranks, nodes, bytes);
}

/* NCCL keeps to its own limit of channels for all algorithms but these. */
static bool is_bounded(unsigned algorithm)
{
    return algorithm != COLLNET_DIRECT && algorithm != COLLNET_CHAIN;
}

void lc_tuner_set_channels(const struct lc_profile_rule *rule, int *channels)
{
    if (rule->width && is_bounded(rule->algorithm))
        *channels = rule->width;
}

bool lc_tuner_apply(const struct lc_profile_rule *rule, const struct lc_tuner_table *table,
                    int *channels)
{
    float *cost;

    if (rule->algorithm >= table->algorithms || rule->protocol >= table->protocols)
        return false;
    cost = &table->costs[rule->algorithm * table->protocols + rule->protocol];
    if (!(*cost >= 0))
        return false;
    *cost = 0;
    lc_tuner_set_channels(rule, channels);
    return true;
}
