# SPDX-License-Identifier: Apache-2.0
"""embed.py FILE NAME: a C string with the text of FILE, on standard output."""
import sys

with open(sys.argv[1], encoding="ascii") as source:
    lines = source.read().split("\n")
print("static const char %s[] =" % sys.argv[2])
for line in lines:
    print('    "%s\\n"' % line.replace("\\", "\\\\").replace('"', '\\"'))
print("    ;")
