#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/kernels_checked.sh LOGS BUILD [SECONDS [TOOL...]]
# The kernels library of a built folder under compute-sanitizer: every tool, or those named, over the tests of communication
# and compute kernels and of attention, with few cases, side by side. None may take longer than SECONDS (90). Each leaves a
# log in the folder LOGS. Ends with `N passed, N failed`; 77 where there is no GPU or no compute-sanitizer.
set -u
[ $# -ge 2 ] || { sed -n '4,7s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$1 build=$2 limit=${3:-90}
shift $(($# < 3 ? $# : 3))
tools=${*:-memcheck racecheck initcheck synccheck}
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if ! command -v compute-sanitizer >/dev/null; then
    echo "SKIPPED: no compute-sanitizer"
    exit 77
fi

# TOOL NAME PROGRAM ARGUMENTS...
check() {
    local tool=$1 name=$2 begun=$SECONDS status
    shift 2
    timeout -k 5 "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" \
        >"$logs/$name-$tool.log" 2>&1 </dev/null
    status=$?
    echo "$status $name under $tool, $((SECONDS - begun)) s: $(grep -E 'SUMMARY' "$logs/$name-$tool.log" | tail -n 1)"
}

for tool in $tools; do
    cuda=$build/kernels/libloongkernels.so host=$build/kernels/libloongkernels-host.so tests=$build/tests/kernels
    check "$tool" communication "$tests/test_kernels_gpu" "$cuda" "$host" --small >"$logs/1-$tool" &
    set_of_cases=--small
    [ "$tool" = racecheck ] && set_of_cases=--races # which looks at memory that threads share, alone, and is slow
    check "$tool" compute "$tests/test_compute_gpu" "$cuda" "$host" $set_of_cases >"$logs/2-$tool" &
    check "$tool" attention "$tests/test_attention_gpu" "$cuda" --small >"$logs/3-$tool" &
done
wait
passed=0 failed=0
for tool in $tools; do
    for n in 1 2 3; do
        read -r status rest <"$logs/$n-$tool"
        rm -f "$logs/$n-$tool"
        if [ "$status" -eq 0 ]; then
            passed=$((passed + 1)) && echo "passed: $rest"
        else
            failed=$((failed + 1)) && echo "failed (status $status): $rest"
        fi
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
