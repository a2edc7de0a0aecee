/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/settings.h"

#include <stdio.h>
#include <string.h>

/* Where the sink below puts its lines; set only while lc_cli_settings_load runs (one thread). */
static struct lc_cli_settings *current;

static void collect(enum lc_log_level level, const char *file, int line, const char *text)
{
    if (current->problem_count < LC_CLI_MAX_PROBLEMS)
        (void)snprintf(current->problem[current->problem_count++], sizeof(current->problem[0]),
                       "%s", text);
}

void lc_cli_settings_load(struct lc_cli_settings *out)
{
    memset(out, 0, sizeof(*out));
    current = out;
    lc_log_set_sink(collect);
    out->problem_total = lc_config_load(&out->config);
    lc_log_set_sink(NULL);
    current = NULL;
    out->count = lc_config_list(out->entry, LC_CLI_MAX_SETTINGS);
    if (out->count > LC_CLI_MAX_SETTINGS)
        out->count = LC_CLI_MAX_SETTINGS;
}
