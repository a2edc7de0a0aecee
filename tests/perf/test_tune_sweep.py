# SPDX-License-Identifier: Apache-2.0
"""How tests/gpu/tune_sweep.py judges what it measured, and what it measures."""
import json
import os
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu"))
import tune_sweep  # noqa: E402


def record(median, choice, p10=None, p90=None, state="measured", us=100):
    return {"state": state, "choice": choice, "median_us": us / median,
            "ratio": {"median": median, "p10": p10 or median, "p90": p90 or median, "rounds": [median] * 9}}


def field(profile, way=1.0, again=(1.0, 0.99, 1.01), wide=1.0, choice="ring/ll/0", **more):
    return dict({"default": record(1, "tree/ll/0"), "again": record(again[0], "tree/ll/0", *again[1:]),
                 "profile": record(profile, choice), "ring/simple/2": record(way, "ring/simple/2"),
                 "wide:ring/ll/8": record(wide, "ring/ll/8")}, **more)


class Judge(unittest.TestCase):
    def judge(self, *args, **more):
        row = tune_sweep.judge("allreduce", 8, field(*args, **more))
        return row["slower"], row["not_best"], row["best_way"], row["wide_way"]

    def test_neither_slower_nor_behind(self):
        self.assertEqual(self.judge(1.0)[:2], (False, False))
        self.assertEqual(self.judge(1.5, 1.54), (False, False, "ring/simple/2", "ring/simple/2"))

    def test_slower_than_medians_of_equal_sides_differ(self):
        self.assertEqual(self.judge(0.98)[:2], (True, False))
        self.assertEqual(self.judge(0.98, again=(1.0, 0.9, 1.1))[0], True)  # single rounds say nothing of medians
        self.assertEqual(self.judge(0.98, again=(0.97, 0.97, 0.97))[0], False)
        self.assertEqual(self.judge(0.98, again=(1.03, 1.03, 1.03))[0], False)
        self.assertEqual(self.judge(0.98, choice="tree/ll/0")[0], False)  # it is the default

    def test_behind_the_best_by_more_than_3_percent_and_chance(self):
        self.assertEqual(self.judge(1.5, 1.55)[1], True)
        self.assertEqual(self.judge(1.5, 1.55, again=(0.96, 0.96, 0.96))[1], False)
        self.assertEqual(self.judge(1.5, 1.55, choice="ring/simple/2")[1], False)  # it is the best

    def test_noise_shows_nothing(self):
        noisy = (0.85, 0.85, 0.85)  # equal sides
        judge = lambda *args, **more: tune_sweep.judge("allreduce", 8, field(*args, again=noisy, **more))  # noqa: E731
        self.assertEqual([(judge(1.5, 1.6)[key]) for key in ("passed", "undecided", "not_best")], [False, True, False])
        self.assertEqual([(judge(1.5, 2.0)[key]) for key in ("passed", "undecided", "not_best")], [False, False, True])
        same = judge(1.0, 0.9, choice="tree/ll/0")  # all three are one way
        self.assertEqual((same["passed"], same["undecided"]), (True, False))
        self.assertIn("UNDECIDED", tune_sweep.line(judge(1.5, 1.6)))

    def test_what_seemed_better_counts_by_rounds_of_its_own(self):
        def anew(profile, way, default=1.0, again=1.0):
            fresh = field(1.5, 1.7)
            for name, ratio in (("default", default), ("again", again), ("profile", profile), ("ring/simple/2", way)):
                fresh[name]["final"] = dict(record(ratio, "")["ratio"])
            return fresh
        judge = lambda *args: tune_sweep.judge("allreduce", 8, anew(*args))  # noqa: E731
        self.assertTrue(judge(1.5, 1.52)["passed"])  # it was luck
        self.assertAlmostEqual(judge(1.5, 1.52)["seemed_behind"], 0.2 / 1.5)
        self.assertTrue(judge(1.5, 1.6)["not_best"])
        self.assertTrue(judge(0.97, 0.96)["slower"])
        self.assertEqual(judge(0.9, 0.8)["best_way"], "default")
        self.assertFalse(judge(0.97, 0.96, 1.0, 0.96)["slower"])
        self.assertEqual(tune_sweep.middle([1.3, 1.2, 1, 1, 1.25], 2), 1.125)
        self.assertEqual(tune_sweep.middle([1.5], 2), 1.5)
        drifting = anew(1.5, 1.5)
        for i, ratio in enumerate((1, 9, 2, 8, 3, 7, 4, 6, 5)):  # both alike in each round
            drifting["profile"]["final"]["rounds"][i] = ratio
            drifting["ring/simple/2"]["final"]["rounds"][i] = ratio * 1.06
        self.assertAlmostEqual(tune_sweep.judge("allreduce", 8, drifting)["behind_best"], 0.06)

    def test_what_a_tuner_cannot_give_is_told_apart(self):
        self.assertEqual(self.judge(1.5, wide=3), (False, False, "profile", "wide:ring/ll/8"))

    def test_what_was_dropped_or_is_the_default_again_is_no_best(self):
        dropped = record(3, "tree/simple/0", state="behind")
        self.assertEqual(self.judge(1.5, again=(2, 2, 2), **{"tree/simple/0": dropped})[2], "profile")


class Again(unittest.TestCase):
    """What did not pass is held against the same ways in another job."""

    def again(self, first, **second):
        row = tune_sweep.judge("allreduce", 8, first)
        self.assertFalse(row["passed"])
        more = {name: second.pop(name) for name in list(second) if "/" in name or name == "again"}
        return tune_sweep.judge_again(row, first, dict(field(**second), **more), 1)

    def test_luck_of_one_job_is_no_failure(self):
        row = self.again(field(1.5, 1.8), profile=1.5, way=1.51)
        self.assertEqual((row["passed"], row["best_way"]), (True, "ring/simple/2"))
        self.assertAlmostEqual(row["first_job"]["behind_best"], 0.2)
        self.assertIn("another job than the first, whose best was +20.0 %", tune_sweep.line(row))

    def test_what_is_better_in_both_is_one(self):
        self.assertTrue(self.again(field(1.5, 1.8), profile=1.5, way=1.6)["not_best"])
        self.assertTrue(self.again(field(0.9), profile=0.9)["slower"])
        self.assertEqual(self.again(field(0.9), profile=0.9, way=0.5)["best_way"], "default")

    def test_only_what_was_chosen_in_the_first_counts(self):
        lucky = {"tree/simple/0": record(3, "tree/simple/0")}
        self.assertTrue(self.again(field(1.5, 1.8), profile=1.5, way=1.5, **lucky)["passed"])
        dropped = record(1.6, "ring/simple/2", state="behind")  # behind another one that is as good
        dropped["ratio"]["rounds"] = [1.6] * 3
        self.assertTrue(self.again(field(1.5, 1.8), profile=1.5, **{"ring/simple/2": dropped})["not_best"])
        gone = {"ring/simple/2": {"state": "tried", "choice": "ring/simple/2"}}
        self.assertTrue(self.again(field(1.5, 1.8), profile=1.5, **gone)["passed"])

    def test_without_figures_the_first_job_stands(self):
        self.assertFalse(self.again(field(1.5, 1.8), profile=1.5, **{"again": {"state": "left"}})["passed"])


LOG = "h:1:2 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo %s proto %s channel{Lo..Hi}={0..%d}\n"


class Jobs(unittest.TestCase):
    """Which jobs a pair runs; what runs them is stood in for."""

    def run_pair(self, way):
        with tempfile.TemporaryDirectory() as folder:
            options = types.SimpleNamespace(logs=folder, bench="bench", command="loongcomm", net="net.so", seconds=9, ranks="2",
                                            nets="sockets", most="256m", again=False, rig=True)
            pair = tune_sweep.Sweep(options).pairs[0]
            with open(pair.name + ".again.json", "w") as f:
                f.write("of another time")
            jobs = []

            def call(command, log, limit, **variables):
                jobs.append(command)
                if command[1] == "tune":
                    with open(pair.name + ".profile.new", "w"):
                        return True
                records = [dict(record, way=name, op="allreduce", bytes=8) for name, record in field(1.5, way).items()]
                with open(command[command.index("--json") + 1], "w") as f:
                    json.dump({"comms": 2, "left": 0, "records": records}, f)
                return True

            pair.call = call
            pair.run(9)
            return jobs, os.path.exists(pair.name + ".again.json")

    def test_what_passes_needs_no_other_job(self):
        jobs, again = self.run_pair(1.5)
        self.assertEqual(([job[1] for job in jobs], again), (["tune", "ways"], False))

    def test_what_does_not_is_measured_again_with_what_was_better(self):
        jobs, again = self.run_pair(1.7)
        self.assertEqual(([job[1] for job in jobs], again), (["tune", "ways", "ways"], True))
        words = jobs[2]
        self.assertEqual([words[i + 1] for i, word in enumerate(words) if word in ("--case", "--way")],
                         ["allreduce:8", "allreduce:ring/simple/2"])


class Log(unittest.TestCase):
    def compare(self, lines, *ways):
        document = {"records": [{"op": "allreduce", "way": way, "state": "measured"} for way in ways]}
        return tune_sweep.compare_log(document, tune_sweep.logged("".join(LOG % line for line in lines)), (2, 8))

    def test_ways_are_looked_for_with_their_channels(self):
        lines = (("RING", "SIMPLE", 1), ("TREE", "LL128", 0), ("RING", "LL", 7))
        ways = ("default", "ring/simple/2", "ring/simple/4", "ring/simple/0", "tree/ll128/1", "wide:ring/ll/8")
        self.assertEqual(self.compare(lines, *ways), (5, []))
        for missing in ("ring/ll/2", "tree/simple/0", "wide:ring/simple/8", "tree/ll128/2"):
            seen, found = self.compare(lines, missing)
            self.assertEqual((seen, len(found)), (1, 1), missing)


class Measure(unittest.TestCase):
    """Pairs of networks and ranks; what runs one is stood in for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.logs = folder.name
        self.asked = []

    def measure(self, seconds=480, again=False, left=()):
        """Which pairs were measured, each with the operations that are left before it. `left`: operations that no job gets to, one
        set for each job."""
        ran, left = [], list(left)

        def run(pair, _seconds):
            ran.append("%s-%d" % (pair.net, pair.ranks))
            missing = pair.missing()
            unmeasured = left.pop(0) if left else set()
            self.asked.append(set(missing))
            with open(pair.name + ".new.json", "w") as f:
                json.dump({"left": len(unmeasured), "records": [
                    {"op": op, "bytes": tune_sweep.in_bytes(size), "way": "default"} for op, own in missing.items()
                    for size in own if op not in unmeasured]}, f)
            pair.keep()

        options = types.SimpleNamespace(logs=self.logs, bench="bench", command="loongcomm", net="net.so", seconds=seconds,
                                        ranks="2,8", nets="sockets,plugin", most="256m", again=again, rig=False)
        with mock.patch.object(tune_sweep.Pair, "run", run), mock.patch.object(tune_sweep.Pair, "check"):
            tune_sweep.Sweep(options).measure()
        return ran

    def test_nothing_is_measured_twice_unless_asked_for(self):
        every = ["sockets-2", "plugin-2", "sockets-8", "plugin-8"]
        self.assertEqual(self.measure(), every)
        self.assertEqual(self.measure(), [])
        os.unlink(os.path.join(self.logs, "plugin-2.json"))
        self.assertEqual(self.measure(), ["plugin-2"])
        self.assertEqual(self.measure(again=True), every)

    def test_sizes_that_a_job_had_no_time_for_are_measured_by_another(self):
        rest = {"allgather", "reducescatter"}
        self.assertEqual(self.measure(left=[rest]), ["sockets-2", "plugin-2", "sockets-8", "plugin-8", "sockets-2"])
        self.assertEqual((self.asked[0], self.asked[4]), (set(tune_sweep.OPS), rest))
        with open(os.path.join(self.logs, "sockets-2.json")) as f:
            records = [(record["op"], record["bytes"]) for record in json.load(f)["records"]]
        self.assertEqual(len(records), len(set(records)))
        self.assertEqual(len(records), len(tune_sweep.OPS) * len(tune_sweep.SIZES))
        self.assertEqual(self.measure(), [])

    def test_a_job_that_gets_nowhere_is_not_tried_for_ever(self):
        every = ["sockets-2", "plugin-2", "sockets-8", "plugin-8"]
        self.assertEqual(self.measure(left=[{"allgather"}, set(), set(), set(), {"allgather"}]), every + ["sockets-2"])
        self.assertEqual(self.measure(), ["sockets-2"])  # but in another call

    def test_sizes_are_told_by_their_bytes(self):
        self.assertEqual([tune_sweep.in_bytes(size) for size in ("8", "1k", "16m")], [8, 1024, 16 << 20])

    def test_what_there_is_no_time_for_is_left(self):
        self.assertEqual(self.measure(seconds=0), [])


if __name__ == "__main__":
    unittest.main()
