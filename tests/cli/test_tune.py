# SPDX-License-Identifier: Apache-2.0
import glob
import json
import os
import signal
import subprocess
import sys
import unittest

from cli import CLI, CliTest, call, environment

HEAD = "loongcomm.profile/1\ngpu %s\nnccl 2.28.9\n"
RINGS = "rings all-reduce 2 exact 1024 65536 one-shot 4\nrings all-reduce 2 exact 65536 0 two-shot 16\n"
NCCL = "nccl all-reduce 2 2 4096 0 tree ll 4\nnccl all-gather 4 1 8192 8193 ring simple 0\n"


class Explain(CliTest):
    def explain(self, *args, **changes):
        result = call("tune", "--json", "--explain", *args, **changes)
        self.assertEqual(result.returncode, 0, result.stderr)
        document = self.document(result)
        self.assertEqual(document["schema"], "loongcomm.explain/1")
        return document

    def profile(self, rules, gpu="none"):
        return self.write("profile", HEAD % gpu + rules)

    def test_by_default_nothing_is_assumed(self):
        document = self.explain("64k")
        self.assertEqual((document["op"], document["bytes"], document["dtype"], document["ranks"], document["nodes"]),
                         ("all-reduce", 65536, "f32", 2, 1))
        self.assertEqual(document["path"]["choice"], "NCCL")
        self.assertEqual(document["path"]["why"], "LOONGCOMM_PEER=off (default)")
        self.assertIn("default", document["nccl"]["why"])
        self.assertIsNone(document["nccl"]["rule"])

    def test_rule_for_mapped_memory_is_named(self):
        path = self.profile(RINGS)
        for size, way in (("4k", "one-shot"), ("64k", "two-shot, 16 CTAs")):
            document = self.explain(size, LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto")
            self.assertIn(way, document["path"]["choice"])
            self.assertIn("rule of the profile: rings all-reduce 2 exact", document["path"]["why"])
            self.assertEqual(document["nccl"]["choice"], "not asked")
        for args in (("512",), ("4k", "--ranks", "3"), ("4k", "--op", "reduce-scatter"), ("4k", "--type", "i32"),
                     ("4k", "--nodes", "2")):
            document = self.explain(*args, LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto")
            self.assertEqual((document["path"]["choice"], document["path"]["rule"]), ("NCCL", None), args)
        document = self.explain("4k", "--profile", path)
        self.assertEqual(document["path"]["why"], "LOONGCOMM_PEER=off (default)")

    def test_settings_win_over_the_profile_as_in_the_library(self):
        path = self.profile(RINGS)
        document = self.explain("512", LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="force")
        self.assertEqual(document["path"]["why"], "LOONGCOMM_PEER=force (environment)")
        document = self.explain("4k", LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto", LOONGCOMM_ENABLE="no")
        self.assertEqual(document["path"]["why"], "LOONGCOMM_ENABLE=no (environment)")
        document = self.explain("1m", LOONGCOMM_ALLREDUCE_WIRE="bf16")
        self.assertEqual(document["path"]["choice"], "NCCL, as bf16")
        document = self.explain("8m", LOONGCOMM_ALLREDUCE_WIRE="bf16", LOONGCOMM_PEER="auto")
        self.assertIn("bf16 on the wire", document["path"]["choice"])
        document = self.explain("1m", LOONGCOMM_ALLREDUCE_WIRE="bf16", LOONGCOMM_PEER="auto")
        self.assertEqual(document["path"]["choice"], "NCCL")
        document = self.explain("4k", LOONGCOMM_ALLREDUCE_WIRE="bf16")
        self.assertEqual(document["path"]["why"], "LOONGCOMM_MIN_BYTES=64k (default)")

    def test_rule_for_nccl_holds_through_the_tuner_plugin(self):
        path = self.profile(NCCL)
        document = self.explain("4k", LOONGCOMM_PROFILE=path)
        self.assertEqual((document["nccl"]["choice"], document["nodes"]), ("NCCL's own choice", 2))
        self.assertIn("NCCL_TUNER_PLUGIN", document["nccl"]["why"])
        plugin = {"LOONGCOMM_PROFILE": path, "NCCL_TUNER_PLUGIN": "libnccl-tuner-loongcomm.so"}
        document = self.explain("4k", **plugin)
        self.assertEqual(document["nccl"]["choice"], "tree ll, 4 channels at most")
        self.assertEqual(document["nccl"]["rule"], "nccl all-reduce 2 2 4096 0 tree ll 4")
        self.assertEqual(self.explain("4k", "--nodes", "1", **plugin)["nccl"]["rule"], None)
        # NCCL counts all ranks' parts of an all-gather; a rank sends a quarter.
        self.assertEqual(self.explain("2k", "--op", "allgather", **plugin)["nccl"]["choice"], "ring simple")
        self.assertIsNone(self.explain("8k", "--op", "allgather", **plugin)["nccl"]["rule"])
        # bf16 on NCCL's wire is half as much for NCCL.
        wire = dict(plugin, LOONGCOMM_ALLREDUCE_WIRE="bf16", LOONGCOMM_MIN_BYTES="0")
        self.assertIsNone(self.explain("4k", **wire)["nccl"]["rule"])
        self.assertIsNotNone(self.explain("8k", **wire)["nccl"]["rule"])

    def test_exchanges_are_explained_too(self):
        path = self.profile("rings all-to-all 2 exact 65536 0 exchange 16\nrings send 2 exact 65536 0 exchange 8\n")
        for op, ctas in (("all-to-all", 16), ("send", 8)):
            document = self.explain("128k", "--op", op, LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto")
            self.assertIn("%d CTAs" % ctas, document["path"]["choice"])
            self.assertIn("rings %s 2 exact" % op, document["path"]["why"])
            document = self.explain("8k", "--op", op, LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto")
            self.assertIn("no rule of the profile", document["path"]["why"])
            document = self.explain("128k", "--op", op, LOONGCOMM_PROFILE=path, LOONGCOMM_PEER="auto", LOONGCOMM_EXCHANGE_MIN_BYTES="1m")
            self.assertIn("LOONGCOMM_EXCHANGE_MIN_BYTES=1m", document["path"]["why"])
            document = self.explain("128k", "--op", op, LOONGCOMM_PROFILE=path)
            self.assertEqual(document["path"]["why"], "LOONGCOMM_PEER=off (default)")

    def test_text_names_the_profile_and_where_it_holds(self):
        result = call("tune", "--explain", "64k", "--profile", self.profile(RINGS, "Some GPU"), LOONGCOMM_PEER="auto")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("of Some GPU with NCCL 2.28.9; not used on this machine", result.stdout)
        self.assertIn("path: memory mapped between the ranks, two-shot, 16 CTAs\n   why: rule of the profile: rings",
                      result.stdout)

    def test_wires_order_the_ways(self):
        h100 = os.path.join(os.environ["LC_SOURCE"], "tests/topology/data/oci-hpc/H100-topology.xml")
        job = ("--ranks", "16", "--nodes", "2", "--topology", h100)
        if "libloongtopo.so is not installed" in self.explain("64", *job)["costs"]["wires"]:
            self.skipTest("no libloongtopo.so")
        for size, best, worse in (("64", "tree ll", "ring simple"), ("64m", "ring ll128", "ring ll 1")):
            document = self.explain(size, *job)
            us = {way["way"]: way["wires_us"] for way in document["costs"]["ways"]}
            self.assertEqual((document["costs"]["ways"][0]["way"], min(us, key=us.get)), (best, best))
            self.assertLess(1.5 * us[best], us[worse])
            self.assertIn("8 GPUs, 371 GB/s (NVL) between them; 16 ports, 360.0 GB/s together", document["costs"]["wires"])
            self.assertEqual(document["nccl"]["choice"], "NCCL's own choice")  # whatever the model says
        result = call("tune", "--explain", "64m", *job)
        self.assertRegex(result.stdout, r"\n   ring ll128 +- +- +435.8 us\n")
        self.assertNotIn("costs", self.explain("64", "--op", "broadcast", *job))
        self.assertNotIn("costs", self.explain("64k", LOONGCOMM_PEER="force"))  # NCCL is not asked

    def test_what_was_measured_stands_beside_the_fit(self):
        figures = "loongcomm.tune/1\ngpu none\nnccl 22809 ranks 2 nodes 2\nhow x\n"
        for step, start, byte in (("again all-reduce", 300, 1e-3), ("nccl all-reduce ring simple 1", 250, 5e-4)):
            figures += "".join("%d took %.3f\n" % (size, start + byte * size) for size in (65536, 262144, 1048576))
            figures += "65536 1 1 1\n1048576 1 1 1\n" + "done %s\n" % step
        path = self.profile("nccl all-reduce 2 2 65536 475136 tree ll 4\nnccl all-reduce 2 2 475136 1048577 ring simple 1\n")
        plugin = {"NCCL_TUNER_PLUGIN": "libnccl-tuner-loongcomm.so", "LOONGCOMM_PROFILE": path}
        self.assertIn("none: there is no %s.2x2.figures" % path, self.explain("64k", **plugin)["costs"]["figures"])
        self.write("profile.2x2.figures", figures)
        document = self.explain("512k", **plugin)
        self.assertIn("; where it ends was placed by the model, and measured on this side of it", document["nccl"]["why"])
        ring, default = document["costs"]["ways"]
        self.assertEqual((ring["way"], ring["sizes"], default["way"]), ("ring simple 1", 3, "default"))
        self.assertAlmostEqual(ring["fitted_us"], 250 + 5e-4 * 524288, 1)
        self.assertLess(ring["error"], 1e-5)
        self.assertNotIn("measured_us", ring)
        self.assertAlmostEqual(self.explain("256k", **plugin)["costs"]["ways"][1]["measured_us"], 300 + 262.144, 2)
        self.assertEqual(self.explain("2m", **plugin)["costs"]["ways"], [])  # beyond what was measured
        for text, why in ((figures.replace("22809", "22808"), "is of another GPU, NCCL or job"), (figures[:-2], "is not understood"),
                          (figures.replace("took", "tock"), "is not understood"), (figures.replace("365.536", "nan"), "is not understood"),
                          (figures.replace("took 3", "took -3"), "is not understood")):
            self.write("profile.2x2.figures", text)
            document = self.document(call("tune", "--json", "--explain", "512k", **plugin))
            self.assertIn(why, document["costs"]["figures"])
            self.assertEqual(document["costs"]["ways"], [])
            self.assertEqual(document["nccl"]["choice"], "ring simple, 1 channels at most")

    def test_figures_that_are_no_file_are_said_at_once(self):
        path = self.profile("nccl all-reduce 2 2 65536 475136 tree ll 4\n")
        for why in self.no_files("profile.2x2.figures"):
            result = call("tune", "--json", "--explain", "64k", NCCL_TUNER_PLUGIN="libnccl-tuner-loongcomm.so",
                          LOONGCOMM_PROFILE=path)
            document = self.document(result)
            if why.startswith("it is"):
                self.assertIn("tune: cannot read %s.2x2.figures: %s\n" % (path, why), result.stderr)
                self.assertIn("figures is not understood", document["costs"]["figures"])
            else:
                self.assertIn("there is no", document["costs"]["figures"])
            self.assertIn("tree ll", document["nccl"]["choice"])

    def test_profile_that_is_no_file_is_said_at_once(self):
        for why in self.no_files("p"):
            result = call("tune", "--explain", "64k", "--profile", self.path("p"))
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn("profile %s: %s; " % (self.path("p"), why), result.stderr)

    def test_unreadable_profile_is_an_error(self):
        for path in (self.path("missing"), self.write("bad", "loongcomm.profile/1\nrings all\n")):
            result = call("tune", "--explain", "64k", "--profile", path)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn(path, result.stderr)


WIN = (1.5, 1.4, 1.6)
HERE = os.path.dirname(os.path.abspath(__file__))
ONE, TWO, BF16 = "rings all-reduce exact one-shot 16", "rings all-reduce exact two-shot 32", "rings all-reduce bf16 two-shot 32"


PART = "loongcomm.tune/1\ngpu none\nnccl 22809 ranks 2 nodes 1\nhow 1024,4096,16384 live 1\n"
LAUNCHER = (sys.executable, "-I", "-S", "-B", os.path.join(HERE, "tune_bench.py"))


class Tune(CliTest):
    """The figures are made up, so that what follows from them is certain."""
    steps = []

    def world(self, ratios, **more):
        self.write("world", repr(dict({"ranks": 2, "nodes": 1, "ratios": ratios}, **more)))

    def tune(self, *args, sizes="1k,4k,16k", code=0):
        result = call("tune", "--out", self.path("p"), "--sizes", sizes, *args, "--", *LAUNCHER, self.folder)
        self.assertEqual(result.returncode, code, (result.stdout, result.stderr))
        return result

    def all_steps(self):
        """Found out once, since it takes a run of each."""
        if not Tune.steps:
            self.world({})
            document = self.document(self.tune("--json", sizes="1k"))
            self.assertTrue(document["complete"])
            Tune.steps = [step["step"] for step in document["steps"]]
            turns = [step for step in Tune.steps if step.startswith(("nccl", "again"))]
            self.assertEqual(self.lines("log"), ["turns"] + Tune.steps[len(turns):])  # all of NCCL's in one job
            self.assertEqual(turns, Tune.steps[:len(turns)])
            os.unlink(self.path("log"))
            os.unlink(self.path("p"))
        return Tune.steps

    def tune_some(self, ratios, *args, code=0, sizes=("1024", "4096", "16384"), **more):
        """As if all steps but these had been measured without a figure."""
        done = [step for step in self.all_steps()
                if step not in ratios and step not in more.get("fail", []) and not step.startswith(("equal", "again"))]
        self.world(ratios, **more)
        self.write("p.part", PART.replace("1024,4096,16384", ",".join(sizes)).replace("ranks 2", "ranks %d" % more.get("ranks", 2)) +
                   "".join("done %s\n" % step for step in done))
        return self.tune("--resume", *args, sizes=",".join(sizes), code=code)

    def lines(self, name):
        with open(self.path(name)) as f:
            return f.read().splitlines()

    def rules(self, name="p"):
        return [line.split(" #")[0] for line in self.lines(name) if line.startswith(("rings ", "nccl a", "nccl r"))]

    def test_rules_stand_where_it_wins_and_between_where_both_sides_agree(self):
        at = {"1024": WIN, "4096": WIN, "else": WIN}
        result = self.tune_some({ONE: at, "nccl all-reduce tree ll 0": {"4096": WIN, "16384": WIN, "else": WIN},
                                 "nccl all-gather ring simple 0": {"1024": WIN}})
        self.assertEqual(self.rules(), [
            "rings all-reduce 2 exact 1024 4097 one-shot 16",
            "nccl all-reduce 2 1 4096 16385 tree ll 0",
            "nccl all-gather 2 1 1024 1025 ring simple 0"])
        self.assertEqual(self.lines("p")[:3], (HEAD % "none").splitlines())
        self.assertIn("p: 3 rules for 2 ranks on none, NCCL 2.28.9", result.stdout)
        self.assertIn("one-shot 16 # 1.400, 1.500", "\n".join(self.lines("p")))
        self.assertEqual(sorted(os.listdir(self.folder)), ["log", "p", "p.2x1.figures", "world"])

    def test_nothing_faster_is_an_empty_profile(self):
        result = self.tune_some({TWO: {"1024": (1.5, 1.01, 1.6), "4096": (1.5, 1.02, 1.6), "16384": (1.03, 1.025, 1.04)},
                                 "equal all-reduce": {"16384": (1.0, 0.9, 1.04)}})
        self.assertIn("nothing was found to be faster", result.stdout)
        self.assertEqual(self.rules(), [])
        self.assertEqual(call("tune", "--explain", "4k", "--profile", self.path("p")).returncode, 0)

    def test_one_shot_kernels_are_measured_where_their_lines_hold_a_call(self):
        at, sizes = {"else": WIN}, ("65536", "131072", "196608", "262144")
        for size in sizes:
            at[size] = WIN
        for ranks, last in ((2, 262144), (6, 196608), (8, 131072)):
            self.tune_some({ONE: at}, sizes=sizes, ranks=ranks)
            self.assertEqual(self.rules(), ["rings all-reduce %d exact 65536 %d one-shot 16" % (ranks, last + 1)])
            os.unlink(self.path("p"))

    def test_sizes_of_sends_are_those_of_messages(self):
        at = {"65536": WIN, "262144": WIN, "else": WIN}
        self.tune_some({"rings all-to-all exact exchange 32": at, "rings send exact exchange 32": at},
                       sizes=("65536", "262144"))
        self.assertEqual(self.rules(), ["rings all-to-all 2 exact 65536 262145 exchange 32",
                                        "rings send 2 exact 65536 262145 exchange 32"])

    def test_fewer_ctas_do_where_they_are_as_good(self):
        self.tune_some({TWO: {"4096": (1.50, 1.4, 1.6)}, TWO.replace("32", "8"): {"4096": (1.48, 1.4, 1.6)},
                        TWO.replace("32", "16"): {"4096": (1.49, 1.4, 1.6)}, "nccl all-reduce tree ll 0": {}},
                       "--only", "rings")
        self.assertEqual(self.rules(), ["rings all-reduce 2 exact 4096 4097 two-shot 8"])
        self.assertNotIn("turns", self.lines("log"))

    def test_bf16_between_ranks_has_to_beat_bf16_through_nccl(self):
        self.tune_some({BF16: {"1024": (1.9, 1.8, 2.0), "4096": (1.9, 1.8, 2.0)},
                        "cast all-reduce": {"1024": (1.8, 1.7, 1.85), "4096": (1.7, 1.6, 1.8)}})
        self.assertEqual(self.rules(), ["rings all-reduce 2 bf16 4096 4097 two-shot 32"])

    def test_second_look_drops_what_was_luck(self):
        win = {"1024": WIN, "4096": WIN, "16384": WIN, "else": WIN}
        for again, rules in (
                ({"4096 f32": (1.5, 1.0, 1.6)}, ["1024 1025", "16384 16385"]),
                ({"16384 bf16": (1.01, 0.9, 1.1)}, ["1024 4097"]),
                ({"2048 f32": (1.0, 0.9, 1.1)}, ["1024 1025", "4096 16385"])):
            self.tune_some({TWO: win}, again=again)
            self.assertEqual(self.rules(), ["rings all-reduce 2 exact %s two-shot 32" % r for r in rules])

    def test_interrupted_it_goes_on_where_it_was(self):
        rings = [step for step in self.all_steps() if not step.startswith(("nccl", "again"))]
        args = ("--only", "rings")
        self.world({ONE: {"1024": WIN}}, kill=5)
        self.tune(*args, sizes="1k", code=-signal.SIGKILL)
        self.assertFalse(os.path.exists(self.path("p")))
        self.world({ONE: {"1024": WIN}})
        document = self.document(self.tune("--resume", "--json", *args, sizes="1k"))
        self.assertEqual((document["schema"], document["complete"], document["ranks"]), ("loongcomm.tune/1", True, 2))
        self.assertEqual([r["rule"] for r in document["rules"]], ["rings all-reduce 2 exact 1024 1025 one-shot 16"])
        steps = {s["step"]: s for s in document["steps"]}
        self.assertEqual(steps[ONE]["ratios"], [{"bytes": 1024, "median": 1.5, "p10": 1.4, "p90": 1.6}])
        log = [line for line in self.lines("log") if not line.startswith("again")]
        self.assertEqual(log, rings[:5] + rings[4:]) # the fifth was under way

    def test_time_that_is_up_leaves_the_rest_for_another_call(self):
        self.all_steps()
        self.world({})
        self.tune("--time", "0", code=1)
        for args, log, done in (((), ["turns"], [step for step in self.steps if step.startswith(("nccl", "again"))]),
                                (("--only", "rings"), ["turns", "equal all-reduce"], ["equal all-reduce"])):
            self.tune("--time", "0.000001", *args, sizes="1k")
            self.assertEqual(self.lines("log"), log)
            result = self.tune("--time", "0", "--resume", *args, sizes="1k")
            self.assertEqual([line[5:] for line in self.lines("p.part") if line.startswith("done ")], done)
            self.assertIn(" of %d ways were not tried" % len(self.steps), result.stdout)

    def test_figures_of_an_older_profile_do_not_stay_beside_a_newer_one(self):
        self.tune_some({"nccl all-reduce tree ll 0": {"4096": WIN, "else": WIN}}, "--only", "nccl")
        self.assertTrue(os.path.exists(self.path("p.2x1.figures")))
        self.write("p.part", PART + "4096 1 1 1\ndone again all-reduce\n4096 1.5 1.4 1.6\ndone nccl all-reduce tree ll 0\n")
        self.assertIn("were not tried", self.tune("--resume", "--only", "nccl", "--time", "0").stdout)
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 4096 4097 tree ll 0"])
        self.assertFalse(os.path.exists(self.path("p.2x1.figures")))

    def test_figures_of_each_job_are_kept_where_that_is_asked_for(self):
        self.world({"nccl all-reduce tree ll 0": {"1024": WIN}})
        for args, kept in (((), []), (("--keep",), [1, 2]), (("--keep",), [1, 2, 3, 4])):
            self.tune("--only", "nccl", *args)
            self.assertEqual([n for n in range(1, 9) if os.path.exists(self.path("p.ways.%d" % n))], kept)
        for n in (1, 2, 3, 4):
            with open(self.path("p.ways.%d" % n)) as f:
                self.assertEqual(json.load(f)["schema"], "loongcomm.bench/1")

    def test_turns_without_all_sizes_go_on_with_the_others(self):
        self.world({"nccl all-reduce tree ll 0": {"1024": WIN, "4096": WIN}}, left=2, sizes=True)
        result = self.tune("--only", "nccl")
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 1025 tree ll 0"])
        self.assertIn("ways were not tried within the time", result.stdout)
        self.world({"nccl all-reduce ring ll 0": {"4096": WIN}, "nccl all-reduce tree ll 0": {"1024": WIN}}, sizes=True)
        os.unlink(self.path("log"))
        self.tune("--only", "nccl", "--resume")
        self.assertEqual(self.lines("log")[:2], ["turns", "allgather:4096,16384 allreduce:4096,16384 reducescatter:4096,16384"])
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 1025 tree ll 0", "nccl all-reduce 2 1 4096 4097 ring ll 0"])
        self.assertFalse(os.path.exists(self.path("p.part")))

    def test_way_that_ends_the_job_is_left_out_and_the_others_go_on(self):
        ratios = {"nccl all-reduce tree ll 0": {"1024": (3, 3, 3)}, "nccl all-reduce ring ll 0": {"1024": WIN, "4096": WIN, "else": WIN}}
        self.world(ratios, dies={"nccl all-reduce tree ll 0": 4096}, sizes=True)
        result = self.tune("--only", "nccl", code=1)
        self.assertIn("cannot be measured to the end: exit code 1: loongcomm-bench: dies as the test wants it\n"
                      "loongcomm: tune: nccl all-reduce tree ll 0 is left out\n", result.stderr)
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 4097 ring ll 0"])
        sizes = " ".join("%s:%%s" % op for op in ("allgather", "allreduce", "reducescatter"))
        self.assertEqual(self.lines("log")[:5], ["turns", sizes % ((("1024,4096,16384"),) * 3), "turns",
                                                 sizes % ((("4096,16384"),) * 3), "again turns"])
        self.assertFalse(os.path.exists(self.path("p.part")))
        self.assertIn("1 ways could not be measured", result.stdout)

    def test_job_that_dies_of_no_way_is_gone_on_with_in_another_call(self):
        self.world({"nccl all-reduce ring ll 0": {"1024": WIN}}, dies={"default": 4096}, sizes=True)
        self.tune("--only", "nccl", code=1)
        self.assertEqual(self.lines("log")[::2], ["turns", "again turns"])
        self.assertIn("open nccl all-reduce ring ll 0", self.lines("p.part"))
        self.world({"nccl all-reduce ring ll 0": {"1024": WIN, "4096": WIN, "else": WIN}}, sizes=True)
        self.tune("--only", "nccl", "--resume")
        self.assertEqual(self.lines("log")[4:6], ["turns", "allgather:4096,16384 allreduce:4096,16384 reducescatter:4096,16384"])
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 4097 ring ll 0"])

    def test_sizes_that_are_one_for_so_many_ranks_make_one_rule(self):
        self.world({})
        self.write("p.part", PART + "1024 1 1 1\n1024 1 1 1\ndone again all-reduce\n"
                   "1024 1.5 1.4 1.6\n1024 1.5 1.4 1.6\ndone nccl all-reduce tree ll 0\n")
        self.world({"nccl all-reduce tree ll 0": {"1024": WIN}})
        self.tune("--only", "nccl", "--resume")
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 1025 tree ll 0"])

    def test_way_of_nccl_has_to_gain_more_than_equal_sides_differ(self):
        way = "nccl all-reduce tree ll 0"
        for figures, again, stands in (((1.03, 1.01, 1.05), (1.0, 0.99, 1.01), True),
                                       ((1.019, 1.01, 1.05), (1.0, 0.99, 1.01), False),  # less than 2 %
                                       ((1.03, 0.98, 1.05), (1.0, 0.99, 1.01), False),  # less than it may be off by,
                                       ((1.03, 0.999, 1.05), (1.0, 0.99, 1.01), True),  # but two looks say the same
                                       ((1.03, 1.01, 1.05), (1.0, 0.99, 1.045), False),  # as much as chance,
                                       ((1.03, 1.01, 1.05), (1.0, 0.955, 1.01), False)):  # in either direction
            self.tune_some({way: {"4096": figures}, "again all-reduce": {"4096": again}}, "--only", "nccl")
            self.assertEqual(self.rules(), ["nccl all-reduce 2 1 4096 4097 tree ll 0"] * stands, (figures, again))

    def test_way_that_was_dropped_after_a_few_rounds_is_no_winner(self):
        self.tune_some({"nccl all-reduce tree ll 0": {"4096": WIN}, "nccl all-reduce ring ll 2": {"4096": (1.1, 1.08, 1.2)}},
                       "--only", "nccl", states={"nccl all-reduce tree ll 0": "behind"})
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 4096 4097 ring ll 2"])

    def test_second_look_at_nccls_ways_is_one_job_and_drops_what_was_luck(self):
        win = {"1024": WIN, "4096": WIN, "else": WIN}
        ratios = {"nccl all-reduce tree ll 0": win, "nccl all-gather ring ll 1": win}
        self.tune_some(ratios, "--only", "nccl")
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 4097 tree ll 0", "nccl all-gather 2 1 1024 4097 ring ll 1"])
        self.assertEqual(self.lines("log")[-2:], ["turns", "again turns"])
        self.tune_some(ratios, "--only", "nccl", again={"all-reduce 4096": (1.01, 1.0, 1.02)})
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 1025 tree ll 0", "nccl all-gather 2 1 1024 4097 ring ll 1"])

    def test_bad_luck_between_sizes_where_it_wins_gets_a_second_look(self):
        whole, hole = ["1024 16385"], ["1024 1025", "16384 16385"]
        for first, second, ranges in (((0.94, 0.87, 1.01), WIN, whole),
                                      ((0.94, 0.87, 1.01), (1.01, 0.99, 1.03), hole),
                                      ((0.94, 0.93, 0.97), WIN, hole)):  # that was no luck
            self.tune_some({"nccl all-gather ring simple 1": {"1024": WIN, "4096": first, "16384": WIN, "else": WIN}},
                           "--only", "nccl", again={"all-gather 4096": second})
            self.assertEqual(self.rules(), ["nccl all-gather 2 1 %s ring simple 1" % r for r in ranges], (first, second))
        # Beside one size where it surely wins, but not beside one where it only may.
        self.tune_some({"nccl all-gather ring simple 1": {"1024": (1.1, 0.99, 1.2), "4096": (0.94, 0.87, 1.01), "16384": (1, 0.9, 1.1)},
                        "nccl all-reduce tree ll 1": {"1024": (1, 0.9, 1.1), "4096": WIN}}, "--only", "nccl",
                       again={"%s %d" % (op, size): WIN for op in ("all-reduce", "all-gather") for size in (1024, 2048, 4096, 8192, 16384)})
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 4097 tree ll 1", "nccl all-gather 2 1 1024 1025 ring simple 1"])

    def test_two_looks_are_taken_together(self):
        way = "nccl all-reduce tree ll 0"
        for first, second, stands in (((1.06, 0.99, 1.13), (1.05, 0.99, 1.11), True),  # neither is sure
                                      ((1.06, 0.99, 1.13), (1.01, 0.99, 1.02), False),  # the second takes it back
                                      ((1.06, 1.03, 1.09), (1.015, 0.99, 1.04), True),
                                      ((1.03, 1.01, 1.05), (1.005, 0.99, 1.02), False),  # 2 % are not reached
                                      ((1.3, 1.2, 1.4), (0.99, 0.98, 1.0), False)):  # never what is slower
            self.tune_some({way: {"4096": first}}, "--only", "nccl", again={"all-reduce 4096": second}, third={
                "all-reduce 4096": (1.0, 0.9, 1.1)})
            self.assertEqual(self.rules(), ["nccl all-reduce 2 1 4096 4097 tree ll 0"] * stands, (first, second))
            os.unlink(self.path("log"))
        unsure = {"4096": (1.2, 0.99, 1.4)}  # the better one comes first, if it is sure
        self.tune_some({way: unsure, "nccl all-reduce ring ll 2": {"4096": (1.1, 1.08, 1.2)}}, "--only", "nccl")
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 4096 4097 ring ll 2"])
        os.unlink(self.path("log"))
        self.tune_some({way: unsure}, "--only", "nccl", again={"all-reduce 4096": (0.9, 0.8, 1.0)}, third={})
        self.assertEqual((self.rules(), self.lines("log").count("again turns")), ([], 1))  # no third look for it
        os.unlink(self.path("log"))
        self.tune_some({way: {**unsure, "1024": WIN}}, "--only", "nccl",
                       again={"all-reduce %d" % size: (1.0, 0.9, 1.1) for size in (1024, 4096)}, third={})
        self.assertEqual((self.rules(), self.lines("log").count("again turns")), (["nccl all-reduce 2 1 1024 1025 tree ll 0"], 2))

    def test_third_look_decides_what_the_second_has_lost(self):
        win = {"1024": WIN, "4096": WIN, "16384": WIN, "else": WIN}
        ratios, lost = {"nccl all-reduce tree ll 0": win}, (1.0, 0.9, 1.1)
        whole = "nccl all-reduce 2 1 1024 16385 tree ll 0"
        parts = ["nccl all-reduce 2 1 %s tree ll 0" % sizes for sizes in ("1024 1025", "4096 16385")]
        for again, third, rules in (({"all-reduce 1024": lost}, {}, [whole]),
                                    ({"all-reduce 1024": lost}, {"all-reduce 1024": lost}, [whole.replace("1024", "4096")]),
                                    ({"all-reduce 4096": lost}, {"all-reduce 16384": lost},
                                     [parts[0].replace("1025", "4097"), parts[1].replace("4096", "16384")]),  # no look has both
                                    ({"all-reduce 4096": lost}, {"all-reduce 2048": lost}, parts)):
            self.tune_some(ratios, "--only", "nccl", again=again, third=third)
            self.assertEqual((self.rules(), self.lines("log").count("again turns")), (rules, 2), (again, third))
            os.unlink(self.path("log"))
        self.tune_some({"nccl all-reduce tree ll 0": {"1024": (1.04, 1.02, 1.06)}}, "--only", "nccl",
                       again={"all-reduce 1024": lost}, third={})
        self.assertEqual((self.rules(), self.lines("log").count("again turns")), ([], 1))  # little was lost

    def test_rule_that_lies_between_two_others_says_so(self):
        slow = (1.3, 1.2, 1.4)
        result = self.tune_some({"nccl all-reduce tree ll 0": {"1024": WIN, "4096": slow, "else": WIN},
                                 "nccl all-reduce ring ll 0": {"1024": slow, "4096": WIN, "else": WIN},
                                 "nccl all-reduce ring simple 0": {"1024": (1.4, 1.3, 1.5), "4096": (1.4, 1.3, 1.5), "else": WIN}}, "--only", "nccl")
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 1024 1025 tree ll 0", "nccl all-reduce 2 1 1025 4096 ring simple 0",
                                        "nccl all-reduce 2 1 4096 4097 ring ll 0"])
        self.assertIn("nccl all-reduce 2 1 1025 4096 ring simple 0 # won at the sizes around it", self.lines("p"))
        self.assertIn("1025 4096 ring simple 0  (won at the sizes around it)", result.stdout)
        self.assertNotIn("inf", result.stdout)

    SIZES = (65536, 262144, 1048576, 4194304)

    def tune_model(self, ways, default, **more):
        """NCCL's ways of which each takes `start` and `byte` us, as the default does; the second look finds whatever was found."""
        took = lambda terms, size: terms[0] + terms[1] * size
        ratios, times = {}, {"all-reduce %d" % size: took(default, size) for size in self.SIZES}
        for way, terms in ways.items():
            gains = {size: took(default, size) / took(terms, size) for size in self.SIZES}
            ratios["nccl all-reduce " + way] = {str(size): (g, .99 * g, 1.01 * g) for size, g in gains.items()} | {"else": WIN}
        return self.tune_some(ratios, "--only", "nccl", sizes=tuple(map(str, self.SIZES)), us=times, **more)

    def test_fits_of_two_ways_say_how_far_each_goes(self):
        tree, ring = "tree simple 0", "ring simple 1"
        ways, default = {tree: (60, 9e-4), ring: (250, 5e-4)}, (300, 1e-3)  # as fast at 475000 bytes
        result = self.tune_model(ways, default)
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 65536 475136 " + tree, "nccl all-reduce 2 1 475136 4194305 " + ring])
        self.assertIn("between sizes, all-reduce: tree simple 0 up to 475136, ring simple 1 from there (fits are off by 0 and 0 %)\n",
                      result.stdout)
        os.unlink(self.path("p"))
        self.tune_model(ways, default, again={"all-reduce 705536": (1.0, 0.99, 1.01)})  # looked at in the middle
        self.assertEqual(self.rules(), ["nccl all-reduce 2 1 65536 475136 " + tree, "nccl all-reduce 2 1 1048576 4194305 " + ring])

    def test_fits_say_where_the_default_is_better(self):
        tree = "tree simple 0"
        for terms, default, ranges in (((100, 2e-3), (600, 1e-3), ["65536 478720"]),  # 600 + x > 1.02 (100 + 2 x)
                                       ((600, 1e-3), (100, 2e-3), ["522240 4194305"])):
            self.tune_model({tree: terms}, default)
            self.assertEqual(self.rules(), ["nccl all-reduce 2 1 %s %s" % (r, tree) for r in ranges])
            os.unlink(self.path("p"))

    def test_what_only_may_win_gets_no_range(self):
        tree = "nccl all-reduce tree simple 0"
        for low, ranges in ((1.27, ["65536 478720"]), (0.99, ["65536 262145"])):
            times = {size: 600 + 1e-3 * size for size in self.SIZES}
            gains = {size: times[size] / (100 + 2e-3 * size) for size in self.SIZES}
            figures = {str(size): (g, .99 * g, 1.01 * g) for size, g in gains.items()} | {"else": WIN}
            figures["262144"] = (gains[262144], low, 1.5)
            self.tune_some({tree: figures}, "--only", "nccl", sizes=tuple(map(str, self.SIZES)),
                           us={"all-reduce %d" % size: us for size, us in times.items()}, again={"all-reduce 262144": WIN})
            self.assertEqual(self.rules(), ["nccl all-reduce 2 1 %s tree simple 0" % r for r in ranges])
            os.unlink(self.path("p"))

    def test_fit_that_is_far_from_what_was_measured_says_nothing(self):
        ways = {"nccl all-reduce tree simple 0": {"65536": WIN, "262144": WIN, "else": WIN}}
        for times in ((), (100, 5000, 80, 9000)):
            result = self.tune_some(ways, "--only", "nccl", sizes=tuple(map(str, self.SIZES)),
                                    us={"all-reduce %d" % size: us for size, us in zip(self.SIZES, times)})
            self.assertEqual(self.rules(), ["nccl all-reduce 2 1 65536 262145 tree simple 0"])
            self.assertNotIn("between sizes", result.stdout)

    def test_figures_are_of_the_settings_of_nccl_that_they_were_measured_with(self):
        settings = {"NCCL_ALGO": "ring", "NCCL_NET": "Socket"}
        self.world({}, left=1)
        command = ("tune", "--out", self.path("p"), "--sizes", "1k,4k", "--only", "nccl", "--resume", "--", *LAUNCHER, self.folder)
        result = call(*command, **settings)
        self.assertEqual((result.returncode, result.stderr), (0, "loongcomm: tune: NCCL_ALGO=ring is set: what is measured "
                                                              "holds for jobs that set the same\n"))
        self.assertIn("how 1024,4096 live 1 NCCL_ALGO=ring NCCL_NET=Socket", self.lines("p.part"))
        self.assertIn("# 1024,4096 live 1 NCCL_ALGO=ring NCCL_NET=Socket", self.lines("p"))
        result = call(*command, **{**settings, "NCCL_NET": "IB"})
        self.assertEqual(result.returncode, 1)
        self.assertIn("and this is 1024,4096 live 1 NCCL_ALGO=ring NCCL_NET=IB: go without --resume", result.stderr)
        result = call(*command, **{**settings, "NCCL_ALGO": "x" * 99, "NCCL_PROTO": "y" * 99})
        self.assertEqual(result.returncode, 1)
        sizes = ",".join(str(4 * i + (1 << 30)) for i in range(31))  # the longest description, and a profile all the same
        every = {name: "z\n#" * 33 for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
                                             "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_NET", "NCCL_NET_PLUGIN")}
        self.world({"nccl all-reduce tree ll 0": {str(1 << 30): WIN}})
        result = call("tune", "--out", self.path("q"), "--sizes", sizes, "--only", "nccl", "--", *LAUNCHER, self.folder, **every)
        self.assertEqual((result.returncode, len(self.rules("q"))), (0, 1), result.stderr)
        self.assertEqual(call("tune", "--explain", "4k", "--profile", self.path("q")).returncode, 0)

    def test_second_look_is_had_at_as_many_sizes_as_there_can_be(self):
        sizes = [str(1024 * (i + 1)) for i in range(31)]
        self.tune_some({"nccl %s ring ll 1" % op: {"else": WIN, **{size: WIN for size in sizes}}
                        for op in ("all-reduce", "reduce-scatter", "all-gather")}, "--only", "nccl", sizes=sizes)
        self.assertEqual(self.rules(), ["nccl %s 2 1 1024 31745 ring ll 1" % op for op in ("all-reduce", "reduce-scatter", "all-gather")])

    def test_second_look_at_mapped_memory_has_as_many_sizes_too(self):
        sizes = [str(4096 * (i + 1)) for i in range(31)]
        self.tune_some({TWO: {"else": WIN, **{size: WIN for size in sizes}}}, "--only", "rings", sizes=sizes)
        self.assertEqual(self.rules(), ["rings all-reduce 2 exact 4096 126977 two-shot 32"])

    def test_second_look_has_equal_sides_of_its_own(self):
        way, equal = {"1024": (1.1, 1.05, 1.2)}, {"again all-reduce": {"1024": (1.0, 0.95, 1.06)}}
        self.tune_some({"nccl all-reduce tree ll 0": way, **equal}, "--only", "nccl",
                       again={"all-reduce 1024": (1.05, 1.04, 1.06), "equal all-reduce 1024": (1.0, 0.99, 1.01)}, third={})
        self.assertEqual(len(self.rules()), 1)
        self.tune_some({"nccl all-reduce tree ll 0": way}, "--only", "nccl",
                       again={"all-reduce 1024": (1.05, 1.04, 1.06), "equal all-reduce 1024": (1.0, 0.85, 1.01)},
                       third={"equal all-reduce 1024": (1.0, 0.8, 1.01)})
        self.assertEqual(self.rules(), [])

    def test_nccls_ways_that_fail_are_said(self):
        self.world({}, fail=["nccl all-reduce tree ll 0"])
        result = self.tune("--only", "nccl", code=1)
        self.assertIn("NCCL's ways cannot be measured: exit code 1: loongcomm-bench: as the test wants it", result.stderr)
        self.assertFalse(os.path.exists(self.path("p")))

    def test_what_fails_gets_no_rule_and_is_said(self):
        result = self.tune_some({ONE: {"1024": WIN}, TWO: {"4096": WIN}}, fail=[TWO], code=1)
        self.assertIn("%s cannot be measured: exit code 1: loongcomm-bench: as the test wants it" % TWO, result.stderr)
        self.assertEqual(self.rules(), ["rings all-reduce 2 exact 1024 1025 one-shot 16"])
        self.assertIn("1 ways could not be measured", result.stdout)
        self.world({}, fail=["equal all-reduce"])
        self.tune("--out", self.path("q"), "--only", "rings", code=1)
        self.assertFalse(os.path.exists(self.path("q")))

    def test_profile_that_is_there_keeps_rules_of_other_ranks(self):
        kept = "nccl all-reduce 4 1 0 0 ring ll 0"
        self.all_steps()
        self.write("p", HEAD % "none" + kept + "\nrings all-reduce 2 exact 0 0 two-shot 4\n")
        self.tune_some({ONE: {"1024": WIN}})
        self.assertEqual(self.rules(), [kept, "rings all-reduce 2 exact 1024 1025 one-shot 16"])
        for text in (HEAD % "Some GPU", HEAD.replace("2.28.9", "2.27.1") % "none", "no profile"):
            path = self.write("p", text)
            result = self.tune(code=1)
            self.assertIn("left alone", result.stderr)
            self.assertEqual(self.lines("p"), text.splitlines())

    def test_figures_of_another_machine_are_refused(self):
        self.world({})
        for text, why in ((PART.replace("none", "Other"), "was measured on Other"),
                          (PART.replace("ranks 2", "ranks 3"), "3 ranks"),
                          (PART.replace("1024,", ""), "was measured with 4096,16384 live 1"),
                          (PART.replace("live 1", "live 0.5 graph"), "live 0.5 graph"),
                          (PART + "1 2\n", "line 5"), (PART + "1024 1 1 1\n", "line 5"), (PART + "done it\n", "line 5"),
                          (PART + "done " + ONE, "line 5"), ("", "line 0"),
                          (PART + "1024 1 1 inf\n", "line 5"), (PART + "1024 1 1 1\nopen %s\n1024 1 1 1\ndone %s\n" % (ONE, ONE), "line 8"),
                          (PART + "opened " + ONE + "\n", "line 5")):
            self.write("p.part", text)
            result = self.tune("--resume", code=1)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            self.assertIn(why, result.stderr)
            self.assertFalse(os.path.exists(self.path("p")))

    def test_what_is_no_file_is_neither_read_nor_replaced(self):
        self.world({})
        for name in ("p", "p.part"):
            for why in self.no_files(name):
                if name == "p" and "links" in why:
                    continue  # a link that leads nowhere is replaced
                before = os.lstat(self.path(name))
                result = self.tune("--resume", code=1)
                self.assertIn(why, result.stderr)
                self.assertEqual(os.lstat(self.path(name)).st_ino, before.st_ino)
        self.assertFalse(os.path.exists(self.path("log")))  # nothing was measured


class Rig(CliTest):
    """With loongcomm-bench itself, ranks being processes over host memory."""

    def bench(self, *args, **changes):
        bench = os.path.join(os.path.dirname(CLI), "..", "..", "perf", "loongcomm-bench")
        result = subprocess.run([bench, "allreduce", "--ranks", "2", "--live", "1", "--rounds", "3", "--iters", "4", *args],
                                env=environment(**changes), timeout=100, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, encoding="utf-8")
        self.assertEqual(result.returncode, 0, result.stdout)

    def profile(self):
        win = {"4096": WIN, "65536": WIN, "else": WIN}
        self.write("world", repr({"ranks": 2, "nodes": 1, "nccl": os.environ["LC_NCCL"],  # the rig's
                                  "ratios": {TWO: win, "nccl all-reduce tree simple 0": win}}))
        result = call("tune", "--out", self.path("p"), "--sizes", "4k,64k", "--", *LAUNCHER, self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        return self.path("p")

    def test_it_measures(self):
        result = call("tune", "--ranks", "2", "--sizes", "4k,64k", "--time", "0.02", "--out", self.path("p"), "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        document = self.document(result)
        self.assertEqual((document["gpu"], document["ranks"], document["nodes"]), ("none", 2, 1))
        self.assertEqual(document["steps"][0]["step"], "again all-reduce")
        self.assertEqual(document["steps"][0]["ratios"][0]["bytes"], 4096)  # the others if time allows
        self.assertEqual(call("tune", "--explain", "4k", "--profile", self.path("p")).returncode, 0)

    def reports(self, name, settle, **changes):
        folder = self.path(name + settle)
        os.mkdir(folder, 0o700)
        self.bench("--sizes", "4k,64k", "--settle", settle, LOONGCOMM_DIR=folder, LOONGCOMM_REPORT="json", **changes)
        reports = glob.glob(os.path.join(folder, "*.json"))
        self.assertEqual(len(reports), 2)
        for report in reports:
            with open(report) as f:
                yield f.read()

    def test_its_profile_sends_calls_through_mapped_memory(self):
        profile = self.profile()
        for settle in ("0.1", "1", "20"): # the ranks agree sooner or later, between two calls
            taken = ["two-shot" in r for r in self.reports("auto", settle, LOONGCOMM_PROFILE=profile, LOONGCOMM_PEER="auto")]
            if any(taken):
                break
        self.assertEqual(taken, [True, True])
        for report in self.reports("off", "0", LOONGCOMM_PROFILE=profile, LOONGCOMM_PEER="off"):
            self.assertNotIn("two-shot", report)

    def test_its_profile_moves_nccls_choice(self):
        plugin = os.path.join(os.path.dirname(CLI), "..", "..", "plugin", "tuner", "libnccl-tuner-loongcomm.so")
        self.bench("--sizes", "512,4k,64k", "--no-preload", LOONGCOMM_PROFILE=self.profile(), NCCL_TUNER_PLUGIN=os.path.realpath(plugin),
                   LOONGCOMM_PROFILE_TRUST="yes", LOONGCOMM_LOG_LEVEL="debug", LOONGCOMM_LOG_FILE=self.path("said"))
        with open(self.path("said")) as f:
            said = f.read()
        for size in (4096, 65536):
            self.assertIn("all-reduce of %d bytes: tree simple 0" % size, said)
        self.assertNotIn("all-reduce of 512 bytes", said)


class Usage(CliTest):
    def test_wrong_words_are_named(self):
        for args in (("--bogus",), ("--explain",), ("--explain", "x"), ("--explain", "0"), ("--explain", "4k", "--op", "q"),
                     ("--explain", "4k", "--type", "q"), ("--explain", "4k", "--ranks", "0"),
                     ("--explain", "4k", "--ranks", "2", "--nodes", "3"), ("--explain", "4k", "--out", "p"),
                     ("--op", "all-reduce"), ("--time", "x"), ("--time", "-1"), ("--sizes", "4k,1k"), ("--sizes", "4k,5"),
                     ("--sizes", "4k,"), ("--only", "q"), ("--live", "1.1"), ("--explain", "4k", "--graph"), ("--ranks", "1"), ("--",), ("x",)):
            result = call("tune", *args)
            self.assertEqual((result.returncode, len(result.stderr.splitlines())), (2, 1), (args, result.stderr))
            self.assertTrue(result.stderr.startswith("loongcomm: tune: "), result.stderr)
        result = call("tune", "--help")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("--explain SIZE", result.stdout)


if __name__ == "__main__":
    unittest.main()
