#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the tuner gains: see tune_sweep.sh, which sets up libraries and MPS.

usage: tune_sweep.py LOGS BENCH COMMAND TUNER NET SECONDS
Everything measured is a ratio of NCCL's default to another setting of NCCL, in turns of one run of loongcomm-bench;
above 1 the other is faster. LOGS keeps a file for each run, and a run that has its file is not made again."""
import argparse
import itertools
import json
import os
import subprocess
import sys
import time

sys.dont_write_bytecode = True
SIZES = "%d,1k,16k,64k,256k,1m,4m,16m,64m,256m"
OPS = {"all-reduce": "allreduce", "all-gather": "allgather", "reduce-scatter": "reducescatter"}
WAYS = {"all-reduce": (("Ring", "Tree"), ("LL", "LL128", "Simple")),
        "all-gather": (("Ring",), ("LL", "LL128", "Simple")), "reduce-scatter": (("Ring",), ("LL", "LL128", "Simple"))}
CHANNELS = (0, 2, 4, 8)  # 0: NCCL's number
MOST = .03  # that the profile may be behind the best of the sweep
BUDGET_S = 5  # of a run's measuring; starting and ending cost about as much again
TUNE_MINUTES = 3


def ways(op):
    """NCCL's settings for the sweep, the likely ones first."""
    algorithms, protocols = WAYS[op]
    combined = [(a, p, c) for c in CHANNELS for a, p in itertools.product(algorithms, protocols)]
    if op != "all-reduce":
        combined.insert(3, ("PAT", "Simple", 0))
    return combined


def way_variables(algorithm, protocol, channels):
    variables = ["NCCL_ALGO=" + algorithm, "NCCL_PROTO=" + protocol]
    return variables + (["NCCL_MIN_CTAS=%d" % channels, "NCCL_MAX_CTAS=%d" % channels] if channels else [])


def sizes(ranks):
    """From 8 bytes on, or one element for each rank, which scattering takes."""
    return SIZES % max(8, 4 * ranks)


class Sweep:
    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.lasted = [BUDGET_S * 3.0]  # seconds of whole runs
        self.failed = 0

    def file(self, *parts):
        return os.path.join(self.options.logs, "-".join(map(str, parts)))

    def environment(self, net):
        env = dict(os.environ)
        if net == "plugin":
            env["NCCL_NET_PLUGIN"] = "loongcomm"
            env["NCCL_NET_PLUGIN_REF_COUNT"] = "1"
            env["LD_LIBRARY_PATH"] = os.path.dirname(self.options.net) + ":" + env.get("LD_LIBRARY_PATH", "")
        return env

    def has_time(self, needed):
        return self.end - time.monotonic() >= needed

    def call(self, command, net, log, limit):
        with open(log, "w") as out:
            try:
                return subprocess.run(command, env=self.environment(net), stdout=out, stderr=subprocess.STDOUT,
                                      stdin=subprocess.DEVNULL, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                return -1

    def bench(self, net, ranks, op, name, variables):
        """One comparison with NCCL's default. False: there is no time for it."""
        result = self.file(net, ranks, op, name + ".json")
        if os.path.exists(result) or os.path.exists(result + ".failed"):
            return True
        if not self.has_time(max(self.lasted[-3:])):
            return False
        begun = time.monotonic()
        command = [self.options.bench, OPS[op], "--ranks", str(ranks), "--types", "f32", "--live", "1", "--sizes", sizes(ranks),
                   "--budget", str(BUDGET_S), "--no-preload", "--json", result + ".new"]
        for variable in variables:
            command += ["--env-b", variable]
        code = self.call(command, net, result[:-5] + ".log", 20 * BUDGET_S)
        self.lasted.append(time.monotonic() - begun)
        if code == 0:
            os.rename(result + ".new", result)
        else:  # some ways do not exist for an operation: NCCL says so; others are looked at
            os.rename(result[:-5] + ".log", result + ".failed")
            self.failed += 1
        return True

    def tune(self, net, ranks):
        """The profile of that job. False: not finished."""
        profile = self.file(net, ranks, "profile")
        if os.path.exists(profile):
            return True
        if not self.has_time(60):
            return False
        minutes = min(TUNE_MINUTES, (self.end - time.monotonic() - 30) / 60)
        command = [self.options.command, "tune", "--only", "nccl", "--ranks", str(ranks), "--sizes", sizes(ranks), "--time",
                   "%.2f" % minutes, "--resume", "--out", profile + ".new"]
        if self.call(command, net, profile + ".log", 60 * minutes + 240) != 0 or not os.path.exists(profile + ".new"):
            return False
        os.rename(profile + ".new", profile)
        return True

    def job(self, net, ranks):
        """All runs of one network and number of ranks, until the time is up."""
        tuned = self.tune(net, ranks)
        profile = ["NCCL_TUNER_PLUGIN=" + self.options.tuner, "LOONGCOMM_ENABLE=yes", "LOONGCOMM_PROFILE_TRUST=yes",
                   "LOONGCOMM_PROFILE=" + self.file(net, ranks, "profile")]
        for op in OPS:
            if not self.bench(net, ranks, op, "equal", []) or not self.bench(net, ranks, op, "equal2", []):
                return False
            if tuned and not self.bench(net, ranks, op, "tuned", profile):
                return False
        return tuned and all(self.bench(net, ranks, op, "%s-%s-%d" % way, way_variables(*way))
                             for op in OPS for way in ways(op))

    def ratios(self, net, ranks, op, name):
        try:
            with open(self.file(net, ranks, op, name + ".json")) as f:
                records = json.load(f)["records"]
        except (OSError, ValueError, KeyError):
            return {}
        return {record["bytes"]: record["ratio"] for record in records if "ratio" in record}

    def report(self, net, ranks, op):
        """Lines about one operation, and how many sizes miss what must be reached."""
        equal = [self.ratios(net, ranks, op, name) for name in ("equal", "equal2")]
        tuned = self.ratios(net, ranks, op, "tuned")
        swept = {"%s/%s/%s" % (a, p, c or "-"): self.ratios(net, ranks, op, "%s-%s-%d" % (a, p, c))
                 for a, p, c in ways(op)}
        lines, missed = [], 0
        for size in sorted(tuned):
            least = min([ratios[size]["p10"] for ratios in equal if size in ratios] or [1])
            best = max([(1.0, "default")] + [(ratios[size]["median"], name) for name, ratios in swept.items()
                                             if size in ratios])
            have = tuned[size]["median"]
            behind = best[0] / have - 1
            slower, short = have < least, behind > MOST
            missed += slower or short
            lines.append("%-14s %10d  equal sides from %.3f  tuned %.3f  best %.3f (%s)  behind %+.1f %%%s" % (
                op, size, least, have, best[0], best[1], 100 * behind,
                "  SLOWER THAN DEFAULT" * slower + "  NOT THE BEST" * short))
        return lines, missed, sum(bool(ratios) for ratios in swept.values())


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("logs", "bench", "command", "tuner", "net"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--nets", default="sockets,plugin")
    sweep = Sweep(parser.parse_args(argv))
    jobs = [(net, int(ranks)) for ranks in sweep.options.ranks.split(",") for net in sweep.options.nets.split(",")]
    open_jobs = 0
    for net, ranks in jobs:
        open_jobs += not sweep.job(net, ranks)
    missed = seen = 0
    for net, ranks in jobs:
        for op in OPS:
            lines, bad, count = sweep.report(net, ranks, op)
            if lines:
                print("%s, %d ranks, %d of %d ways of the sweep:" % (net, ranks, count, len(ways(op))))
                print("\n".join(lines))
            missed, seen = missed + bad, seen + len(lines)
    print("a run takes %.0f s; %d runs failed now; %d of %d jobs have runs left: call again" % (
        sum(sweep.lasted) / len(sweep.lasted), sweep.failed, open_jobs, len(jobs)))
    print("%d passed, %d failed" % (seen - missed, missed))
    return 1 if missed or not seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
