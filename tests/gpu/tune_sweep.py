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
SIZES = ["8", "1k", "16k", "64k", "256k", "1m", "4m", "16m", "64m", "256m"]
OPS = ("allreduce", "allgather", "reducescatter")
PROTOCOLS = ("ll", "ll128", "simple")
CHANNELS = (0, 1, 2, 4, 8)  # 0: NCCL's number; more than the communicator has are the same as fewer, and left out
CTAS = 8  # of the wide communicator
COMMS = 2  # take turns: each has luck of its own
MOST = .03  # that the profile may be behind the best of the sweep, or what equal sides differ by
NOISY = .1  # where medians of equal sides differ by more, nothing is shown
SHARES = {2: .65, 4: 1, 8: 1.55}  # of the time, by ranks: a call of eight takes three times as long
JOB_S = (1, .45)  # what starting and ending a job cost, and more for each rank; two jobs a pair, and short ones
AGAIN = .2  # of a pair's time, for the short ones
TUNE = .4  # of a pair's measuring is the profile's; the more rounds the sweep has, the less its own spread hides
LOOKS = (2, 5)  # jobs that look again at what is not shown in the first one: at least, and at most
LOOK_ROUNDS = 30  # that each of them should have time for
LOOK_COMMS = 4  # in them


def ways(op):
    combined = list(itertools.product(("ring", "tree") if op == "allreduce" else ("ring",), PROTOCOLS, CHANNELS))
    if op != "allreduce":
        combined += [("pat", "simple", c) for c in CHANNELS]
    wide = [("ring", "simple", 4), ("ring", "simple", 8), ("ring", "ll", 8)]
    if op == "allreduce":
        wide += [("tree", "simple", 8), ("tree", "ll", 8)]
    return ["%s/%s/%d" % way for way in combined] + ["wide:%s/%s/%d" % way for way in wide]


def sizes(ranks, wanted):
    """From 8 bytes on, or one element for each rank, which scattering takes."""
    return [str(max(8, 4 * ranks)) if size == SIZES[0] else size for size in SIZES if size in wanted]


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
        missing = self.missing()
        wanted = [size for size in sizes(self.ranks, SIZES) if any(size in own for own in missing.values())]
        if os.path.exists(profile):
            with open(profile + ".sizes") as f:
                known = f.read().split(",")
            if set(wanted) <= set(known):
                return True
            self.failure = profile
            print("%s is of other sizes (%s): take another folder for %s" % (profile, ",".join(known), ",".join(wanted)))
            return False
        command = [self.sweep.options.command, "tune", "--only", "nccl", "--keep", "--ranks", str(self.ranks),
                   "--sizes", ",".join(wanted), "--time", "%.3f" % (seconds / 60), "--out", profile + ".new"]
        if not self.call(command, self.name + ".tune.log", seconds + 60) or not os.path.exists(profile + ".new"):
            return False
        with open(profile + ".sizes", "w") as f:
            f.write(",".join(wanted))
        os.rename(profile + ".new", profile)
        return True

    def missing(self):
        """{operation: sizes} that are asked for and that no job has measured yet, as the bench takes them."""
        done = set()
        if os.path.exists(self.name + ".json"):
            done = {(op, size) for op, size, _ in self.fields()[1]}
        done |= {(row["op"], row["bytes"]) for row in self.sweep.stored if (row["net"], row["ranks"]) == (self.net, self.ranks)}
        options = self.sweep.options
        whole = 4 * self.ranks  # down to which the bench rounds
        rest = {op: [size for size in sizes(self.ranks, options.sizes)
                     if not any((op, in_bytes(size) - less) in done for less in range(whole))] for op in options.ops}
        return {op: own for op, own in rest.items() if own}

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
        return not self.missing() and not self.to_look_at()

    def run(self, seconds):
        """`seconds`: for all jobs."""
        end, job_s = time.monotonic() + seconds, JOB_S[0] + JOB_S[1] * self.ranks
        if self.missing():
            if not self.tune(max(TUNE * (seconds - 4 * job_s) + 1.5, 1) / .9):  # which takes .9 of it and two jobs' starting
                return
            if not self.measure(max(end - time.monotonic() - job_s - AGAIN * seconds, 1)):
                return
        at_least = 1 if self.sweep.options.rig else 2
        while self.to_look_at() and end - time.monotonic() > job_s + at_least:
            if not self.look_again(end - time.monotonic() - job_s):
                break

    def looks(self):
        """{(operation, bytes): what each of the jobs that looked again has of it, and of how many communicators}"""
        found = {}
        for name in sorted(glob.glob(glob.escape(self.name) + ".again.*.json")):
            document, fields = self.fields(name[len(self.name):])
            for op, size, field in fields:
                found.setdefault((op, size), []).append((field, document.get("comms", 1)))
        return found

    def rows(self):
        """[(row, its field of the first job, how many have looked again)]"""
        if not os.path.exists(self.name + ".json"):
            return []
        document, fields = self.fields()
        comms, looks, found = document.get("comms", 1), self.looks(), []
        for op, size, field in fields:
            if is_whole(field):
                row, own = judge(op, size, field, comms), looks.get((op, size), [])
                found.append((judge_again(row, field, own), field, len(own)))
        return found

    def to_look_at(self):
        """What the first job has not shown is measured in others, with what was better there: all rounds of one job share its luck,
        and the best of many ways is the luckiest one also by that. How many more depends on how far equal sides are apart in
        them, and on nothing that they say of the profile."""
        options = self.sweep.options
        asked = {in_bytes(size) for size in sizes(self.ranks, options.sizes)}
        return [(row, field) for row, field, looks in self.rows()
                if row["open"] and row["op"] in options.ops and row["bytes"] in asked and (
                    looks < LOOKS[0] or (row["median_error"] > MOST and looks < LOOKS[1]))]

    def look_again(self, seconds):
        number = len(glob.glob(glob.escape(self.name) + ".again.*.json"))
        name, cases, wanted, want_s = "%s.again.%d" % (self.name, number), {}, {}, 1
        for row, field in self.to_look_at():
            cases.setdefault(row["op"], []).append(str(row["bytes"]))
            wanted.setdefault(row["op"], set()).update(better(field))
            want_s += LOOK_ROUNDS * (3 + len(better(field))) * turn_s(row["default_us"])
        command = [self.sweep.options.bench, "ways", "--ranks", str(self.ranks), "--comms", str(LOOK_COMMS), "--to-the-end", "--budget", "%.1f" % min(seconds, want_s),
                   "--profile", self.name + ".profile", "--json", name + ".new"]
        for op, own in cases.items():
            command += ["--case", "%s:%s" % (op, ",".join(own))]
            for way in sorted(wanted[op]):
                command += ["--way", "%s:%s" % (op, way)]
        if not self.call(command, name + ".log", seconds + 60):
            return False
        os.rename(name + ".new", name + ".json")
        return True

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


def turn_s(us):
    """What a turn of calls that long takes in all, about."""
    return .002 + (.002 if us < 1000 else (2 if us < 20000 else 1) * us / 1e6)


def median_error(*jobs):
    """By how much the median of as many rounds of equal sides is off, in 19 of 20 draws; of several jobs, the mean of theirs."""
    source = random.Random(1)
    means = sorted(abs(statistics.mean(statistics.median(source.choices(rounds, k=len(rounds))) for rounds in jobs) - 1) for _ in range(400))
    return means[379]


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


def may_be_better(field):
    """Ways that a tuner can give, of which the job has not shown that they are not better than the profile by more than 3 %."""
    tuned = field["profile"]["ratio"]["median"]
    return [name for name, record in field.items() if "/" in name and not name.startswith("wide:") and record.get("ratio")
            and record["choice"] != field["profile"]["choice"]
            and record["ratio"].get("high", record["ratio"]["median"]) > (1 + MOST) * tuned]


def verdict(slower, short, error, same):
    """`same`: default, profile and best are one way, whatever the noise, and no other may be better."""
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
    decided = verdict(slower, short, error, as_default and as_best and not may_be_better(field))
    by_noise = (behind > MOST and not as_best) or (1 / tuned["median"] - 1 > MOST and not as_default)
    return {"op": op, "bytes": size, "default_us": field["default"]["median_us"], "default_choice": field["default"]["choice"],
            "again": again["median"], "spread": spread, "profile_us": field["profile"]["median_us"], "profile": tuned["median"],
            "profile_choice": choice, "best": best[0], "best_way": name, "behind_best": behind, "seemed_behind": seemed,
            "anew": bool(anew), "same_as_default": as_default, "allowed_behind": max(MOST, error), "wide_best": widest[0],
            "wide_way": widest[1], "rounds": len(again["rounds"]), "median_error": error, "passed_by_rounds": loosely,
            "states": states, "slower": slower, "not_best": short,
            "open": by_noise or not decided["passed"], **decided}


def judge_again(row, field, looks):
    """What the first job has not shown, by the rounds of others, in which nothing was chosen: each of those counts as much."""
    of_comms = [(look, comms) for look, comms in looks if is_whole(look)]
    looks = [look for look, _ in of_comms]
    if not row["open"] or not looks:
        return row
    tuned, again = (statistics.mean(look[name]["ratio"]["median"] for look in looks) for name in ("profile", "again"))
    error = max(median_error(*(look["again"]["ratio"]["rounds"] for look in looks)), abs(again - 1))
    apart = {}
    for look, comms in of_comms:
        for name in ["default"] + better(field):  # also the few rounds of one that was dropped
            if look.get(name, {}).get("ratio"):
                pairs = zip(look[name]["ratio"]["rounds"], look["profile"]["ratio"]["rounds"])
                apart.setdefault(name, []).append(middle([other / own for other, own in pairs], comms) - 1)
    behind, name = max((statistics.mean(own), name) for name, own in apart.items())
    choice = looks[-1]["profile"]["choice"]
    as_best = choice == next(look for look in looks if look.get(name, {}).get("ratio"))[name]["choice"]
    slower = 1 / tuned - 1 > error and not row["same_as_default"]
    short = behind > max(MOST, error) and not as_best
    return dict(row, first_job={key: row[key] for key in ("behind_best", "best_way", "profile", "again", "median_error")},
                profile=tuned, again=again, median_error=error, behind_best=behind, best_way=name, looks=len(looks),
                allowed_behind=max(MOST, error), rounds=sum(len(look["profile"]["ratio"]["rounds"]) for look in looks),
                slower=slower, not_best=short,
                **verdict(slower, short, error, row["same_as_default"] and as_best and not any(map(may_be_better, looks))))


def line(row):
    return ("%-13s %9d  default %9.1f us [%s]  A/A %.3f, spread %.1f %%, of medians %.1f %%  profile %9.1f us, %.3f [%s]  best %.3f %s  "
            "behind %+.1f %% of %.1f%s  wider %.3f %s  %d rounds  %s%s%s" % (
                row["op"], row["bytes"], row["default_us"], row["default_choice"], row["again"], 100 * row["spread"], 100 * row["median_error"],
                row["profile_us"], row["profile"], row["profile_choice"], row["best"], row["best_way"],
                100 * row["behind_best"], 100 * row["allowed_behind"],
                " (measured anew, first %+.1f)" % (100 * row["seemed_behind"]) if row["anew"] else "", row["wide_best"], row["wide_way"], row["rounds"],
                "same way as the default, " * row["same_as_default"] + ("%d other jobs than the first, whose best was %+.1f %%, " % (
                    row["looks"], 100 * row["first_job"]["behind_best"]) if "first_job" in row else ""), "pass" if row["passed"] else "UNDECIDED" if row["undecided"] else "FAIL", ": SLOWER THAN DEFAULT" * row["slower"] + ": NOT THE BEST" * row["not_best"]))


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


def key(row):
    return row["net"], row["ranks"], row["op"], row["bytes"]


def stored(paths):
    """Rows of earlier runs, each with the name of its file; of two that are of one size, the later file's."""
    rows = {}
    for path in paths:
        with open(path) as f:
            document = json.load(f)
        if document.get("schema") != "loongcomm.sweep/1":
            raise SystemExit("%s is no document of a sweep (tune_sweep.json)" % path)
        rows.update((key(row), dict(row, **{"from": row.get("from", os.path.basename(path))})) for row in document["rows"])
    return list(rows.values())


class Sweep:
    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.stored = stored(options.having)
        self.pairs = [Pair(self, net, int(ranks)) for ranks in options.ranks.split(",") for net in options.nets.split(",")]
        self.out = []

    def say(self, text):
        self.out.append(text)
        print(text, flush=True)

    def measure(self):
        """Those that have no file yet share the time by their ranks."""
        if self.options.again:
            for pair in self.pairs:
                for name in [pair.name + ".json", pair.name + ".profile"] + glob.glob(glob.escape(pair.name) + ".again.*.json"):
                    if os.path.exists(name):
                        os.unlink(name)
        waiting = [pair for pair in self.pairs if not pair.finished()]
        if waiting and not self.options.rig and not self.options.having:  # else an earlier run has looked
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

    def join(self, rows):
        """With those of earlier runs, which were not measured."""
        own = {key(row) for row in rows}
        for name in sorted({row["from"] for row in self.stored}):
            theirs = [row for row in self.stored if row["from"] == name and key(row) not in own]
            self.say("%s: %d sizes, %d of them passed" % (name, len(theirs), sum(row["passed"] for row in theirs)))
            rows = rows + theirs
        return rows

    def report(self):
        rows, wide = [], 0
        self.report_check()
        for pair in self.pairs:
            if not os.path.exists(pair.name + ".json"):
                continue
            document = pair.fields()[0]
            self.say("%s, %d ranks: %d channels, wide %d; %d sizes left" % (
                pair.net, pair.ranks, document["channels"], document["wide_channels"], sum(map(len, pair.missing().values()))))
            for row, _, _ in pair.rows():
                self.say(line(row))
                wide += row["wide_best"] > row["best"] * (1 + row["allowed_behind"])
                rows.append(dict(row, net=pair.net, ranks=pair.ranks, machine=document["machine"]["gpu"],
                                 nccl=document["machine"]["nccl"], channels=document["channels"]))
        rows = self.join(rows)
        passed, undecided = (sum(row.get(word, False) for row in rows) for word in ("passed", "undecided"))
        undone = ["%s-%d" % (pair.net, pair.ranks) for pair in self.pairs if not pair.finished()]
        self.say("profile slower than the default at %d sizes, behind the best by more than 3 %% at %d, beyond what medians of equal "
                 "sides differ by; a communicator with more channels would be faster still at %d" % (
                     sum(row["slower"] for row in rows), sum(row["not_best"] for row in rows), wide))
        self.say("by what single rounds of equal sides differ: %d of %d would pass; default and profile are the same way at %d; "
                 "at %d something seemed better than the profile and was measured anew" % (
                     sum(row.get("passed_by_rounds", row["passed"]) for row in rows), len(rows), sum(row["same_as_default"] for row in rows),
                     sum(row.get("anew", False) for row in rows)))
        self.say("%d were not shown by the job that chose the best, and were measured in others" % (
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


def words(known):
    def parse(text):
        asked = text.split(",")
        if not set(asked) <= set(known):
            raise argparse.ArgumentTypeError("not of %s: %s" % (",".join(known), text))
        return [word for word in known if word in asked]
    return parse


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("logs", "bench", "command", "net"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--ranks", default="2,8,4")
    parser.add_argument("--nets", default="sockets,plugin")
    parser.add_argument("--ops", type=words(OPS), default=OPS)
    parser.add_argument("--sizes", type=words(SIZES), default=SIZES)
    parser.add_argument("--having", action="append", default=[], metavar="FILE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--rig", action="store_true")
    sweep = Sweep(parser.parse_args(argv))
    sweep.measure()
    return sweep.report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
