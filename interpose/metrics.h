/* SPDX-License-Identifier: Apache-2.0
 *
 * Counters that plugins of the same process add to its report. */
#ifndef LC_INTERPOSE_METRICS_H
#define LC_INTERPOSE_METRICS_H

#include <stddef.h>
#include <stdint.h>

#define LC_METRIC_LINKS    256 /* devices times peers; of more, the last takes the sum */
#define LC_METRIC_COUNTERS 12  /* of each; more are dropped */

struct lc_metric {
    char source[16];
    char device[32];
    char peer[64];
    int n;
    struct {
        char name[32];
        uint64_t value;
    } counter[LC_METRIC_COUNTERS];
};

/* Asks the plugins for what they have not told yet, and copies all. An array to be freed, or NULL: none, or no memory. */
struct lc_metric *lc_metrics_take(size_t *n);

/* In the child of a fork, which has only the thread that forked. */
void lc_metrics_after_fork(void);

#endif
