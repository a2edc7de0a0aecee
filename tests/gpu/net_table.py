#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""net_table.py LOGS: of net_bench.sh's rows, how the plugin compares with NCCL's own (a) as it comes and (b) with as many
channels at what was best for so many ranks and 16 MB. What is best there may be worst elsewhere, so the ratio is the lesser of
the two, and there is none for a case that lacks one. One line an operation, ranks, size and share of live rows; cpu: processor
seconds for a GB, the plugin's, and in brackets NCCL's."""
import json
import pathlib
import sys

WAYS = {"a": "as it comes", "b": "at its best"}


def read(folder):
    """The plugin's ratios, times and processor times, and NCCL's processor times, by case and way."""
    cases = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        way = path.stem.rpartition("-")[2]
        if way not in WAYS or path.stem.startswith(("grid-", "own-", "equal-")):
            continue
        theirs = {}
        for record in json.loads(path.read_text())["records"]:
            key = (record["op"], record["ranks"], record["bytes"], record["live"])
            cpu = record.get("cpu_s_per_gb", 0)
            if "ratio" in record:
                cases.setdefault(key, {})[way] = record["ratio"]["median"], record["median_us"], cpu, theirs.get(key, 0)
            theirs[key] = cpu
    return cases


def line(op, ranks, size, live, found):
    ratio, us = min(found.values())[:2]
    text = f"{size >> 20}m" if size >> 20 else f"{size >> 10}k" if size >> 10 else str(size)
    missing = [name for way, name in WAYS.items() if way not in found]
    return " ".join([f"{op:10} {ranks} ranks {text:>5} live {live:<4} {us:10.1f} us ",
                     "    -" if missing else f"{ratio:.3f}",
                     *(f"({found[way][0]:.3f} to {name}, cpu {found[way][2]:.3g} [{found[way][3]:.3g}])" for way, name in WAYS.items() if way in found),
                     *([f"not compared: {', '.join(missing)}"] if missing else [])])


def main(folder):
    print("plugin / the faster of NCCL's own: the lesser of the ratios to it in two ways")
    for key, found in sorted(read(folder).items()):
        print(line(*key, found))


if __name__ == "__main__":
    main(sys.argv[1])
