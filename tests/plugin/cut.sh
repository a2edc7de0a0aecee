#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: cut.sh LIBCUT MANY COMMAND...
# A command that uses the network plugin, while libcut.so breaks its connections: it must succeed, and at least MANY must
# have been broken.
set -u
library=$(readlink -f "$1") many=$2
shift 2
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
LCCUT_US=2000 LCCUT_FOLDER=$folder LD_PRELOAD=$library "$@" || exit 1
cuts=$(cat "$folder"/cuts.* | awk '{ n += $1 } END { print n + 0 }')
echo "$cuts connections were cut"
[ "$cuts" -ge "$many" ]
