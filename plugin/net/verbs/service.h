/* SPDX-License-Identifier: Apache-2.0
 *
 * The transport's thread: it reads side sockets, answers whoever connects to a listen, and gives connections their
 * ticks. It starts with the first connection or listen and ends with the library. */
#ifndef LC_PLUGIN_NET_VERBS_SERVICE_H
#define LC_PLUGIN_NET_VERBS_SERVICE_H

#include "plugin/net/verbs/comm.h"

struct lc_net_listen;

/* Before the first device is opened, once: makes children of a fork let go of what they must not hold. 0 or -errno. */
int lc_verbs_service_prepare(void);

int lc_verbs_service_listen(struct lc_verbs_device *dev, const union lc_tcp_address *address,
                            int64_t timeout_ns, struct lc_net_listen **out);
void lc_verbs_service_handle(const struct lc_net_listen *listen, struct lc_verbs_handle *out);
void lc_verbs_service_unlisten(struct lc_net_listen *listen);

/* A connection that somebody with the token has begun; it still has to come to run. NULL: none waits. */
struct lc_net_comm *lc_verbs_service_incoming(struct lc_net_listen *listen);
void lc_verbs_service_put_back(struct lc_net_listen *listen, struct lc_net_comm *comm);

/* Takes the connection over into the thread's care. On failure it is still the caller's, with its socket. */
int lc_verbs_service_add(struct lc_net_comm *comm);

/* The same for one without a socket, which gets one that is being connected. Called with the connection's lock held. */
int lc_verbs_service_dial(struct lc_net_comm *comm, const union lc_tcp_address *address);

/* A connecting one by its name in a handle; NULL: not known. It is taken out of the search. */
struct lc_net_comm *lc_verbs_service_take(uint64_t ticket, const uint8_t token[LC_VERBS_TOKEN]);
void lc_verbs_service_offer(struct lc_net_comm *comm); /* puts it into the search (again) */

/* Ends the registration, and before it every connection of which an open request uses it, `comm` most likely: after an
 * abort NCCL frees the memory next, and closes later. `mr` may be NULL. */
int lc_verbs_service_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr);

/* Ends a connection and frees it; NULL is allowed. When this returns, no buffer of it is touched any more. What is not known,
 * as when it is closed a second time, is left alone. */
void lc_verbs_service_close(struct lc_net_comm *comm);

bool lc_verbs_forked(void);

#endif
