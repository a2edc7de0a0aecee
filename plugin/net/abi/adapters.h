/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_PLUGIN_NET_ABI_ADAPTERS_H
#define LC_PLUGIN_NET_ABI_ADAPTERS_H

#include <stdbool.h>

/* NCCL has begun to use the network, and it is TCP. Any thread; true from the first init that found a device on. */
bool lc_net_is_over_tcp(void);

#endif
