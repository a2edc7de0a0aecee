#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/comms.sh LOGS BUILD [SECONDS] [COUNT [SIDE...]]
# COUNT (64) communicators of two ranks over NCCL's sockets, as they come and with one thread and socket for each connection, and
# over the network plugin: time to make and first use each, threads and descriptors of a process while all are open. SIDE:
# sockets, plugin, sockets-1x1; all of them. A side makes them in a third of SECONDS (40) at most, and says how many it made;
# to destroy them takes NCCL longer: 64 on one GPU, 25 seconds. LOGS/comms.txt. 77 where there is no GPU.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 2 ] || { sed -n '4,8s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2") seconds=${3:-40} count=${4:-64}
sides=("${@:5}")
[ ${#sides[@]} -gt 0 ] || sides=(sockets plugin sockets-1x1)
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if [ -z "${LC_COMMS:-}" ]; then
    LC_COMMS=1 exec bash "$root/tests/gpu/mps.sh" 2 bash "$0" "$logs" "$build" "$seconds" "$count" "${sides[@]}"
fi
libraries=${LC_NET_BENCH_LIBRARIES:-$(python3 -c 'import nvidia
p = list(nvidia.__path__)[0]
print(p + "/nccl/lib:" + p + "/cu13/lib")')} || exit 1
export LD_LIBRARY_PATH=$build/plugin/net/abi:$libraries NCCL_SOCKET_IFNAME=lo NCCL_NET_PLUGIN_REF_COUNT=1
each=$(((seconds - 7) / 3)) failed=0
: >"$logs/comms.txt"

# side NAME SETTING...
side() {
    local name=$1
    shift
    if ! timeout -k 5 $((each + 30)) env "$@" "$build/tests/gpu/comms" 2 "$count" "$each" >"$logs/comms-$name.log" 2>&1 </dev/null; then
        failed=$((failed + 1))
        tail -n 5 "$logs/comms-$name.log"
    fi
    printf '%-16s %s\n' "$name" "$(grep -E '^[0-9]+ communicators' "$logs/comms-$name.log" || echo failed)" | tee -a "$logs/comms.txt"
}

for name in "${sides[@]}"; do
    case $name in
    sockets) side sockets NCCL_NET=Socket NCCL_NET_PLUGIN=none ;;
    plugin) side plugin NCCL_NET=loongcomm NCCL_NET_PLUGIN=loongcomm ;;
    sockets-1x1) side sockets-1x1 NCCL_NET=Socket NCCL_NET_PLUGIN=none NCCL_SOCKET_NTHREADS=1 NCCL_NSOCKS_PERTHREAD=1 ;;
    *) side "$name" false ;;
    esac
done
echo "$((${#sides[@]} - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
