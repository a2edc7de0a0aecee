#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Machines by their /sys: captured ones, and one made up of all that matters."""
import ctypes
import errno
import os
import re
import sys
import tarfile
import unittest

from topo import DATA, TopoTest, above, call, counts, nodes

sys.dont_write_bytecode = True


def has_openat2():
    """Kernels before 5.6 and some containers lack it; a call that can only fail tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(437, -1, None, None, ctypes.c_size_t(0))
    return ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)


class Machine:
    """A made-up /sys: `devices` by the path of bus ids from the host bridge down."""

    def __init__(self, root):
        self.root = root

    def put(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text + "\n")

    def link(self, path, target):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)

    def node(self, number, cpumap):
        self.put("sys/devices/system/node/node%d/cpumap" % number, cpumap)

    def device(self, chain, pci_class, vendor="0x8086", numa=0, speed="32.0 GT/s PCIe", width=16, **more):
        place = "devices/pci%s/%s" % (chain[0][:7], "/".join(chain))
        values = {"class": pci_class, "vendor": vendor, "device": "0x1234", "numa_node": str(numa),
                  "max_link_speed": speed, "max_link_width": str(width), **more}
        for name, text in values.items():
            self.put("sys/%s/%s" % (place, name), text)
        self.link("sys/bus/pci/devices/" + chain[-1], "../../../" + place)
        return place

    def infiniband(self, place, name, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE"):
        base = "%s/infiniband/%s" % (place, name)
        self.put("sys/%s/ports/1/rate" % base, rate)
        self.put("sys/%s/ports/1/state" % base, state)
        self.put("sys/%s/sys_image_guid" % base, "0c42:a103:0072:3f04")
        self.link("sys/class/infiniband/" + name, "../../" + base)

    def ethernet(self, place, name, speed="25000"):
        base = "%s/net/%s" % (place, name)
        self.put("sys/%s/speed" % base, speed)
        self.put("sys/%s/operstate" % base, "up")
        self.link("sys/class/net/" + name, "../../" + base)


def big_node(root, pairs=8):
    """8 GPUs and 8 NICs (or fewer), a switch for each pair, 2 NUMA nodes, and a network card for management."""
    machine = Machine(root)
    machine.put("proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
                "model name\t: Xeon")
    machine.node(0, "00000000,0000ffff")
    machine.node(1, "00000000,ffff0000")
    machine.node(2, "00000000,00000000")
    for pair in range(pairs):
        numa, bus = pair // 4, 0x10 + 0x10 * pair
        port = "0000:%02x:01.0" % bus
        up = "0000:%02x:00.0" % (bus + 1)
        machine.device([port], "0x060400", numa=numa)
        machine.device([port, up], "0x060400", vendor="0x1000", numa=numa)
        for slot, down in enumerate(("0000:%02x:00.0" % (bus + 2), "0000:%02x:01.0" % (bus + 2))):
            machine.device([port, up, down], "0x060400", vendor="0x1000", numa=numa)
            leaf = "0000:%02x:00.0" % (bus + 3 + slot)
            if slot == 0:
                machine.device([port, up, down, leaf], "0x030200", vendor="0x10de", numa=numa)
            else:
                place = machine.device([port, up, down, leaf], "0x020700", vendor="0x15b3", numa=numa,
                                       current_link_width="8")
                machine.infiniband(place, "mlx5_%d" % pair)
                machine.ethernet(place, "ib%d" % pair)
    machine.device(["0000:00:1c.0"], "0x060400", speed="8.0 GT/s PCIe", width=4)
    place = machine.device(["0000:00:1c.0", "0000:02:00.0"], "0x020000", speed="8.0 GT/s PCIe", width=8)
    machine.ethernet(place, "eno1")
    machine.device(["0000:00:1d.0"], "0x030000", vendor="0x1a03")  # graphics of the management controller
    machine.link("sys/class/net/lo", "../../devices/virtual/net/lo")
    return machine


# What is read of a captured machine; the rest of its thousands of files need not be unpacked.
READ = re.compile(r"[^/]+/(proc/cpuinfo|sys/(bus/pci/devices|class/(net|infiniband))/[^/]+|sys/devices/(system/node/"
                  r"node\d+/cpumap|.*/(class|vendor|device|subsystem_vendor|subsystem_device|numa_node|local_cpus|"
                  r"(max|current)_link_(speed|width)|speed|operstate|rate|state|sys_image_guid)))")


class Machines(TopoTest):
    def extracted(self, name):
        with tarfile.open(DATA / "hwloc" / name) as archive:
            members = [m for m in archive.getmembers() if (m.isreg() or m.issym()) and READ.fullmatch(m.name)]
            archive.extractall(self.path("root"), members)
        return self.path("root", os.listdir(self.path("root"))[0])

    def test_captured_machine_with_networks(self):
        document = self.topo(self.extracted("40intel64-2g2n4c-pcilocality.tar.bz2"))
        self.assertEqual(counts(document), (0, 5, 5, 5))
        ports = {net["id"]: net for net in nodes(document, "net")}
        self.assertEqual(sorted(ports), ["eth0", "eth1", "eth2", "eth3", "qib0"])
        self.assertEqual(ports["qib0"]["mbits_per_s"], 40000)
        # numa_node says -1 everywhere; local_cpus of that one names a node
        self.assertEqual(above(document, ports["qib0"]), ["nic", "0000:43:00.0", "cpu2"])
        self.assertEqual(above(document, ports["eth0"]), ["nic", "0000:02:00.0", "cpu-1"])
        self.assertTrue(document["partial"])

    def test_captured_machine_with_long_pci_domains(self):
        document = self.topo(self.extracted("2pa-pcidomain32bits.tar.bz2"))
        self.assertEqual(counts(document), (0, 1, 1, 1))

    def test_captured_machine_whose_gpus_are_numa_nodes(self):
        document = self.topo(self.extracted("nvidiagpunumanodes.tar.bz2"))
        self.assertEqual([(cpu["numa"], cpu["arch"]) for cpu in nodes(document, "cpu")], [(0, "ppc64"), (8, "ppc64")])

    def test_functions_hang_where_nccl_puts_them(self):
        big_node(self.path("root"))
        document = self.topo(self.path("root"))
        self.assertEqual(counts(document), (8, 9, 9, 2))
        for number, gpu in enumerate(nodes(document, "gpu")):
            bus = 0x10 + 0x10 * number
            self.assertEqual(above(document, gpu),
                             ["0000:%02x:00.0" % (bus + 3), "0000:%02x:00.0" % (bus + 1), "cpu%d" % (number // 4)])
        ports = {net["id"]: net for net in nodes(document, "net")}
        self.assertEqual(sorted(ports), ["eno1"] + ["mlx5_%d" % i for i in range(8)])
        self.assertEqual(above(document, ports["mlx5_7"]), ["nic", "0000:84:00.0", "0000:81:00.0", "cpu1"])
        self.assertEqual(ports["mlx5_7"]["mbits_per_s"], 400000)
        self.assertEqual(ports["mlx5_7"]["guid"], "0xc42a10300723f04")
        self.assertNotIn("dev", ports["eno1"])  # beside InfiniBand NCCL takes no sockets
        self.assertFalse(document["partial"])
        cpu = nodes(document, "cpu")[1]
        self.assertEqual((cpu["cpus"], cpu["vendor"], cpu["family"], cpu["model"]), ("16-31", "GenuineIntel", 6, 143))
        # the smaller of what the function and its port can do
        card, = [pci for pci in nodes(document, "pci") if pci["id"] == "0000:02:00.0"]
        self.assertEqual((card["link_gts"], card["link_width"]), (8, 4))

    def test_virtual_machine_as_nccl_reads_it(self):
        machine = Machine(self.path("vm"))
        machine.node(0, "ffffffff")
        for number in (6, 7):
            machine.device(["0000:00:%02d.0" % number], "0x030200", "0x10de", numa=-1)
        machine.device(["0000:00:03.0"], "0x020000", "0x1af4", numa=-1)
        place = "sys/devices/pci0000:00/0000:00:03.0/virtio1/net/eth0"
        machine.put(place + "/operstate", "up")
        machine.link("sys/class/net/eth0", "../../" + place[4:])
        ours = self.topo(self.path("vm"))
        self.assertEqual([above(ours, node) for node in nodes(ours, "gpu") + nodes(ours, "net")],
                         [["0000:00:06.0", "cpu0"], ["0000:00:07.0", "cpu0"], ["nic", "0000:00:03.0", "cpu0"]])
        nccls = self.topo(self.path("vm"), "--as-nccl")
        self.assertEqual([above(nccls, node) for node in nodes(nccls, "gpu") + nodes(nccls, "net")],
                         [["0000:00:06.0", "cpu-1"], ["0000:00:07.0", "cpu-1"], ["nic", "cpu-1"]])
        real = Machine(self.path("real"))
        real.node(0, "ffffffff")
        place = real.device(["0000:00:06.0"], "0x030200", "0x10de")
        real.ethernet(real.device(["0000:00:03.0"], "0x020000"), "eth0")
        self.assertEqual(above(self.topo(self.path("real"), "--as-nccl"), nodes(self.topo(self.path("real"), "--as-nccl"), "net")[0]),
                         ["nic", "0000:00:03.0", "cpu0"])

    def test_what_it_writes_for_nccl_is_the_same_machine(self):
        big_node(self.path("root"))
        before = self.topo(self.path("root"), "--nccl-xml", self.path("nccl.xml"))
        after = self.topo(self.path("nccl.xml"))
        lists = [sorted((n["type"], n.get("id", ""), above(document, n)) for n in document["nodes"])
                 for document in (before, after)]
        self.assertEqual(*lists)

    @unittest.skipUnless(has_openat2(), "no openat2 here, which keeps links inside")
    def test_links_out_of_a_captured_machine_lead_nowhere(self):
        machine = big_node(self.path("root"), 1)
        secret = self.write("outside/cpuinfo", "vendor_id\t: Secret\n")
        os.unlink(self.path("root", "proc", "cpuinfo"))
        machine.link("proc/cpuinfo", secret)
        machine.link("sys/class/net/evil", "../../devices/pci0000:00/0000:99:00.0/net/evil")
        machine.link("sys/bus/pci/devices/0000:98:00.0", "/")
        document = self.topo(self.path("root"))
        self.assertEqual(counts(document), (1, 2, 2, 2))
        self.assertNotIn("vendor", nodes(document, "cpu")[0])

    def test_hostile_files_of_a_machine_do_no_harm(self):
        machine = big_node(self.path("root"), 1)
        machine.put("sys/devices/system/node/node3/cpumap", "z" * 100000)
        machine.put("sys/devices/system/node/node99999999/cpumap", "1")
        machine.put("sys/devices/system/node/nodeX/cpumap", "1")
        place = machine.device(["0000:00:1e.0"], "x" * 5000, numa="99999999999", speed="1e999 GT/s", width="9" * 99)
        machine.infiniband(place, "a" * 100, rate="nan Gb/sec")
        machine.infiniband(place, "b", rate="1e99 Gb/sec")
        result = call("topo", "--input", self.path("root"))
        self.assertIn(result.returncode, (0, 1))
        self.assertLessEqual(result.stderr.count("\n"), 1)

    def test_files_that_are_none_are_left_out(self):
        machine = big_node(self.path("root"), 1)
        numa = self.path("root", "sys/devices/system/node/node0")
        os.makedirs(numa, exist_ok=True)
        for name in ("cpumap", "numastat"):
            path = os.path.join(numa, name)
            if os.path.exists(path):
                os.unlink(path)
            os.mkfifo(path)
        os.unlink(self.path("root", "proc", "cpuinfo"))
        os.mkfifo(self.path("root", "proc", "cpuinfo"))
        self.assertEqual(counts(self.topo(self.path("root"))), (1, 2, 2, 2))

    def test_a_folder_that_is_no_machine_is_refused(self):
        self.assertIn("no sys/devices below this folder", self.refusal(self.folder))
        self.assertIn("No such file or directory", self.refusal(self.path("none")))
        os.mkfifo(self.path("fifo"))
        self.assertIn("neither a file nor a folder", self.refusal(self.path("fifo")))
        os.symlink("/dev/zero", self.path("zero"))
        self.assertIn("neither a file nor a folder", self.refusal(self.path("zero")))
        os.symlink("loop", self.path("loop"))
        self.assertIn("Too many levels of symbolic links", self.refusal(self.path("loop")))
        self.assertIn("empty", self.refusal(self.write("empty", "")))

    def test_this_machine_is_shown(self):
        result = call("topo")
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("this machine: ", result.stdout)

    @unittest.skipIf(os.path.exists("/proc/driver/nvidia"), "a real driver is here")
    def test_gpus_that_only_the_driver_knows(self):
        folder = os.path.dirname(os.environ["LC_FAKE_NVML"])
        result = call("topo", "--json", LD_LIBRARY_PATH=folder)
        self.assertEqual(result.returncode, 0, result)
        document = self.document(result)
        gpus = [gpu for gpu in nodes(document, "gpu") if above(document, gpu)[0].startswith("fedc:")]
        self.assertEqual([(gpu["dev"], gpu["sm"]) for gpu in gpus], [(0, 90), (1, 90)])
        self.assertEqual(above(document, gpus[1]), ["fedc:2b:00.0", "cpu-1"])
        links = {(link["parent"], link["target"]): link["count"] for link in nodes(document, "nvlink")}
        self.assertEqual(links[(gpus[0]["node"], "fffffff:ffff:ff")], 18)
        self.assertEqual(links[(gpus[0]["node"], "fedc:2b:00.0")], 2)
        self.assertTrue(any("fedc:1b:00.0 is known to the driver but not to /sys" in n for n in document["notes"]))


if __name__ == "__main__":
    unittest.main()
