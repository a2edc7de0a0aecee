#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/topo.sh LOGS BUILD
# Is our model of this machine NCCL's? Two nodes (by NCCL_HOSTID) of all GPUs here run a small job; NCCL's dump of its
# topology is held against `loongcomm topo` on the live machine, and every way and port in each rank's log against our
# prediction, from the live machine and from the dump. Then the same with topology files that put GPUs and ports
# elsewhere, and with that of a real machine of 16 ports, which a plugin pretends to have: what NCCL then says must be
# what we said before. BUILD needs loongcomm, libloongtopo.so (which needs hwloc and libxml2), and topo_job and
# libnccl-net-named.so of tests/gpu. All logs go to LOGS; ends with `N passed, N failed`; 77 where there is no GPU.
# Takes 20 to 50 seconds; TOPO_SECONDS: other than 58 at most.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -eq 2 ] || { sed -n '4,11s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2")
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -eq 0 ]; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
ranks=$((2 * gpus))
end=$((SECONDS + ${TOPO_SECONDS:-58}))
if [ -z "${LC_TOPO_MPS:-}" ]; then
    LC_TOPO_MPS=1 exec bash "$root/tests/gpu/mps.sh" "$ranks" bash "$0" "$logs" "$build"
fi
command=${LC_CLI:-$build/interpose/cli/loongcomm}
passed=0 failed=0

# check NAME COMMAND...: what it prints is the reason.
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        passed=$((passed + 1)) && echo "passed: $name: ${output##*$'\n'}"
    else
        failed=$((failed + 1)) && echo "FAILED: $name" && printf '%s\n' "$output" | tail -n 40 | sed 's/^/    | /'
    fi
}

compare() { python3 -B "$root/tests/gpu/topo_compare.py" "$@"; }

# What we say of FILE (none: this machine) goes to LOGS/NAME.json: not what we know better than NCCL.
ours() { "$command" topo --as-nccl ${2:+--input "$2"} --paths --json >"$logs/$1.json"; }

# job NAME [SETTING=VALUE]...: NCCL's logs go to LOGS/NAME.nccl.*, its dump to LOGS/NAME.dump.xml.
job() {
    local name=$1 left=$((end - SECONDS))
    shift
    rm -f "$logs/$name".nccl.* "$logs/$name.dump.xml"
    [ "$left" -ge 5 ] || { echo "no time left"; return 1; }
    timeout -k 5 "$left" env -u LD_PRELOAD LD_LIBRARY_PATH="$libraries" NCCL_DEBUG=INFO \
        NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING,NET,ENV NCCL_DEBUG_FILE="$logs/$name.nccl.%p" \
        NCCL_TOPO_DUMP_FILE="$logs/$name.dump.xml" "$@" \
        ${LC_TOPO_JOB:-"$build/tests/gpu/topo_job"} "$ranks" $only </dev/null &&
        [ -s "$logs/$name.dump.xml" ] && ls "$logs/$name".nccl.* >/dev/null
}

libraries= only=
if [ -z "${LC_TOPO_JOB:-}" ]; then
    libraries=$(python3 "$root/tests/gpu/real_libraries.py" \
        "$(cd "$build/tests/rig" && ls -d libcudart.so.[0-9]* | grep -v '\.p$' | head -n 1)") || exit 1
fi
check "our model of this machine" ours live ${LC_TOPO_LIVE:+"$LC_TOPO_LIVE"}
check "NCCL's job" job plain
check "our model of NCCL's dump" ours plain "$logs/plain.dump.xml"
check "devices and links: this machine, NCCL's dump" compare --machine "$logs/live.json" "$logs/plain.json"
check "ways and ports: NCCL's log, its dump" compare --paths "$logs/plain.json" "$logs"/plain.nccl.*
check "ways and ports: NCCL's log, this machine" compare --paths "$logs/live.json" "$logs"/plain.nccl.*
for file in $(python3 -B "$root/tests/gpu/topo_given.py" "$logs/plain.dump.xml" "$logs"); do
    name=$(basename "$file" .xml)
    check "our model of $name" ours "$name" "$file"
    check "NCCL's job, $name" job "$name" NCCL_TOPO_FILE="$file"
    check "ways and ports: NCCL's log, $name" compare --paths "$logs/$name.json" "$logs/$name".nccl.*
done
real=$root/tests/topology/data/oci-hpc/H100-topology.xml only=init
if names=$(python3 -B "$root/tests/gpu/topo_given.py" "$logs/plain.dump.xml" "$logs" "$real"); then
    check "our model of given-real" ours given-real "$logs/given-real.xml"
    # whether a communicator comes about is not the question: nothing can be sent
    job given-real NCCL_TOPO_FILE="$logs/given-real.xml" LD_LIBRARY_PATH="$libraries:$build/tests/gpu" \
        NCCL_NET_PLUGIN=named LC_NET_NAMES="$names" >"$logs/given-real.log" 2>&1
    check "ways: NCCL's log, given-real" compare --paths "$logs/given-real.json" "$logs"/given-real.nccl.*
fi
grep -hE 'PXN|via NET' "$logs"/plain.nccl.* "$logs"/given-real.nccl.* 2>/dev/null | cut -c 1-300 | head -n 4
[ "$gpus" -gt 1 ] || echo "one GPU shows no PXN: that needs two of a node, and GPUDirect"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -ge 20 ]
