#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""net_table.py LOGS: of net_bench.sh's rows, how the plugin compares with the fastest of NCCL's own: (a) as it comes, and
at what was best for 2 ranks and 16 MB with (b2) two channels and (b8) eight. What is best there may be worst elsewhere, so the
ratio is the least of the three, and there is none for a case that lacks one. One line an operation, ranks, size and share of
live rows."""
import json
import pathlib
import sys

WAYS = {"a": "as it comes", "b2": "2 channels", "b8": "8 channels"}


def read(folder):
    """The plugin's ratios and times by case and way."""
    cases = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        way = path.stem.rpartition("-")[2]
        if way not in WAYS or path.stem.startswith(("grid-", "own-", "equal-")):
            continue
        for record in json.loads(path.read_text())["records"]:
            if "ratio" in record:
                key = (record["op"], record["ranks"], record["bytes"], record["live"])
                cases.setdefault(key, {})[way] = record["ratio"]["median"], record["median_us"]
    return cases


def line(op, ranks, size, live, found):
    ratio, us = min(found.values())
    text = f"{size >> 20}m" if size >> 20 else f"{size >> 10}k" if size >> 10 else str(size)
    missing = [name for way, name in WAYS.items() if way not in found]
    return " ".join([f"{op:10} {ranks} ranks {text:>5} live {live:<4} {us:10.1f} us ",
                     "    -" if missing else f"{ratio:.3f}",
                     *(f"({found[way][0]:.3f} to {name})" for way, name in WAYS.items() if way in found),
                     *([f"not compared: {', '.join(missing)}"] if missing else [])])


def main(folder):
    print("plugin / the fastest of NCCL's own: the least of the ratios to it in three ways")
    for key, found in sorted(read(folder).items()):
        print(line(*key, found))


if __name__ == "__main__":
    main(sys.argv[1])
