/* SPDX-License-Identifier: Apache-2.0
 *
 * `loongcomm tune`: measures what is fastest on this machine and writes a profile, or says what a profile and the settings
 * make of one call. */
#ifndef LC_CLI_TUNE_H
#define LC_CLI_TUNE_H

#include "common/profile.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#define LC_TUNE_LINE 192 /* room for a rule as a line */

/* What `--explain` is asked. NULL or 0: not given. */
struct lc_tune_question {
    const char *size, *op, *type, *profile;
    int ranks, nodes;
    bool json;
};

/* Returns the exit code. */
int lc_tune_explain(const struct lc_tune_question *question);

#endif
