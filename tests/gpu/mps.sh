#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: mps.sh RANKS COMMAND...
# Runs the command under an MPS daemon of its own if this machine has fewer GPUs than RANKS: without one,
# processes on one GPU take turns of milliseconds, and ranks that wait for each other crawl. The daemon is
# an ordinary process with folders of its own; no setting of the device is touched; it is stopped on every
# way out. Where there is no GPU or no daemon to be had, the command simply runs.
set -u
ranks=$1
shift

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
daemon=$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control || true)
# Which of them are the job's.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
    [ "$visible" -ge "$gpus" ] || gpus=$visible
fi
if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || [ "$gpus" -eq 0 ] || [ "$gpus" -ge "$ranks" ]; then
    exec "$@"
fi
if [ -z "$daemon" ]; then
    echo "mps.sh: no nvidia-cuda-mps-control here: ranks on one GPU will be slow" >&2
    exec "$@"
fi

# Short paths: they name sockets.
folder=$(mktemp -d /tmp/lc-mps.XXXXXX) || exit 1
mkdir -m 0700 "$folder/pipe" "$folder/log" || exit 1
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
child=

runs() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }

stop() {
    trap - EXIT HUP INT TERM
    if runs "$child"; then
        kill -TERM "$child"
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            runs "$child" && sleep 0.5
        done
    fi
    pid=$(cat "$folder/pipe/nvidia-cuda-mps-control.pid" 2>/dev/null)
    if runs "$pid"; then
        echo 'quit -t 5' | CUDA_MPS_PIPE_DIRECTORY=$folder/pipe timeout 20 "$daemon" >/dev/null 2>&1
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            runs "$pid" && sleep 0.5
        done
    fi
    if runs "$pid"; then
        echo "mps.sh: the daemon $pid did not stop when asked; it is ended" >&2
        kill -KILL "$pid"
    fi
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 143' HUP INT TERM # by way of EXIT

if ! timeout 30 "$daemon" -d; then
    echo "mps.sh: the MPS daemon did not start: ranks on one GPU will be slow" >&2
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
"$@" & # in the background, so that a signal is handled at once
child=$!
wait "$child"
status=$?
child=
exit "$status"
