#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What NCCL says of a machine (its log with NCCL_DEBUG_SUBSYS=GRAPH,NET, its NCCL_TOPO_DUMP_FILE) held against what
`loongcomm topo --json --paths` says.

usage: topo_compare.py --paths DOCUMENT LOG...      every way, its type, bandwidth and length; the ports used
       topo_compare.py --machine LIVE DUMP          documents of the live machine and of NCCL's dump
Prints each difference and ends with `N compared, N differences`; exit code 1 if there are any, or nothing was there
to compare."""
import json
import re
import sys

sys.dont_write_bytecode = True

# GPU/0-1b000 (2/24.0/PHB): host and id in hexadecimal; hops, GB/s, type
END = re.compile(r"(GPU|CPU|NET)/([0-9a-f]+)-([0-9a-f]+) \((\d+)/(\d+\.\d)/([A-Z0-9]{3})\)")
FROM = re.compile(r"NCCL INFO (GPU|NET)/([0-9a-f]+)-([0-9a-f]+) :(?=[A-Z]+/)")
# Channel 00/1 : 0[0] -> 1[0] [send] via NET/Socket/0(2)/GDRDMA/Shared: 0[7] is rank and device, /1 marks sends and
# receives, (2) is the rank that relays
USED = re.compile(r"NCCL INFO Channel (\d+)/(\d+) : (\d+)\[([0-9a-f]+)\] -> (\d+)\[([0-9a-f]+)\] \[(send|receive)\] via "
                  r"NET/[^/]+/(\d+)(?:\((\d+)\))?(/GDRDMA)?")


LONGEST = 1000  # NCCL writes lines of up to 1024 characters, and cuts what is longer


class Log:
    """What one process's log says. Of several communicators the first."""

    def __init__(self, text):
        self.paths = {}
        self.cut = set()  # where they start whose line may lack its end
        self.used = []  # (channel, connection, from rank, to rank, "send" or "receive", port's number, relay)
        begun = set()
        for line in text.splitlines():
            found = FROM.search(line)
            if found:
                start = self.name(*found.groups())
                if start in begun:  # another communicator
                    continue
                begun.add(start)
                if len(line) - found.start(1) >= LONGEST - 50:
                    self.cut.add(start)
                for end in END.finditer(line, found.end()):
                    hops, gbps, kind = end.groups()[3:]
                    self.paths.setdefault((start, self.name(*end.groups()[:3])), (kind, float(gbps), int(hops)))
            found = USED.search(line)
            if found:
                channel, connection, source, _, target, _, way, net, relay, _ = found.groups()
                self.used.append((int(channel), int(connection), int(source), int(target), way, int(net),
                                  int(relay) if relay else None))

    @staticmethod
    def name(kind, host, number):
        return "%s %s" % (kind, number) if host == "0" else "%s %s on host %s" % (kind, number, host)


def nccl_name(document, index):
    """How NCCL's log names a node of our document."""
    node = document["nodes"][index]
    if node["type"] == "gpu":
        bus = document["nodes"][node["parent"]]["id"]
        return "GPU %x" % int(re.sub("[:.]", "", bus), 16)
    if node["type"] == "cpu":
        return "CPU %x" % (node["numa"] & (1 << 56) - 1)
    return "NET %x" % node["dev"]


def compare_paths(document, log):
    """Lines about each way that is not the same, and how many were compared."""
    ours = {(nccl_name(document, path["from"]), nccl_name(document, path["to"])):
            (path["type"], path["gbytes_per_s"], path["hops"]) for path in document["paths"]}
    theirs = {ends: way for ends, way in log.paths.items() if way[0] not in ("DIS", "NET")}
    problems = []
    known = {start for start, _ in theirs}
    seen = known | {end for _, end in theirs}
    for ends in sorted(theirs | {ends: None for ends in ours if ends[0] in known}):
        mine, nccls = ours.get(ends), theirs.get(ends)
        if nccls is None and ends[1] not in seen:
            continue  # a device that takes no part in that communicator, a NUMA node without any
        if nccls is None and ends[0] in log.cut:
            continue
        # NCCL prints one digit, and computes with floats
        if mine is None or nccls is None or mine[0] != nccls[0] or mine[2] != nccls[2] or \
                abs(mine[1] - nccls[1]) > 0.0501 + 1e-6 * nccls[1]:
            problems.append("%s -> %s: NCCL has %s, we %s" % (*ends, say(nccls), say(mine)))
    return problems, len(theirs)


def say(way):
    return "%s, %.1f GB/s, %d hops" % way if way else "none"


def compare_use(document, log):
    """The ports that sends and receives went by, against our choice for their channels; no collectives, whose ports NCCL
    searches, and no sends that another GPU relays. The ranks are those that the file has GPUs of."""
    gpus = {node.get("rank"): entry["nets"] for entry in document["channels"]
            for node in [document["nodes"][entry["gpu"]]]}
    problems, compared = [], 0
    for channel, connection, source, target, way, net, relay in log.used:
        rank = source if way == "send" else target
        if connection != 1 or relay not in (None, rank) or not gpus.get(rank):
            continue
        turns = [document["nodes"][index]["dev"] for index in gpus[rank]]
        compared += 1
        if turns[channel % len(turns)] != net:
            problems.append("channel %d of rank %d, %s: NCCL goes by port %d, we say %d" %
                            (channel, rank, way, net, turns[channel % len(turns)]))
    return problems, compared


# --- the machine ---

FIELDS = {"cpu": ("numa", "cpus", "arch", "vendor", "family", "model"),
          "pci": ("class", "vendor", "device", "link_gts", "link_width", "link_gbytes_per_s"),
          "gpu": ("dev", "sm"),
          "net": ("dev", "port", "mbits_per_s", "guid", "gdr"),
          "nvlink": ("target", "count"), "c2c": ("count",)}
UNKNOWN = {"mbits_per_s": 10000, "guid": "any"}  # what NCCL takes an unknown speed for; sockets' guids are their numbers


def target(node):
    """Of a link. A virtual machine does not say which switch is behind it, and NCCL writes fewer f's than the driver."""
    return re.sub("^f+:ff:ff.0$", "unknown", node.get("target", ""))


def identity(document, node):
    """The same for the same thing in both documents: its kind, its own name, and what it hangs below. A card without a
    PCI function hangs below whatever GPU NCCL met first."""
    names = []
    while "parent" in node:
        own = node.get("id", target(node))
        names.append("%s %s" % (node["type"], own) if own else node["type"])
        if node["type"] == "nic" and document["nodes"][node["parent"]]["type"] == "cpu":
            break
        node = document["nodes"][node["parent"]]
    return " of ".join(names)


def compare_machines(live, dump):
    """Lines about what NCCL's dump has that the live machine has not, or with other values."""
    have = {identity(live, node): node for node in live["nodes"]}
    problems, compared = [], 0
    for node in dump["nodes"]:
        if node["type"] not in FIELDS:
            continue
        who = identity(dump, node)
        mine = have.get(who)
        compared += 1
        if mine is None:
            name = who.split(" of ")[0]
            others = [other for other in have if other.split(" of ")[0] == name]
            problems.append("NCCL has %s; we have %s" % (who, others[0] if others else "no such thing"))
            continue
        for field in FIELDS[node["type"]]:
            have_it = mine.get(field, UNKNOWN.get(field))
            if field == "target" and target(node) == target(mine):
                continue
            if node.get(field) is not None and have_it not in (node[field], "any"):
                problems.append("%s: %s is %s for NCCL, %s for us" % (who, field, node[field], mine.get(field)))
    return problems, compared


def load(path):
    with open(path) as f:
        return json.load(f)


def main(argv):
    if len(argv) < 3 or argv[0] not in ("--paths", "--machine"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    problems, compared = [], 0
    if argv[0] == "--machine":
        problems, compared = compare_machines(load(argv[1]), load(argv[2]))
    for name in argv[2:] if argv[0] == "--paths" else ():
        document = load(argv[1])
        with open(name, errors="replace") as f:
            log = Log(f.read())
        for compare in (compare_paths, compare_use):
            found, count = compare(document, log)
            problems += ["%s: %s" % (name.rsplit("/", 1)[-1], line) for line in found]
            compared += count
    for line in problems:
        print("DIFFERENT: " + line)
    print("%d compared, %d differences" % (compared, len(problems)))
    return 0 if compared and not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
