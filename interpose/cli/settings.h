/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_SETTINGS_H
#define LC_CLI_SETTINGS_H

#include "common/config.h"

#define LC_CLI_MAX_SETTINGS 128
#define LC_CLI_MAX_PROBLEMS 32

struct lc_cli_settings {
    struct lc_config config;
    struct lc_config_entry entry[LC_CLI_MAX_SETTINGS];
    size_t count;
    char problem[LC_CLI_MAX_PROBLEMS][512]; /* the lines that the library would log */
    size_t problem_count;
    int problem_total; /* those beyond LC_CLI_MAX_PROBLEMS included */
};

/* The settings of this process's environment. */
void lc_cli_settings_load(struct lc_cli_settings *out);

#endif
