#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/tune_sweep.sh LOGS BUILD SECONDS [--ranks 2,4,8] [--nets sockets,plugin]
# Is the tuner's profile ever slower than NCCL's default, and how far is it from the best that NCCL's algorithms,
# protocols and channels give? For ranks that are nodes of their own on the GPUs here (under MPS where they share one),
# over NCCL's sockets and our network plugin, for all-reduce, all-gather and reduce-scatter of 8 B to 256 MB: a profile is
# made by `loongcomm tune` (3 minutes), the default is measured against itself twice, then the profile and every way of
# the sweep against the default. A run takes about 15 seconds, all of them for one network and number of ranks about 20
# minutes. SECONDS bound one call; what is in LOGS is not measured again, so call it until no runs are left. Prints a line
# for each size; ends with `N passed, N failed` sizes; 77 where there is no GPU. BUILD needs loongcomm-bench, loongcomm and
# both plugins.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 3 ] || { sed -n '4,13s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2") seconds=$3
shift 3
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
LD_LIBRARY_PATH=$(python3 "$root/tests/gpu/real_libraries.py" \
    "$(cd "$build/tests/rig" && ls -d libcudart.so.[0-9]* | grep -v '\.p$' | head -n 1)") || exit 1
export LD_LIBRARY_PATH
exec bash "$root/tests/gpu/mps.sh" 8 python3 -B "$root/tests/gpu/tune_sweep.py" "$logs" "$build/perf/loongcomm-bench" \
    "$build/interpose/cli/loongcomm" "$build/plugin/tuner/libnccl-tuner-loongcomm.so" \
    "$build/plugin/net/abi/libnccl-net-loongcomm.so" "$seconds" "$@"
