#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command itself: outputs, pictures, and what happens without its library."""
import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree as ElementTree

from topo import DATA, TopoTest, call
from cli import CLI

sys.dont_write_bytecode = True

LIBRARY = os.environ["LC_TOPO_LIBRARY"]
BIG = str(DATA / "oci-hpc/H100-topology.xml")
MESH = str(DATA / "rccl-topo_expl/topo_8p_940.xml")
SVG = "{http://www.w3.org/2000/svg}"


def boxes(root, name):
    return [tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
            for rect in root.iter(SVG + "rect") if rect.get("class") == name]


def overlap(a, b):
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def holds(outer, inner):
    return (outer[0] <= inner[0] and inner[0] + inner[2] <= outer[0] + outer[2] and
            outer[1] <= inner[1] and inner[1] + inner[3] <= outer[1] + outer[3])


class Command(TopoTest):
    def test_the_picture_that_is_shown_to_readers_is_ours(self):
        source = os.environ["LC_SOURCE"]
        result = call("topo", "--input", os.path.relpath(BIG, source), "--svg", "-", cwd=source)
        with open(os.path.join(source, "topology", "example.svg")) as f:
            self.assertTrue(f.read() == result.stdout, "loongcomm topo --input ... --svg topology/example.svg")

    def test_ways_as_a_table(self):
        result = call("topo", "--input", BIG, "--paths")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        table = result.stdout[result.stdout.index("ways as NCCL 2.28 sees them"):].splitlines()
        self.assertEqual(table[1].split()[:4], ["GPU", "0", "GPU", "1"])
        self.assertRegex(table[2], r"^GPU 0 +- +NVL 370.8 +NVL 370.8 .* PIX 22.5 +PIX 22.5 +PXN 22.5 ")
        self.assertIn("GPU 1: mlx5_4 mlx5_3", table)
        off = call("topo", "--input", BIG, "--paths", NCCL_PXN_DISABLE="1").stdout
        self.assertNotIn("PXN", off)
        self.assertEqual(call("topo", "--compare", "--paths").returncode, 2)

    def test_tree(self):
        result = call("topo", "--input", BIG)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        lines = result.stdout.splitlines()
        self.assertEqual(lines[0], BIG + ": 8 GPUs, 8 NICs (16 ports), 2 NUMA nodes")
        self.assertEqual(lines[1], "|-- NUMA 0  CPUs 0-55,112-167  GenuineIntel 6/143")
        self.assertIn("|   |   |   `-- GPU 0  0000:0f:00.0  32 GT/s x16  sm_90  NVLink to switches x18", lines)
        self.assertIn("                |-- port mlx5_16:1  180 Gb/s  GPUDirect", lines)
        self.assertTrue(all(line.strip(" |`-") for line in lines[:lines.index("")]))
        self.assertIn("XGMI to GPU 1 x1, GPU 2 x1", call("topo", "--input", MESH).stdout)

    def test_nearest_ports(self):
        lines = call("topo", "--input", BIG).stdout.splitlines()
        self.assertIn("GPU 0: mlx5_0, mlx5_1  PIX  22.5 GB/s", lines)
        document = self.topo(BIG)
        first = document["nearest"][0]
        self.assertEqual([document["nodes"][net]["id"] for net in first["nets"]], ["mlx5_0", "mlx5_1"])
        self.assertEqual((len(document["nearest"]), first["path"], first["gbytes_per_s"]), (8, "PIX", 22.5))

    def test_picture(self):
        for path, fabric, table in ((BIG, 1, 0), (MESH, 0, 56)):
            picture = self.path("p.svg")
            self.assertEqual(call("topo", "--input", path, "--svg", picture).returncode, 0)
            root = ElementTree.parse(picture).getroot()
            page = (0, 0, float(root.get("width")), float(root.get("height")))
            gpus, nics, numa = (boxes(root, name) for name in ("gpu", "nic", "numa"))
            self.assertEqual((len(gpus), len(nics), len(numa)), (8, 8, 2))
            devices = gpus + nics
            self.assertFalse([(a, b) for a in devices for b in devices if a is not b and overlap(a, b)])
            self.assertFalse(overlap(*numa))
            for box in devices:
                self.assertEqual(sum(holds(cpu, box) for cpu in numa), 1)
                self.assertTrue(any(holds(switch, box) for switch in boxes(root, "switch")))
            self.assertTrue(all(holds(page, box) for box in numa))
            words = " ".join(text.text or "" for text in root.iter(SVG + "text"))
            self.assertTrue(all("GPU %d" % i in words for i in range(8)))
            self.assertEqual(words.count("NVSwitch fabric: 8 GPUs"), fabric)
            self.assertEqual(len(boxes(root, "cell xgmi")), table)

    def test_names_cannot_break_a_picture_or_a_terminal(self):
        path = self.write("odd.xml", '<system version="1"><cpu numaid="0"><nic><net name="&lt;&amp;&quot;&#27;[2J&#233;"/>'
                          '</nic></cpu></system>'.replace("&#27;", "\N{LATIN SMALL LETTER E WITH ACUTE}"))
        result = call("topo", "--input", path, "--svg", self.path("p.svg"))
        self.assertEqual(result.returncode, 0, result)
        self.assertTrue(result.stdout.isascii())
        ElementTree.parse(self.path("p.svg"))
        result = call("topo", "--input", path, "--nccl-xml", self.path("n.xml"))
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result)
        self.assertIn("a name holds a character that NCCL cannot read", result.stderr)

    def test_standard_output(self):
        self.assertTrue(call("topo", "--input", BIG, "--svg", "-").stdout.startswith("<svg "))
        self.assertTrue(call("topo", "--input", BIG, "--nccl-xml", "-").stdout.startswith('<system version="1"'))
        self.assertEqual(call("topo", "--input", BIG, "--svg", "-", "--json").returncode, 2)

    def test_pipe_that_nobody_reads_is_said_at_once(self):
        os.mkfifo(self.path("fifo"))
        result = call("topo", "--input", BIG, "--svg", self.path("fifo"))
        self.assertEqual((result.returncode, result.stderr), (1, "loongcomm: topo: cannot write %s: nobody reads it\n" % self.path("fifo")))
        reader = os.open(self.path("fifo"), os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        with subprocess.Popen([CLI, "topo", "--input", BIG, "--svg", self.path("fifo")], stdout=subprocess.DEVNULL) as topo:
            picture = b""
            while not picture.endswith(b"</svg>\n"):  # it waits for us where the pipe is full
                select.select([reader], [], [])
                picture += os.read(reader, 1 << 20)
            self.assertEqual(topo.wait(), 0)

        result = call("topo", "--input", BIG, "--svg", self.path("none", "p.svg"))
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1))

    def compared(self, *args, **changes):
        result = call("topo", "--compare", "--json", *args, **changes)
        self.assertEqual((result.returncode, result.stderr), (0, ""), result)
        document = json.loads(result.stdout)
        self.assertEqual(document["schema"], "loongcomm.plan/1")
        return {plan["name"]: plan for plan in document["plans"]}

    def test_compare(self):
        plans = self.compared("--input", BIG, "--nodes", "16")
        self.assertEqual(plans[os.path.basename(BIG)]["gpus"], 16 * 8)
        self.assertEqual(plans[os.path.basename(BIG)]["settings"], {})
        self.assertEqual({name for name, plan in plans.items() if plan["settings"]},
                         {"uneven-ports", "three-ports-for-two"})
        for plan in plans.values():
            ours, theirs = plan["loongcomm"]["all_to_all"]["ms"], plan["nccl"]["all_to_all"]["ms"]
            self.assertTrue(ours < theirs if plan["settings"] else ours == theirs, plan)
        self.assertEqual(plans["uneven-ports"]["topology_file_most_mbits_per_s"], 200000)
        plans = self.compared("--input", BIG, NCCL_PXN_DISABLE="1")
        self.assertGreater(plans["a-port-each"]["nccl"]["between_rails"], 0.8)
        text = call("topo", "--compare", "--input", BIG).stdout
        self.assertIn("better than NCCL's own: uneven-ports, three-ports-for-two", text)
        self.assertIn("set NCCL_NETDEVS_POLICY=ALL", text)

    def test_compare_a_job_of_unlike_nodes(self):
        plans = self.compared("--mixed", "--nodes", "2", "--input", BIG, "--input", BIG)
        self.assertEqual(list(plans), ["mixed"])
        self.assertEqual(plans["mixed"]["gpus"], 32)

    def test_compare_says_where_there_is_nothing_to_choose(self):
        text = call("topo", "--compare", "--input", str(DATA / "azhpc-images/ndv5-topo.xml")).stdout
        self.assertIn("ndv5-topo.xml: nothing to choose: GPUs or ports are not in it", text)

    def test_compare_all_given_machines_at_once(self):
        files = sorted(str(path) for path in DATA.rglob("*.xml"))
        refused = [path for path in files if "/hwloc/" in path or path.endswith("graph.xml")]
        self.assertGreater(len(files), 20)
        result = call("topo", "--compare", "--json", *[word for path in files for word in ("--input", path)])
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, len(refused)), result.stderr)
        for path in refused:
            self.assertIn(path, result.stderr)
        plans = {plan["name"]: plan for plan in json.loads(result.stdout)["plans"]}
        given = {"topo_8p_940.xml", "topo_4p2h_2nic.xml", "topo_8p_ts1_n4_2.xml", "topo_4p4h.xml", "H100-topology.xml",
                 "H100-topology-kubernetes.xml"}  # with NVLink or XGMI and several ports
        self.assertEqual({name for name in plans if name.endswith(".xml")}, given)
        for plan in plans.values():
            for what in ("all_to_all", "all_reduce"):
                self.assertLessEqual(plan["loongcomm"][what]["ms"], plan["nccl"][what]["ms"], plan)
        only = call("topo", "--compare", "--input", refused[0])
        self.assertEqual((only.returncode, only.stdout, only.stderr.count("\n")), (1, "", 1))
        mixed = call("topo", "--compare", "--mixed", "--input", BIG, "--input", refused[0])
        self.assertEqual((mixed.returncode, mixed.stdout, mixed.stderr.count("\n")), (1, "", 1))

    def test_compare_a_thousand_nodes_in_two_seconds_and_a_gigabyte(self):
        def limit():  # of the processor's time, which does not count what else runs here
            resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        result = subprocess.run([CLI, "topo", "--compare", "--json", "--nodes", "1024", "--input", BIG], stdout=subprocess.PIPE,
                                preexec_fn=None if os.environ["LC_SANITIZE"] != "none" else limit, check=True)
        plans = {plan["name"]: plan for plan in json.loads(result.stdout)["plans"]}
        self.assertEqual((plans[os.path.basename(BIG)]["gpus"], plans["a-port-each"]["gpus"]), (8192, 8192))

    def test_usage_of_compare(self):
        for args in (["--nodes", "3"], ["--mixed"], ["--compare", "--nodes", "x"], ["--compare", "--nodes", "1"],
                     ["--compare", "--svg", "-"], ["--input", BIG, "--input", BIG], ["--compare"] + 65 * ["--input", BIG],
                     ["--compare", "--mixed"] + 17 * ["--input", BIG]):
            result = call("topo", *args)
            self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (2, "", 1), args)

    def test_usage(self):
        self.assertEqual(call("topo", "--help").returncode, 0)
        for args in (["--input"], ["--what"], ["--svg", ""], ["file"]):
            result = call("topo", *args)
            self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (2, "", 1), args)

    def test_without_the_library_the_other_commands_work(self):
        alone = self.path("bin", "loongcomm")
        os.makedirs(os.path.dirname(alone))
        shutil.copy(CLI, alone)
        result = call("topo", cli=alone)
        self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (1, "", 1), result)
        self.assertIn("libloongtopo.so is not installed", result.stderr)
        self.assertEqual(call("config", cli=alone).returncode, 0)
        self.write("bin/libloongtopo.so", "no library")
        result = call("topo", cli=alone)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result)
        self.assertIn("libloongtopo.so cannot be loaded, it needs hwloc and libxml2", result.stderr)
        os.unlink(self.path("bin/libloongtopo.so"))
        shutil.copy(LIBRARY, self.path("bin"))
        self.assertEqual(call("topo", cli=alone).returncode, 0)

    def test_the_command_needs_libc_only(self):
        needed = subprocess.run(["readelf", "-d", CLI], capture_output=True, text=True, check=True).stdout
        self.assertNotRegex(needed, r"hwloc|libxml|loongtopo")

    def test_exports_are_those_of_the_header(self):
        with open(os.path.join(os.environ["LC_SOURCE"], "topology/loongtopo.h")) as f:
            declared = set(re.findall(r"\b(lc_topo_\w+)\(", f.read()))
        listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True)
        exported = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
        if "address" not in os.environ["LC_SANITIZE"]:
            self.assertEqual(exported - {"_init", "_fini"}, declared)


if __name__ == "__main__":
    unittest.main()
