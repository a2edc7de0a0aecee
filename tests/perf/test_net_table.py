# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/net_bench.sh compares, with programs in place of a GPU's, and what tests/gpu/net_table.py makes of it."""
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
GPU = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu")
sys.path.insert(0, GPU)
import net_table  # noqa: E402

# Writes its arguments and the first side's settings where --json would be, and what a job prints.
BENCH = """#!/bin/sh
words="$*"
while [ "$1" != --json ]; do shift; done
{ env | grep -E '^NCCL_|^LOONGCOMM_'; echo "args $words"; } >"${2%.json}.args"
echo '{"records": []}' >"$2"
"""
# The grid's first is faster than NCCL as it comes.
FASTER = BENCH + """case $words in *NCCL_SOCKET_NTHREADS=1\ --env-b\ NCCL_NSOCKS_PERTHREAD=1*) echo '16m f32 1 nccl-b 1 1 1 1 1 1 1.5 ok' ;; esac
"""
RUN = """#!/bin/sh
[ "${GROUP_WORLD_SIZE:-0}" = "$WORLD_SIZE" ] || exit 0
case $WORLD_SIZE in 2) n=8 ;; 4) n=4 ;; *) exit 0 ;; esac
printf '%s\\n' NCCL_MIN_CTAS=$n NCCL_NCHANNELS_PER_NET_PEER=$n LOONGCOMM_NET_CTAS=$n
"""


def document(ratio, size=16 << 20, ranks=8):
    record = {"op": "allreduce", "ranks": ranks, "bytes": size, "live": 1, "median_us": 10.0, "cpu_s_per_gb": 2.5}
    return {"records": [record, dict(record, ratio={"median": ratio}, cpu_s_per_gb=0.75)]}


class Table(unittest.TestCase):
    def lines(self, **files):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                with open(os.path.join(folder, name.replace("_", "-") + ".json"), "w") as f:
                    json.dump(content, f)
            return [net_table.line(*key, found) for key, found in sorted(net_table.read(folder).items())]

    def test_ratio_is_to_the_faster_of_nccls_ways(self):
        line, = self.lines(x_8_a=document(0.666), x_8_b=document(1.749))
        self.assertIn(" us  0.666 (0.666 to as it comes, cpu 0.75 [2.5]) (1.749 to at its best, cpu 0.75 [2.5])", line)

    def test_case_that_lacks_a_way_has_no_ratio(self):
        line, = self.lines(x_8_b=document(1.749))
        self.assertIn(" - (1.749 to at its best, cpu 0.75 [2.5]) not compared: as it comes", line)

    def test_other_rows_do_not_count(self):
        self.assertEqual(self.lines(grid_8_a=document(1), equal_sides_a=document(1), x=document(1)), [])


class Bench(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.logs = os.path.join(self.folder.name, "logs")
        for name, text in (("bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: none'\n"), ("perf/loongcomm-bench", BENCH),
                           ("interpose/cli/loongcomm", RUN), ("plugin/net/abi/libnccl-net-loongcomm.so", "")):
            self.write(name, text)

    def write(self, name, text):
        path = os.path.join(self.folder.name, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, stat.S_IRWXU)

    def bench(self, only="*"):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "LOONGCOMM_", "LC_"))}
        env = dict(clean, PATH=os.path.join(self.folder.name, "bin") + ":" + os.environ["PATH"],
                   LC_NET_BENCH="1", LC_NET_BENCH_LIBRARIES="/none")
        return subprocess.run(["bash", os.path.join(GPU, "net_bench.sh"), self.logs, self.folder.name, "100000", only], env=env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
                              encoding="utf-8")

    def row(self, name):
        with open(os.path.join(self.logs, name + ".args")) as f:
            lines = f.read().splitlines()
        given = dict(line.split("=", 1) for line in lines if not line.startswith("args "))
        words = [line for line in lines if line.startswith("args ")][0].split()
        other = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--env-b")
        return given, dict(given, **other), words

    def test_each_case_is_compared_with_as_many_channels_and_equal_sizes(self):
        result = self.bench()
        self.assertEqual(result.returncode, 0, result.stdout)
        for case, ranks, ours in (("allreduce-2", 2, "8"), ("alltoall-2", 2, "8"), ("small-2", 2, "8"), ("zeros-2", 2, "8"),
                                  ("allreduce-4", 4, "4"), ("alltoall-4", 4, "4")):
            for way, theirs in (("a", ""), ("b", ours)):
                if way == "a" and case in ("small-2", "zeros-2"):
                    continue
                nccl, plugin, words = self.row("%s-%s" % (case, way))
                self.assertEqual(nccl["NCCL_NET"], "Socket")
                self.assertEqual(plugin["NCCL_NET"], "loongcomm")
                self.assertEqual(nccl.get("NCCL_MIN_CTAS", ""), theirs, (case, way))
                self.assertEqual(plugin.get("NCCL_MIN_CTAS", ""), ours, (case, way))
                self.assertEqual(plugin.get("LOONGCOMM_NET_CTAS", "0"), ours, (case, way))
                self.assertEqual(words[words.index("--ranks") + 1], str(ranks))

    def test_best_of_the_grid_is_what_is_compared_with(self):
        self.write("perf/loongcomm-bench", FASTER)
        result = self.bench()
        self.assertEqual(result.returncode, 0, result.stdout)
        for case, ours in (("allreduce-8", ""), ("alltoall-8", ""), ("allreduce-4", "4"), ("alltoall-4", "4")):
            nccl, plugin, _ = self.row(case + "-b")
            self.assertEqual((nccl["NCCL_SOCKET_NTHREADS"], nccl["NCCL_NSOCKS_PERTHREAD"]), ("1", "1"))
            self.assertEqual(nccl.get("NCCL_MIN_CTAS", ""), ours)
            self.assertEqual(plugin["NCCL_NET"], "loongcomm")

    def test_where_nccl_is_best_as_it_comes_both_ways_are_one(self):
        result = self.bench()
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertTrue(os.path.exists(os.path.join(self.logs, "allreduce-8-b.json")))
        self.assertFalse(os.path.exists(os.path.join(self.logs, "allreduce-8-b.args")))

    def test_rows_are_chosen_by_name(self):
        result = self.bench("small-*")
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual([name for name in os.listdir(self.logs) if name.endswith(".args")], ["small-2-b.args"])

    def test_channels_that_are_not_set_are_a_failure(self):
        self.write("interpose/cli/loongcomm", "#!/bin/sh\n")
        result = self.bench()
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("loongcomm run sets '' for 2 ranks", result.stdout)
        self.assertFalse(os.path.exists(os.path.join(self.logs, "allreduce-8-a.json")))


if __name__ == "__main__":
    unittest.main()
