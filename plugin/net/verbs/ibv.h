/* SPDX-License-Identifier: Apache-2.0
 *
 * libibverbs, opened at run time: a machine without it has no verbs devices, and nothing else changes. Its inline
 * functions that go through the context's own table (ibv_poll_cq, ibv_post_send, ibv_post_recv) are used directly. */
#ifndef LC_PLUGIN_NET_VERBS_IBV_H
#define LC_PLUGIN_NET_VERBS_IBV_H

#include <infiniband/verbs.h>

/* Macros that would call the functions by name. */
#undef ibv_reg_mr
#undef ibv_query_port

struct lc_ibv {
#define LC_IBV(name)       __typeof__(name) *name;
#define LC_IBV_MAYBE(name) LC_IBV(name)
#include "plugin/net/verbs/ibv.def"
#undef LC_IBV
#undef LC_IBV_MAYBE
};

/* Written by the one call of lc_ibv_open that succeeds, before anything else here is called. */
extern struct lc_ibv lc_ibv;

/* 0, or -ENOENT where the library or a function that is needed is missing (said at debug). Called once. */
int lc_ibv_open(void);

#endif
