#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/tune_sweep.sh LOGS BUILD SECONDS [--ranks 2,8,4] [--nets sockets,plugin] [--ops allreduce,allgather,reducescatter]
#            [--sizes 8,1k,...,256m] [--having FILE]... [--again] | --rig LOGS BUILD SECONDS
# Is the tuner's profile ever slower than NCCL's default, and how far is it from the best of NCCL's algorithms, protocols
# and channels? For ranks that are nodes of their own on the GPUs here (under MPS where they share one), over NCCL's sockets
# and our network plugin, for all-reduce, all-gather and reduce-scatter of 8 B to 256 MB. For each network and number of
# ranks `loongcomm tune` makes a profile; then one job measures in turns the default, the default again, what the tuner
# plugin makes of that profile, and every way there is, also on a communicator with 8 channels, which a tuner cannot give.
# What seems better than the profile is then measured anew beside it: the best of many noisy figures is also the luckiest.
# What is better still, or is not for noise alone, is measured in two other jobs or more, which have other luck (which
# connection is served by whom), until medians of equal sides differ by 3 % at most; those jobs decide together.
# All six pairs take 480 seconds together (SECONDS; they get shares of it, and nothing starts that would not fit). What is
# measured is in LOGS and is not measured again (but with --again): another call with the same LOGS goes on with the pairs,
# or sizes of one, that are left. --having: the tune_sweep.json of an earlier run, whose sizes are not measured but stand in
# this run's; with SECONDS 0 nothing is measured. LOGS/summary.txt has a line for each
# size, LOGS/tune_sweep.json the same for programs. Ends with `N passed, N failed` sizes: 77 where there is no GPU. --rig: on
# the host rig, which shows that it works and nothing else. BUILD needs loongcomm-bench, loongcomm, the tuners and the
# network plugin.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
rig=
[ "${1:-}" = --rig ] && rig=--rig && shift
[ $# -ge 3 ] || { sed -n '4,22s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1") build=$(readlink -f "$2") seconds=$3
shift 3
run=(python3 -B "$root/tests/gpu/tune_sweep.py" "$logs" "$build/perf/loongcomm-bench" "$build/interpose/cli/loongcomm"
    "$build/plugin/net/abi/libnccl-net-loongcomm.so" "$seconds" $rig "$@")
if [ -n "$rig" ] || [ "$seconds" = 0 ]; then
    exec "${run[@]}"
fi
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
LD_LIBRARY_PATH=$(python3 "$root/tests/gpu/real_libraries.py" \
    "$(cd "$build/tests/rig" && ls -d libcudart.so.[0-9]* | grep -v '\.p$' | head -n 1)") || exit 1
export LD_LIBRARY_PATH
exec bash "$root/tests/gpu/mps.sh" 8 "${run[@]}"
