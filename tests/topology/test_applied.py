#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `loongcomm run` sets for NCCL, and what it leaves alone."""
import os
import sys
import unittest

from topo import DATA, TopoTest, call, nodes

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
