/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_PROBE_H
#define LC_CLI_PROBE_H

#include "interpose/cli/child.h"

#define LC_CLI_PROBE_LINES 128

/* What probe.py answered. The texts point into `outcome` and are the child's: any bytes. */
struct lc_cli_probe {
    struct lc_cli_child child;
    struct lc_cli_outcome outcome;
    size_t count;
    struct {
        const char *key;
        const char *value;
    } line[LC_CLI_PROBE_LINES];
};

/* Runs probe.py in `python`, with LD_PRELOAD as given (NULL: as it is). */
void lc_cli_probe_run(const char *python, const char *preload, int64_t timeout_ms,
                      struct lc_cli_probe *out);

/* The first value of a key, or NULL. */
const char *lc_cli_probe_get(const struct lc_cli_probe *probe, const char *key);

/* True if the probe came to its end. */
bool lc_cli_probe_done(const struct lc_cli_probe *probe);

#endif
