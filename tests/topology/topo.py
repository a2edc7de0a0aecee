# SPDX-License-Identifier: Apache-2.0
"""What the tests of `loongcomm topo` share."""
import json
import os
import pathlib
import sys
import tempfile

if os.access("/dev/shm", os.W_OK):  # hundreds of small files
    tempfile.tempdir = "/dev/shm"
sys.path.insert(0, os.path.join(os.environ["LC_SOURCE"], "tests", "cli"))
from cli import CliTest, call  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parent / "data"


class TopoTest(CliTest):
    def topo(self, path, *args, **changes):
        """The document of what must load."""
        result = call("topo", "--input", str(path), "--json", *args, **changes)
        self.assertEqual((result.returncode, result.stderr), (0, ""), path)
        document = json.loads(result.stdout)
        self.assertEqual(document["schema"], "loongcomm.topology/1")
        return document

    def refusal(self, path, **changes):
        """The one line about what must not load."""
        result = call("topo", "--input", str(path), **changes)
        self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (1, "", 1), result)
        return result.stderr.strip()


def nodes(document, kind):
    return [node for node in document["nodes"] if node["type"] == kind]


def counts(document):
    return tuple(len(nodes(document, kind)) for kind in ("gpu", "nic", "net", "cpu"))


def above(document, node):
    """Types and names from a node's parent up."""
    found = []
    while "parent" in node and node["parent"] != 0:
        node = document["nodes"][node["parent"]]
        found.append(node["id"] if node["type"] == "pci" else node["type"] + str(node.get("numa", "")))
    return found
