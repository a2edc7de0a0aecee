/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/transport.h"

const struct lc_net_ops *lc_net_choose(void)
{
    return &lc_net_tcp;
}
