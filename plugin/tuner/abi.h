/* SPDX-License-Identifier: Apache-2.0
 *
 * What NCCL looks for in a tuner plugin: a data object `ncclTunerPlugin_vN` of type `struct lc_nccl_tuner_vN`. The layouts
 * are facts about NCCL 2.21 to 2.32, stated here so that nothing of NCCL is needed to build, and pinned below:
 *
 *   v2  2.21  a context for each communicator; one answer
 *   v3  2.22  a table of costs, in which the answer is written
 *   v4  2.24  regBuff
 *   v5  2.28  the communicator's id, NVLink domains and constants of NCCL's model
 *   v6  2.30  getChunkSize, which may be NULL
 *
 * A table of costs is one `float[algorithms][protocols]` in microseconds, passed as `float **`; the smallest entry that is
 * not negative wins. An entry of -1 is unusable and must stay so. An answer other than success fails the collective, in
 * all releases. */
#ifndef LC_PLUGIN_TUNER_ABI_H
#define LC_PLUGIN_TUNER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum lc_nccl_result {
    LC_NCCL_SUCCESS = 0,
};

enum lc_nccl_log_level {
    LC_NCCL_LOG_NONE = 0,
    LC_NCCL_LOG_VERSION = 1,
    LC_NCCL_LOG_WARN = 2,
    LC_NCCL_LOG_INFO = 3,
    LC_NCCL_LOG_ABORT = 4,
    LC_NCCL_LOG_TRACE = 5,
};

#define LC_NCCL_LOG_TUNING 0x40UL /* subsystem, for NCCL_DEBUG_SUBSYS */

typedef void lc_nccl_logger(enum lc_nccl_log_level level, unsigned long flags, const char *file,
                            int line, const char *format, ...);

struct lc_nccl_nvl_domains {
    int nNvlDomains;
    int minRanksPerNvlDomain;
    int maxRanksPerNvlDomain;
};

struct lc_nccl_tuner_constants_v5 {
    double baseLatencies[7][3];
    double hwLatencies[3][7][3];
    double llMaxBws[4][3];
    double perChMaxRingLL128Bws[4][3];
    double perChMaxTreeLL128Bws[4][3];
    double perChMaxTreeBws[4][3];
    double perChMaxNVLSTreeBws[4][3];
};

struct lc_nccl_tuner_v2 {
    const char *name;
    enum lc_nccl_result (*init)(size_t ranks, size_t nodes, lc_nccl_logger *log, void **context);
    enum lc_nccl_result (*getCollInfo)(void *context, int op, size_t bytes, int collnet, int nvls,
                                       int pipe_ops, int *algorithm, int *protocol, int *channels);
    enum lc_nccl_result (*destroy)(void *context);
};

struct lc_nccl_tuner_v3 {
    const char *name;
    enum lc_nccl_result (*init)(size_t ranks, size_t nodes, lc_nccl_logger *log, void **context);
    enum lc_nccl_result (*getCollInfo)(void *context, int op, size_t bytes, int pipe_ops,
                                       float **table, int algorithms, int protocols, int *channels);
    enum lc_nccl_result (*destroy)(void *context);
};

struct lc_nccl_tuner_v4 {
    const char *name;
    enum lc_nccl_result (*init)(size_t ranks, size_t nodes, lc_nccl_logger *log, void **context);
    enum lc_nccl_result (*getCollInfo)(void *context, int op, size_t bytes, int pipe_ops,
                                       float **table, int algorithms, int protocols, int registered,
                                       int *channels);
    enum lc_nccl_result (*destroy)(void *context);
};

struct lc_nccl_tuner_v5 {
    const char *name;
    enum lc_nccl_result (*init)(void **context, uint64_t comm_id, size_t ranks, size_t nodes,
                                lc_nccl_logger *log, struct lc_nccl_nvl_domains *domains,
                                struct lc_nccl_tuner_constants_v5 *constants);
    enum lc_nccl_result (*getCollInfo)(void *context, int op, size_t bytes, int pipe_ops,
                                       float **table, int algorithms, int protocols, int registered,
                                       int *channels);
    enum lc_nccl_result (*finalize)(void *context);
};

struct lc_nccl_tuner_v6 {
    const char *name;
    enum lc_nccl_result (*init)(void **context, uint64_t comm_id, size_t ranks, size_t nodes,
                                lc_nccl_logger *log, struct lc_nccl_nvl_domains *domains,
                                struct lc_nccl_tuner_constants_v5 *constants);
    enum lc_nccl_result (*getCollInfo)(void *context, int op, size_t bytes, int pipe_ops,
                                       float **table, int algorithms, int protocols, int registered,
                                       int *channels);
    enum lc_nccl_result (*finalize)(void *context);
    enum lc_nccl_result (*getChunkSize)(void *context, int op, size_t bytes, int algorithm,
                                        int protocol, int channels, size_t *chunk);
};

_Static_assert(sizeof(struct lc_nccl_tuner_constants_v5) == sizeof(double[21 + 63 + 5 * 12]),
               "constants");
_Static_assert(sizeof(struct lc_nccl_tuner_v2) == 4 * sizeof(void *), "v2");
_Static_assert(sizeof(struct lc_nccl_tuner_v3) == 4 * sizeof(void *), "v3");
_Static_assert(sizeof(struct lc_nccl_tuner_v4) == 4 * sizeof(void *), "v4");
_Static_assert(sizeof(struct lc_nccl_tuner_v5) == 4 * sizeof(void *), "v5");
_Static_assert(sizeof(struct lc_nccl_tuner_v6) == 5 * sizeof(void *), "v6");
_Static_assert(sizeof(enum lc_nccl_result) == sizeof(int), "as NCCL's");

#endif
