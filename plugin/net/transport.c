/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/transport.h"

#include <pthread.h>

static const struct lc_net_ops *chosen = &lc_net_tcp; /* written by `choose` at most */

#ifdef LC_HAVE_VERBS
static void choose(void)
{
    const struct lc_net_options options = { .traffic_class = -1 };
    struct lc_net_context *ctx;
    int n = 0;

    if (lc_net_verbs.init(&options, &ctx))
        return;
    if (lc_net_verbs.devices(&n) == 0 && n > 0)
        chosen = &lc_net_verbs;
    lc_net_verbs.fini(ctx);
}
#else
static void choose(void)
{
}
#endif

const struct lc_net_ops *lc_net_choose(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, choose);
    return chosen;
}
