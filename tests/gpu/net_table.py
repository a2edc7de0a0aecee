#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""net_table.py LOGS: of net_bench.sh's rows, how the plugin compares with (b): the faster of NCCL's own with two channels
and with as many as the plugin has. One line an operation, ranks, size and share of live rows."""
import json
import pathlib
import sys

cases = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*-b[28].json")):
    document = json.loads(path.read_text())
    for record in document["records"]:
        if "ratio" not in record:
            continue
        key = (record["op"], record["ranks"], record["bytes"], record["live"])
        cases.setdefault(key, []).append((record["ratio"]["median"], path.stem[-1], record["median_us"]))
print("plugin / (b): the least of the ratios to NCCL's own with 2 and with 8 channels")
for (op, ranks, size, live), found in sorted(cases.items()):
    least = min(found)
    text = f"{size >> 20}m" if size >> 20 else f"{size >> 10}k" if size >> 10 else str(size)
    print(f"{op:10} {ranks} ranks {text:>5} live {live:<4} {least[2]:10.1f} us  {least[0]:.3f}",
          " ".join(f"({ratio:.3f} to {channels} channels)" for ratio, channels, _ in found))
