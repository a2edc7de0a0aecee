/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_TOPO_FINDINGS_H
#define LC_TOPO_FINDINGS_H

#include "topology/print.h"
#include "topology/root.h"
#include "topology/routes.h"

struct lc_exam {
    const struct lc_topo *topo;
    const struct lc_topo_checks *checks;
    const struct lc_topo_routes *routes; /* by the settings given; NULL: too large */
    const struct lc_topo_routes
        *default_routes;        /* as NCCL would have it without settings; NULL likewise */
    const struct lc_root *root; /* NULL: there is only a file */
    lc_topo_report *report;
    void *arg;
};

/* Names of devices, cut after a dozen. */
struct lc_exam_list {
    struct lc_topo_text text;
    int count;
};
__attribute__((format(printf, 2, 3))) void lc_exam_add(struct lc_exam_list *list, const char *fmt,
                                                       ...);
void lc_exam_add_gpu(struct lc_exam_list *list, const struct lc_topo_routes *routes, int gpu);

/* A finding; the text before the first newline of `fmt` is the evidence, the rest the remedy. */
__attribute__((format(printf, 4, 5))) void lc_exam_find(const struct lc_exam *exam,
                                                        enum lc_topo_severity severity,
                                                        const char *id, const char *fmt, ...);

/* A variable of the environment that is set and not empty; NULL. */
const char *lc_exam_get(const struct lc_exam *exam, const char *name);

bool lc_exam_is_used(const struct lc_topo_routes *routes, int net);
int lc_exam_fastest(const struct lc_topo_routes *routes);

void lc_exam_pci(const struct lc_exam *exam);
void lc_exam_settings(const struct lc_exam *exam);

#endif
