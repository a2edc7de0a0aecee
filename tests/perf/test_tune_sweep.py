# SPDX-License-Identifier: Apache-2.0
"""How tests/gpu/tune_sweep.py judges what it measured, and what it measures."""
import argparse
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


def options(logs, **more):
    values = {"logs": logs, "bench": "bench", "command": "loongcomm", "net": "net.so", "seconds": 9, "ranks": "2", "nets": "sockets",
              "ops": tune_sweep.OPS, "sizes": tune_sweep.SIZES, "having": [], "again": False, "rig": True}
    return types.SimpleNamespace(**dict(values, **more))


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
        hidden = dict(record(0.9, "ring/simple/2"))
        hidden["ratio"]["high"] = 1.04  # what its few rounds do not exclude
        same = tune_sweep.judge("allreduce", 8, dict(field(1.0, choice="tree/ll/0", again=noisy), **{"ring/simple/2": hidden}))
        self.assertEqual((same["passed"], same["undecided"]), (False, True))
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
    """What was not shown is held against the same ways in other jobs."""

    def again(self, first, *looks, **second):
        row = tune_sweep.judge("allreduce", 8, first)
        self.assertTrue(row["open"])
        more = {name: second.pop(name) for name in list(second) if "/" in name or name == "again"}
        return tune_sweep.judge_again(row, first, [(look, 1) for look in list(looks) or [dict(field(**second), **more)]])

    def test_luck_of_one_job_is_no_failure(self):
        row = self.again(field(1.5, 1.8), profile=1.5, way=1.51)
        self.assertEqual((row["passed"], row["best_way"]), (True, "ring/simple/2"))
        self.assertAlmostEqual(row["first_job"]["behind_best"], 0.2)
        self.assertIn("1 other jobs than the first, whose best was +20.0 %", tune_sweep.line(row))

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


    def test_all_jobs_count_alike(self):
        first = field(1.5, 1.8)
        self.assertTrue(self.again(first, field(1.5, 1.6), field(1.5, 1.5), field(1.5, 1.47))["passed"])
        row = self.again(first, field(1.5, 1.6), field(1.5, 1.6), field(1.5, 1.5))
        self.assertAlmostEqual(row["behind_best"], 0.2 / 1.5 / 3)
        self.assertEqual((row["not_best"], row["looks"], row["rounds"]), (True, 3, 27))
        noisy = [field(1.5, 1.6, again=(ratio, ratio, ratio)) for ratio in (0.92, 1.08)]
        self.assertTrue(self.again(first, noisy[0])["passed"])
        self.assertTrue(self.again(first, *noisy)["not_best"])  # which cancels out

    def test_each_communicator_of_a_job_counts_as_much(self):
        first, look = field(1.5, 1.8), field(1.5, 1.5)
        look["ring/simple/2"]["ratio"]["rounds"] = [1.5, 1.5, 1.65, 1.65, 1.5, 1.5, 1.5, 1.5, 1.5]
        row = tune_sweep.judge("allreduce", 8, first)
        behind = [tune_sweep.judge_again(row, first, [(look, comms)])["behind_best"] for comms in (1, 2, 4)]
        self.assertEqual([round(one, 3) for one in behind], [0, 0.025, 0.025])

    def test_what_passed_for_noise_alone_is_open(self):
        state = lambda row: (row["passed"], row["open"])  # noqa: E731
        judge = lambda *args, **more: state(tune_sweep.judge("allreduce", 8, field(*args, **more)))  # noqa: E731
        noisy = (0.93, 0.93, 0.93)
        self.assertEqual(judge(1.5, 1.6, again=noisy), (True, True))
        self.assertEqual(judge(0.95, again=noisy), (True, True))
        self.assertEqual(judge(1.5, 1.52, again=noisy), (True, False))
        self.assertEqual(judge(0.95, 0.95, again=noisy, choice="tree/ll/0"), (True, False))


LOG = "h:1:2 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo %s proto %s channel{Lo..Hi}={0..%d}\n"


class Jobs(unittest.TestCase):
    """Which jobs a pair runs; what runs them is stood in for."""

    def run_pair(self, way, looks=(), **more):
        """`looks`: what equal sides and `way` are in the jobs that look again, one after the other."""
        with tempfile.TemporaryDirectory() as folder:
            pair = tune_sweep.Sweep(options(folder, **more)).pairs[0]
            jobs, looks = [], list(looks)

            def call(command, log, limit, **variables):
                jobs.append(command)
                if command[1] == "tune":
                    with open(pair.name + ".profile.new", "w"):
                        return True
                again, own = (1.0, way) if len(jobs) == 2 else looks.pop(0)
                records = [dict(record, way=name, op="allreduce", bytes=8)
                           for name, record in field(1.5, own, again=(again, again, again)).items()]
                with open(command[command.index("--json") + 1], "w") as f:
                    json.dump({"comms": 2, "left": 0, "records": records}, f)
                return True

            pair.call = call
            with mock.patch.object(tune_sweep, "JOB_S", (0, 0)):
                pair.run(9)
            return jobs, pair.rows()[0][0]

    def test_what_passes_needs_no_other_job(self):
        jobs, row = self.run_pair(1.5)
        self.assertEqual(([job[1] for job in jobs], row["passed"]), (["tune", "ways"], True))

    def test_what_does_not_is_measured_again_with_what_was_better(self):
        jobs, row = self.run_pair(1.7, [(1, 1.5), (1, 1.52)])
        self.assertEqual(([job[1] for job in jobs], row["passed"]), (["tune", "ways", "ways", "ways"], True))
        words = jobs[2]
        self.assertEqual(["--to-the-end" in job for job in jobs], [False, False, True, True])
        self.assertEqual([words[i + 1] for i, word in enumerate(words) if word in ("--case", "--way")],
                         ["allreduce:8", "allreduce:ring/simple/2"])

    def test_noise_decides_how_often_and_not_what_is_said(self):
        jobs, row = self.run_pair(1.7, [(0.9, 1.7), (0.9, 1.7), (1.15, 1.7)])
        self.assertEqual((len(jobs), row["not_best"]), (5, True))
        jobs, row = self.run_pair(1.7, [(0.88, 1.5)] * 5)
        self.assertEqual((len(jobs), row["passed"]), (7, False))
        self.assertTrue(row["undecided"])

    def test_only_what_is_asked_for_is_looked_at(self):
        for ops, sizes, looks in ((tune_sweep.OPS, tune_sweep.SIZES, 2), (["allgather"], tune_sweep.SIZES, 0), (tune_sweep.OPS, ["1m"], 0)):
            jobs, _ = self.run_pair(1.7, [(1, 1.5), (1, 1.5)], ops=ops, sizes=sizes)
            self.assertEqual(len(jobs), 2 + looks)


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
        self.asked, self.sizes = [], []

    def measure(self, seconds=480, again=False, left=(), **more):
        """Which pairs were measured, each with the operations that are left before it. `left`: operations that no job gets to, one
        set for each job."""
        ran, left = [], list(left)

        def run(pair, _seconds):
            ran.append("%s-%d" % (pair.net, pair.ranks))
            missing = pair.missing()
            unmeasured = left.pop(0) if left else set()
            self.asked.append(set(missing))
            self.sizes.append(missing)
            with open(pair.name + ".new.json", "w") as f:
                json.dump({"left": len(unmeasured), "records": [
                    {"op": op, "bytes": tune_sweep.in_bytes(size), "way": "default"} for op, own in missing.items()
                    for size in own if op not in unmeasured]}, f)
            pair.keep()

        given = options(self.logs, seconds=seconds, ranks="2,8", nets="sockets,plugin", again=again, rig=False, **more)
        with mock.patch.object(tune_sweep.Pair, "run", run), mock.patch.object(tune_sweep.Pair, "check"):
            tune_sweep.Sweep(given).measure()
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

    def test_only_what_is_asked_for_is_measured(self):
        some = {"ops": ["allgather"], "sizes": ["8", "1m"]}
        self.assertEqual(len(self.measure(**some)), 4)
        self.assertEqual((self.sizes[0], self.sizes[2]), ({"allgather": ["8", "1m"]}, {"allgather": ["32", "1m"]}))
        self.assertEqual(self.measure(**some), [])
        self.assertEqual(len(self.measure(ops=["allgather", "allreduce"], sizes=["1m", "4m"])), 4)
        self.assertEqual(self.sizes[4], {"allgather": ["4m"], "allreduce": ["1m", "4m"]})

    def test_what_an_earlier_run_has_is_not_measured_but_stands_in_the_document(self):
        def document(name, *rows):
            path = os.path.join(self.logs, name)
            with open(path, "w") as f:
                json.dump({"schema": "loongcomm.sweep/1", "rows": list(rows)}, f)
            return path
        row = {"net": "sockets", "ranks": 2, "op": "allreduce", "bytes": 1 << 20, "passed": False, "slower": False, "not_best": True,
               "same_as_default": False}
        old = document("old.json", dict(row, bytes=8), row)
        new = document("new.json", dict(row, passed=True, not_best=False))
        having = {"having": [old, new], "ops": ["allreduce"], "sizes": ["8", "1m"]}
        self.measure(**having)
        self.assertEqual(self.sizes, [{"allreduce": own} for own in (["8", "1m"], ["32", "1m"], ["32", "1m"])])  # not sockets-2
        sweep = tune_sweep.Sweep(options(self.logs, **having))
        sweep.say = lambda text: None
        self.assertEqual([(one["bytes"], one["passed"], one["from"]) for one in sorted(sweep.join([]), key=tune_sweep.key)],
                         [(8, False, "old.json"), (1 << 20, True, "new.json")])
        self.assertEqual([one.get("from") for one in sweep.join([row])], [None, "old.json"])  # what was measured now
        with self.assertRaises(SystemExit):
            tune_sweep.stored([os.path.join(self.logs, "sockets-8.json")])

    def test_a_profile_of_other_sizes_is_not_used(self):
        pair = tune_sweep.Sweep(options(self.logs, sizes=["1m", "4m"])).pairs[0]
        for name, text in ((".profile", ""), (".profile.sizes", "1m")):
            with open(pair.name + name, "w") as f:
                f.write(text)
        self.assertFalse(pair.tune(9))
        self.assertIn("sockets-2.profile", pair.failure)
        pair.sweep.options.sizes = ["1m"]
        self.assertTrue(pair.tune(9))

    def test_words_are_known_ones_in_their_order(self):
        self.assertEqual(tune_sweep.words(["a", "b", "c"])("c,a"), ["a", "c"])
        self.assertRaises(argparse.ArgumentTypeError, tune_sweep.words(["a"]), "a,d")

    def test_sizes_are_told_by_their_bytes(self):
        self.assertEqual([tune_sweep.in_bytes(size) for size in ("8", "1k", "16m")], [8, 1024, 16 << 20])

    def test_what_there_is_no_time_for_is_left(self):
        self.assertEqual(self.measure(seconds=0), [])


if __name__ == "__main__":
    unittest.main()
