#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/nvlink_jobs.sh LOGS BUILD [SECONDS [PART...]]
# torch's jobs between two GPUs of this machine, what matters most first, in 360 s or SECONDS: whether the links' own counters
# agree with the ledger (`bytes`), collectives beside NCCL, registered windows, torch's symmetric memory and its bf16 hook
# (`collectives`), a mixture-of-experts job and a DDP job, plain and preloaded, over the link, without peer access and as two
# hosts (`moe`, `ddp`, `moe-p2p-off`, `ddp-p2p-off`, `moe-apart`, `ddp-apart`), a rank that is killed (`dies`), random programs
# of everything (`mixed`). PARTs: those alone. Logs and JSON go to the folder LOGS; summary.txt has a line for each part.
# Ends with `N passed, N failed, N skipped`; 77 where there are not two GPUs.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 2 ] || { sed -n '4,11s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -m "$2") end=$((SECONDS + ${3:-360}))
shift $(($# < 3 ? $# : 3))
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then
    echo "SKIPPED: not two GPUs on this machine"
    exit 77
fi
cd "$root" || exit 2
passed=0 failed=0 skipped=0 parts=" $* "
library=$build/interpose/libloongcomm.so
: >"$logs/summary.txt"

say() { echo "$*" | tee -a "$logs/summary.txt"; }

# part NAME LIMIT LINES [SETTING=VALUE]... COMMAND...: the last LINES of its output are shown.
part() {
    local name=$1 limit=$2 lines=$3 begun=$SECONDS left=$((end - SECONDS)) status
    shift 3
    [ "$parts" = "  " ] || [[ $parts == *" $name "* ]] || return 0
    if [ "$left" -lt 10 ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    timeout -k 5 "$limit" env "$@" >"$logs/$name.log" 2>&1 </dev/null
    status=$?
    case $status in
    0) passed=$((passed + 1)) && say "passed: $name, $((SECONDS - begun)) s" ;;
    77) skipped=$((skipped + 1)) && say "skipped: $name" ;;
    *)
        failed=$((failed + 1))
        say "failed: $name (status $status), $((SECONDS - begun)) s"
        lines=$((lines + 10))
        ;;
    esac
    tail -n "$lines" "$logs/$name.log" | tee -a "$logs/summary.txt"
    return "$status"
}

job="--rounds 6 --steps 5 --library $library --json"
force=LOONGCOMM_PEER=force auto=LOONGCOMM_PEER=auto
part bytes 60 5 python3 tests/gpu/link_bytes.py --library "$library"
part collectives 150 150 $force python3 perf/peers_torch.py --library "$library" --seconds 110 --json "$logs/collectives.json"
# shellcheck disable=SC2086 # a list of options
{
    part moe 50 6 $force python3 perf/moe.py $job "$logs/moe.json"
    part ddp 60 7 $auto python3 perf/ddp.py $job "$logs/ddp.json" --variants nodp,plain,loongcomm,exact,hook
    part dies 120 8 python3 tests/gpu/peer_dies.py --library "$library"
    part moe-p2p-off 50 6 NCCL_P2P_DISABLE=1 $force python3 perf/moe.py $job "$logs/moe-p2p-off.json"
    part ddp-p2p-off 60 7 NCCL_P2P_DISABLE=1 $auto python3 perf/ddp.py $job "$logs/ddp-p2p-off.json"
    part ddp-apart 70 7 python3 perf/ddp.py $job "$logs/ddp-apart.json" --apart --rounds 2
    part moe-apart 50 6 python3 perf/moe.py $job "$logs/moe-apart.json" --apart --rounds 2
}
mixed=$((end - SECONDS))
[ "$mixed" -lt 300 ] || mixed=300
part mixed "$((mixed + 10))" 20 bash tests/gpu/soak.sh "$logs/mixed" "$build" "$mixed" 2
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
