/* SPDX-License-Identifier: Apache-2.0
 *
 * What the text and the picture say alike. */
#ifndef LC_TOPO_PRINT_H
#define LC_TOPO_PRINT_H

#include "topology/topo_internal.h"

struct lc_topo_text {
    char s[256];
    size_t used;
};

/* Adds to the text; what does not fit is cut. Bytes that a terminal would obey become '?'. */
__attribute__((format(printf, 2, 3))) void lc_topo_say(struct lc_topo_text *text, const char *fmt,
                                                       ...);

/* "0-47,96-143" of a mask in words of 32 bits; "" if there is none. */
void lc_topo_say_cpus(struct lc_topo_text *text, const char *mask);

/* "32 GT/s x16"; "" if neither is known. */
void lc_topo_say_link(struct lc_topo_text *text, const struct lc_topo_pci *pci);

/* "400 Gb/s", "down" */
void lc_topo_say_net(struct lc_topo_text *text, const struct lc_topo *topo, int net);

/* "NVLink x18 to switches", "NVLink to GPU 1 x4, GPU 2 x4"; "" without links. */
void lc_topo_say_links(struct lc_topo_text *text, const struct lc_topo *topo, int gpu);

/* "8 GPUs, 8 NICs with 8 ports, 2 NUMA nodes" */
void lc_topo_say_counts(struct lc_topo_text *text, const struct lc_topo *topo);

/* The GPU inside the PCI function that a link leads to; -1: none. */
int lc_topo_gpu_of(const struct lc_topo *topo, const struct lc_topo_link *link);

/* The port of a PCI function that has just one; -1. */
int lc_topo_only_port(const struct lc_topo *topo, int pci);

/* What a reader calls the GPU: its number, or where none is known its place in the file. */
int lc_topo_gpu_number(const struct lc_topo *topo, int gpu);

const char *lc_topo_format_name(enum lc_topo_format format);

#endif
