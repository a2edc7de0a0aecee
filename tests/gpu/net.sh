#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: net.sh [--cut LIBRARY] PLUGIN FOLDER COMMAND...
# Runs a job whose ranks reach each other over the network plugin only, and looks into NCCL's log: every process that
# made a communicator of several ranks must have used it, and none may have fallen back.
# --cut: with libcut.so, which breaks connections at random; some must have been.
set -u
cut=
[ "$1" = --cut ] && cut=$(readlink -f "$2") && shift 2
plugin=$(readlink -f "$1") folder=$2
shift 2
mkdir -p "$folder" && rm -f "$folder"/nccl.* "$folder"/cuts.* || exit 1
export LD_LIBRARY_PATH=$(dirname "$plugin")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export NCCL_NET_PLUGIN=loongcomm NCCL_NET_PLUGIN_REF_COUNT=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_DEBUG_FILE=$folder/nccl.%h.%p
if [ -n "$cut" ]; then
    LCCUT_FOLDER=$folder LD_PRELOAD=$cut${LD_PRELOAD:+:$LD_PRELOAD} "$@"
else
    "$@"
fi
status=$?
[ "$status" -eq 0 ] || exit "$status"
used=0
for log in "$folder"/nccl.*; do
    [ -e "$log" ] || { echo "NCCL has written no log"; exit 1; }
    grep -qE 'ncclCommInit.* Init (COMPLETE|START)' "$log" || continue
    if ! grep -q 'Using network loongcomm' "$log" || grep -qE 'Using network (IB|Socket)' "$log"; then
        echo "not over the plugin: $log"
        grep -E 'NET|network' "$log" | head -n 20
        exit 1
    fi
    used=$((used + 1))
done
echo "$used processes used network loongcomm"
if [ -n "$cut" ]; then
    cuts=$(cat "$folder"/cuts.* 2>/dev/null | awk '{ n += $1 } END { print n + 0 }')
    echo "$cuts connections were cut"
    [ "$cuts" -ge 10 ] || exit 1
fi
[ "$used" -gt 0 ]
