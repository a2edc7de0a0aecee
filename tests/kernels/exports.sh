#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# exports.sh NM LIBRARY LIST.def... [EXTRA...]: the library exports what the lists name, and EXTRA, and nothing else.
set -eu
nm=$1 library=$2
shift 2
want=$(for name in "$@"; do
    case $name in
    *.def) sed -n 's/^LK_SYM(\(.*\))$/\1/p' "$name" ;;
    *) printf '%s\n' "$name" ;;
    esac
done | sort)
have=$("$nm" -D --defined-only "$library" | awk '{ print $NF }' | sort)
if [ "$want" != "$have" ]; then
    printf 'exported:\n%s\nlisted:\n%s\n' "$have" "$want"
    exit 1
fi
