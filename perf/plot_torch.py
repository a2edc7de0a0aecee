#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A picture (SVG, standard output) of what perf/peers_torch.py stored: a row for each case, a mark for each way at how many
times NCCL takes as long in the same round. Stored pictures are what it draws of the stored files.

usage: perf/plot_torch.py [--table] FILE.json >PICTURE.svg

--table: the README's table instead, in Markdown."""
import json
import math
import sys
from xml.sax.saxutils import escape

LABEL, TRACK, ROW, TOP = 290, 560, 24, 74
LEAST, MOST = 0.25, 6.0  # of the axis, whose scale is logarithmic
TICKS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 5)
# colour, and whether the mark is filled
WAYS = {"loongcomm": ("#2874a6", True), "loongcomm, bf16 wire": ("#1e8449", True), "loongcomm, mask": ("#7d3c98", True),
        "loongcomm, 64 CTAs": ("#2874a6", False), "loongcomm, 64 CTAs, bf16 wire": ("#1e8449", False),
        "loongcomm, 128 CTAs": ("#2874a6", False), "loongcomm, 128 CTAs, bf16 wire": ("#1e8449", False),
        "NCCL, windows": ("#566573", False), "NCCL, bf16 hook": ("#d68910", False),
        "torch one-shot": ("#c0392b", False), "torch two-shot": ("#c0392b", True)}


def place(ratio):
    inside = min(max(ratio, LEAST), MOST)
    return LABEL + TRACK * math.log(inside / LEAST) / math.log(MOST / LEAST)


def case_of(record):
    size = record["bytes"]
    text = "%s %s %s" % (record["op"].replace("torch-", ""), record["dtype"].replace("float32", "fp32").replace("bfloat16", "bf16"),
                         "%d MB" % (size >> 20) if size >= 1 << 20 else "%d KB" % (size >> 10))
    if record["live"] < 1:
        text += ", %d %% zeros" % round(100 - 100 * record["live"])
    return text + (", graph" if record["graph"] else "")


def rows_of(document):
    """{case: {way: record}} of the cases that NCCL was measured in."""
    rows = {}
    for record in document["records"]:
        rows.setdefault(case_of(record), {})[record["variant"]] = record
    return {case: ways for case, ways in rows.items() if "NCCL" in ways}


def mark(x, y, way):
    colour, filled = WAYS[way]
    return '<circle cx="%.1f" cy="%d" r="5" stroke="%s" stroke-width="2" fill="%s"/>' % (x, y, colour, colour if filled else "#fff")


def legend(ways):
    for i, way in enumerate(ways):
        x, y = 20 + i % 5 * 186, 36 + i // 5 * 18
        yield mark(x, y - 4, way) + '<text x="%d" y="%d">%s</text>' % (x + 10, y, escape(way))


def draw(document):
    machine, rows = document["machine"], rows_of(document)
    width, bottom = LABEL + TRACK + 90, TOP + len(rows) * ROW
    yield ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" '
           'font-size="12"><style>text{fill:#17202a}.grid{stroke:#d5d8dc}.one{stroke:#17202a}</style>'
           % (width, bottom + 24, width, bottom + 24))
    yield '<rect width="%d" height="%d" fill="#fff"/>' % (width, bottom + 24)
    yield ('<text x="14" y="16" font-weight="bold">%s, torch %s: times as fast as NCCL %s, median of rounds in turns</text>'
           % tuple(escape(str(machine[key])) for key in ("gpu", "torch", "nccl")))
    yield from legend([way for way in WAYS if any(r["variant"] == way for r in document["records"])])
    for tick in TICKS:
        yield ('<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" class="%s"/><text x="%.1f" y="%d" text-anchor="middle">%g</text>'
               % (place(tick), place(tick), TOP - 6, bottom, "one" if tick == 1 else "grid", place(tick), bottom + 16, tick))
    for i, (case, ways) in enumerate(rows.items()):
        y = TOP + i * ROW + ROW // 2
        nccl = ways["NCCL"]["median_us"]
        yield '<text x="%d" y="%d" text-anchor="end">%s</text>' % (LABEL - 12, y + 4, escape(case))
        yield '<text x="%d" y="%d">%s us</text>' % (LABEL + TRACK + 14, y + 4, "%.1f" % nccl if nccl < 100 else "%.0f" % nccl)
        yield from (mark(place(ways[way]["ratio"]), y, way) for way in WAYS if way in ways)
    yield "</svg>"


def cell(ways, names):
    found = [ways[name] for name in names if name in ways]
    if not found:
        return ""
    best = min(found, key=lambda record: record["median_us"])
    return "%.3g us, %.2f" % (best["median_us"], best["ratio"]) if best["median_us"] < 100 else "%.0f us, %.2f" % (
        best["median_us"], best["ratio"])


def table(document):
    columns = {"windows": ["NCCL, windows"], "PyTorch's symmetric memory": ["torch one-shot", "torch two-shot"],
               "`bf16_compress_hook`": ["NCCL, bf16 hook"], "loongcomm": ["loongcomm"], "bf16 on the wire": ["loongcomm, bf16 wire"],
               "64 CTAs: exact": ["loongcomm, 64 CTAs"], "64 CTAs: bf16": ["loongcomm, 64 CTAs, bf16 wire"],
               "128 CTAs: exact": ["loongcomm, 128 CTAs"], "128 CTAs: bf16": ["loongcomm, 128 CTAs, bf16 wire"]}
    columns = {title: names for title, names in columns.items() if any(r["variant"] in names for r in document["records"])}
    yield "| case | NCCL | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * (len(columns) + 1)
    for case, ways in rows_of(document).items():
        cells = [cell(ways, names) for names in columns.values()]
        yield "| %s | %s | %s |" % (case, cell(ways, ["NCCL"]).split(",")[0], " | ".join(cells))


if __name__ == "__main__":
    drawn = table if "--table" in sys.argv else draw
    files = [argument for argument in sys.argv[1:] if argument != "--table"]
    if len(files) != 1 or files[0].startswith("-"):
        sys.exit(__doc__)
    with open(files[0]) as file:
        print("\n".join(drawn(json.load(file))))
