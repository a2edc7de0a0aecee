/* SPDX-License-Identifier: Apache-2.0
 *
 * How a topology is built: a reader adds nodes and sets attributes as text, lc_topo_finish makes fields of them and
 * judges the whole, the same for every source. */
#ifndef LC_TOPO_INTERNAL_H
#define LC_TOPO_INTERNAL_H

#include "topology/loongtopo.h"

#define LC_TOPO_MAX_ATTRS 32 /* of one node */
#define LC_TOPO_MAX_NOTES 64

struct lc_topo_attr {
    char *name;
    char *value;
};

struct lc_topo_raw { /* beside each node */
    struct lc_topo_attr *attrs;
    int attr_count;
    int last_child;
};

struct lc_topo {
    enum lc_topo_format format;
    char *name;
    struct lc_topo_node *nodes;
    struct lc_topo_raw *raw;
    int count, room;
    bool as_nccl; /* nothing better is looked for than NCCL finds: NUMA nodes, functions of ports */
    char *notes[LC_TOPO_MAX_NOTES];
    int note_count;
    char *error; /* while loading: where the one line goes */
    size_t error_size;
};

/* For each type: its tag and the types it may hang below (bits). */
struct lc_topo_tag {
    const char *name;
    unsigned parents;
};
extern const struct lc_topo_tag lc_topo_tags[LC_TOPO_TYPES];

/* A topology with the root alone. NULL: no memory. */
struct lc_topo *lc_topo_new(const char *name, enum lc_topo_format format, char *error,
                            size_t error_size);

/* Index of the new node, or -errno with the line written. */
int lc_topo_add(struct lc_topo *topo, int parent, enum lc_topo_type type, int line);

/* Sets or replaces. The value is cut at LC_TOPO_MAX_VALUE bytes. 0 or -errno with the line written. */
int lc_topo_set(struct lc_topo *topo, int node, const char *name, const char *value);
__attribute__((format(printf, 4, 5))) int lc_topo_setf(struct lc_topo *topo, int node,
                                                       const char *name, const char *fmt, ...);

int lc_topo_find_child(const struct lc_topo *topo, int parent, enum lc_topo_type type,
                       const char *attr, const char *value);

/* Writes the one line; returns -err. Bytes that a terminal would obey are replaced. */
__attribute__((format(printf, 4, 5))) int lc_topo_fail(const struct lc_topo *topo, int err,
                                                       int line, const char *fmt, ...);
__attribute__((format(printf, 3, 4))) void lc_topo_remark(struct lc_topo *topo, int line,
                                                          const char *fmt, ...);

int lc_topo_finish(struct lc_topo *topo);

/* Is this a bus id: domain of 4 to 8 digits, bus, device, function? */
bool lc_topo_is_busid(const char *text);

/* The readers fill `topo`. */
int lc_topo_read_nccl(struct lc_topo *topo, const char *text, size_t size);
int lc_topo_read_hwloc(struct lc_topo *topo, const char *text, size_t size);
int lc_topo_read_sysfs(struct lc_topo *topo, const char *root, bool driver); /* also by NVML */

/* GPUs as NVML sees them, added to what sysfs gave. Without NVML nothing happens but a note. */
int lc_topo_read_nvml(struct lc_topo *topo);

#endif
