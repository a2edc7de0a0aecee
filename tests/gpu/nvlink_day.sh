#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/nvlink_day.sh LOGS [BUILD] [SECONDS]
# What the rings' way over the link costs, what matters most first, in 480 s or SECONDS: builds the variants of the kernels
# for the GPUs at hand (sm_90 unless GPU_ARCH says otherwise); measures what the link gives to bare stores, every variant in
# turns with NCCL and with the library's own kernels (sums, bf16 wire, all-to-alls dense and with zeros, one-shot sums in
# graphs) with 32, 48 and 64 CTAs, other sizes, memory and slots, sums beside products with 8, 16 and 32 CTAs, and at last
# variants with random calls. A variant that does not end is named and left out from then on. Seven files go to the folder
# LOGS: table.txt has the best of each case, bench.jsonl all rows. Called again with the same LOGS it goes on with what had
# not passed. Ends with `N passed, N failed, N skipped`; 77 where there is no GPU.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,13s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build-nvlink-day}")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
end=$((SECONDS + ${3:-480}))
passed=0 failed=0 skipped=0 without=
summary=$logs/summary.txt
touch "$summary"

say() { echo "$*" | tee -a "$summary"; }

# row NAME LIMIT LOG COMMAND...: behind what is in the log; not begun when the time is up, nor when it has passed before.
row() {
    local name=$1 limit=$2 log=$logs/$3 begun=$SECONDS left=$((end - SECONDS)) status
    shift 3
    grep -qxF "passed: $name" "$summary" && return 0
    if [ "$left" -lt 5 ]; then
        skipped=$((skipped + 1))
        echo "skipped: $name: no time left"
        return 77
    fi
    [ "$limit" -le "$left" ] || limit=$left
    printf '=== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 </dev/null
    status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
        say "passed: $name"
        echo "    $((SECONDS - begun)) s"
    elif [ "$status" -eq 124 ] && [ "$limit" -eq "$left" ]; then
        skipped=$((skipped + 1))
        echo "skipped: $name: cut short"
    elif [ "$status" -ne 3 ]; then
        failed=$((failed + 1))
        say "failed: $name (status $status), $((SECONDS - begun)) s"
        grep -v '^{' "$log" | tail -n 12 | sed 's/^/    | /'
    fi
    return "$status"
}

# measured NAME LIMIT OPTION VALUE...: loongcomm-bench-peers, again without what was stuck.
measured() {
    local name=$1 limit=$2 number tries
    shift 2
    for tries in 1 2 3 4; do
        row "$name" "$limit" bench.log "${bench[@]}" "$@" ${without:+--without "$without"} && return
        [ $? -eq 3 ] || return
        number=$(sed -n 's/^stuck: *//p' "$logs/bench.log" | tail -n 1)
        say "stuck: $number in $name"
        [ "${number:--}" != - ] && [ "$number" -gt 0 ] || break
        without=${without:+$without,}$number
    done
    failed=$((failed + 1))
    say "failed: $name: stuck $tries times"
}

targets="kernels/libloongkernels-variants.so perf/kernels/loongcomm-bench-peers perf/kernels/loongcomm-bench-link tests/gpu/rings"
build_it() {
    local vendor_includes=
    set --
    cd "$root" && . tools/setup build || return 1
    [ -f "$build/build.ninja" ] ||
        meson setup "$build" -Dkernels=enabled "-Dgpu_arch=${GPU_ARCH:-90}" "-Dvendor_includes=$vendor_includes" || return 1
    ninja -C "$build" $targets
}
export -f build_it
export root build targets

# number NAME: of the variant.
number() {
    "${bench[@]}" --list 1 2>/dev/null | sed -n "s/^ *\([0-9]*\) $1\$/\1/p"
}

finish() {
    sed -n '/^{/p' "$logs/link.log" "$logs/bench.log" >"$logs/bench.jsonl" 2>/dev/null
    python3 "$root/tests/gpu/nvlink_table.py" "$logs/bench.jsonl" >"$logs/table.txt" && cat "$logs/table.txt"
    say "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

variants=$build/kernels/libloongkernels-variants.so
bench=("$build/perf/kernels/loongcomm-bench-peers" "$variants")
row build 240 build.log bash -c build_it || { [ -x "${bench[0]}" ] || finish; }
if folder=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null); then
    export LD_LIBRARY_PATH=$folder/nccl/lib:$folder/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    [ -f "$folder/nccl/lib/libnccl.so.2" ] && bench+=(--nccl "$folder/nccl/lib/libnccl.so.2")
fi
without=$(sed -n 's/^stuck: \([1-9][0-9]*\) .*/\1/p' "$summary" | paste -sd,)

row link 60 link.log "$build/perf/kernels/loongcomm-bench-link" 7
measured "variants, 32 CTAs" 120 --variants all --cases 0,1,2,3,4
measured "one-shot sums" 60 --variants all --cases 5,6,7,8
measured "variants, 48 CTAs" 90 --variants all --cases 0,1,3,4 --ctas 48 --channels 48
measured "variants, 64 CTAs" 90 --variants all --cases 0,1,2,3,4 --ctas 64
measured "beside products" 100 --beside 1 --ctas 8,16,32 --cases 0,1 --variants "0,$(number 'plain stores'),$(number 'plain, same domain')"
measured "other sizes, 32 CTAs" 60 --variants all --cases 9,10,11,12,13,14
measured "plain memory" 40 --memory plain --variants "0,$(number 'plain stores'),$(number 'plain, pull')" --cases 0,1,3,4
for slots in 4 16; do
    measured "$slots slots" 40 --slots $slots --variants "0,$(number 'plain stores'),$(number 'plain, publishers apart')" --cases 0,1,2,3,4
done
measured "128 channels, 64 CTAs" 40 --channels 128 --slots 4 --ctas 64 --variants "0,$(number 'plain stores')" --cases 0,1,3,4
for v in $("${bench[@]}" --list 1 2>/dev/null | sed -n 's/^ *\([1-9][0-9]*\) .*/\1/p'); do
    row "variant $v with random calls" 25 random.log "$build/tests/gpu/rings" "$variants" --variant "$v" --ranks 2 --seconds 1
done
finish
