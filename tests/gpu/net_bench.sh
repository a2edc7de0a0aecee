#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/net_bench.sh LOGS BUILD [SECONDS]
# Real NCCL over the network plugin beside NCCL over its own sockets, in jobs that stay and take turns, what matters most
# first, in SECONDS (300) at most. Ranks share the GPUs at hand under MPS, each a host of its own to NCCL, so that all goes
# over the loopback: it shows what the software costs, not what a network does. The plugin has the channels that
# `loongcomm run` gives a job of so many ranks. Compared is NCCL (a) as it comes, and at the best of some numbers of threads
# and sockets (for 2 ranks and 16 MB) with (b2) its own two channels and (b8) eight. LOGS/summary.txt has two lines a size:
# NCCL's and the plugin's median, bandwidths, processor seconds for a GB, and the ratio with p10..p90 of the rounds, and at
# the end a table of the ratios to the fastest of the three; LOGS/*.json has the quartiles, too. 77 where there is no GPU.
# Ends with `N passed, N failed, N skipped`.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 2 ] || { sed -n '4,12s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2") seconds=${3:-300}
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if [ -z "${LC_NET_BENCH:-}" ]; then
    LC_NET_BENCH=1 exec bash "$root/tests/gpu/mps.sh" 8 bash "$0" "$logs" "$build" "$seconds"
fi
end=$((SECONDS + seconds))
passed=0 failed=0 skipped=0
: >"$logs/summary.txt"
libraries=${LC_NET_BENCH_LIBRARIES:-$(python3 -c 'import nvidia
p = list(nvidia.__path__)[0]
print(p + "/nccl/lib:" + p + "/cu13/lib")')} || exit 1
bench=$build/perf/loongcomm-bench
export LD_LIBRARY_PATH=$build/plugin/net/abi:$libraries NCCL_SOCKET_IFNAME=lo NCCL_NET_PLUGIN_REF_COUNT=1
[ -x "$bench" ] && [ -e "$build/plugin/net/abi/libnccl-net-loongcomm.so" ] || { echo "not built: $bench and the plugin"; exit 2; }

say() { echo "$*" | tee -a "$logs/summary.txt"; }

# Named, so that NCCL fails where it would else fall back.
sockets="NCCL_NET=Socket NCCL_NET_PLUGIN=none"
plugin="NCCL_NET=loongcomm NCCL_NET_PLUGIN=loongcomm"

# row NAME BUDGET A B OPERATION OPTION...: A and B are settings of the two sides, B's on top of A's.
row() {
    local name=$1 budget=$2 a=$3 b=$4 left=$((end - SECONDS)) limit begun=$SECONDS status word
    local words=()
    shift 4
    limit=$((budget * 2 + 40))
    if [ "$left" -lt $((budget + 12)) ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    for word in $b; do
        words+=(--env-b "$word")
    done
    # shellcheck disable=SC2086 # settings are words
    timeout -k 5 "$limit" env $a "$bench" "$1" --live 1.0 "${@:2}" --no-preload "${words[@]}" --rounds 11 --budget "$budget" --settle 1 \
        --json "$logs/$name.json" >"$logs/$name.log" 2>&1 </dev/null
    status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1)) && say "$name, $((SECONDS - begun)) s   (nccl: $a; nccl-b: $b)"
        grep -E ' ok$' "$logs/$name.log" | tee -a "$logs/summary.txt"
    else
        failed=$((failed + 1)) && say "failed: $name (status $status), $((SECONDS - begun)) s"
        tail -n 12 "$logs/$name.log" | sed 's/^/    | /'
    fi
    return "$status"
}

# How much faster the second side was, of one case.
gain() { awk '$4 == "nccl-b" { print $11; exit }' "$1" 2>/dev/null || echo 0; }

# given RANKS COUNT: what `loongcomm run` sets for so many ranks, as words; fails where it is not COUNT of them.
given() {
    local words
    words=$(env WORLD_SIZE="$1" GROUP_WORLD_SIZE="$1" LOCAL_WORLD_SIZE=1 NCCL_NET_PLUGIN=loongcomm \
        "$build/interpose/cli/loongcomm" run -- env 2>/dev/null |
        grep -E '^(NCCL_MIN_CTAS|NCCL_NCHANNELS_PER_NET_PEER|LOONGCOMM_NET_CTAS)=' | tr '\n' ' ')
    echo "$words"
    [ "$(wc -w <<<"$words")" -eq "$2" ] || { echo "loongcomm run sets '$words' for $1 ranks, not $2 variables" >&2 && return 1; }
}

# best NAME SETTINGS GRID...: the fastest of THREADS:SOCKETS with these settings of NCCL's sockets, in `best`.
best() {
    local name=$1 base=$2 gained=1.0 grid settings this
    shift 2
    best=$base
    for grid in "$@"; do
        settings="NCCL_SOCKET_NTHREADS=${grid%:*} NCCL_NSOCKS_PERTHREAD=${grid#*:}"
        row "grid-$name-${grid%:*}x${grid#*:}" 2 "$base" "$settings" allreduce --ranks 2 --sizes 16m || continue
        this=$(gain "$logs/grid-$name-${grid%:*}x${grid#*:}.log")
        if awk -v a="${this:-0}" -v b="$gained" 'BEGIN { exit !(a > b) }'; then
            gained=$this best="$base $settings"
        fi
    done
    say "best of NCCL's own: $best ($gained times its one socket with as many channels)"
}

say "$(nproc) processors, $(nvidia-smi -L | head -n 1)"
many=$(given 2 3) && four=$(given 4 3) && given 8 0 >/dev/null || exit 1
say "channels of the plugin: 2 ranks: $many; 4: $four; 8: NCCL's own"
best 2 "$sockets" 2:2 4:2 1:4
best2=$best
best 8 "$sockets $many" 1:1 2:1 2:2
best8=$best

# Where the plugin has no more channels than NCCL makes, and NCCL beside it has: (b8).
own="NCCL_MIN_CTAS= NCCL_NCHANNELS_PER_NET_PEER= LOONGCOMM_NET_CTAS=0"

# rows CASE BUDGET SETTINGS OPERATION OPTION...: against all ways of NCCL's own.
rows() {
    local name=$1 budget=$2 settings=$3
    shift 3
    row "$name-a" "$budget" "$sockets" "$plugin $settings" "$@"
    row "$name-b2" "$budget" "$best2" "$plugin $settings" "$@"
    row "$name-b8" "$budget" "$best8" "$plugin ${settings:-$own}" "$@"
}

rows allreduce-2 7 "$many" allreduce --ranks 2 --sizes 64k,256k,1m,16m,64m
rows alltoall-2 4 "$many" alltoall --ranks 2 --sizes 1m,64m
rows allreduce-8 10 "" allreduce --ranks 8 --sizes 64k,1m,4m,16m,64m
rows allreduce-4 7 "$four" allreduce --ranks 4 --sizes 64k,1m,16m,64m
rows zeros-2 3 "$many" alltoall --ranks 2 --sizes 64m --live 0.25
rows small-2 4 "$many" allreduce --ranks 2 --sizes 8,1k,16k
rows alltoall-8 7 "" alltoall --ranks 8 --sizes 1m,64m
rows alltoall-4 5 "$four" alltoall --ranks 4 --sizes 1m,64m
row equal-sides 6 "$best2" "" allreduce --ranks 2 --sizes 64k,16m
python3 "$root/tests/gpu/net_table.py" "$logs" >"$logs/table.txt" || failed=$((failed + 1))
tee -a "$logs/summary.txt" <"$logs/table.txt"
# What the plugin gains by other numbers of its own; NCCL's side is the plugin as it comes.
for setting in NET_SOCKETS=1 NET_SOCKETS=2 NET_SOCKETS=8 NET_THREADS=2 NET_THREADS=8 NET_PIECE=128k NET_PIECE=512k; do
    row "own-$setting" 5 "$plugin $many" "LOONGCOMM_$setting" allreduce --ranks 2 --sizes 1m,64m
done
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
