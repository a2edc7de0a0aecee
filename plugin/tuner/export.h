/* SPDX-License-Identifier: Apache-2.0
 *
 * What NCCL finds in a tuner plugin, for the one source file of each that includes this. It brings four functions, the
 * newest version's but for what they do not need, and a name:
 *
 *   begin(&context, comm_id, ranks, nodes, log) (comm_id 0: unknown)   end(context)
 *   get(context, op, bytes, pipe_ops, &table, registered, &channels)   get_v2(...), which has no table */
#ifndef LC_PLUGIN_TUNER_EXPORT_H
#define LC_PLUGIN_TUNER_EXPORT_H

#include "plugin/tuner/abi.h"
#include "plugin/tuner/choose.h"

#define LC_TUNER_EXPORT __attribute__((visibility("default")))

#define LC_TUNER_DEFINE(NAME, begin, get, get_v2, end)                                             \
    static enum lc_nccl_result get_v4(void *context, int op, size_t bytes, int pipe_ops,           \
                                      float **costs, int algorithms, int protocols,                \
                                      int registered, int *channels)                               \
    {                                                                                              \
        const struct lc_tuner_table table = { (float *)costs, algorithms, protocols };             \
                                                                                                   \
        return get(context, op, bytes, pipe_ops, &table, registered, channels);                    \
    }                                                                                              \
                                                                                                   \
    static enum lc_nccl_result get_v3(void *context, int op, size_t bytes, int pipe_ops,           \
                                      float **costs, int algorithms, int protocols, int *channels) \
    {                                                                                              \
        return get_v4(context, op, bytes, pipe_ops, costs, algorithms, protocols, 0, channels);    \
    }                                                                                              \
                                                                                                   \
    static enum lc_nccl_result init_v2(size_t ranks, size_t nodes, lc_nccl_logger *log,            \
                                       void **context)                                             \
    {                                                                                              \
        return begin(context, 0, ranks, nodes, log);                                               \
    }                                                                                              \
                                                                                                   \
    static enum lc_nccl_result init_v5(                                                            \
        void **context, uint64_t comm_id, size_t ranks, size_t nodes, lc_nccl_logger *log,         \
        struct lc_nccl_nvl_domains *domains, struct lc_nccl_tuner_constants_v5 *constants)         \
    {                                                                                              \
        return begin(context, comm_id, ranks, nodes, log);                                         \
    }                                                                                              \
                                                                                                   \
    LC_TUNER_EXPORT const struct lc_nccl_tuner_v2 ncclTunerPlugin_v2 = { NAME, init_v2, get_v2,    \
                                                                         end };                    \
    LC_TUNER_EXPORT const struct lc_nccl_tuner_v3 ncclTunerPlugin_v3 = { NAME, init_v2, get_v3,    \
                                                                         end };                    \
    LC_TUNER_EXPORT const struct lc_nccl_tuner_v4 ncclTunerPlugin_v4 = { NAME, init_v2, get_v4,    \
                                                                         end };                    \
    LC_TUNER_EXPORT const struct lc_nccl_tuner_v5 ncclTunerPlugin_v5 = { NAME, init_v5, get_v4,    \
                                                                         end };                    \
    LC_TUNER_EXPORT const struct lc_nccl_tuner_v6 ncclTunerPlugin_v6 = { NAME, init_v5, get_v4,    \
                                                                         end, NULL }

#endif
