/* SPDX-License-Identifier: Apache-2.0
 *
 * The requests of a connection. Every function is called with the connection's lock held and no error on it. */
#ifndef LC_PLUGIN_NET_VERBS_DATA_H
#define LC_PLUGIN_NET_VERBS_DATA_H

#include "plugin/net/verbs/comm.h"

int lc_verbs_data_send(struct lc_net_comm *comm, void *data, size_t size, int tag,
                       struct lc_net_mr *mr, struct lc_net_request **out);
int lc_verbs_data_recv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                       const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out);
int lc_verbs_data_flush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                        struct lc_net_mr *const *mrs, struct lc_net_request **out);

/* Of a request that is done, which is free then. */
void lc_verbs_data_end(struct lc_net_request *request, size_t *sizes);

#endif
