#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/gpu/kernels.sh LOGS [BUILD]
# The kernels library on a GPU, in a few minutes: builds it for the GPU at hand (sm_90 unless GPU_ARCH says
# otherwise), checks it against the host library, once more with few cases under compute-sanitizer, and measures
# it beside plain copies. Logs go to the folder LOGS. Ends with `N passed, N failed`; 77 where there is no GPU.
set -u
root=$(readlink -f "$(dirname "$0")/../..")
[ $# -ge 1 ] || { sed -n '4,7s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
logs=$(readlink -f "$1")
build=$(readlink -m "${2:-$root/build-gpu-kernels}")
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "SKIPPED: no GPU on this machine"
    exit 77
fi

passed=0 failed=0 skipped=0

# row NAME LIMIT LOG COMMAND...: its output goes to LOG, the end of it is shown when it fails.
row() {
    local name=$1 limit=$2 log=$logs/$3 begun=$SECONDS status
    shift 3
    timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null
    status=$?
    case $status in
    0) passed=$((passed + 1)) && echo "passed: $name, $((SECONDS - begun)) s" ;;
    77) skipped=$((skipped + 1)) && echo "skipped: $name: $(tail -n 1 "$log")" ;;
    *)
        failed=$((failed + 1))
        echo "failed: $name (status $status), $((SECONDS - begun)) s; the end of $log:"
        tail -n 40 "$log" | sed 's/^/    | /'
        ;;
    esac
    return "$status"
}

build_it() {
    set --
    cd "$root" && . tools/setup build || return 1
    [ -f "$build/build.ninja" ] ||
        meson setup "$build" -Dkernels=enabled "-Dgpu_arch=${GPU_ARCH:-90}" "-Dvendor_includes=$vendor_includes" || return 1
    ninja -C "$build" kernels/libloongkernels.so kernels/libloongkernels-host.so \
        tests/kernels/test_kernels_gpu tests/kernels/test_kernels_host \
        tests/kernels/test_compute_gpu tests/kernels/test_compute_host tests/kernels/test_attention_gpu perf/kernels/loongcomm-bench-kernels
}
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return 77; }
    compute-sanitizer --tool memcheck --error-exitcode 9 "$@"
}
export -f build_it sanitize
export root build

# cuBLASLt and cuDNN as the loader finds them, else those of torch's wheels or of the toolkit.
find_libraries() {
    python3 - <<'PY'
import glob, os, sys
patterns = [os.path.join(path, "nvidia/*/lib") for path in sys.path if path] + ["/usr/local/cuda/lib64"]
folders = [folder for pattern in patterns for folder in sorted(glob.glob(pattern))]
found = [next((f for f in folders if glob.glob(f + library)), "")
         for library in ("/libcublasLt.so.*", "/libcublas.so.*", "/libcudnn.so.9")]
print(":".join(dict.fromkeys(filter(None, found))))
PY
}
compute_paths=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(find_libraries) # not for torch, which has its own

cuda=$build/kernels/libloongkernels.so
host=$build/kernels/libloongkernels-host.so
gpu_test=$build/tests/kernels/test_kernels_gpu
compute_test=$build/tests/kernels/test_compute_gpu
attention_test=$build/tests/kernels/test_attention_gpu
if row build 120 build.log bash -c build_it; then
    row "host kernels" 60 host.log "$build/tests/kernels/test_kernels_host" "$host"
    row "CUDA kernels" 60 gpu.log "$gpu_test" "$cuda" "$host"
    row "CUDA compute kernels" 180 compute.log env LD_LIBRARY_PATH="$compute_paths" "$compute_test" "$cuda" "$host"
    row "CUDA attention" 240 attention.log env LD_LIBRARY_PATH="$compute_paths" "$attention_test" "$cuda"
    grep -hE '^FAILED|[1-9][0-9]* rounded more than once' "$logs/compute.log" "$logs/attention.log"
    row "AdamW beside torch's" 60 adamw_torch.log python3 "$root/kernels/examples/adamw_torch.py" "$cuda"
    row "blocks beside torch's" 90 blocks_torch.log python3 "$root/kernels/examples/blocks_torch.py" "$cuda"
    row "experts beside torch's" 60 moe_torch.log python3 "$root/kernels/examples/moe_torch.py" "$cuda"
    row "attention beside torch's" 90 attention_torch.log python3 "$root/kernels/examples/attention_torch.py" "$cuda"
    row "augmentation from torch" 60 augment_torch.log python3 "$root/kernels/examples/augment_torch.py" "$cuda"
    row "bench" 60 bench.log "$build/perf/kernels/loongcomm-bench-kernels"
    sed '/^{/d' "$logs/bench.log"
    grep '^{' "$logs/bench.log" >"$logs/bench.jsonl"
    row "compute kernels beside torch" 150 compute_bench.log python3 "$root/perf/kernels/compute.py" \
        --library "$cuda" --json "$logs/compute.json"
    cat "$logs/compute_bench.log"
    row "attention beside torch's back ends" 120 attention_bench.log python3 "$root/perf/kernels/attention_torch.py" \
        "$cuda" --json "$logs/attention.json"
    cat "$logs/attention_bench.log"
    row "groups of products beside torch" 60 grouped_bench.log python3 "$root/perf/kernels/grouped_torch.py" \
        "$cuda" --json "$logs/grouped.json"
    cat "$logs/grouped_bench.log"
    row "CUDA kernels under memcheck" 90 memcheck.log bash -c 'sanitize "$@"' - "$gpu_test" "$cuda" "$host" --small
    row "CUDA compute kernels under memcheck" 120 compute_memcheck.log bash -c 'sanitize "$@"' - "$compute_test" "$cuda" "$host" --small
    row "CUDA attention under memcheck" 120 attention_memcheck.log bash -c 'sanitize "$@"' - "$attention_test" "$cuda" --small
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
