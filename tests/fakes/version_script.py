#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the version script of a library that exports what NCCL VERSION exported."""
import re
import sys

listing, version = sys.argv[1], int(sys.argv[2])
names = []
for bare, name, since in re.findall(r'^LC_NCCL(_BARE)?\((\w+), (\d+), \w+\)', open(listing).read(), re.M):
    if int(since) <= version:
        names += [name] if bare else [name, 'p' + name]
print('{\n  global:\n    fake_count;')
print(''.join(f'    {name};\n' for name in names) + '  local: *;\n};')
