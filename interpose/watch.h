/* SPDX-License-Identifier: Apache-2.0
 *
 * What the watchdog says of a communicator that stands still. */
#ifndef LC_INTERPOSE_WATCH_H
#define LC_INTERPOSE_WATCH_H

#include "interpose/control/control.h"

#include <stddef.h>
#include <stdio.h>

/* For lc_control_watch. With LOONGCOMM_DIR each rank writes one file, and the lowest rank that is not to blame one line;
 * without, each rank one line (in communicators of more than 64 ranks only that one and those to blame). Where nobody is
 * to blame the line is one of level info, and the file is written only if the whole process stands still. */
void lc_watch_report(const struct lc_hang *hang);

/* "rank 2 has not arrived on ...". Returns `out`, which is cut. */
const char *lc_watch_verdict(const struct lc_hang *hang, char *out, size_t size);

int lc_watch_print_json(const struct lc_hang *hang, const char *host, int pid, int64_t unix_s,
                        FILE *out);

#endif
