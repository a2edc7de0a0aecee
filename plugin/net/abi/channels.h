/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_PLUGIN_NET_ABI_CHANNELS_H
#define LC_PLUGIN_NET_ABI_CHANNELS_H

#include <stdbool.h>
#include <stddef.h>

/* How many channels a collective is to use over TCP, where each rank is a node of its own; 0: as many as NCCL likes. A pure
 * function of what all ranks share, as ranks with different channels hang. `op` is NCCL's number, `bytes` what NCCL asks its
 * tuner about: the whole of the larger buffer. `ours`: the communicator has the channels of `loongcomm run`. */
int lc_net_channels(int op, size_t ranks, size_t nodes, size_t bytes, bool ours);

#endif
