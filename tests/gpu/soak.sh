#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/soak.sh LOGS BUILD [SECONDS [RANKS]]
# Random programs of everything at once (tests/gpu/mixed) on the GPUs at hand for SECONDS (300) in all: 2, 4 and 8 ranks
# (or the parts with RANKS alone), which share a GPU under MPS where there are too few, one, two and four communicators,
# matrix products beside, graphs, rings that grow and rings of one slot, as many CTAs as there may be, bf16 on the wire,
# also with error feedback and rounded stochastically, one queue to the device; at first NCCL alone, which has to take
# the programs, too. What is not built in the folder BUILD is built (sm_90 unless GPU_ARCH says otherwise), which is not
# counted. Seeds begin at SOAK_SEED (the time of day); a program that fails or hangs names its own: `mixed --seed N
# --programs 1` makes it again. Logs go to the folder LOGS; summary.txt has a line for each part. Ends with `N passed, N
# failed, N skipped`; 77 where there is no GPU.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 2 ] || { sed -n '4,12s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "$2")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi
if [ -z "${LC_SOAK:-}" ]; then
    LC_SOAK=1 exec bash "$root/tests/gpu/mps.sh" "${4:-8}" bash "$0" "$logs" "$build" "${3:-300}" "${4:-}"
fi
cd "$root" || exit 2
passed=0 failed=0 skipped=0
: >"$logs/summary.txt"
say() { echo "$*" | tee -a "$logs/summary.txt"; }

needed="interpose/libloongcomm.so kernels/libloongkernels.so tests/gpu/mixed tests/gpu/libmixed-load.so"
build_it() {
    bash tools/build --configure "$build" -Dkernels=enabled "-Dgpu_arch=${GPU_ARCH:-90}" || return 1
    # shellcheck disable=SC2086 # a list
    ninja -C "$build" $needed
}
for file in $needed; do
    [ ! -e "$build/$file" ] || continue
    build_it >"$logs/build.log" 2>&1 || { tail -n 20 "$logs/build.log"; exit 1; }
    break
done
libraries=$(python3 -c 'import nvidia
p = list(nvidia.__path__)[0]
print(p + "/nccl/lib:" + p + "/cu13/lib")') || exit 1

# NCCL's own kernels must all find room beside each other when eight ranks with four communicators share a GPU.
common="LD_LIBRARY_PATH=$libraries LOONGCOMM_REPORT=text LOONGCOMM_SCRATCH=4m LOONGCOMM_MIN_BYTES=4096
    LOONGCOMM_EXCHANGE_MIN_BYTES=2000 LOONGCOMM_HANG_TIMEOUT=20 LOONGCOMM_HOSTID=one
    NCCL_MAX_NCHANNELS=2 NCCL_MAX_P2P_NCHANNELS=2 NCCL_BUFFSIZE=1048576"
ours="LD_PRELOAD=$build/interpose/libloongcomm.so LOONGCOMM_PEER=force"
bf16=LOONGCOMM_ALLREDUCE_WIRE=bf16
fed="LOONGCOMM_ERROR_FEEDBACK=yes LOONGCOMM_ROUNDING=stochastic LOONGCOMM_FEEDBACK_MAX=32m"
one_slot="LOONGCOMM_STAGING_START=1m LOONGCOMM_STAGING_GROW=0"
wide="LOONGCOMM_MAX_CTAS=128 NCCL_MAX_CTAS=4 NCCL_CGA_CLUSTER_SIZE=0"
grows="LOONGCOMM_STAGING_START=1m LOONGCOMM_STAGING_WARMUP=8 LOONGCOMM_STAGING_CALM=300"
# NAME RANKS PARTS-OF-THE-TIME SETTINGS -- OPTIONS
parts="plain-2 2 2 -- --comms 2
plain-8 8 2 -- --comms 4
bf16-8 8 5 $ours $bf16 -- --comms 4
data-2 2 4 $ours -- --comms 4 --bytes 24000000
bf16-4 4 3 $ours $bf16 -- --comms 2
fed-4 4 3 $ours $bf16 $fed -- --comms 2
data-8 8 5 $ours -- --comms 2
grows-2 2 5 $ours $bf16 $grows -- --comms 2 --bytes 48000000 --says from_now_on
fed-2 2 3 $ours $bf16 $fed -- --comms 2
one-slot-4 4 4 $ours $one_slot -- --comms 4
one-slot-8 8 4 $ours $bf16 $one_slot -- --comms 2
grows-4 4 4 $ours $grows -- --comms 2 --bytes 32000000
cast-4 4 3 $ours LOONGCOMM_PEER=off $bf16-accurate -- --comms 2
cast-fed-4 4 2 $ours LOONGCOMM_PEER=off $bf16-accurate $fed -- --comms 2
wide-2 2 3 $ours $bf16 $wide -- --comms 1 --bytes 24000000
wide-4 4 2 $ours LOONGCOMM_MAX_CTAS=64 -- --comms 2
one-queue-2 2 3 $ours CUDA_DEVICE_MAX_CONNECTIONS=1 -- --comms 2"
[ -z "${4:-}" ] || parts=$(awk -v ranks="$4" '$2 == ranks' <<<"$parts")
[ -n "$parts" ] || { echo "soak.sh: no part has ${4:-} ranks; 2, 4 and 8 do" >&2; exit 2; }

ordered=
seed=${SOAK_SEED:-$(($(date +%s) % 100000 * 10000))}
end=$((SECONDS + ${3:-300}))
rest=$(awk '{ n += $3 } END { print n }' <<<"$parts")
while read -r name ranks share options; do
    settings=${options%%-- *} options=${options#*-- }
    left=$((end - SECONDS))
    share=$((left * share / rest)) rest=$((rest - $(awk -v n="$name" '$1 == n { print $3 }' <<<"$parts")))
    seconds=$((share - 3 - ranks)) # they need some to begin and to end
    [ "$seconds" -ge 3 ] || seconds=3
    limit=$((seconds + 100))
    [ "$limit" -le $((left + 30)) ] || limit=$((left + 30))
    if [ "$left" -lt 10 ]; then
        skipped=$((skipped + 1)) && say "skipped: $name: no time left"
        continue
    fi
    [ -z "$settings" ] || options="$options --says committed"
    seed=$((seed + 100000)) begun=$SECONDS
    # shellcheck disable=SC2086 # settings and options are lists
    timeout -k 5 "$limit" env -u LD_PRELOAD $common $settings "$build/tests/gpu/mixed" --ranks "$ranks" \
        --load "$build/tests/gpu/libmixed-load.so" --hang 45 --seed "$seed" --seconds "$seconds" $options $ordered \
        >"$logs/$name.log" 2>&1 </dev/null
    status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1)) && say "passed: $name, $((SECONDS - begun)) s"
    else
        [ -n "$settings" ] || ordered=--ordered # perhaps NCCL takes these
        failed=$((failed + 1)) && say "failed: $name (status $status), seed $seed, $((SECONDS - begun)) s"
        grep -vE '^ *(#|communicator)' "$logs/$name.log" | tail -n 25 | sed 's/^/    | /'
    fi
    grep -E '^mixed:' "$logs/$name.log" | sed 's/^/    /' | tee -a "$logs/summary.txt"
done <<<"$parts"
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
