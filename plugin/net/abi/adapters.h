/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_PLUGIN_NET_ABI_ADAPTERS_H
#define LC_PLUGIN_NET_ABI_ADAPTERS_H

#include <stdbool.h>
#include <stdint.h>

/* This communicator of NCCL's uses the network, and it is TCP. A process may have several networks, and communicators of each:
 * what it has begun says nothing of ranks of another one. One that was split off and shares its parent's resources is left to
 * NCCL, on all ranks alike: no init has named it. Where NCCL's interfaces do not tell communicators apart (comm_id 0; to
 * the network, before v11): NCCL has begun to use it, true from the first init that found a device on. Any thread. */
bool lc_net_is_over_tcp(uint64_t comm_id);

#endif
