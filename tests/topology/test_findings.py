#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `loongcomm doctor` finds wrong with machines: a made-up healthy one, with one fault at a time."""
import json
import os
import struct
import sys
import unittest

from topo import DATA, TopoTest, call
from test_machines import Machine, big_node

sys.dont_write_bytecode = True

BIG = DATA / "oci-hpc/H100-topology.xml"
UP = "0000:%02x:00.0"


def place(pair, slot):
    """The folder of big_node's GPU (slot 0) or NIC (slot 1) of that pair."""
    bus = 0x10 + 0x10 * pair
    chain = ["0000:%02x:01.0" % bus, UP % (bus + 1), "0000:%02x:%02x.0" % (bus + 2, slot), UP % (bus + 3 + slot)]
    return "sys/devices/pci%s/%s" % (chain[0][:7], "/".join(chain))


class Findings(TopoTest):
    def examined(self, path, code=0, **changes):
        result = call("doctor", "--json", "--input", str(path), **changes)
        self.assertEqual((result.returncode, result.stderr), (code, ""), result)
        document = json.loads(result.stdout)
        self.assertEqual(document["schema"], "loongcomm.findings/1")
        return {finding["id"]: finding for finding in document["findings"]}

    def healthy(self, pairs=8):
        machine = big_node(self.path("root"), pairs)
        for pair in range(pairs):
            machine.put(place(pair, 1) + "/current_link_width", "16")
            machine.put("dev/infiniband/uverbs%d" % pair, "")
        os.makedirs(self.path("root/sys/module/nvidia_peermem"))
        return machine

    def found(self, finding, severity, *texts, path=None, code=0, **changes):
        findings = self.examined(path or self.path("root"), code, **changes)
        self.assertIn(finding, findings)
        self.assertEqual(findings[finding]["severity"], severity)
        for text in texts:
            self.assertIn(text, findings[finding]["evidence"])
        return findings

    def test_a_healthy_machine_has_none(self):
        self.healthy()
        self.assertEqual(set(self.examined(self.path("root"))), {"machine", "p2p-off"})
        self.assertEqual(set(self.examined(BIG)), {"machine"})

    def test_a_machine_with_nothing_is_clean(self):
        os.makedirs(self.path("root/sys/devices"))
        findings = self.examined(self.path("root"))
        self.assertEqual({finding["severity"] for finding in findings.values()}, {"ok", "info"})
        text = call("doctor", "--input", self.path("root")).stdout
        self.assertIn("no fault was found (0 errors, 0 warnings)", text)

    def test_what_cannot_be_read_is_an_error(self):
        self.found("machine-unknown", "error", "No such file", path=self.path("none"), code=1)

    def test_worst_first(self):
        self.healthy()
        result = call("doctor", "--json", "--input", self.path("root"), NCCL_SOCKET_IFNAME="gone0", NCCL_P2P_LEVEL="FAR")
        severities = [finding["severity"] for finding in json.loads(result.stdout)["findings"]]
        self.assertEqual(severities, ["error", "warning", "info", "ok"])
        self.assertEqual(result.returncode, 1)

    def test_ports_on_the_other_socket(self):
        machine = self.healthy(1)
        machine.device(["0000:a0:01.0"], "0x060400", numa=1)
        machine.device(["0000:a0:01.0", "0000:a1:00.0"], "0x030200", vendor="0x10de", numa=1)
        findings = self.found("gpu-far-nic", "warning", "GPU 1:")
        self.assertIn("GPU 1:", findings["gpudirect-off-far"]["evidence"])

    def test_unused_and_unplugged_ports(self):
        machine = self.healthy(1)
        machine.device(["0000:a0:01.0"], "0x060400", numa=1)
        nic = machine.device(["0000:a0:01.0", "0000:a1:00.0"], "0x020700", vendor="0x15b3", numa=1)
        machine.infiniband(nic, "mlx5_7")
        machine.put("dev/infiniband/uverbs7", "")
        self.found("nic-unused", "warning", "mlx5_7")
        machine.put("sys/%s/infiniband/mlx5_7/ports/1/state" % nic, "1: DOWN")
        findings = self.found("nic-down", "warning", "mlx5_7")
        self.assertNotIn("nic-unused", findings)

    def test_ports_of_different_speed(self):
        machine = self.healthy()
        machine.put(place(3, 1) + "/infiniband/mlx5_3/ports/1/rate", "200 Gb/sec (4X HDR)")
        self.found("rails-uneven", "warning", "mlx5_2 400 Gb/s", "mlx5_3 200 Gb/s")

    def test_cards_without_ports(self):
        machine = self.healthy()
        machine.device(["0000:a0:01.0"], "0x020700", vendor="0x15b3")
        self.found("nic-invisible", "info", "0000:a0:01.0")
        alone = Machine(self.path("alone"))
        alone.device(["0000:a0:01.0"], "0x020700", vendor="0x15b3")
        self.found("nic-invisible", "warning", path=self.path("alone"))

    def test_rdma_devices_without_their_files(self):
        self.healthy()
        os.unlink(self.path("root/dev/infiniband/uverbs4"))
        self.found("rdma-device-missing", "warning", "8 RDMA devices", "7 of their files")

    def test_links_that_were_trained_down(self):
        machine = self.healthy()
        machine.put(place(2, 1) + "/current_link_width", "4")
        machine.put(place(3, 1) + "/current_link_speed", "8.0 GT/s PCIe")
        machine.put(place(4, 0) + "/current_link_speed", "2.5 GT/s PCIe")
        findings = self.found("pcie-width", "warning", "0000:34:00.0 x4 of x16")
        self.assertIn("0000:44:00.0 8 of 32 GT/s", findings["pcie-speed"]["evidence"])
        self.assertEqual(findings["pcie-speed"]["severity"], "warning")
        self.assertIn("0000:53:00.0 2.5 of 32 GT/s", findings["pcie-speed-gpu"]["evidence"])
        self.assertEqual(findings["pcie-speed-gpu"]["severity"], "info")

    def test_gpudirect_and_why_not(self):
        self.healthy()
        os.rmdir(self.path("root/sys/module/nvidia_peermem"))
        self.found("gpudirect-off-port", "warning", "GPU 0, GPU 1")
        text = BIG.read_text().replace("<gpu ", '<gpu gdr="0" ').replace('gdr="1"', "")
        self.found("gpudirect-off-gpu", "warning", "GPU 7", path=self.write("gpu.xml", text))

    def test_no_peer_access(self):
        self.healthy()
        self.found("p2p-off", "info", "0-1, 0-2", "SYS")

    def config(self, machine, bridge, control, size=4096):
        space = bytearray(size)
        if size > 0x110:
            struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
            struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x5F, control)
        path = self.path("root", os.path.dirname(place(1, 0)).split("/0000:21")[0], bridge, "config")
        with open(path, "wb") as f:
            f.write(space)

    def test_acs(self):
        machine = self.healthy()
        down = "0000:21:00.0/0000:22:00.0"
        self.config(machine, down, 0x1D)
        self.found("acs", "warning", "0000:22:00.0")
        self.config(machine, down, 0x11)  # source validation and upstream forwarding do no harm
        self.assertNotIn("acs", self.examined(self.path("root")))
        self.config(machine, down, 0x1D, 64)
        self.found("acs-unknown", "info")

    def test_acs_of_hostile_config_space(self):
        machine = self.healthy()
        self.config(machine, "0000:21:00.0/0000:22:00.0", 0x1D)
        path = self.path("root", os.path.dirname(place(1, 0)), "config")
        for head in (0xFFFFFFFF, 0x0001 | 0x100 << 20, 0x0001 | 0xFFC << 20):  # out of bounds, a loop, the last word
            with open(path, "r+b") as f:
                f.seek(0x100)
                f.write(struct.pack("<I", head))
            self.assertNotIn("acs", self.examined(self.path("root")))

    def test_unknown_numa_node(self):
        machine = self.healthy()
        for bridge in ("", "/0000:21:00.0", "/0000:21:00.0/0000:22:00.0", "/0000:21:00.0/0000:22:00.0/0000:23:00.0"):
            machine.put("sys/devices/pci0000:20/0000:20:01.0%s/numa_node" % bridge, "-1")
        self.found("numa-unknown", "warning", "GPU 1")

    def test_words_that_nccl_does_not_know(self):
        for name, value in (("NCCL_P2P_LEVEL", "NEAR"), ("NCCL_NET_GDR_LEVEL", "pxb"), ("NCCL_NETDEVS_POLICY", "MAX"),
                            ("NCCL_NETDEVS_POLICY", "MIN:3")):
            self.found("nccl-setting-unknown", "warning", name + "=" + value, path=BIG, **{name: value})
        for name, value in (("NCCL_P2P_LEVEL", "SYS"), ("NCCL_NET_GDR_LEVEL", "3"), ("NCCL_NETDEVS_POLICY", "max:8")):
            self.assertNotIn("nccl-setting-unknown", self.examined(BIG, **{name: value}))

    def test_names_of_what_is_not_there(self):
        self.healthy()
        self.found("nccl-setting-name", "warning", "mlx5_9", NCCL_IB_HCA="mlx5_0:1,mlx5_9")
        self.found("nccl-setting-name", "warning", "NCCL would take sockets", NCCL_IB_HCA="=mlx5")
        self.found("nccl-setting-name", "error", "gone0", "no network", NCCL_SOCKET_IFNAME="gone0", code=1)
        for changes in ({"NCCL_IB_HCA": "mlx5"}, {"NCCL_IB_HCA": "^mlx5_9"}, {"NCCL_IB_HCA": "=mlx5_3:1"},
                        {"NCCL_SOCKET_IFNAME": "eno"}, {"NCCL_SOCKET_IFNAME": "=ib1,eno1"}):
            self.assertNotIn("nccl-setting-name", self.examined(self.path("root"), **changes))

    def test_settings_that_take_away(self):
        self.found("nccl-setting-p2p", "warning", "NCCL_P2P_DISABLE", "0-1", path=BIG, NCCL_P2P_DISABLE="1")
        self.found("nccl-setting-p2p", "warning", "NCCL_P2P_LEVEL", path=BIG, NCCL_P2P_LEVEL="LOC")
        self.found("nccl-setting-gpudirect", "warning", "NCCL_NET_GDR_LEVEL", path=BIG, NCCL_NET_GDR_LEVEL="LOC")
        self.found("nccl-setting-gpudirect", "warning", "NCCL_NET_GDR_READ", path=BIG, NCCL_NET_GDR_READ="0")
        self.found("nccl-setting-slow", "warning", "NCCL_PXN_DISABLE=1", "88 %", path=BIG, NCCL_PXN_DISABLE="1")
        findings = self.found("nccl-setting-slow", "warning", "MAX:1", path=BIG, NCCL_NETDEVS_POLICY="MAX:1")
        self.assertIn("44.4 ms instead of 22.2", findings["nccl-setting-slow"]["evidence"])
        self.found("nccl-setting-rdma", "warning", "mlx5_0", path=BIG, NCCL_IB_DISABLE="1")
        self.healthy()
        self.found("nccl-setting-shm", "warning", NCCL_SHM_DISABLE="1")
        self.assertEqual(set(self.examined(BIG, NCCL_PXN_DISABLE="0", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="0")), {"machine"})

    def test_topology_file_of_another_machine(self):
        self.healthy()
        self.found("nccl-topology-file", "warning", "knows 0 of the 8 GPUs", NCCL_TOPO_FILE=str(BIG))
        self.found("nccl-topology-file", "warning", "empty", NCCL_TOPO_FILE=self.write("empty.xml", ""))
        self.assertNotIn("nccl-topology-file", self.examined(BIG, NCCL_TOPO_FILE=str(BIG)))

    def test_what_a_plan_would_gain(self):
        text = BIG.read_text().replace('speed="180000"', 'speed="90000"', 12)
        findings = self.found("rails-uneven", "warning", path=self.write("uneven.xml", text))
        self.assertIn("NCCL_TOPO_FILE takes", findings["plan-gain"]["evidence"])
        self.assertEqual(findings["plan-gain"]["severity"], "info")

    def test_usage(self):
        for args in (["--input"], ["--input", str(BIG), "--python", "p"], ["--input", str(BIG), "--", "true"]):
            result = call("doctor", *args)
            self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (2, "", 1), args)

    def test_every_captured_machine(self):
        for path in sorted(DATA.rglob("*.xml")):
            result = call("doctor", "--input", str(path))
            self.assertIn(result.returncode, (0, 1), path)
            self.assertEqual(result.stderr, "", path)


if __name__ == "__main__":
    unittest.main()
