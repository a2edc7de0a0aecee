#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/peers_day.sh LOGS [BUILD]
# What goes through memory mapped between two GPUs, what matters most first, in 5 minutes at most: builds for the GPUs at
# hand (sm_90 unless GPU_ARCH says otherwise), checks every collective, random reductions and the job scripts of
# tests/pytorch, also with LOONGCOMM_PEER=force, and measures beside NCCL: all-to-alls by share of zeros, all-reduces with both
# wires and by the memory that rings begin with, small ones in graphs, a group, bf16 through NCCL, a DDP job. Where there is
# one GPU the ranks share it under MPS, and NCCL's side goes through sockets. Logs and JSON go to the folder LOGS;
# summary.txt has a line for each part. Ends with `N passed, N failed, N skipped`; 77 where there is no GPU.
# PEERS_DAY_SECONDS: other than 300.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,12s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build-peers-day}")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if [ -z "${LC_PEERS_DAY:-}" ]; then
    LC_PEERS_DAY=1 exec bash "$root/tests/gpu/mps.sh" 2 bash "$0" "$logs" "$build"
fi
cd "$root" || exit 2
end=$((SECONDS + ${PEERS_DAY_SECONDS:-300}))
# shellcheck source=tests/gpu/rows.sh
. "$root/tests/gpu/rows.sh"

# measured NAME SETTING=VALUE... -- OPERATION OPTION...: loongcomm-bench, and the lines of the table that matter.
measured() {
    local name=$1 settings=()
    shift
    while [ "$1" != -- ]; do
        settings+=("$1")
        shift
    done
    shift
    row "$name" 30 LD_LIBRARY_PATH="$libraries" ${settings[@]+"${settings[@]}"} "$build/perf/loongcomm-bench" "$@" --ranks 2 \
        --settle 1 --json "$logs/$name.json"
    grep -E ' loongcomm +[0-9]' "$logs/$name.log" | tee -a "$logs/summary.txt"
}

row build 200 bash tools/build "$build" "-Dgpu_arch=${GPU_ARCH:-90}" || exit 1
libraries=$(python3 -c 'import nvidia
p = list(nvidia.__path__)[0]
print(p + "/nccl/lib:" + p + "/cu13/lib")') || exit 1
library=$build/interpose/libloongcomm.so
peer="LOONGCOMM_PEER=force LOONGCOMM_HOSTID=one" bf16=LOONGCOMM_ALLREDUCE_WIRE=bf16
preloaded="$peer LD_PRELOAD=$library LD_LIBRARY_PATH=$libraries LOONGCOMM_SCRATCH=1m"

row verify 40 $peer LD_LIBRARY_PATH="$libraries" python3 tests/gpu/verify_report.py "$build/tests/gpu/verify" "$library" \
    --ranks 2 --limit 35
row reduce-bf16 40 $preloaded $bf16 "$build/tests/gpu/reduce" --limit 35 --ranks 2 --seconds 3
row reduce-data 40 $preloaded "$build/tests/gpu/reduce" --limit 35 --ranks 2 --seconds 3
row wire-error 30 $preloaded $bf16 "$build/tests/gpu/wire_error" --json 2
measured alltoall $peer -- alltoall --budget 8 --sizes 64K,1M,16M,256M
measured alltoall-32m $peer LOONGCOMM_STAGING_START=32m -- alltoall --budget 4 --sizes 16M,256M
measured sendrecv $peer -- alltoall --sendrecv --budget 3 --sizes 1M,256M --live 1.0,0.1
for start in 16m 32m; do
    measured "bf16-$start" $peer $bf16 LOONGCOMM_STAGING_START=$start -- allreduce --budget 3 --sizes 1M,4M,16M,256M --live 1.0 --bits 8
    measured "exact-$start" $peer LOONGCOMM_STAGING_START=$start -- allreduce --budget 3 --sizes 4M,16M,256M --live 1.0
done
measured graph $peer -- allreduce --graph --budget 4 --sizes 8,1K,64K,1M --live 1.0
measured group $peer $bf16 -- allreduce --tensors 500 --budget 3 --sizes 302M --live 1.0 --bits 8
measured group-exact $peer -- allreduce --tensors 500 --budget 3 --sizes 302M --live 1.0
row pytorch 130 python3 tests/pytorch/run.py --library "$library" --ranks 2 --no-torchrun --peers &&
    tail -n 4 "$logs/pytorch.log"
row ddp 70 LOONGCOMM_PEER=auto LOONGCOMM_HOSTID=one python3 perf/ddp.py --rounds 2 --steps 3 --library "$library" \
    --json "$logs/ddp.json" && tail -n 4 "$logs/ddp.log"
measured cast LOONGCOMM_PEER=off $bf16 -- allreduce --budget 3 --sizes 4M,32M,256M --live 1.0 --bits 8
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
