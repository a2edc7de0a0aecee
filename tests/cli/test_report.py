#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`loongcomm report`: what it makes of the reports of a job, and of what is none."""
import json
import os
import sys
import unittest

from cli import CliTest, call

sys.dont_write_bytecode = True


def note(seq, count=64, call="AllReduce", type="float32", reduction="sum", peer=None):
    return {"seq": seq, "call": call, "reduction": reduction, "count": count, "type": type, "bytes": 4 * count,
            "peer": peer, "path": "nccl"}


def exit_report(rank, notes, ranks=3, id="00000000deadbeef", calls=2):
    return {"schema": "loongcomm.report/1", "version": "0", "host": "node", "pid": 100 + rank, "rank": rank,
            "ranks": ranks, "enabled": True, "nccl": {"version": None, "path": None}, "communicators": [
                {"number": 0, "name": "dp", "ranks": ranks, "rank": rank, "device": rank, "origin": "init",
                 "parent": None, "windows": 0, "closed": True, "id": id, "collectives": notes[-1]["seq"],
                 "messages": 0, "returned": notes[-1]["seq"], "recent": notes, "message": None,
                 "operations": [{"op": "AllReduce", "paths": [
                     {"path": "nccl", "reason": "no-faster-path", "calls": calls, "bytes_asked": 256,
                      "bytes_sent": 256},
                     {"path": "cast", "reason": "bf16-wire", "calls": 1, "bytes_asked": 100, "bytes_sent": 50}],
                     "sizes": [{"from": 128, "count": calls}]}]}],
            "others": {"communicators": 0, "operations": []}, "groups": []}


def hang_report(rank, at, verdict, blames=True, ranks=3):
    return {"schema": "loongcomm.hang/1", "version": "0", "host": "node", "pid": 100 + rank, "time": 1000 + rank,
            "verdict": verdict, "blames": blames, "process_quiet": True,
            "communicator": {"id": "00000000deadbeef", "ranks": ranks, "rank": rank, "age_ms": 60000,
                             "stream": None, "collectives": at, "messages": 0, "returned": at,
                             "recent": [note(n) for n in range(1, at + 1)], "message": None},
            "finding": {"foremost": 3, "at": 3, "awaited": note(3), "missing_ranks": 1, "unknown_ranks": 0,
                        "missing": [{"rank": 2, "presence": "here", "pid": 1, "collectives": 2, "age_ms": 9}],
                        "differing_ranks": 0}}


class Report(CliTest):
    def put(self, name, document):
        return self.write("job/loongcomm-%s.json" % name, document if isinstance(document, str) else json.dumps(document))

    def report(self, *args):
        return call("report", self.path("job"), *args)

    def test_ledgers_are_summed_and_nothing_is_wrong(self):
        for rank in range(3):
            self.put("n-%d" % rank, exit_report(rank, [note(1), note(2)]))
        result = self.report()
        self.assertEqual((result.returncode, result.stderr), (0, ""), result)
        self.assertIn('communicator 00000000deadbeef "dp", 3 ranks', result.stdout)
        self.assertIn("all 3 ranks that reported are at #2, AllReduce (sum) of 64 float32", result.stdout)
        document = self.document(self.report("--json"))
        self.assertEqual(document["schema"], "loongcomm.job/1")
        comm, = document["communicators"]
        self.assertEqual([(line["path"], line["calls"], line["bytes_asked"], line["bytes_sent"])
                          for line in comm["ledger"]], [("nccl", 6, 768, 768), ("cast", 3, 300, 150)])
        self.assertEqual((comm["behind"], comm["differs"], len(comm["members"])), (0, None, 3))

    def test_network_counters_are_summed_by_host_device_and_peer(self):
        for rank in range(3):
            report = exit_report(rank, [note(1)])
            report["network"] = [{"source": "tcp", "device": "eth%d" % (rank // 2), "peer": "10.0.0.2\x1b[2J",
                                  "counters": {"bytes_sent": 1 << 20, "rails_lost": rank}},
                                 {"source": "tcp", "device": "eth9", "peer": "10.0.0.3", "counters": {"waits": 1}}]
            self.put("n-%d" % rank, report)
        result = self.report()
        self.assertEqual((result.returncode, result.stderr), (0, ""), result)
        self.assertIn("network eth0 of node, 10.0.0.2?[2J (tcp): bytes_sent 2.0 MiB, rails_lost 1\n", result.stdout)
        network = self.document(self.report("--json"))["network"]
        self.assertEqual(sorted((m["host"], m["device"], m["peer"], str(m["counters"])) for m in network),
                         [("node", "eth0", "10.0.0.2?[2J", str({"bytes_sent": 2 << 20, "rails_lost": 1})),
                          ("node", "eth1", "10.0.0.2?[2J", str({"bytes_sent": 1 << 20, "rails_lost": 2})),
                          ("node", "eth9", "10.0.0.3", str({"waits": 3}))])
        self.put("bad", {**exit_report(0, [note(1)]), "network": [{"source": "x", "counters": {"waits": "many"}}]})
        self.assertEqual(self.report().returncode, 1)

    def test_who_lags_is_named(self):
        for rank, last in enumerate((5, 5, 4)):
            self.put("n-%d" % rank, exit_report(rank, [note(n) for n in range(1, last + 1)]))
        result = self.report()
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("behind #5: rank 2 at #4\n", result.stdout)
        self.assertEqual([m["behind"] for m in self.document(self.report("--json"))["communicators"][0]["members"]],
                         [False, False, True])

    def test_what_differs_first_is_named(self):
        for what in (dict(count=7), dict(type="int32"), dict(call="Broadcast"), dict(reduction="max"), dict(peer=1)):
            self.put("a", exit_report(0, [note(1), note(2), note(3)]))
            self.put("b", exit_report(1, [note(1), note(2, **what), note(3, count=9)]))
            result = self.report()
            self.assertEqual(result.returncode, 1, result)
            self.assertIn("ranks differ at #2: rank 0 called AllReduce (sum) of 64 float32, rank 1 called", result.stdout)
        self.put("b", exit_report(1, [note(1), note(2, reduction="own operation"), note(3)]))
        self.assertEqual(self.report().returncode, 0)
        self.put("b", exit_report(1, [note(1), note(2, count=8), note(3)], id=None))
        self.assertEqual(self.report().returncode, 0, "without a number in common nothing is compared")

    def test_hang_reports_are_merged_and_a_silent_rank_is_named(self):
        for rank in (0, 2):
            self.put("n-%d.hang" % rank, hang_report(rank, 2 if rank == 2 else 3, "rank 2 is late"))
        result = self.report()
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("hang (2 reports): rank 2 is late\n", result.stdout)
        self.assertIn("behind #3: rank 2 at #2\n", result.stdout)
        self.assertIn("no report of rank 1: killed", result.stdout)
        for rank in range(3):
            self.put("n-%d" % rank, exit_report(rank, [note(n) for n in range(1, 10)]))
        result = self.report()
        self.assertIn("all 3 ranks that reported are at #9", result.stdout)
        self.assertEqual(result.returncode, 1)

    def test_a_standstill_that_blames_nobody_is_fine(self):
        for rank in range(3):
            self.put("n-%d.hang" % rank, hang_report(rank, 2, "idle", blames=False))
        result = self.report()
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("standstill (3 reports): idle\n", result.stdout)

    def test_hostile_files_are_left_out_with_one_line_each(self):
        whole = json.dumps(exit_report(0, [note(1)]))
        self.put("good", whole)
        self.put("cut", whole[:len(whole) // 2])
        self.put("schema", whole.replace("report/1", "report/9"))
        self.put("rank", json.dumps(exit_report(7, [note(1)])))
        self.put("number", whole.replace('"calls": 2', '"calls": -2'))
        self.put("huge", "[" + "1," * (3 << 20) + "1]")
        self.put("deep", "[" * 100000)
        self.put("nul", whole + "\0")
        os.symlink("/etc/passwd", self.path("job", "loongcomm-link.json"))
        os.mkfifo(self.path("job", "loongcomm-pipe.json"))
        os.mkdir(self.path("job", "loongcomm-folder.json"))
        self.write("job/other.json", "{")
        self.write("job/loongcomm-text.txt", "{")
        result = self.report()
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(result.stderr.splitlines()), 10, result.stderr)
        self.assertIn("loongcomm-link.json is left out: it is a link", result.stderr)
        self.assertIn("loongcomm-huge.json is left out: it is larger than 4 MiB", result.stderr)
        self.assertIn("loongcomm-schema.json is left out: it is no whole report of this version", result.stderr)
        self.assertIn("1 exit report, 0 hang reports, 1 communicator\n", result.stdout)
        self.assertEqual(self.document(self.report("--json"))["bad_files"], 10)
        for i in range(3):
            self.put("empty-%d" % i, "")
        result = self.report()
        self.assertEqual(len(result.stderr.splitlines()), 11, result.stderr)
        self.assertIn("loongcomm: and more files", result.stderr)

    def test_text_of_a_report_cannot_steer_a_terminal(self):
        self.put("a", hang_report(0, 3, "late \x1b[2Jrank\n2"))
        self.assertIn("late ?[2Jrank?2", self.report().stdout)

    def test_folders_without_reports_and_wrong_usage(self):
        os.mkdir(self.path("job"))
        result = self.report()
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("no report in", result.stderr)
        result = call("report", self.path("nowhere"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("No such file", result.stderr)
        for args in ((), ("a", "b"), ("--what", "a")):
            self.assertEqual(call("report", *args).returncode, 2)
        self.assertEqual(call("report", "--help").returncode, 0)


if __name__ == "__main__":
    unittest.main()
