#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: topo_given.py DUMP FOLDER [FILE]
From NCCL's dump of this machine, topology files in which the GPUs and ports that are here hang elsewhere: what NCCL makes
of such a file can be predicted from the file. Prints their names, one a line.
With FILE, the topology of another machine: FOLDER/given-real.xml is that machine with the GPUs that are here in place of
as many of its own. Prints the names of its ports by their numbers, with commas between."""
import copy
import os
import sys
import xml.etree.ElementTree as xml

WIDE = {"link_speed": "32.0 GT/s PCIe", "link_width": "16"}
NARROW = {"link_speed": "8.0 GT/s PCIe", "link_width": "4"}
INTEL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "85"}
AMD = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "25", "modelid": "1"}


class Given:
    def __init__(self, dump):
        root = xml.parse(dump).getroot()
        self.affinity = [cpu.get("affinity", "") for cpu in root.iter("cpu")][0]
        self.gpus = [copy.deepcopy(pci) for pci in root.iter("pci") if pci.find("gpu") is not None]
        nets = {}
        for net in root.iter("net"):
            nets.setdefault(net.get("name"), copy.deepcopy(net))
        self.nets = list(nets.values())
        self.root = xml.Element("system", version="1")

    def cpu(self, number, kind):
        return xml.SubElement(self.root, "cpu", numaid=str(number), affinity=self.affinity, **kind)

    @staticmethod
    def switch(parent, bus, link=WIDE):
        return xml.SubElement(parent, "pci", busid="ffff:%02x:00.0" % bus, **{"class": "0x060400"}, vendor="0x10b5",
                              device="0x9765", subsystem_vendor="0x0000", subsystem_device="0x0000", **link)

    def gpu(self, parent, number, link=WIDE):
        pci = self.gpus[number]
        pci.attrib.update(link)
        parent.append(pci)

    def card(self, parent, bus, number, mbps, link=WIDE):
        """The port's card; one bus id for each."""
        card = xml.SubElement(parent, "pci", busid="ffff:%02x:00.0" % bus, **{"class": "0x020000"}, vendor="0x15b3",
                              device="0x1021", subsystem_vendor="0x0000", subsystem_device="0x0000", **link)
        net = self.nets[number]
        net.set("speed", str(mbps))
        xml.SubElement(card, "nic").append(net)


def beside(given):
    """Each GPU below a switch, all ports below the first one."""
    cpu = given.cpu(0, INTEL)
    for number in range(len(given.gpus)):
        switch = given.switch(cpu, 0x10 + number)
        given.gpu(switch, number)
        for net in range(len(given.nets) if number == 0 else 0):
            given.card(switch, 0x40 + net, net, 100000)


def across(given):
    """The ports on the other socket."""
    first, second = given.cpu(0, INTEL), given.cpu(1, INTEL)
    for number in range(len(given.gpus)):
        given.gpu(given.switch(first, 0x10 + number), number)
    for net in range(len(given.nets)):
        given.card(second, 0x40 + net, net, 200000)


def split(given):
    """GPUs and ports in turn on two sockets, through two switches each; the last port is the fastest."""
    cpus = [given.cpu(0, AMD), given.cpu(1, AMD)]
    inner = [given.switch(given.switch(cpu, 0x10 + 2 * i), 0x11 + 2 * i) for i, cpu in enumerate(cpus)]
    for number in range(len(given.gpus)):
        given.gpu(inner[number % 2], number)
    for net in range(len(given.nets)):
        given.card(cpus[net % 2] if net else inner[0], 0x40 + net, net, 40000 * (net + 1))


def narrow(given):
    """Links of few lanes, which bound every way."""
    cpu = given.cpu(0, AMD)
    for number in range(len(given.gpus)):
        given.gpu(given.switch(cpu, 0x10 + number), number, NARROW)
    for net in range(len(given.nets)):
        given.card(given.switch(cpu, 0x30 + net, NARROW), 0x40 + net, net, 400000)


def real(dump, file):
    """All of the file but GPUs. Its bus ids are moved to another domain, lest NCCL finds them here."""
    given = Given(dump)
    root = xml.parse(file).getroot()
    for element in root.iter():
        for name in ("busid", "target"):
            if element.get(name, "").startswith("0000:"):
                element.set(name, "fffe" + element.get(name)[4:])
    places = [(parent, pci) for parent in root.iter() for pci in parent.findall("pci") if pci.find("gpu") is not None]
    chosen = {len(places) * i // len(given.gpus): gpu for i, gpu in enumerate(given.gpus[:len(places)])}
    for place, (parent, pci) in enumerate(places):
        if place in chosen:
            gpu = chosen[place]
            gpu.attrib.update({key: pci.get(key) for key in ("link_speed", "link_width") if pci.get(key)})
            gpu.find("gpu").attrib.pop("keep", None)
            parent.insert(list(parent).index(pci), gpu)
        parent.remove(pci)
    ports = sorted(root.iter("net"), key=lambda net: int(net.get("dev")))
    return root, ",".join(net.get("name") for net in ports)


def main():
    dump, folder = sys.argv[1:3]
    if len(sys.argv) > 3:
        root, names = real(dump, sys.argv[3])
        xml.ElementTree(root).write(os.path.join(folder, "given-real.xml"))
        print(names)
        return
    for make in (beside, across, split, narrow):
        given = Given(dump)
        make(given)
        for gpu in given.root.iter("gpu"):
            gpu.attrib.pop("keep", None)
        path = os.path.join(folder, "given-%s.xml" % make.__name__)
        xml.ElementTree(given.root).write(path)
        print(path)


if __name__ == "__main__":
    main()
