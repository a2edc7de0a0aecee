#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/rings_day.sh LOGS [BUILD]
# The rings on a GPU, what matters most first, in 8 minutes at most: builds what is needed for the GPU at hand (sm_90
# unless GPU_ARCH says otherwise), plays calls with 2 and 4 ranks, measures every variant of the kernels over grids and
# shapes, then processes under MPS, variants with random calls and compute-sanitizer. Eight files go to the folder LOGS;
# summary.txt has a line for each part, bench.jsonl all rows. Ends with `N passed, N failed, N skipped`; 77 where there is
# no GPU. RINGS_DAY_SECONDS: other than 480.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,10s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build-rings-day}")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
end=$((SECONDS + ${RINGS_DAY_SECONDS:-480}))
passed=0 failed=0 skipped=0
: >"$logs/summary.txt"

say() { echo "$*" | tee -a "$logs/summary.txt"; }

# row NAME LIMIT LOG COMMAND...: behind what is in the log; not begun when the time is up.
row() {
    local name=$1 limit=$2 log=$logs/$3 begun=$SECONDS left=$((end - SECONDS)) status
    shift 3
    if [ "$left" -lt 5 ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    printf '=== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 </dev/null
    status=$?
    case $status in
    0) passed=$((passed + 1)) && say "passed: $name, $((SECONDS - begun)) s" ;;
    77) skipped=$((skipped + 1)) && say "skipped: $name: $(tail -n 1 "$log")" ;;
    *)
        failed=$((failed + 1))
        say "failed: $name (status $status), $((SECONDS - begun)) s"
        tail -n 15 "$log" | sed 's/^/    | /'
        ;;
    esac
    return "$status"
}

targets="kernels/libloongkernels.so kernels/libloongkernels-variants.so tests/gpu/rings tests/gpu/rings_together
    perf/kernels/loongcomm-bench-rings"
build_it() {
    set --
    cd "$root" && . tools/setup build || return 1
    [ -f "$build/build.ninja" ] ||
        meson setup "$build" -Dkernels=enabled "-Dgpu_arch=${GPU_ARCH:-90}" "-Dvendor_includes=$vendor_includes" || return 1
    ninja -C "$build" $targets
}
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return 77; }
    compute-sanitizer "$@"
}
export -f build_it sanitize
export root build targets

product=$build/kernels/libloongkernels.so
variants=$build/kernels/libloongkernels-variants.so
rings=$build/tests/gpu/rings
together=$build/tests/gpu/rings_together
bench=("$build/perf/kernels/loongcomm-bench-rings" "$variants" --limit 1 --samples 51)
all=0,1,18,19,20,21 # plain stores, and other shapes with them

finish() {
    sed -n '/^{/p' "$logs/bench.log" >"$logs/bench.jsonl" 2>/dev/null
    sed -i '/^{/d' "$logs/bench.log" 2>/dev/null
    say "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

row build 150 build.log bash -c build_it || finish
row "all ranks in one grid" 40 calls.log "$together"
row "2 ranks as streams" 40 calls.log "$rings" "$product" --ranks 2 --seconds 4
row "4 ranks as streams" 40 calls.log "$rings" "$product" --ranks 4 --seconds 4
row "what has to be reached" 60 bench.log "${bench[@]}" --ctas 16,32,64
row "all-to-all" 40 bench.log "${bench[@]}" --ctas 16,32 --channels 32 --slots 4,8 --cases 12,13,14,15,16,17
row "every variant, 32 CTAs" 60 bench.log "${bench[@]}" --variant $all --ctas 32 --cases 0,2,1

row "slots and channels" 40 bench.log "${bench[@]}" --ctas 32 --channels 32,64 --slots 2,4,6,8 --cases 0,1,2
row "2 ranks as processes under MPS" 40 mps.log bash "$root/tests/gpu/mps.sh" 2 "$rings" "$product" --processes --ranks 2 --seconds 4
row "4 ranks as processes under MPS" 40 mps.log bash "$root/tests/gpu/mps.sh" 4 "$rings" "$product" --processes --ranks 4 --seconds 4
for v in 1 6 8 10; do
    row "variant $v with random calls" 25 variants.log "$rings" "$variants" --variant $v --ranks 2 --seconds 2
done
row "memcheck" 90 sanitizer.log bash -c 'sanitize "$@"' - --tool memcheck --error-exitcode 9 "$together" 9
row "4 ranks" 40 bench.log "${bench[@]}" --ranks 4 --ctas 16,32 --cases 0,1,2,5,7
finish
