# SPDX-License-Identifier: Apache-2.0
"""Stands in for loongcomm-bench behind `loongcomm tune -- python3 tune_bench.py FOLDER`: figures of FOLDER/world.json, a
line in FOLDER/log for each run. What it is faster with, it reads from the profile that the second side would use."""
import json
import os
import signal
import sys

folder, _, op = sys.argv[1:4]
options, env = {}, {}
words = iter(sys.argv[4:])
for word in words:
    if word == "--no-preload":
        options[word] = True
    elif word == "--env-b":
        name, _, value = next(words).partition("=")
        env[name] = value
    else:
        options[word] = next(words)
with open(os.path.join(folder, "world.json")) as f:
    world = json.load(f)

OPS = {"allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather"}
wire = "bf16" if env.get("LOONGCOMM_ALLREDUCE_WIRE") == "bf16" else "exact"
rules = []
if env.get("LOONGCOMM_PROFILE"):
    with open(env["LOONGCOMM_PROFILE"]) as f:
        rules = [line.split("#")[0].split() for line in f if line.startswith(("rings ", "nccl all", "nccl reduce"))]


def step_at(size):
    """The step's name, as tune has it, that decides at a size."""
    for rule in rules:
        if rule[1] != OPS[op] or not int(rule[4]) <= size < (int(rule[5]) or 1 << 62):
            continue
        if rule[0] == "nccl" and "NCCL_TUNER_PLUGIN" in env:
            return " ".join(["nccl", rule[1]] + rule[6:9])
        if rule[0] == "rings" and env.get("LOONGCOMM_PEER") == "auto" and rule[3] == wire:
            return " ".join(["rings", rule[1], rule[3]] + rule[6:8])
    if env.get("LOONGCOMM_PEER") == "off":
        return "cast " + OPS[op]
    return "equal " + OPS[op]


sizes = [int(s) for s in options["--sizes"].split(",")]
again = len(rules) > 1 or (rules and rules[0][4] != "0")
with open(os.path.join(folder, "log"), "a") as f:
    f.write("%s%s\n" % ("again " if again else "", step_at(sizes[-1])))
with open(os.path.join(folder, "log")) as f:
    runs = len(f.readlines())
if runs == world.get("kill"):
    os.kill(os.getppid(), signal.SIGKILL)
if step_at(sizes[-1]) in world.get("fail", ()):
    sys.exit("loongcomm-bench: as the test wants it")

records = []
for size in sizes:
    for dtype in options["--types"].split(","):
        figures = world["ratios"].get(step_at(size), {}).get(str(size))
        if again:
            figures = world.get("again", {}).get("%d %s" % (size, dtype), figures)
        if figures is None and again:
            figures = world["ratios"].get(step_at(size), {}).get("else")
        median, p10, p90 = figures or (1.0, 0.99, 1.01)
        record = {"op": op, "bytes": size, "dtype": dtype, "ranks": world["ranks"], "variant": "nccl", "median_us": 1}
        records.append(dict(record))
        records.append(dict(record, variant="loongcomm", ratio={"median": median, "p10": p10, "p90": p90, "rounds": [median]}))
machine = {"nccl": world.get("nccl", "2.28.9"), "ranks": world["ranks"], "nodes": world["nodes"], "gpu": "x"}
with open(options["--json"], "w") as f:
    json.dump({"schema": "loongcomm.bench/1", "machine": machine, "records": records}, f)
