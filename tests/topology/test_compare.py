#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/topo_compare.py: what NCCL says of a machine against what we say. NCCL's log is written here from the
answers that its own code has given (nccl/), in the words of its log."""
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

from topo import DATA, TopoTest, call

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.environ["LC_SOURCE"], "tests", "gpu"))
import topo_compare  # noqa: E402

NCCL = pathlib.Path(__file__).resolve().parent / "nccl"
PREFIX = "node7:4242:4250 [0] NCCL INFO "


def log_of(name):
    """NCCL's lines for the ways of nccl/NAME.txt."""
    lines = {}
    for line in (NCCL / (name + ".txt")).read_text().splitlines():
        found = re.fullmatch(r"(GPU|NET)/(\w+) (GPU|CPU|NET)/(\w+) (\(.*\))", line)
        if found:
            lines.setdefault("%s/0-%s :" % found.groups()[:2], []).append("%s/0-%s %s " % found.groups()[2:])
    return "".join(PREFIX + start + "".join(ends) + "\n" for start, ends in lines.items())


class Compare(TopoTest):
    def document(self, name, **changes):
        result = call("topo", "--input", str(name), "--json", "--paths", **changes)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return json.loads(result.stdout)

    def variables(self, name):
        return dict(line.split("=") for line in (NCCL / (name + ".txt")).read_text().splitlines() if "=" in line)

    def compare(self, *args):
        """Exit code and output of the command."""
        result = subprocess.run([sys.executable, "-B", topo_compare.__file__, *args], stdout=subprocess.PIPE, text=True,
                                check=False)
        return result.returncode, result.stdout

    def test_the_same_ways_are_found_the_same(self):
        for name in ("one-port-twice", "seed-7", "seed-52", "seed-101"):
            document = self.document(NCCL / (name + ".xml"), **self.variables(name))
            problems, compared = topo_compare.compare_paths(document, topo_compare.Log(log_of(name)))
            self.assertEqual(problems, [])
            self.assertGreater(compared, 8)

    def test_every_planted_difference_is_found(self):
        document = self.document(NCCL / "one-port-twice.xml")
        log = log_of("one-port-twice")
        for old, new in ((r"\((\d)/370.8/NVL\)", r"(\1/185.4/NVL)"), (r"NVL\)", "PIX)"), (r"\(1/48.0", "(3/48.0"),
                         (r"CPU/0-1 \([^)]*\) ", ""), (r"NET/0-1 ", "NET/0-7 ")):
            changed = re.sub(old, new, log, count=1)
            self.assertTrue(changed != log, old)
            problems, _ = topo_compare.compare_paths(document, topo_compare.Log(changed))
            self.assertTrue(problems, old)

    def test_a_line_that_nccl_has_cut_is_compared_as_far_as_it_goes(self):
        document = self.document(NCCL / "one-port-twice.xml")
        lines = log_of("one-port-twice").splitlines()
        short = lines[0][:lines[0].rindex("CPU")]
        for line, same in ((short, False), (short.ljust(topo_compare.LONGEST + 20), True)):
            problems, _ = topo_compare.compare_paths(document, topo_compare.Log("\n".join([line, *lines[1:]])))
            self.assertEqual(not problems, same)

    def test_ports_that_connections_went_by(self):
        document = self.document(NCCL / "one-port-twice.xml")
        line = PREFIX + "Channel 00/1 : %d[0] -> %d[0] [%s] via NET/Socket/%d%s\n"
        right = line % (0, 1, "send", 1, "/Shared") + line % (1, 0, "receive", 1, "") + line % (0, 1, "send", 0, "(1)") + \
            (line % (0, 1, "send", 0, "")).replace("00/1", "00/0")
        self.assertEqual(topo_compare.compare_use(document, topo_compare.Log(right)), ([], 2))
        for wrong in (line % (0, 1, "send", 0, "/GDRDMA"), line % (1, 0, "receive", 0, "/Shared")):
            problems, compared = topo_compare.compare_use(document, topo_compare.Log(wrong))
            self.assertEqual((len(problems), compared), (1, 1))

    def test_machines(self):
        text = (DATA / "oci-hpc/H100-topology.xml").read_text()
        live = self.write("live.json", json.dumps(self.document(self.write("live.xml", text))))
        part = re.sub(r'<pci busid="0000:0f:00.0".*?</nic>\s*</pci>', "", text, count=1, flags=re.S)
        dump = self.write("dump.json", json.dumps(self.document(self.write("dump.xml", part))))
        code, output = self.compare("--machine", live, dump)
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"^\d+ compared, 0 differences\n$")
        for old, new in (('count="5"', 'count="6"'), ('link_width="16"', 'link_width="8"'),
                         ('speed="180000"', 'speed="90000"'), ('name="mlx5_7"', 'name="mlx5_70"'), ('dev="3"', 'dev="33"'), ('numaid="1"', 'numaid="2"'),
                         ('sm="90"', 'sm="100"')):
            changed = text.replace(old, new, 1)
            self.assertTrue(changed != text, old)
            wrong = self.write("wrong.json", json.dumps(self.document(self.write("wrong.xml", changed))))
            code, output = self.compare("--machine", live, wrong)
            self.assertEqual((code, "DIFFERENT: " in output), (1, True), old)

    def test_switches_that_a_virtual_machine_does_not_name_are_the_same(self):
        text = (DATA / "oci-hpc/H100-topology.xml").read_text()
        first = re.search('<nvlink target="([^"]*)"', text).group(1)
        files = {}
        for name, target in (("driver", "ffffffff:ff:ff.0"), ("nccl", "fffffff:ff:ff.0"), ("other", "fffffff:ff:fe.0")):
            file = self.write(name + ".xml", text.replace('target="%s"' % first, 'target="%s"' % target))
            files[name] = self.write(name + ".json", json.dumps(self.document(file)))
        self.assertEqual(self.compare("--machine", files["driver"], files["nccl"])[0], 0)
        self.assertEqual(self.compare("--machine", files["driver"], files["other"])[0], 1)

    def test_a_log_without_ways_is_a_failure(self):
        document = self.write("d.json", json.dumps(self.document(NCCL / "one-port-twice.xml")))
        self.assertEqual(self.compare("--paths", document, self.write("empty.log", "NCCL INFO nothing\n")),
                         (1, "0 compared, 0 differences\n"))
        good = self.write("good.log", log_of("one-port-twice"))
        self.assertEqual(self.compare("--paths", document, good)[0], 0)


if __name__ == "__main__":
    unittest.main()
