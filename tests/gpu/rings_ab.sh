#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/rings_ab.sh LOGS [BUILD] [SECONDS]
# The library's sums in rings and other ways to run them (warps, asking L2 ahead, order of packs), in 150 s or SECONDS beside
# what it takes to build them: on one GPU with 16 and 32 CTAs (a group of 500 tensors, too), between two in turns with NCCL
# with 32, 64 and 128 CTAs and few and many slots. What does not fit is left out. LOGS gets one.log, two.log and bench.jsonl.
# Ends with `N passed, N failed, N skipped`; 77 where there is no GPU.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,8s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build-nvlink-day}")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
passed=0 failed=0 skipped=0

# row LOG COMMAND...: behind what is in the log.
row() {
    local log=$logs/$1 left=$((end - SECONDS))
    shift
    if [ "$left" -lt 5 ]; then
        skipped=$((skipped + 1))
        return
    fi
    printf '=== %s\n' "${*#"$build"/}" >>"$log"
    if timeout -k 5 "$left" "$@" >>"$log" 2>&1 </dev/null; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed (status $?): $*"
        grep -v '^{' "$log" | tail -n 5 | sed 's/^/    | /'
    fi
}

cd "$root" && . tools/setup build || exit 1
[ -f "$build/build.ninja" ] ||
    meson setup "$build" -Dkernels=enabled "-Dgpu_arch=${GPU_ARCH:-90}" -Dvendor_includes= || exit 1
ninja -C "$build" kernels/libloongkernels-variants.so perf/kernels/loongcomm-bench-peers \
    perf/kernels/loongcomm-bench-rings >"$logs/build.log" 2>&1 || { tail -n 20 "$logs/build.log"; exit 1; }
end=$((SECONDS + ${3:-150}))
library=$build/kernels/libloongkernels-variants.so
peers=("$build/perf/kernels/loongcomm-bench-peers" "$library")
if folder=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null); then
    export LD_LIBRARY_PATH=$folder/nccl/lib:$folder/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    [ -f "$folder/nccl/lib/libnccl.so.2" ] && peers+=(--nccl "$folder/nccl/lib/libnccl.so.2")
fi
these=0,$("${peers[@]}" --list 1 | sed -n 's/^ *\([0-9]*\) \(ways\|prefetch\).*/\1/p' | paste -sd,)

row one.log "$build/perf/kernels/loongcomm-bench-rings" "$library" --limit 1 --samples 31 --variant "$these" \
    --cases 0,3,4,2,8 --ctas 16,32 --slots 4
if [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ]; then
    for how in '64 64 8' '32 64 4' '32 64 8' '128 128 4' '64 64 4' '64 64 2'; do
        set -- $how
        row two.log "${peers[@]}" --variants "$these" --cases 0,1,2,9 --ctas "$1" --channels "$2" --slots "$3"
    done
fi
sed -n '/^{/p' "$logs/one.log" "$logs/two.log" >"$logs/bench.jsonl" 2>/dev/null
grep -hv '^{' "$logs/one.log" "$logs/two.log" 2>/dev/null
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
