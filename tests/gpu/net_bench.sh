#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/net_bench.sh LOGS BUILD [SECONDS [ONLY]]
# Real NCCL over the network plugin beside NCCL over its own sockets, in jobs that stay and take turns, what is known least
# first, in SECONDS (200) at most; ONLY: a pattern of the names of rows. Ranks share the GPUs at hand under MPS, each a host of
# its own to NCCL, so that all goes over the loopback: it shows what the software costs, not what a network does. The plugin
# has the channels that `loongcomm run` gives a job of so many ranks. Compared is NCCL (a) as it comes, and (b) with as many
# channels as the plugin at the best of some numbers of threads and sockets, for so many ranks and 16 MB. LOGS/summary.txt has
# two lines a size: NCCL's and the plugin's median, bandwidths, processor seconds for a GB, and the ratio with p10..p90 of the
# rounds, and at the end a table of the ratios to the faster of the two; LOGS/*.json has the quartiles, too. 77 where there is
# no GPU. Ends with `N passed, N failed, N skipped`.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 2 ] || { sed -n '4,13s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2") seconds=${3:-200} only=${4:-*}
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if [ -z "${LC_NET_BENCH:-}" ]; then
    LC_NET_BENCH=1 exec bash "$root/tests/gpu/mps.sh" 8 bash "$0" "$logs" "$build" "$seconds" "$only"
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
    # shellcheck disable=SC2053 # a pattern
    [[ $name == $only ]] || return 77
    if [ "$left" -lt $((budget + 8)) ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    for word in $b; do
        words+=(--env-b "$word")
    done
    # shellcheck disable=SC2086 # settings are words
    timeout -k 5 "$limit" env $a "$bench" "$1" --live 1.0 "${@:2}" --no-preload "${words[@]}" --rounds "${rounds:-11}" --budget "$budget" \
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

# best RANKS SETTINGS GRID...: the fastest of THREADS:SOCKETS for so many ranks with these settings of NCCL's sockets, in `best`.
best() {
    local ranks=$1 base="$sockets${2:+ $2}" gained=1.0 grid settings this rounds=5
    shift 2
    best=$base
    for grid in "$@"; do
        settings="NCCL_SOCKET_NTHREADS=${grid%:*} NCCL_NSOCKS_PERTHREAD=${grid#*:}"
        row "grid-$ranks-${grid%:*}x${grid#*:}" 2 "$base" "$settings" allreduce --ranks "$ranks" --sizes 16m || continue
        this=$(gain "$logs/grid-$ranks-${grid%:*}x${grid#*:}.log")
        if awk -v a="${this:-0}" -v b="$gained" 'BEGIN { exit !(a > b) }'; then
            gained=$this best="$base $settings"
        fi
    done
    say "best of NCCL's own for $ranks ranks: $best ($gained times its one socket with as many channels)"
}

say "$(nproc) processors, $(nvidia-smi -L | head -n 1)"
two=$(given 2 3) && four=$(given 4 3) && given 8 0 >/dev/null || exit 1
say "channels of the plugin: 2 ranks: $two; 4: $four; 8: NCCL's own"

# as_it_comes and at_best CASE BUDGET SETTINGS OPERATION OPTION...: rows (a) and (b); what is best, in `best`, was found before.
as_it_comes() { row "$1-a" "$2" "$sockets" "$plugin $3" "${@:4}"; }
at_best() {
    if [ "$best" = "$sockets" ]; then # both are one
        [ ! -e "$logs/$1-a.json" ] || cp "$logs/$1-a.json" "$logs/$1-b.json"
    else
        row "$1-b" "$2" "$best" "$plugin $3" "${@:4}"
    fi
}

# What the plugin does with other numbers of its own; NCCL's side is the plugin as it comes.
own() {
    local ranks=$1 settings=$2 sizes=$3 setting
    shift 3
    for setting in "$@"; do
        row "own-$ranks-$setting" 4 "$plugin $settings" "${setting//,/ }" allreduce --ranks "$ranks" --sizes "$sizes"
    done
}

eight="allreduce --ranks 8 --sizes 1m,16m,64m"
# shellcheck disable=SC2086 # words
as_it_comes allreduce-8 8 "" $eight
# What was best of 1:1, 1:2 and none with 8 ranks, and of 1:1 and 2:1 with 4 (perf/results); with all the time there is, looked
# for again.
best=$sockets
[ "$seconds" -lt 240 ] || best 8 "" 1:1 1:2
best8=$best
# shellcheck disable=SC2086
at_best allreduce-8 8 "" $eight
best="$sockets $four NCCL_SOCKET_NTHREADS=1 NCCL_NSOCKS_PERTHREAD=1"
[ "$seconds" -lt 240 ] || best 4 "$four" 1:1 2:1
best4=$best
at_best allreduce-4 6 "$four" allreduce --ranks 4 --sizes 1m,16m,64m
best="$sockets $two NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=1"
best2=$best
at_best zeros-2 3 "$two" alltoall --ranks 2 --sizes 64m --live 0.25
best=$best8
as_it_comes alltoall-8 5 "" alltoall --ranks 8 --sizes 1m,32m
at_best alltoall-8 5 "" alltoall --ranks 8 --sizes 1m,32m
best=$best4
at_best alltoall-4 5 "$four" alltoall --ranks 4 --sizes 1m,32m
as_it_comes allreduce-4 4 "$four" allreduce --ranks 4 --sizes 1m,16m,64m
best=$best2
at_best small-2 4 "$two" allreduce --ranks 2 --sizes 8,16k,64k,256k
own 8 "" 16m,64m LOONGCOMM_NET_SPIN=0 LOONGCOMM_NET_SOCKETS=2
own 4 "$four" 1m,16m LOONGCOMM_NET_THREADS=1 LOONGCOMM_NET_THREADS=3
row own-2-spin-0 4 "$plugin $two" LOONGCOMM_NET_SPIN=0 alltoall --ranks 2 --sizes 1m,64m --live 1.0,0.25
row own-2-chunk-256k 4 "$plugin $two" NCCL_P2P_NET_CHUNKSIZE=262144 alltoall --ranks 2 --sizes 1m,64m --live 1.0,0.25
at_best alltoall-2 5 "$two" alltoall --ranks 2 --sizes 256k,1m,64m
at_best allreduce-2 7 "$two" allreduce --ranks 2 --sizes 1m,16m,64m
as_it_comes allreduce-2 5 "$two" allreduce --ranks 2 --sizes 64k,16m,64m
as_it_comes alltoall-4 5 "$four" alltoall --ranks 4 --sizes 1m,32m
as_it_comes alltoall-2 4 "$two" alltoall --ranks 2 --sizes 1m,64m
row equal-sides 6 "$sockets" "" allreduce --ranks 2 --sizes 64k,256k,16m
python3 "$root/tests/gpu/net_table.py" "$logs" >"$logs/table.txt" || failed=$((failed + 1))
tee -a "$logs/summary.txt" <"$logs/table.txt"
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
