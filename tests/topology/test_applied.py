#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `loongcomm run` sets for NCCL, and what it leaves alone."""
import os
import shutil
import sys
import unittest

from test_machines import big_node
from topo import DATA, TopoTest, above, call, nodes

sys.dont_write_bytecode = True

BIG = DATA / "oci-hpc/H100-topology.xml"


class Applied(TopoTest):
    def setUp(self):
        super().setUp()
        # the last four GPUs' ports are twice as fast as the others': NCCL draws all GPUs to them
        self.uneven = self.write("uneven.xml", BIG.read_text().replace('speed="180000"', 'speed="90000"', 12))
        self.write("home/empty", "")

    def started(self, *args, **changes):
        """NCCL's variables that a command finds, and the lines about them."""
        changes = {"HOME": self.path("home"), **changes}
        result = call("run", *args, "--", "env", **changes)
        self.assertEqual(result.returncode, 0, result)
        variables = dict(line.split("=", 1) for line in result.stdout.splitlines() if line.startswith("NCCL_"))
        return variables, result.stderr.splitlines()

    def test_nothing_is_set_where_nothing_is_gained(self):
        self.assertEqual(self.started("--topology", str(BIG)), ({}, []))
        self.assertEqual(self.started("--topology", str(DATA / "azhpc-images/ndv5-topo.xml")), ({}, []))

    @unittest.skipIf(os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/kfd"), "GPUs are here")
    def test_nothing_is_set_without_gpus(self):
        self.assertEqual(self.started(), ({}, []))

    def test_a_topology_file_is_written_into_the_folder_of_the_job(self):
        variables, lines = self.started("--topology", self.uneven, "--dir", self.path("reports"))
        self.assertEqual(list(variables), ["NCCL_TOPO_FILE"])
        self.assertEqual(os.path.dirname(variables["NCCL_TOPO_FILE"]), os.path.realpath(self.path("reports")))
        self.assertEqual(len(lines), 1)
        self.assertRegex(lines[0], r"NCCL_TOPO_FILE=.*: takes \d+ % off the most loaded link")
        speeds = {net["mbits_per_s"] for net in nodes(self.topo(variables["NCCL_TOPO_FILE"]), "net")}
        self.assertEqual(speeds, {90000})

    def misplaced(self):
        """A machine whose kernel names no NUMA nodes; what is near to what can still be seen."""
        machine = big_node(self.path("root"))
        for place, _, files in os.walk(self.path("root", "sys", "devices")):
            if "numa_node" in files:
                path = os.path.relpath(place, machine.root)
                with open(os.path.join(place, "numa_node")) as f:
                    second = f.read() == "1\n"
                machine.put(path + "/local_cpus", "00000000,ffff0000" if second else "00000000,0000ffff")
                machine.put(path + "/numa_node", "-1")
        return self.path("root")

    @unittest.skipIf(os.path.exists("/proc/driver/nvidia"), "the GPUs of this machine are looked at")
    def test_numa_nodes_that_the_kernel_does_not_name_are_put_right(self):
        big_node(self.path("right"))
        self.assertEqual(self.started("--topology", self.path("right"), "--dir", self.path("reports")), ({}, []))
        for setting in ("auto", "force"):
            variables, lines = self.started("--topology", self.misplaced(), "--dir", self.path("reports"),
                                            LOONGCOMM_PXN=setting)
            document = self.topo(variables["NCCL_TOPO_FILE"])
            self.assertEqual([above(document, gpu)[-1] for gpu in nodes(document, "gpu")], ["cpu0"] * 4 + ["cpu1"] * 4)
            line, = [line for line in lines if "NCCL_TOPO_FILE" in line]
            self.assertIn(": /sys misplaces 17 of the GPUs and ports: GPU 0000:13:00.0 is at no known NUMA node for "
                          "NCCL, and is at 0", line)
            written = variables["NCCL_TOPO_FILE"]
            os.unlink(written)
            shutil.rmtree(self.path("root"))
        variables, _ = self.started("--topology", self.misplaced(), "--dir", self.path("reports"), LOONGCOMM_PXN="off")
        self.assertNotIn("NCCL_TOPO_FILE", variables)
        shutil.rmtree(self.path("root"))
        os.mkfifo(written)
        variables, lines = self.started("--topology", self.misplaced(), "--dir", self.path("reports"))
        self.assertNotIn("NCCL_TOPO_FILE", variables)
        self.assertIn("loongcomm: run: cannot write %s: it is no regular file" % written, lines)

    HOST = """<system version="1"><cpu numaid="1" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6"
        modelid="143"><pci busid="fedc:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
        <pci busid="fedc:1b:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90"/></pci>
        <pci busid="fedc:1c:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" gdr="1"/></nic></pci></pci></cpu></system>"""

    @unittest.skipIf(os.path.exists("/proc/driver/nvidia"), "a real driver is here")
    def test_what_a_container_hides_is_taken_from_a_description_of_its_host(self):
        host = self.write("host.xml", self.HOST)
        driver = {"LD_LIBRARY_PATH": os.path.dirname(os.environ["LC_FAKE_NVML"])}
        args = ("--topology", host, "--dir", self.path("reports"))
        self.assertEqual(self.started(*args), ({}, []))  # none of its GPUs is here
        own = self.write("own.xml", self.HOST)
        variables, lines = self.started(*args, **driver, NCCL_TOPO_FILE=own)
        self.assertEqual(variables, {"NCCL_TOPO_FILE": own})
        self.assertRegex(lines[0], "^loongcomm: run: NCCL_TOPO_FILE is set already and stays: /sys misplaces 1 of ")
        self.assertFalse([name for name in os.listdir(self.path("reports")) if name.endswith(".xml")])
        variables, lines = self.started("--topology", host, **driver)
        self.assertEqual((variables, len(lines)), ({}, 1))
        self.assertIn("only where LOONGCOMM_DIR (--dir) names a folder", lines[0])
        variables, lines = self.started(*args, **driver)
        self.assertEqual(len(lines), 1)
        self.assertIn(": /sys misplaces 1 of the GPUs and ports: GPU fedc:1b:00.0 is at no known NUMA node for NCCL, "
                      "and is at 1", lines[0])
        document = self.topo(variables["NCCL_TOPO_FILE"])
        gpu, = nodes(document, "gpu")
        self.assertEqual(above(document, gpu), ["fedc:1b:00.0", "fedc:10:00.0", "cpu1"])

    def test_without_a_folder_it_is_said_what_is_missing(self):
        variables, lines = self.started("--topology", self.uneven)
        self.assertEqual(variables, {})
        self.assertEqual(len(lines), 1)
        self.assertIn("only where LOONGCOMM_DIR (--dir) names a folder", lines[0])

    def test_what_the_user_has_set_stays(self):
        changes = {"NCCL_TOPO_FILE": str(BIG)}
        variables, lines = self.started("--topology", self.uneven, "--dir", self.path("reports"), **changes)
        self.assertEqual(variables["NCCL_TOPO_FILE"], str(BIG))
        self.assertFalse([line for line in lines if "NCCL_TOPO_FILE" in line], lines)

    def test_settings_in_nccls_own_files_are_the_users(self):
        conf = self.write("nccl.conf", "# ours\nNCCL_PXN_DISABLE=0\n")
        home = os.path.dirname(self.write("h/.nccl.conf", "NCCL_PXN_DISABLE=0\n"))
        for changes in ({"NCCL_CONF_FILE": conf}, {"HOME": home}):
            variables, lines = self.started("--set", "PXN=off", **changes)
            self.assertNotIn("NCCL_PXN_DISABLE", variables)
            self.assertEqual(lines, ["loongcomm: run: NCCL_PXN_DISABLE is set already and stays: "
                                     "LOONGCOMM_PXN=off would set it to 1"])

    def test_off_and_force(self):
        variables, lines = self.started("--set", "PXN=off", "--topology", self.uneven)
        self.assertEqual(variables, {"NCCL_PXN_DISABLE": "1"})
        self.assertEqual(lines, ["loongcomm: run: NCCL_PXN_DISABLE=1: LOONGCOMM_PXN=off"])
        variables, lines = self.started(LOONGCOMM_PXN="force")
        self.assertEqual(variables, {"NCCL_PXN_DISABLE": "0", "NCCL_P2P_PXN_LEVEL": "2"})
        self.assertEqual(len(lines), 2)
        self.assertEqual(self.started(LOONGCOMM_PXN="force", LOONGCOMM_ENABLE="no"), ({}, []))

    def test_a_description_that_cannot_be_read_stops_nothing(self):
        variables, lines = self.started("--topology", self.path("none"))
        self.assertEqual(variables, {})
        self.assertEqual(len(lines), 1)
        self.assertIn("No such file", lines[0])

    def test_the_users_topology_file_is_what_is_planned_by(self):
        text = BIG.read_text().replace('speed="180000"', 'speed="90000"', 12)
        gained = self.started(NCCL_TOPO_FILE=self.write("given.xml", text))
        self.assertTrue(set(gained[0]) >= {"NCCL_TOPO_FILE"} and len(gained[0]) == 1 + len(gained[1]), gained)
        self.assertEqual(self.started(NCCL_TOPO_FILE=str(BIG)), ({"NCCL_TOPO_FILE": str(BIG)}, []))


if __name__ == "__main__":
    unittest.main()
