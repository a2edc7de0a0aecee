#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every given file loads as what it is, or is refused in one line."""
import re
import sys
import unittest
import xml.etree.ElementTree as ElementTree

from topo import DATA, TopoTest, call, counts, nodes

sys.dont_write_bytecode = True

# GPUs, NICs, ports, NUMA nodes
LOADS = {
    "aws-ofi-nccl/p4d-24xl-topo.xml": (0, 0, 0, 2),
    "aws-ofi-nccl/p5.48xl-topo.xml": (0, 0, 0, 2),
    "azhpc-images/ncv4-topo.xml": (4, 1, 1, 4),
    "azhpc-images/ndv4-topo.xml": (0, 0, 0, 4),
    "azhpc-images/ndv5-topo.xml": (0, 0, 0, 2),
    "oci-hpc/H100-topology.xml": (8, 8, 16, 2),
    "oci-hpc/H100-topology-kubernetes.xml": (8, 8, 16, 2),
    "oci-hpc/topo-flattened-b4.xml": (0, 0, 0, 4),
    "panlichen-nccl-tests/topo.xml": (8, 1, 1, 2),
    "rccl-topo_expl/topo_3p_pcie.xml": (3, 1, 1, 2),
    "rccl-topo_expl/topo_4p2h_2nic.xml": (8, 2, 2, 1),
    "rccl-topo_expl/topo_4p4h.xml": (16, 16, 16, 1),
    "rccl-topo_expl/topo_8p_90a_1.xml": (8, 1, 1, 3),
    "rccl-topo_expl/topo_8p_940.xml": (8, 8, 8, 2),
    "rccl-topo_expl/topo_8p_rome_pcie.xml": (8, 1, 2, 2),
    "rccl-topo_expl/topo_8p_ts1_n4_2.xml": (8, 2, 3, 8),
    "simllm/vastai_hgx_h200_8x/nccl_topo.xml": (8, 2, 2, 2),
}
GRAPH = "azhpc-images/ncv4-graph.xml"
HWLOC = {  # of format 3; the counts of the same machine as hwloc 2 would export it
    "hwloc/nvidiaDGX2.xml": (16, 0, 0, 2),
    "hwloc/32em64t-2n8c2t-pci-normalio.xml": (4, 3, 3, 2),
    "hwloc/16intel64-manyVFs.xml": (0, 18, 6, 2),
}
# Kinds of devices of the operating system, in format 3 and in format 2.
DEVICE_KINDS = {"1": "0", "4": "1", "8": "5", "12": "1", "16": "2", "32": "3", "48": "3", "64": "4"}


def attributes(element):
    return (element.tag, dict(element.attrib), [attributes(child) for child in element])


class Files(TopoTest):
    def test_all_files_are_named_here(self):
        self.assertEqual({str(path.relative_to(DATA)) for path in DATA.rglob("*.xml")}, {GRAPH, *LOADS, *HWLOC})

    def test_every_topology_loads_as_what_it_is(self):
        for name, expected in LOADS.items():
            with self.subTest(name):
                document = self.topo(DATA / name)
                self.assertEqual(counts(document), expected)
                self.assertEqual(document["format"], "rccl" if name.startswith("rccl") else "nccl")
                partial = expected[0] == 0 or expected[2] == 0
                self.assertEqual(document["partial"], partial)
                self.assertEqual(any("partial: no " in note for note in document["notes"]), partial)

    def test_a_graph_file_is_named_as_such(self):
        self.assertIn("an NCCL graph file (NCCL_GRAPH_FILE), not a topology", self.refusal(DATA / GRAPH))

    def test_written_files_hold_all_that_was_read(self):
        for name in LOADS:
            with self.subTest(name):
                written = self.path("written.xml")
                document = self.topo(DATA / name, "--nccl-xml", written)
                again = self.topo(written)
                for doc in (document, again):
                    del doc["source"], doc["notes"]
                    for node in doc["nodes"]:
                        node.pop("line", None)
                self.assertEqual(document, again)
                original = attributes(ElementTree.parse(DATA / name).getroot())
                self.assertEqual(str(attributes(ElementTree.parse(written).getroot())).lower(), str(original).lower())

    def test_links_lead_to_the_gpus_they_name(self):
        document = self.topo(DATA / "rccl-topo_expl/topo_8p_940.xml")
        links = nodes(document, "xgmi")
        self.assertEqual(len(links), 56)
        for link in links:
            gpu = document["nodes"][link["target_gpu"]]
            self.assertEqual(document["nodes"][gpu["parent"]]["id"], link["target"])
            self.assertNotEqual(link["target_gpu"], link["parent"])
        document = self.topo(DATA / "simllm/vastai_hgx_h200_8x/nccl_topo.xml")
        self.assertEqual(sum(link["count"] for link in nodes(document, "nvlink")), 8 * 18)

    def test_hwloc_of_a_newer_format_is_refused_in_one_line(self):
        for name in HWLOC:
            with self.subTest(name):
                line = self.refusal(DATA / name)
                self.assertRegex(line, r"\.xml:3: hwloc XML of format 3\.0; the installed hwloc reads format 2\.x")

    def test_hwloc_of_format_2_loads(self):
        for name, expected in HWLOC.items():
            with self.subTest(name):
                text = (DATA / name).read_text().replace('topology version="3.0"', 'topology version="2.0"')
                text = re.sub(r'osdev_type="(\d+)"', lambda m: 'osdev_type="%s"' % DEVICE_KINDS[m[1]], text)
                path = self.write("machine.xml", text)
                document = self.topo(path)
                self.assertEqual((counts(document), document["format"]), (expected, "hwloc"))
                self.topo(path, "--nccl-xml", self.path("nccl.xml"))
                self.assertEqual(counts(self.topo(self.path("nccl.xml"))), expected)

    def test_hwloc_that_is_broken_is_refused_in_one_line(self):
        text = (DATA / "hwloc/nvidiaDGX2.xml").read_text().replace('topology version="3.0"', 'topology version="2.0"')
        for cut in range(0, len(text), len(text) // 12):
            self.refusal(self.write("cut.xml", text[:cut]))
        for set_of, value in (("complete_cpuset", None), ("cpuset", None), ("complete_cpuset", "-1"), ("complete_cpuset", "")):
            at = text.index(' %s="' % set_of, text.index('type="L2Cache"'))
            end = text.index('"', at + len(set_of) + 3) + 1
            line = self.refusal(self.write("set.xml", text[:at] + (' %s="%s"' % (set_of, value) if value is not None else "") + text[end:]))
            self.assertIn("set.xml:%d: an object (L2Cache) without cpuset and complete_cpuset" % (text[:at].count("\n") + 1), line)
        for kind in ("Machine", "NUMANode", "PU"):
            at = text.index(' complete_nodeset="', text.index('type="%s"' % kind))
            end = text.index('"', at + len(' complete_nodeset="')) + 1
            line = self.refusal(self.write("nodes.xml", text[:at] + text[end:]))
            self.assertIn("an object (%s) with nodeset, but no complete_nodeset" % kind, line)
        sets = 'cpuset="0x1" complete_cpuset="0x1"'
        line = self.refusal(self.write("old.xml", """<topology><object type="Machine" %s>
<object type="NUMANode" os_index="0" %s nodeset="0x1" complete_nodeset="0x1"/></object></topology>""" % (sets, sets)))
        self.assertIn("old.xml:2: an object (NUMANode) with nodeset in a machine without", line)
        for kind in ("MemCache", "Misc"):
            line = self.refusal(self.write("first.xml", text.replace('<object type="Machine"', '<object type="%s"' % kind, 1)))
            self.assertIn("the first object is no Machine (%s)" % kind, line)
        odd = text.replace('complete_cpuset="0x02000000"', 'complete_cpuset="%s"' % ("a" * 5000))
        self.assertLessEqual(call("topo", "--input", str(self.write("order.xml", odd))).stderr.count("\n"), 1)  # hwloc would complain at length
        self.refusal(self.write("empty.xml", '<topology version="2.0"></topology>'))
        self.refusal(self.write("odd.xml", '<topology version="2.0"><object type="Core"/></topology>'))


if __name__ == "__main__":
    unittest.main()
