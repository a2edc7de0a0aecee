/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_CONFIG_H
#define LC_COMMON_CONFIG_H

#include "common/log.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum lc_report_kind {
    LC_REPORT_OFF,
    LC_REPORT_TEXT,
    LC_REPORT_JSON,
};

/* How fp32 data of all-reduce and reduce-scatter travels. */
enum lc_wire {
    LC_WIRE_DATA,
    LC_WIRE_BF16,
    LC_WIRE_BF16_ACCURATE,
};

/* How fp32 becomes bf16 for the wire. */
enum lc_rounding {
    LC_ROUNDING_NEAREST,
    LC_ROUNDING_STOCHASTIC,
};

/* When reductions go through peers' memory. */
enum lc_peer {
    LC_PEER_AUTO,
    LC_PEER_FORCE,
    LC_PEER_OFF,
};

/* Who adds up 16-bit data. */
enum lc_exact {
    LC_EXACT_FP32,
    LC_EXACT_NCCL,
};

typedef bool lc_conf_bool;
typedef size_t lc_conf_size;
typedef unsigned lc_conf_seconds;
typedef size_t lc_conf_ctas;
typedef enum lc_wire lc_conf_wire;
typedef enum lc_rounding lc_conf_rounding;
typedef enum lc_peer lc_conf_peer;
typedef enum lc_exact lc_conf_exact;
typedef const char *lc_conf_path; /* owned by the struct, never NULL */
typedef enum lc_log_level lc_conf_level;
typedef enum lc_report_kind lc_conf_report;

struct lc_config {
#define LC_CONF(type, field, name, dflt, help) lc_conf_##type field;
#include "common/config.def"
#undef LC_CONF
};

/* One setting, as `loongcomm config` prints it. The texts live as long as the process. */
struct lc_config_entry {
    const char *name; /* with the prefix LOONGCOMM_ */
    const char *value;
    const char *dflt;
    const char *help;
    char origin[512]; /* "default", "environment" or "FILE:LINE" */
};

/* Fills every field from the environment and the file. What is malformed, unknown or unreadable is
 * logged in one line that names it and says what is accepted, and the default is used. Returns the
 * number of such lines. Called once per process, before other threads ask for settings; the strings are
 * copies and live as long as the process. */
int lc_config_load(struct lc_config *out);

/* The settings in table order, from the same sources as lc_config_load and without logging. Returns
 * their number; entries beyond `max` are not written. */
size_t lc_config_list(struct lc_config_entry *out, size_t max);

/* Of the settings that all ranks must share (LC_CONF_AGREED). */
uint64_t lc_config_hash(const struct lc_config *config);

/* True if the program's environment has this variable, one of another library. */
bool lc_environment_has(const char *name);

/* Its value, or NULL; another library's as well. Points into the environment. */
const char *lc_environment_get(const char *name);

/* "64k" -> 65536: digits, then nothing or one of k, m, g (powers of 1024). Also used by the tools.
 * 0, or -EINVAL and *out unchanged. */
int lc_parse_size(const char *text, size_t *out);

#endif
