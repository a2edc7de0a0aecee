# SPDX-License-Identifier: Apache-2.0
"""Stands in for loongcomm-bench behind `loongcomm tune -- python3 tune_bench.py FOLDER`: figures of FOLDER/world, a line in
FOLDER/log for each run. What it is faster with, it reads from the profile that the second side would use. It is started
often, so it imports little."""
import os
import sys

folder, _, op = sys.argv[1:4]
options, env, cases, ways = {}, {}, [], []
words = iter(sys.argv[4:])
for word in words:
    if word in ("--no-preload", "--sendrecv"):
        options[word] = True
    elif word in ("--case", "--way"):
        (cases if word == "--case" else ways).append(next(words).split(":"))
    elif word == "--env-b":
        name, _, value = next(words).partition("=")
        env[name] = value
    else:
        options[word] = next(words)
with open(os.path.join(folder, "world")) as f:
    world = eval(f.read())

ranks = world["ranks"]
OPS = {"allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather",
       "alltoall": "send" if "--sendrecv" in options else "all-to-all"}


def write(records, more=""):
    with open(options["--json"], "w") as f:
        f.write('{"schema": "loongcomm.bench/1", "machine": {"nccl": "%s", "ranks": %d, "nodes": %d}, "records": [%s]%s}' %
                (world.get("nccl", "2.28.9"), ranks, world["nodes"], ", ".join(records), more))


def log(line):
    with open(os.path.join(folder, "log"), "a+") as f:
        f.write(line + "\n")
        f.seek(0)
        lines = f.read().splitlines()
        if len(lines) == world.get("kill"):
            os.kill(os.getppid(), 9)
    return lines


def took(op, size, ratio):
    us = world.get("us", {}).get("%s %s" % (OPS[op], size))
    return '"median_us": %r, ' % (us / ratio) if us else ""


def turn(op, size, way, step, figures):
    figures = tuple(figures or (1.0, 0.995, 1.005))
    return ('{"op": "%s", "bytes": %s, "dtype": "f32", "way": "%s", "state": "%s", %s'
            '"ratio": {"median": %s, "p10": %s, "p90": %s, "rounds": [1]}}' %
            ((op, size, way, world.get("states", {}).get(step, "measured"), took(op, size, figures[0])) + figures))


def profile_step(op, size):
    """As the tuner would."""
    with open(options["--profile"]) as f:
        for rule in [line.split("#")[0].split() for line in f if line.startswith("nccl all") or line.startswith("nccl reduce")]:
            if rule[1] == op and int(rule[4]) <= size < (int(rule[5]) or 1 << 62):
                return " ".join(["nccl", op] + rule[6:9])
    return "nothing"


if op == "ways":
    steps = [(name, way, "nccl %s %s" % (OPS[name], way.replace("/", " "))) for name, way in ways]
    looks = log("again turns" if "--profile" in options else "turns").count("again turns")
    look = world.get("third" if looks > 1 and "third" in world else "again", {}) if "--profile" in options else {}
    if any(step in world.get("fail", ()) for _, _, step in steps):
        sys.exit("loongcomm-bench: as the test wants it")
    dies = [(size, step) for step, size in world.get("dies", {}).items() if step in [s for _, _, s in steps] + ["default"]]
    records, last = [], dies[0][0] - 1 if dies else 1 << 62
    if "sizes" in world:
        log(" ".join(sorted(":".join(case) for case in cases)))
    for name, sizes in cases:
        sizes = [s for s in sizes.split(",") if int(s) <= last]
        for size in sizes[:len(sizes) - ("--profile" not in options) * world.get("left", 0)]:
            again = "again " + OPS[name]
            records.append('{"op": "%s", "bytes": %s, "way": "default", %s"state": "measured"}' % (name, size, took(name, size, 1)))
            records.append(turn(name, size, "again", again, look.get("equal %s %s" % (OPS[name], size)) or world["ratios"].get(again, {}).get(size)))
            records += [turn(name, size, way, step, world["ratios"].get(step, {}).get(size)) for op, way, step in steps if op == name]
            if "--profile" in options:
                step = profile_step(OPS[name], int(size))
                figures = world["ratios"].get(step, {}).get(size) or world["ratios"].get(step, {}).get("else")
                records.append(turn(name, size, "profile", step, look.get("%s %s" % (OPS[name], size), figures)))
    more = ', "left": %d' % world.get("left", 0)
    if dies:
        options["--json"] += ".part"
        way = dies[0][1].split()[2:] or ["default"]
        more = ', "left": 1, "failed": {"op": "allreduce", "bytes": %d, "way": "%s"}' % (dies[0][0], "/".join(way))
    write(records, more)
    sys.exit("loongcomm-bench: dies as the test wants it" if dies else 0)

op = OPS[op]
parts = ranks if op == "send" else 1  # a message is a part of the buffer
wire = "bf16" if env.get("LOONGCOMM_ALLREDUCE_WIRE") == "bf16" else "exact"
rules = []
if env.get("LOONGCOMM_PROFILE"):
    with open(env["LOONGCOMM_PROFILE"]) as f:
            rules = [line.split("#")[0].split() for line in f if line.startswith("rings ")]


def step_at(size):
    """The step's name, as tune has it, that decides at a size."""
    for rule in rules:
        if rule[1] != op or not int(rule[4]) <= size < (int(rule[5]) or 1 << 62):
            continue
        if env.get("LOONGCOMM_PEER") == "auto" and rule[3] == wire:
            return " ".join(["rings", rule[1], rule[3]] + rule[6:8])
    return ("cast " if env.get("LOONGCOMM_PEER") == "off" else "equal ") + op


sizes = [int(s) // parts for s in options["--sizes"].split(",")]
again = len(rules) > 1 or (rules and rules[0][4] != "0")
log("%s%s" % ("again " if again else "", step_at(sizes[-1])))
if step_at(sizes[-1]) in world.get("fail", ()):
    sys.exit("loongcomm-bench: as the test wants it")

records = []
for size in sizes:
    for dtype in options["--types"].split(","):
        of_step = world["ratios"].get(step_at(size), {})
        figures = of_step.get(str(size))
        if again:
            figures = world.get("again", {}).get("%d %s" % (size, dtype), figures) or of_step.get("else")
        record = '{"op": "x", "bytes": %d, "dtype": "%s", "variant": ' % (size * parts, dtype)
        records.append(record + '"nccl", "median_us": 1}')
        records.append(record + '"loongcomm", "ratio": {"median": %s, "p10": %s, "p90": %s, "rounds": [1]}}' %
                       (figures or (1.0, 0.99, 1.01)))
write(records)
