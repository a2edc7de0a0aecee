/* SPDX-License-Identifier: Apache-2.0
 *
 * libloongtopo.so, opened when it is needed: it needs hwloc and libxml2, the command does not. */
#ifndef LC_CLI_TOPO_LIBRARY_H
#define LC_CLI_TOPO_LIBRARY_H

#include "topology/loongtopo.h"

#include <stddef.h>

#define LC_CLI_TOPO_FUNCTIONS(each) \
    each(load);                     \
    each(load_as_nccl);             \
    each(misplaced);                \
    each(format);                   \
    each(next);                     \
    each(free);                     \
    each(name);                     \
    each(is_partial);               \
    each(print_text);               \
    each(print_json);               \
    each(print_json_paths);         \
    each(print_paths);              \
    each(print_svg);                \
    each(write_nccl_slowed);        \
    each(examine);                  \
    each(is_plannable);             \
    each(plan_make);                \
    each(plan_free);                \
    each(plan_loads);               \
    each(plan_gpus);                \
    each(plan_print);               \
    each(plan_setting_count);       \
    each(plan_setting);             \
    each(plan_most_mbps);           \
    each(nccl_read);                \
    each(path_name);                \
    each(routes_find);              \
    each(routes_free);              \
    each(routes_wires);             \
    each(sample_name);              \
    each(sample)

struct lc_cli_topo_library {
#define LC_CLI_TOPO_FIELD(name) __typeof__(lc_topo_##name) *name
    LC_CLI_TOPO_FUNCTIONS(LC_CLI_TOPO_FIELD);
#undef LC_CLI_TOPO_FIELD
};

/* It stays open until the process ends. 0, or -errno and a line about what is missing in `why`. */
int lc_cli_topo_open(struct lc_cli_topo_library *out, char *why, size_t size);

/* A variable as NCCL finds it: in the environment, else in the first of its files that has it (NCCL_CONF_FILE or
 * ~/.nccl.conf, then /etc/nccl.conf). NULL: not set. It stays as it is until the process ends. */
char *lc_cli_nccl_get(const char *name);

#endif
