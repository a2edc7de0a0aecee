#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds our model of NCCL's topology against NCCL's own source, on machines made up at random.

usage: compare.py NCCL TEST_NCCL [--first SEED] [--count N] [--store FOLDER] [FILE...]
NCCL is a checkout of its source, 2.28; TEST_NCCL the program tests/topology/test_nccl. Its graph code is built in a
folder that goes away again. --store keeps machine and answer, as the tests beside this file have them; of FILEs, real
machines' topology files, only the differences are told."""
import argparse
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
VARIABLES = {
    "NCCL_PXN_DISABLE": "0 1", "NCCL_PXN_C2C": "0 1", "NCCL_NET_GDR_LEVEL": "LOC PIX PXB PHB SYS 2 4",
    "NCCL_NETDEVS_POLICY": "ALL MAX:1 MAX:2 AUTO", "NCCL_P2P_LEVEL": "NVL PIX PHB SYS LOC", "NCCL_NET_GDR_READ": "0 1",
    "NCCL_P2P_PXN_LEVEL": "0 1 2", "NCCL_CROSS_NIC": "0 1", "NCCL_NET_GDR_C2C": "0 1"}
SPEEDS = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe",
          "64.0 GT/s PCIe", "", "Unknown")
CPUS = ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="60"',
        'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"',
        'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"',
        'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"',
        'arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1"',
        'arch="x86_64" vendor="CentaurHauls" familyid="7" modelid="91"', 'arch="arm64"', 'arch="ppc64"')
GEN4, GEN5, GEN5_PART = (0xc010, 0xa010), (0xc030, 0x0010), (0xc030, 0x1010)  # Broadcom's switches


class Machine:
    def __init__(self, choose):
        self.choose = choose
        self.busses, self.nets, self.gpus = 0, 0, []
        self.alike = choose.random() < .6  # links and ports
        self.speed, self.port = choose.choice(SPEEDS), choose.choice((100000, 200000, 400000))
        self.gdr = choose.choice((0, 1, 1, 1, None))  # None: differs
        self.links = choose.choice(("switches", "mesh", "pairs", "c2c", "none"))
        self.sm = choose.choice((90, 100) if self.links == "c2c" else (60, 70, 80, 86, 90, 100))
        self.count, self.c2c = choose.choice((4, 12, 18)), choose.choice((150000, 450000))
        cpu = choose.choice(CPUS)
        self.trees = [[self.child(0, None) for _ in range(choose.randint(1, 3))]
                      for _ in range(choose.choice((1, 1, 2, 2, 3, 4)))]
        self.wire()
        lines = ['<system version="1">']
        for numa, tree in enumerate(self.trees):
            lines.append('<cpu numaid="%d" affinity="0000ffff" %s>' % (numa, cpu))
            lines += [self.text(child) for child in tree]
            if choose.random() < .2:
                lines.append("<nic>%s</nic>" % self.net(10000, 0))
            lines.append("</cpu>")
        self.xml = "\n".join(lines + ["</system>", ""])

    def bus(self):
        self.busses += 1
        return "0000:%02x:00.0" % self.busses

    def child(self, depth, switch):
        kind = self.choose.random()
        if kind < .35 and len(self.gpus) < 8:
            self.gpus.append(self.bus())
            return "gpu", self.gpus[-1]
        if kind < .6 or depth > 3:
            return "nic", self.bus(), [self.port if self.alike else self.choose.choice((10000, 25000, 100000, 400000))
                                       for _ in range(self.choose.choice((1, 1, 1, 2)))]
        own = self.choose.choice((None, GEN4, GEN5_PART) if switch == GEN5 else (None, None, GEN4, GEN5))
        bus = self.bus()
        return "switch", bus, own, [self.child(depth + 1, own) for _ in range(self.choose.randint(1, 3))]

    def wire(self):
        self.mesh = {}
        for a in range(len(self.gpus)):
            for b in range(a):
                if self.links == "mesh" and self.choose.random() < .5 or \
                        self.links == "pairs" and a == b + 1 and b % 2 == 0:
                    count = self.choose.randint(1, 4)
                    self.mesh.setdefault(a, []).append((b, count))
                    self.mesh.setdefault(b, []).append((a, count))

    def link(self):
        return 'link_speed="%s" link_width="%d"' % (
            (self.speed, 16) if self.alike else (self.choose.choice(SPEEDS), self.choose.choice((0, 4, 8, 16, 16))))

    def has_gdr(self):
        return self.choose.randint(0, 1) if self.gdr is None else self.gdr

    def net(self, mbps, gdr):
        self.nets += 1
        return '<net name="n%d" dev="%d" speed="%d" port="1" guid="0x%x" gdr="%d"/>' % (
            self.nets - 1, self.nets - 1, mbps, self.nets, gdr)

    def text(self, child):
        if child[0] == "nic":
            return '<pci busid="%s" class="0x020000" %s><nic>%s</nic></pci>' % (
                child[1], self.link(), "".join(self.net(mbps, self.has_gdr()) for mbps in child[2]))
        if child[0] == "switch":
            ids = 'vendor="0x10b5" device="0x9765" subsystem_vendor="0x0" subsystem_device="0x0"' if not child[2] else \
                'vendor="0x1000" device="0x%04x" subsystem_vendor="0x1000" subsystem_device="0x%04x"' % child[2]
            return '<pci busid="%s" class="0x060400" %s %s>\n%s</pci>' % (
                child[1], ids, self.link(), "\n".join(self.text(below) for below in child[3]))
        dev = self.gpus.index(child[1])
        links = ['<nvlink target="%s" count="%d" tclass="0x030200"/>' % (self.gpus[peer], count)
                 for peer, count in self.mesh.get(dev, [])]
        if self.links in ("switches", "c2c"):
            links.append('<nvlink target="0000:fe:00.0" count="%d" tclass="0x068000"/>' % self.count)
        if self.links == "c2c":
            links.append('<c2c bw="%d" count="1"/>' % self.c2c)
        return '<pci busid="%s" class="0x030200" %s><gpu dev="%d" sm="%d" rank="%d" gdr="%d">%s</gpu></pci>' % (
            child[1], self.link(), dev, self.sm, dev, self.has_gdr(), "".join(links))


def build(nccl, folder):
    source = os.path.join(nccl, "src")
    version = dict(re.findall(r"NCCL_(\w+)\s*:=\s*(\d*)", pathlib.Path(nccl, "makefiles/version.mk").read_text()))
    header = pathlib.Path(source, "nccl.h.in").read_text()
    for name, value in (("Major", version["MAJOR"]), ("Minor", version["MINOR"]), ("Patch", version["PATCH"]),
                        ("Suffix", ""), ("Version", "%d%02d%02d" % tuple(int(version[part]) for part in
                                                                          ("MAJOR", "MINOR", "PATCH")))):
        header = header.replace("${nccl:%s}" % name, value)
    pathlib.Path(folder, "nccl.h").write_text(header)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = os.path.join(folder, "model")
    subprocess.run(
        ["g++", "-std=c++17", "-w", "-I" + folder, *("-I%s/%s" % (source, below) for below in
                                                     ("include", "include/plugin", "graph")),
         "-I%s/include" % cuda, "-I%s/include/cccl" % cuda, str(HERE / "model.cc"),
         *("%s/%s.cc" % (source, file) for file in ("graph/topo", "graph/paths", "graph/xml", "graph/search",
                                                    "misc/utils")),
         # what it does not call need not be there
         "-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-Wl,-z,lazy", "-o", program], check=True)
    return program


def answer(command, variables):
    result = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, text=True)
    return result.stdout if result.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("nccl")
    parser.add_argument("test")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--store")
    options = parser.parse_args()
    same = different = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        model = build(options.nccl, folder)
        cases = [(name, pathlib.Path(name).read_text(), {}) for name in options.files]
        for seed in range(options.first, options.first + options.count if not options.files else 0):
            choose = random.Random(seed)
            machine = Machine(choose)
            if machine.gpus:
                cases.append(("seed-%d" % seed, machine.xml,
                              {name: choose.choice(values.split()) for name, values in VARIABLES.items()
                               if choose.random() < .15}))
        for name, text, variables in cases:
            file = os.path.join(folder, "machine.xml")
            pathlib.Path(file).write_text(text)
            theirs, ours = (answer([program, *option, file], variables) for program, option in
                            ((model, ()), (options.test, ("--print",))))
            if theirs is None:
                refused += 1
                continue
            if options.store:
                os.makedirs(options.store, exist_ok=True)
                pathlib.Path(options.store, name + ".xml").write_text(text)
                pathlib.Path(options.store, name + ".txt").write_text(
                    "".join("%s=%s\n" % pair for pair in sorted(variables.items())) + theirs)
            if set(theirs.splitlines()) == set((ours or "").splitlines()):  # a port that is there twice is so for NCCL
                same += 1
                continue
            different += 1
            a, b = set(theirs.splitlines()), set((ours or "").splitlines())
            print(name, variables, "NCCL:", sorted(a - b)[:3], "we:", sorted(b - a)[:3])
    print("%d machines are the same, %d differ, %d are refused by NCCL" % (same, different, refused))
    return 1 if different or not same else 0


if __name__ == "__main__":
    sys.exit(main())
