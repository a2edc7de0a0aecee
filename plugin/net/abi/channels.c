/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/abi/channels.h"

#define ALL_GATHER 2
#define ALL_REDUCE 4

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

#define MOST_RANKS 8 /* that were measured */

/* A message is what a rank has of a buffer in one channel, and less: with many channels it is short, and each costs. As
 * measured over the loopback of one machine with all of NCCL's ways side by side (perf/results, tune-sweep): below 384 KiB a
 * rank one channel is 1.1 to 1.8 times as fast as NCCL's own two. Where most won, all that the communicator has are used: they
 * may be the user's, or NCCL's for a network of several ports. Only of those that `loongcomm run` has added do middle sizes
 * use fewer. The number of this node's interfaces is no reason to say something else: other nodes may have more. */
int lc_net_channels(int op, size_t ranks, size_t nodes, size_t bytes, bool ours)
{
    size_t share = ranks ? bytes / ranks : 0;

    if (ranks < 2 || ranks > MOST_RANKS || ranks != nodes || op < ALL_GATHER || op > ALL_REDUCE)
        return 0;
    if (share < 384 * KIB)
        return 1;
    if (ours && ranks <= 4 && share < 2 * MIB)
        return 2;
    if (ours && ranks == 2 && share < 6 * MIB)
        return 4;
    return 0;
}
