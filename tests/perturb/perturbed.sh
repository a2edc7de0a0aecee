#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: perturbed.sh LIBPERTURB SEEDS COMMAND...
# The command must succeed with each of the seeds (1,2); with LCTEST_SOAK=1 it gets random ones for three minutes. To run the command once with the seed that failed: LCPERTURB_SEED=SEED LD_PRELOAD=LIBPERTURB COMMAND...
# What needs other libraries preloaded has them in LD_PRELOAD already.
set -u
library=$(readlink -f "$1") seeds=$2
shift 2

try() { # seed
  LCPERTURB_SEED=$1 LD_PRELOAD=${LD_PRELOAD:+$LD_PRELOAD:}$library "${@:2}" && return
  status=$?
  [ $status -eq 77 ] || echo "failed with LCPERTURB_SEED=$1 (status $status): ${*:2}"
  exit $status
}

if [ -n "${LCTEST_SOAK:-}" ]; then
  end=$((SECONDS + 180))
  while [ $SECONDS -lt $end ]; do
    try $((RANDOM << 15 | RANDOM)) "$@"
  done
else
  for seed in ${seeds//,/ }; do
    try "$seed" "$@"
  done
fi
