# SPDX-License-Identifier: Apache-2.0
import unittest

from cli import CliTest, call

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
        document = self.explain("1m", LOONGCOMM_ALLREDUCE_WIRE="bf16", LOONGCOMM_PEER="auto")
        self.assertIn("bf16 on the wire", document["path"]["choice"])
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

    def test_text_names_the_profile_and_where_it_holds(self):
        result = call("tune", "--explain", "64k", "--profile", self.profile(RINGS, "Some GPU"), LOONGCOMM_PEER="auto")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("of Some GPU with NCCL 2.28.9; not used on this machine", result.stdout)
        self.assertIn("path: memory mapped between the ranks, two-shot, 16 CTAs\n   why: rule of the profile: rings",
                      result.stdout)

    def test_unreadable_profile_is_an_error(self):
        for path in (self.path("missing"), self.write("bad", "loongcomm.profile/1\nrings all\n")):
            result = call("tune", "--explain", "64k", "--profile", path)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn(path, result.stderr)


class Usage(CliTest):
    def test_wrong_words_are_named(self):
        for args in (("--bogus",), ("--explain",), ("--explain", "x"), ("--explain", "0"), ("--explain", "4k", "--op", "q"),
                     ("--explain", "4k", "--type", "q"), ("--explain", "4k", "--ranks", "0"),
                     ("--explain", "4k", "--ranks", "2", "--nodes", "3")):
            result = call("tune", *args)
            self.assertEqual((result.returncode, len(result.stderr.splitlines())), (2, 1), (args, result.stderr))
            self.assertTrue(result.stderr.startswith("loongcomm: tune: "), result.stderr)
        result = call("tune", "--help")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("--explain SIZE", result.stdout)


if __name__ == "__main__":
    unittest.main()
