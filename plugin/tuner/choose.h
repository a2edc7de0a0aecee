/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tuner answers: a pure function of a profile and of what all ranks share of a call.
 *
 * The model of costs (common/cost.h) is not asked beside the profile. NCCL's table holds its own model of this machine, and
 * an entry below 0 what it cannot or, by NCCL_ALGO and NCCL_PROTO, must not do: a second model over the same nominal figures
 * could replace one guess by another only. tests/gpu/tune_sweep.sh measures what the best of NCCL's settings gains at each size; without
 * such a measurement nothing says that a default is worth changing. */
#ifndef LC_PLUGIN_TUNER_CHOOSE_H
#define LC_PLUGIN_TUNER_CHOOSE_H

#include "common/profile.h"

/* One row or column more than a rule can name is left alone: NCCL's enumerations grow. */
struct lc_tuner_table {
    float *costs; /* [algorithms][protocols] */
    int algorithms, protocols;
};

/* The rule for a call, or NULL. `op` is NCCL's number. */
const struct lc_profile_rule *lc_tuner_rule(const struct lc_profile *profile, size_t ranks,
                                            size_t nodes, int op, size_t bytes);

/* Makes the rule's entry the cheapest, unless NCCL has ruled it out (an entry below 0) or does not have it: then nothing
 * is changed. True if the table was changed. */
_Bool lc_tuner_apply(const struct lc_profile_rule *rule, const struct lc_tuner_table *table,
                     int *channels);

/* *channels as the rule has it, if it names a number and NCCL holds it within the communicator's. */
void lc_tuner_set_channels(const struct lc_profile_rule *rule, int *channels);

#endif
