#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/topo.sh with a stand-in for NCCL's job, which says of a topology what our model says, or something else."""
import json
import os
import stat
import subprocess
import sys
import unittest

from topo import TopoTest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.environ["LC_SOURCE"], "tests", "gpu"))
import topo_compare  # noqa: E402

MACHINE = """<system version="1">
<cpu numaid="0" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207">
<pci busid="0000:8b:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:fe:00.0" count="18" tclass="0x068000"/></gpu></pci>
<nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" gdr="0" keep="1"/>
<net name="eth1" dev="1" speed="25000" port="0" guid="0x1" gdr="0" keep="1"/></nic>
</cpu>
</system>
"""


def job(file, wrong):
    """What NCCL would leave behind."""
    with open(file) as source, open(os.environ["NCCL_TOPO_DUMP_FILE"], "w") as dump:
        dump.write(source.read())
    text = subprocess.run([os.environ["LC_CLI"], "topo", "--input", file, "--paths", "--json"], check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    document, lines = json.loads(text), {}
    for path in document["paths"]:
        start, end = (topo_compare.nccl_name(document, path[key]).replace(" ", "/0-") for key in ("from", "to"))
        lines.setdefault(start, []).append(
            "%s (%d/%.1f/%s)" % (end, path["hops"], path["gbytes_per_s"], "PIX" if wrong else path["type"]))
    port = document["nodes"][document["channels"][0]["nets"][0]]["dev"]
    with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "w") as log:
        for start, ends in lines.items():
            log.write("node7:1:2 [0] NCCL INFO %s :%s \n" % (start, " ".join(ends)))
        log.write("node7:1:2 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] [send] via NET/Socket/%d\n" % port)


class Script(TopoTest):
    def run_script(self, wrong="", live=MACHINE):
        smi = self.write("bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: a stand-in'\n")
        os.chmod(smi, os.stat(smi).st_mode | stat.S_IXUSR)
        path = ":".join((os.path.dirname(smi), os.path.dirname(sys.executable), os.environ["PATH"]))
        env = {**os.environ, "PATH": path, "LC_STUB_WRONG": wrong,
               "LC_STUB_MACHINE": self.write("machine.xml", MACHINE), "LC_TOPO_LIVE": self.write("live.xml", live),
               "LC_TOPO_JOB": "%s -B %s job" % (sys.executable, os.path.abspath(__file__)), "TOPO_SECONDS": "300"}
        result = subprocess.run(["bash", os.path.join(os.environ["LC_SOURCE"], "tests/gpu/topo.sh"), self.path("logs"),
                                 self.folder], stdout=subprocess.PIPE, text=True, env=env, check=False)
        return result.returncode, result.stdout

    def test_a_machine_that_is_as_nccl_has_it_passes(self):
        code, output = self.run_script()
        self.assertEqual(code, 0, output)
        self.assertIn("20 passed, 0 failed\n", output)

    def test_what_nccl_has_otherwise_fails(self):
        code, output = self.run_script(wrong="given-across", live=MACHINE.replace('count="18"', 'count="12"'))
        self.assertEqual(code, 1, output)
        self.assertIn("FAILED: devices and links: this machine, NCCL's dump\n", output)
        self.assertIn("count is 18 for NCCL, 12 for us", output)
        self.assertIn("FAILED: ways and ports: NCCL's log, given-across\n", output)
        self.assertIn("18 passed, 2 failed\n", output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        topology = os.environ.get("NCCL_TOPO_FILE", os.environ["LC_STUB_MACHINE"])
        job(topology, os.environ["LC_STUB_WRONG"] and os.environ["LC_STUB_WRONG"] in topology)
    else:
        unittest.main()
