/* SPDX-License-Identifier: Apache-2.0
 *
 * The tuner that NCCL finds in our network's library, and asks where it has loaded no tuner plugin. Where we have nothing to
 * say, what it says stays: a job that names a tuner plugin shall lose nothing by that, and ranks that have none (a file that
 * is missing on one node) choose as the others do. */
#ifndef LC_PLUGIN_TUNER_NET_TUNER_H
#define LC_PLUGIN_TUNER_NET_TUNER_H

#include "plugin/tuner/abi.h"
#include "plugin/tuner/choose.h"

/* A communicator's. Made once, constant until it is closed. */
struct lc_net_tuner {
    void *library; /* NULL: it is not in this process; loaded as long as this is open */
    const struct lc_nccl_tuner_v5 *tuner;
    const struct lc_nccl_tuner_v2 *old;
    void *context;
};

/* While NCCL makes a communicator, when it has begun its network. */
void lc_net_tuner_open(struct lc_net_tuner *out, uint64_t comm_id, size_t ranks, size_t nodes,
                       lc_nccl_logger *log);
void lc_net_tuner_ask(const struct lc_net_tuner *net, int op, size_t bytes, int pipe_ops,
                      const struct lc_tuner_table *table, int registered, int *channels);
void lc_net_tuner_ask_v2(const struct lc_net_tuner *net, int op, size_t bytes, int collnet,
                         int nvls, int pipe_ops, int *algorithm, int *protocol, int *channels);
void lc_net_tuner_close(struct lc_net_tuner *net);

#endif
