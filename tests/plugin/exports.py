#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A plugin exports the versions that its list names, as data, and needs libc only: exports.py LIBRARY LIST."""
import re
import subprocess
import sys

library, listing = sys.argv[1:]
names = {"NET": "ncclNetPlugin_v", "TUNER": "ncclTunerPlugin_v", "MEASURE": "loongcomm_measure_v"}
wanted = {names[kind] + n: "D" for kind, n in re.findall(r"^LC_(\w+)_VERSION\((\d+)\)", open(listing).read(), re.M)}
lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
found = {name: kind for _, kind, name in (line.split() for line in lines.splitlines())}
assert len(wanted) >= 5, wanted
assert found == wanted, f"exported {sorted(found.items())}, listed {sorted(wanted.items())}"
dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
foreign = [name for name in needed if not re.match(r"(libc|ld-linux|lib[atu].*san)[.-]", name)]
assert not foreign, f"needs {foreign}"
