/* SPDX-License-Identifier: Apache-2.0
 *
 * Any text as a profile; what is accepted is looked up at the borders of every rule. The source is included to be
 * instrumented. NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "common/profile.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void say_nothing(enum lc_log_level level, const char *file, int line, const char *text)
{
}

static void look_up(const struct lc_profile *profile, const struct lc_profile_rule *rule)
{
    const struct lc_profile_rule *found;

    if (rule->who == LC_PROFILE_NCCL)
        found = lc_profile_nccl(profile, rule->op, rule->ranks, rule->nodes, rule->from);
    else
        found = lc_profile_rings(profile, rule->op, rule->ranks, rule->protocol, rule->from);
    if (found != rule)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lc_profile *profile;

    lc_log_set_sink(say_nothing);
    profile = lc_profile_parse("fuzz", (const char *)data, size);
    for (size_t i = 0; profile && i < profile->n; i++)
        look_up(profile, &profile->rules[i]);
    free(profile);
    return 0;
}
