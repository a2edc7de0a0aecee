#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# exports.sh NM LIBRARY LIST [EXTRA...]: the library exports what the list names, and EXTRA, and nothing else.
set -eu
nm=$1 library=$2 list=$3
shift 3
want=$({ sed -n 's/^LK_SYM(\(.*\))$/\1/p' "$list"; printf '%s\n' "$@"; } | sed '/^$/d' | sort)
have=$("$nm" -D --defined-only "$library" | awk '{ print $NF }' | sort)
if [ "$want" != "$have" ]; then
    printf 'exported:\n%s\nlisted:\n%s\n' "$have" "$want"
    exit 1
fi
