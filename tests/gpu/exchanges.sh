#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/exchanges.sh LOGS [BUILD] [SECONDS]
# All-to-alls between two GPUs beside NCCL, in 170 s or SECONDS, builds not counted: each size with and without lines, eager
# and in graphs, by share of zeros, as sends and receives, the kernels alone with 32 and 64 CTAs, and on one GPU; random calls
# beside NCCL's through both ways, and the kernels under memcheck. Files go to the folder LOGS; summary.txt has a line for each part.
# Ends with `N passed, N failed, N skipped`; 77 where there are not two GPUs.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,9s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build}")
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then
    echo "SKIPPED: no two GPUs on this machine"
    exit 77
fi
cd "$root" || exit 2
# shellcheck source=tests/gpu/rows.sh
. "$root/tests/gpu/rows.sh"

# measured NAME SETTINGS OPTION...: loongcomm-bench alltoall.
measured() {
    local name=$1 settings=$2
    shift 2
    # shellcheck disable=SC2086 # a list
    row "$name" 30 $peer $settings "$build/perf/loongcomm-bench" alltoall "$@" --ranks 2 --settle 1 --json "$logs/$name.json"
    grep -E ' loongcomm +[0-9]' "$logs/$name.log" | tee -a "$logs/summary.txt"
}

# beside NAME CASES OPTION...: the kernels alone, in one process.
beside() {
    local name=$1 cases=$2
    shift 2
    row "$name" 30 LD_LIBRARY_PATH="$libraries" "$build/perf/kernels/loongcomm-bench-peers" \
        "$build/kernels/libloongkernels.so" --nccl "${libraries%%:*}/libnccl.so.2" --cases "$cases" "$@"
    grep -E '^all-to-all' "$logs/$name.log" | tee -a "$logs/summary.txt"
}

# random NAME SETTINGS: calls of all kinds by two ranks, compared with what they must give.
random() {
    # shellcheck disable=SC2086 # a list
    row "$1" 45 $peer $2 LD_PRELOAD="$build/interpose/libloongcomm.so" LOONGCOMM_SCRATCH=4m LOONGCOMM_MIN_BYTES=4096 \
        LOONGCOMM_EXCHANGE_MIN_BYTES=2000 LOONGCOMM_HANG_TIMEOUT=20 "$build/tests/gpu/mixed" --ranks 2 --comms 2 --hang 30 \
        --seed "$(date +%s)" --seconds 8 --says committed
}

end=$((SECONDS + 300))
needed="interpose/libloongcomm.so kernels/libloongkernels.so perf/loongcomm-bench perf/kernels/loongcomm-bench-peers perf/kernels/loongcomm-bench-rings
    tests/gpu/mixed"
row build 300 bash -c "[ -f '$build/build.ninja' ] || bash tools/build --configure '$build' -Dkernels=enabled -Dgpu_arch=${GPU_ARCH:-90}
    . tools/setup build && ninja -C '$build' ${needed//$'\n'/ }" || exit 1
libraries=$(python3 -c 'import nvidia
p = list(nvidia.__path__)[0]
print(p + "/nccl/lib:" + p + "/cu13/lib")') || exit 1
peer="LOONGCOMM_PEER=force LOONGCOMM_HOSTID=one LD_LIBRARY_PATH=$libraries"
slots=LOONGCOMM_EXCHANGE_SHORT_BYTES=0
end=$((SECONDS + ${3:-170}))

measured large "" --budget 8 --sizes 16M,256M
measured masked "" --mask --budget 4 --sizes 256M --live 0.4,0.25,0.1
measured experts "" --experts 512 --budget 4 --sizes 256M --live 0.4,0.25,0.1
beside kernels-zeros 10,11,4,28,29,30,31,32,33,34,35,36 --ctas 64 --rounds 3
measured graph "" --graph --budget 3 --sizes 64K,256K,1M,4M --live 1.0
for ctas in 32 48; do
    measured "graph-$ctas" "" --env-b NCCL_MAX_CTAS=$ctas --graph --budget 1 --sizes 4M --live 1.0
done
random random-lines ""
measured eager "" --budget 4 --sizes 64K,256K,1M,4M --live 1.0
beside kernels 18,17,16,15,12,3 --ctas 64
row one-gpu 30 "$build/perf/kernels/loongcomm-bench-rings" "$build/kernels/libloongkernels.so" --cases 12,13,14,15,18,16,17 \
    --ctas 16,32 --slots 4 --limit 0.3 && grep -E '^all-to-all' "$logs/one-gpu.log" | tee -a "$logs/summary.txt"
random random-some "LOONGCOMM_EXCHANGE_SHORT_BYTES=20000"
row memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$build/perf/kernels/loongcomm-bench-peers" \
    "$build/kernels/libloongkernels.so" --rounds 1 --cases 18,16,15
measured zeros "" --budget 3 --sizes 1M,4M --live 0.4,0.1
measured sendrecv "" --sendrecv --budget 3 --sizes 64K,1M,256M --live 1.0
measured tiny "" --budget 2 --sizes 64,1K,8K,32K --live 1.0
measured eager-slots "$slots" --budget 3 --sizes 64K,256K,1M,4M --live 1.0
beside kernels-slots 18,17,16,15 --short 0 --ctas 32,64
beside kernels-32 18,17,16,15,12,3,10,11,4 --ctas 32
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
