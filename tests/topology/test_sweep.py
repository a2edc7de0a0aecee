#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/tune_sweep.py with stand-ins for loongcomm-bench and `loongcomm tune`: what it runs, what it keeps and what
it says of the figures."""
import contextlib
import io
import os
import re
import stat
import sys
import unittest

from topo import TopoTest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.environ["LC_SOURCE"], "tests", "gpu"))
import tune_sweep  # noqa: E402

# Ratios by what the other side is: FIGURES/equal, tuned, or the way; every call is a line of FIGURES/calls.
BENCH = """#!/bin/sh
who=equal
while [ $# -gt 0 ]; do
    case $1 in
    --json) json=$2 ;;
    --env-b) case $2 in NCCL_ALGO=*) who=${2#*=} ;; NCCL_PROTO=*) who=$who-${2#*=} ;; LOONGCOMM_PROFILE=*) who=tuned ;; esac ;;
    esac
    shift
done
echo "$who" >>"$FIGURES/calls"
[ ! -e "$FIGURES/$who.fails" ] || { echo "no such way"; exit 3; }
ratio=1.00
[ ! -e "$FIGURES/$who" ] || read -r ratio <"$FIGURES/$who"
printf '{"records": [{"bytes": 8, "variant": "nccl"}, {"bytes": 8, "ratio": {"median": %s, "p10": %s}}]}' \\
    "$ratio" "${ratio%?}" >"$json"
"""
TUNE = """#!/bin/sh
[ ! -e "$FIGURES/tune.fails" ] || exit 1
while [ "$1" != --out ]; do shift; done
echo "loongcomm.profile/1" >"$2"
"""


class SweepTest(TopoTest):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("figures"))
        os.environ["FIGURES"] = self.path("figures")
        for name, text in (("bench", BENCH), ("loongcomm", TUNE)):
            path = self.write(name, text)
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        self.addCleanup(setattr, tune_sweep, "CHANNELS", tune_sweep.CHANNELS)
        tune_sweep.CHANNELS = (0,)

    def figure(self, who, ratio):
        self.write("figures/" + who, ratio + "\n")

    def calls(self):
        try:
            with open(self.path("figures", "calls")) as f:
                return f.read().split()
        except OSError:
            return []

    def sweep(self, seconds="3600"):
        os.makedirs(self.path("logs"), exist_ok=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = tune_sweep.main([self.path("logs"), self.path("bench"), self.path("loongcomm"), "tuner.so", "net.so",
                                    seconds, "--ranks", "2", "--nets", "sockets"])
        return code, out.getvalue()

    def test_a_good_profile_passes_and_nothing_is_measured_twice(self):
        self.figure("equal", "1.01")
        self.figure("tuned", "1.20")
        self.figure("Tree-LL", "1.22")
        code, output = self.sweep()
        self.assertEqual(code, 0, output)
        self.assertIn("3 passed, 0 failed\n", output)
        self.assertIn("0 of 1 jobs have runs left", output)
        self.assertIn("best 1.220 (Tree/LL/-)  behind +1.7 %\n", output)
        calls = self.calls()
        self.assertEqual([calls.count(who) for who in ("equal", "tuned", "Tree-LL", "Ring-Simple", "PAT-Simple")],
                         [6, 3, 1, 3, 2])
        self.assertEqual(self.sweep()[1].splitlines()[-1], output.splitlines()[-1])
        self.assertEqual(self.calls(), calls)

    def test_a_profile_that_is_slower_than_equal_sides_are_fails(self):
        self.figure("equal", "1.001")  # from 1.00 on
        self.figure("tuned", "0.995")
        code, output = self.sweep()
        self.assertEqual((code, output.count("SLOWER THAN DEFAULT"), output.count("NOT THE BEST")), (1, 3, 0), output)
        self.figure("equal", "0.98")
        for name in os.listdir(self.path("logs")):
            if "equal" in name:
                os.unlink(self.path("logs", name))
        self.assertEqual(self.sweep()[0], 0)

    def test_a_profile_that_is_behind_the_best_fails(self):
        self.figure("tuned", "1.10")
        self.figure("Ring-LL128", "1.14")
        code, output = self.sweep()
        self.assertEqual((code, output.count("NOT THE BEST")), (1, 3), output)

    def test_ways_that_do_not_exist_are_left_out_and_not_tried_again(self):
        self.write("figures/Ring-LL128.fails", "")
        code, output = self.sweep()
        self.assertEqual(code, 0, output)
        self.assertIn("5 of 6 ways", output.replace("sockets, 2 ranks, ", ""))
        self.assertRegex(output, r"; 3 runs failed now; 0 of 1")
        self.assertRegex(self.sweep()[1], r"; 0 runs failed now; 0 of 1")
        self.assertEqual(self.calls().count("Ring-LL128"), 3)

    def test_what_there_is_no_time_for_is_left_open(self):
        self.assertRegex(self.sweep("1")[1], r"1 of 1 jobs have runs left: call again\n0 passed, 0 failed\n$")
        self.assertEqual(self.calls(), [])
        self.write("figures/tune.fails", "")
        output = self.sweep()[1]
        self.assertIn("1 of 1 jobs have runs left", output)
        self.assertEqual(set(self.calls()), {"equal"})

    def test_sizes_hold_an_element_of_each_rank(self):
        self.assertTrue(tune_sweep.sizes(2).startswith("8,1k,") and tune_sweep.sizes(8).startswith("32,1k,"))
        self.assertTrue(re.fullmatch(r"[0-9a-z,]+", tune_sweep.sizes(4)))


if __name__ == "__main__":
    unittest.main()
