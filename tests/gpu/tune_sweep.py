#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the tuner gains: see tune_sweep.sh, which sets up libraries and MPS.

usage: tune_sweep.py LOGS BENCH COMMAND NET SECONDS
Everything measured is a ratio of NCCL's default to another way, in turns of one job (`loongcomm-bench ways`); above 1 the
other is faster. LOGS keeps a file for each pair of network and ranks, which is not measured again."""
import argparse
import glob
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
SIZES = ["%d", "1k", "16k", "64k", "256k", "1m", "4m", "16m", "64m", "256m"]
OPS = ("allreduce", "allgather", "reducescatter")
PROTOCOLS = ("ll", "ll128", "simple")
CHANNELS = (0, 1, 2, 4, 8)  # 0: NCCL's number; more than the communicator has are the same as fewer, and left out
CTAS = 8  # of the wide communicator
COMMS = 2  # take turns: each has luck of its own
MOST = .03  # that the profile may be behind the best of the sweep, or what equal sides differ by
NOISY = .1  # where medians of equal sides differ by more, nothing is shown
SHARES = {2: .65, 4: 1, 8: 1.55}  # of the time, by ranks: a call of eight takes three times as long
JOB_S = (1, .45)  # what starting and ending a job cost, and more for each rank; three jobs a pair, and a short one
AGAIN = .12  # of a pair's time, for the short one
TUNE = .45  # of a pair's measuring is the profile's; the more rounds the sweep has, the less its own spread hides


def ways(op):
    combined = list(itertools.product(("ring", "tree") if op == "allreduce" else ("ring",), PROTOCOLS, CHANNELS))
    if op != "allreduce":
        combined += [("pat", "simple", c) for c in CHANNELS]
    wide = [("ring", "simple", 4), ("ring", "simple", 8), ("ring", "ll", 8)]
    if op == "allreduce":
        wide += [("tree", "simple", 8), ("tree", "ll", 8)]
    return ["%s/%s/%d" % way for way in combined] + ["wide:%s/%s/%d" % way for way in wide]


def sizes(ranks, most):
    """From 8 bytes on, or one element for each rank, which scattering takes."""
    last = [size for size in SIZES if size != "256m"] if most == "64m" else SIZES
    return ",".join(last) % max(8, 4 * ranks)


def in_bytes(size):
    return int(size.rstrip("km")) << {"k": 10, "m": 20}.get(size[-1], 0)


class Pair:
    def __init__(self, sweep, net, ranks):
        self.sweep, self.net, self.ranks = sweep, net, ranks
        self.name = os.path.join(sweep.options.logs, "%s-%d" % (net, ranks))
        self.failure = None

    def environment(self):
        env = dict(os.environ)
        if self.sweep.options.rig:
            return env
        env["NCCL_SOCKET_IFNAME"] = "lo"
        env["NCCL_NET_PLUGIN_REF_COUNT"] = "1"
        # Named, so that NCCL fails where it would else fall back.
        env["NCCL_NET"], env["NCCL_NET_PLUGIN"] = {"plugin": ("loongcomm", "loongcomm"), "sockets": ("Socket", "none")}[self.net]
        if self.net == "plugin":
            env["LD_LIBRARY_PATH"] = os.path.dirname(self.sweep.options.net) + ":" + env.get("LD_LIBRARY_PATH", "")
        return env

    def call(self, command, log, limit, **variables):
        begun = time.monotonic()
        with open(log, "w") as out:
            try:
                code = subprocess.run(command, env=dict(self.environment(), **variables), stdout=out, stderr=subprocess.STDOUT,
                                      stdin=subprocess.DEVNULL, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = "time out"
        print("%s, %d ranks: %s: %s after %.0f s" % (self.net, self.ranks, " ".join(map(os.path.basename, command[:2])),
                                                     "done" if code == 0 else "failed (%s), see %s" % (code, log),
                                                     time.monotonic() - begun), flush=True)
        if code != 0:
            self.failure = log
        return code == 0

    def tune(self, seconds):
        profile = self.name + ".profile"
        if os.path.exists(profile):
            return True
        command = [self.sweep.options.command, "tune", "--only", "nccl", "--keep", "--ranks", str(self.ranks),
                   "--sizes", sizes(self.ranks, self.sweep.options.most), "--time", "%.3f" % (seconds / 60), "--out", profile + ".new"]
        if not self.call(command, self.name + ".tune.log", seconds + 60) or not os.path.exists(profile + ".new"):
            return False
        os.rename(profile + ".new", profile)
        return True

    def missing(self):
        """{operation: sizes} that no job has measured yet, as the bench takes them."""
        every = sizes(self.ranks, self.sweep.options.most).split(",")
        if not os.path.exists(self.name + ".json"):
            return {op: every for op in OPS}
        document, fields = self.fields()
        done = {(op, size) for op, size, _ in fields}
        rest = {op: [size for size in every if (op, in_bytes(size)) not in done] for op in OPS}
        return {op: own for op, own in rest.items() if own} if document["left"] else {}

    def measure(self, seconds):
        """What an earlier call had no time for, or all."""
        command = [self.sweep.options.bench, "ways", "--ranks", str(self.ranks), "--ctas", str(CTAS), "--comms", str(COMMS),
                   "--budget", "%.1f" % seconds, "--profile", self.name + ".profile", "--json", self.name + ".new.json"]
        for op, own in self.missing().items():
            command += ["--case", "%s:%s" % (op, ",".join(own))]
            for way in ways(op):
                command += ["--way", "%s:%s" % (op, way)]
        return self.call(command, self.name + ".log", seconds + 60) and self.keep()

    def keep(self):
        """A job's figures, beside those of the jobs before."""
        with open(self.name + ".new.json") as f:
            document = json.load(f)
        if os.path.exists(self.name + ".json"):
            with open(self.name + ".json") as f:
                document["records"] = json.load(f)["records"] + document["records"]
        with open(self.name + ".new.json", "w") as f:
            json.dump(document, f)
        os.rename(self.name + ".new.json", self.name + ".json")
        return True

    def check(self, seconds):
        """Does NCCL's own log have every way that was asked for? A job of its own, since writing it takes time."""
        result = os.path.join(self.sweep.options.logs, "taken.json")
        if os.path.exists(result):
            return
        command = [self.sweep.options.bench, "ways", "--ranks", str(self.ranks), "--ctas", str(CTAS), "--budget", "%.1f" % seconds,
                   "--json", result + ".new"]
        for op in OPS:
            command += ["--case", op + ":1m"]
            for way in ways(op):
                command += ["--way", "%s:%s" % (op, way)]
        log = os.path.join(self.sweep.options.logs, "taken.nccl")
        if not self.call(command, result + ".log", seconds + 60, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,TUNING",
                         NCCL_DEBUG_FILE=log + ".%p"):
            return
        os.rename(result + ".new", result)

    def finished(self):
        return not self.missing()

    def run(self, seconds):
        """`seconds`: for all three jobs."""
        begun, job_s = time.monotonic(), JOB_S[0] + JOB_S[1] * self.ranks
        if os.path.exists(self.name + ".again.json"):  # of other figures than there will be
            os.unlink(self.name + ".again.json")
        if self.tune(max(TUNE * (seconds - 3 * job_s) + 1.5, 1) / .9):  # which takes .9 of it and two jobs' starting
            left = seconds - (time.monotonic() - begun) - job_s
            if self.measure(max(left - AGAIN * seconds - job_s, 1)):
                self.measure_again(max(AGAIN * seconds, 1))

    def measure_again(self, seconds):
        """What did not pass, with what was better there, in another job: all rounds of one job share its luck, and the best of
        many ways is the luckiest one also by that."""
        document, fields = self.fields()
        cases, wanted = {}, {}
        for op, size, field in fields:
            if is_whole(field) and not judge(op, size, field, document.get("comms", 1))["passed"]:
                cases.setdefault(op, []).append(str(size))
                wanted.setdefault(op, set()).update(better(field))
        if not cases:
            return
        command = [self.sweep.options.bench, "ways", "--ranks", str(self.ranks), "--comms", str(COMMS), "--budget", "%.1f" % seconds,
                   "--profile", self.name + ".profile", "--json", self.name + ".again.json"]
        for op, own in cases.items():
            command += ["--case", "%s:%s" % (op, ",".join(own))]
            for way in sorted(wanted[op]):
                command += ["--way", "%s:%s" % (op, way)]
        self.call(command, self.name + ".again.log", seconds + 60)

    def fields(self, suffix=".json"):
        """[(operation, bytes, {way: record})]"""
        with open(self.name + suffix) as f:
            document = json.load(f)
        fields = {}
        for record in document["records"]:
            fields.setdefault((record["bytes"], record["op"]), {})[record["way"]] = record
        return document, [(op, size, field) for (size, op), field in sorted(fields.items(), key=lambda item: (OPS.index(item[0][1]), item[0][0]))]


def best_of(field, wide):
    """What was measured to the end, the default included: (ratio, name)."""
    return max([(record["ratio"]["median"], name) for name, record in field.items()
                if record["state"] == "measured" and name != "again" and name.startswith("wide:") <= wide])


def is_whole(field):
    return all(field.get(name, {}).get("ratio") for name in ("default", "again", "profile"))


def better(field):
    """The ways that the profile is held against: those that were measured anew, or the best one."""
    names = [name for name, record in field.items() if "final" in record] or [best_of(field, False)[1]]
    return [name for name in names if "/" in name]


def median_error(rounds):
    """By how much the median of as many rounds of equal sides is off, in 19 of 20 draws."""
    source, n = random.Random(1), len(rounds)
    medians = sorted(abs(statistics.median(source.choices(rounds, k=n)) - 1) for _ in range(400))
    return medians[379]


def middle(ratios, comms):
    """Of each communicator's own; two rounds of each take turns, as in `loongcomm-bench ways`."""
    return statistics.mean(statistics.median(own) for own in (
        [ratio for i, ratio in enumerate(ratios) if i // 2 % comms == comm] for comm in range(comms)) if own)


def best_anew(field, comms):
    """The best of many is also the luckiest. What seemed better than the profile was measured again in rounds of its own, with the
    profile: (how far that is behind, name) in the middle of those rounds; None where nothing seemed better."""
    if "final" not in field["profile"]:
        return None
    tuned = field["profile"]["final"]["rounds"]
    return max((middle([other / own for other, own in zip(record["final"]["rounds"], tuned)], comms) - 1, name)
               for name, record in field.items() if "final" in record and name != "again")


def verdict(slower, short, error, same):
    """`same`: default, profile and best are one way, whatever the noise."""
    undecided = not slower and not short and error > NOISY and not same
    return {"undecided": undecided, "passed": not slower and not short and not undecided}


def judge(op, size, field, comms=1):
    """One size: what was measured, and whether it is what must be reached. What equal sides differ by is that of medians, as those
    are compared, and as they did differ."""
    anew = best_anew(field, comms)
    key = "final" if anew else "ratio"
    again, tuned = field["again"][key], field["profile"][key]
    spread = max(1 / again["p10"] - 1, again["p90"] - 1, 0)
    error = max(median_error(again["rounds"]), abs(again["median"] - 1))
    best, widest = best_of(field, False), best_of(field, True)
    states = {}
    for name, record in field.items():
        if name not in ("default", "again", "profile"):
            states[record["state"]] = states.get(record["state"], 0) + 1
    seemed = best[0] / field["profile"]["ratio"]["median"] - 1
    behind, name = anew or (seemed, best[1])
    choice = field["profile"]["choice"]  # told NCCL the same, two figures differ by chance alone
    as_default, as_best = choice == field["default"]["choice"], choice == field[name]["choice"]
    slower = 1 / tuned["median"] - 1 > error and not as_default
    short = behind > max(MOST, error) and not as_best
    loosely = ((1 / tuned["median"] - 1 <= spread or as_default) and (behind <= max(MOST, spread) or as_best))
    return {"op": op, "bytes": size, "default_us": field["default"]["median_us"], "default_choice": field["default"]["choice"],
            "again": again["median"], "spread": spread, "profile_us": field["profile"]["median_us"], "profile": tuned["median"],
            "profile_choice": choice, "best": best[0], "best_way": name, "behind_best": behind, "seemed_behind": seemed,
            "anew": bool(anew), "same_as_default": as_default, "allowed_behind": max(MOST, error), "wide_best": widest[0],
            "wide_way": widest[1], "rounds": len(again["rounds"]), "median_error": error, "passed_by_rounds": loosely,
            "states": states, "slower": slower, "not_best": short, **verdict(slower, short, error, as_default and as_best)}


def judge_again(row, field, second, comms):
    """What did not pass in one job, by the rounds of another one, in which nothing was chosen."""
    if not is_whole(second):
        return row
    tuned, again = second["profile"]["ratio"], second["again"]["ratio"]
    error = max(median_error(again["rounds"]), abs(again["median"] - 1))
    rounds = {name: second[name]["ratio"]["rounds"] for name in ["default"] + better(field)  # also the few of one that was dropped
              if second.get(name, {}).get("ratio")}
    behind, name = max((middle([other / own for other, own in zip(rounds[name], tuned["rounds"])], comms) - 1, name)
                       for name in rounds)
    slower = 1 / tuned["median"] - 1 > error and not row["same_as_default"]
    short = behind > max(MOST, error) and second["profile"]["choice"] != second[name]["choice"]
    return dict(row, first_job={key: row[key] for key in ("behind_best", "best_way", "profile", "again", "median_error")},
                profile=tuned["median"], again=again["median"], median_error=error, behind_best=behind, best_way=name,
                allowed_behind=max(MOST, error), rounds=len(tuned["rounds"]), slower=slower, not_best=short,
                **verdict(slower, short, error, row["same_as_default"] and second["profile"]["choice"] == second[name]["choice"]))


def line(row):
    return ("%-13s %9d  default %9.1f us [%s]  A/A %.3f, spread %.1f %%, of medians %.1f %%  profile %9.1f us, %.3f [%s]  best %.3f %s  "
            "behind %+.1f %% of %.1f%s  wider %.3f %s  %d rounds  %s%s%s" % (
                row["op"], row["bytes"], row["default_us"], row["default_choice"], row["again"], 100 * row["spread"], 100 * row["median_error"],
                row["profile_us"], row["profile"], row["profile_choice"], row["best"], row["best_way"],
                100 * row["behind_best"], 100 * row["allowed_behind"],
                " (measured anew, first %+.1f)" % (100 * row["seemed_behind"]) if row["anew"] else "", row["wide_best"], row["wide_way"], row["rounds"],
                "same way as the default, " * row["same_as_default"] + ("another job than the first, whose best was %+.1f %%, " % (
                    100 * row["first_job"]["behind_best"]) if "first_job" in row else ""), "pass" if row["passed"] else "UNDECIDED" if row["undecided"] else "FAIL", ": SLOWER THAN DEFAULT" * row["slower"] + ": NOT THE BEST" * row["not_best"]))


LOG_LINE = re.compile(r"NCCL INFO (\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
LOG_NAMES = {"AllReduce": "allreduce", "AllGather": "allgather", "ReduceScatter": "reducescatter"}


def logged(text):
    """{(operation, algorithm/protocol): the numbers of channels} of NCCL's log."""
    found = {}
    for name, _, algorithm, protocol, low, high in LOG_LINE.findall(text):
        key = (LOG_NAMES.get(name, name), "%s/%s" % (algorithm.lower(), protocol.lower()))
        found.setdefault(key, set()).add(int(high) - int(low) + 1)
    return found


def compare_log(document, found, channels):
    """What was measured as a way, but is not in NCCL's log. `channels`: of the two communicators."""
    missing, seen = [], 0
    for record in document["records"]:
        wide, way = record["way"].startswith("wide:"), record["way"].split(":")[-1]
        if "/" not in way or record["state"] not in ("measured", "behind", "tried"):
            continue
        name, number = way.rsplit("/", 1)
        number = min(int(number) or channels[wide], channels[wide])
        seen += 1
        have = found.get((record["op"], name), set())
        if not have or (way[-2:] != "/0" and number not in have):
            missing.append("%s %s (channels seen: %s)" % (record["op"], record["way"], sorted(have)))
    return seen, missing


class Sweep:
    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.pairs = [Pair(self, net, int(ranks)) for ranks in options.ranks.split(",") for net in options.nets.split(",")]
        self.out = []

    def say(self, text):
        self.out.append(text)
        print(text, flush=True)

    def measure(self):
        """Those that have no file yet share the time by their ranks."""
        if self.options.again:
            for pair in self.pairs:
                for suffix in (".json", ".again.json", ".profile"):
                    if os.path.exists(pair.name + suffix):
                        os.unlink(pair.name + suffix)
        waiting = [pair for pair in self.pairs if not pair.finished()]
        if waiting and not self.options.rig:
            waiting[0].check(2)
        least = min(60, self.options.seconds / 2) if not self.options.rig else 1
        while waiting:
            left = self.end - time.monotonic()
            pair = waiting[0]
            share = left * SHARES.get(pair.ranks, 2) / sum(SHARES.get(p.ranks, 2) for p in waiting)
            if left < least * SHARES.get(pair.ranks, 2) / 2:
                break
            before = pair.missing()
            pair.run(max(share, min(left, least * SHARES.get(pair.ranks, 2))))
            waiting.pop(0)
            if pair.missing() and pair.missing() != before:
                waiting.append(pair)

    def report_check(self):
        logs = glob.glob(os.path.join(self.options.logs, "taken.nccl.*"))
        try:
            with open(os.path.join(self.options.logs, "taken.json")) as f:
                document = json.load(f)
        except OSError:
            return
        text = ""
        for log in logs:
            with open(log, errors="replace") as f:
                text += f.read()
        channels = [int(n) for n in re.findall(r"(\d+) coll channels", text)]
        if not channels:
            return
        seen, missing = compare_log(document, logged(text), (min(channels), max(channels)))
        self.say("NCCL's own log (%d ranks, 1 MB; %d and %d channels) has %d of %d ways that were measured there%s" % (
            document["machine"]["ranks"], min(channels), max(channels), seen - len(missing), seen,
            "; not: " + ", ".join(missing) if missing else ""))

    def report(self):
        rows, wide = [], 0
        self.report_check()
        for pair in self.pairs:
            if not os.path.exists(pair.name + ".json"):
                continue
            document, fields = pair.fields()
            second = {}
            if os.path.exists(pair.name + ".again.json"):
                second = {(op, size): field for op, size, field in pair.fields(".again.json")[1]}
            self.say("%s, %d ranks: %d channels, wide %d; %d sizes left" % (
                pair.net, pair.ranks, document["channels"], document["wide_channels"], document["left"]))
            for field in fields:
                if not is_whole(field[2]):
                    continue
                row = judge(*field, document.get("comms", 1))
                if not row["passed"] and field[:2] in second:
                    row = judge_again(row, field[2], second[field[:2]], document.get("comms", 1))
                self.say(line(row))
                wide += row["wide_best"] > row["best"] * (1 + row["allowed_behind"])
                rows.append(dict(row, net=pair.net, ranks=pair.ranks, machine=document["machine"]["gpu"],
                                 nccl=document["machine"]["nccl"], channels=document["channels"]))
        passed, undecided = (sum(row[key] for row in rows) for key in ("passed", "undecided"))
        undone = ["%s-%d" % (pair.net, pair.ranks) for pair in self.pairs if not pair.finished()]
        self.say("profile slower than the default at %d sizes, behind the best by more than 3 %% at %d, beyond what medians of equal "
                 "sides differ by; a communicator with more channels would be faster still at %d" % (
                     sum(row["slower"] for row in rows), sum(row["not_best"] for row in rows), wide))
        self.say("by what single rounds of equal sides differ: %d of %d would pass; default and profile are the same way at %d; "
                 "at %d something seemed better than the profile and was measured anew" % (
                     sum(row["passed_by_rounds"] for row in rows), len(rows), sum(row["same_as_default"] for row in rows),
                     sum(row["anew"] for row in rows)))
        self.say("%d did not pass in the job that chose the best, and were measured in another one" % (
            sum("first_job" in row for row in rows)))
        self.say("pairs left: %s" % (", ".join(undone) or "none"))
        self.say("%d undecided: medians of equal sides differ by more than %.0f %%" % (undecided, 100 * NOISY))
        self.say("%d passed, %d failed" % (passed, len(rows) - passed - undecided))
        with open(os.path.join(self.options.logs, "tune_sweep.json"), "w") as f:
            json.dump({"schema": "loongcomm.sweep/1", "left": undone, "rows": rows}, f, indent=1)
        with open(os.path.join(self.options.logs, "summary.txt"), "w") as f:
            f.write("\n".join(self.out) + "\n")
        failed = [pair for pair in self.pairs if pair.failure]
        return 1 if passed + undecided < len(rows) or not rows or failed else 0


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("logs", "bench", "command", "net"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--ranks", default="2,8,4")
    parser.add_argument("--nets", default="sockets,plugin")
    parser.add_argument("--most", default="256m", choices=("64m", "256m"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--rig", action="store_true")
    sweep = Sweep(parser.parse_args(argv))
    sweep.measure()
    return sweep.report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
