# SPDX-License-Identifier: Apache-2.0
"""Resident sets of processes that take turns: a set for each variant, all of one job script, so that drift of the machine
meets all alike. A worker first says a line of JSON about itself, then answers each line that it gets with one."""
import json
import os
import random
import select
import socket
import subprocess
import sys

LIMIT = 180  # seconds for an answer
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = os.path.join(ROOT, "build/interpose/libloongcomm.so")


def free_port():
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                pass
    raise OSError("no free port")


class Ended(Exception):
    """A rank that did not answer, or not well. Nobody who takes no notice goes on."""


class Set:
    """The ranks of one variant. settings: variables of its own; library: preloaded, and only then do variables
    LOONGCOMM_... of the environment count. apart: every rank is a host of its own for NCCL."""

    def __init__(self, script, variant, ranks, arguments=(), settings=(), library=None, apart=False):
        self.variant, self.processes = variant, []
        port = free_port()
        for rank in range(ranks):
            env = {k: v for k, v in os.environ.items() if not k.startswith("LOONGCOMM_") and k != "LD_PRELOAD"}
            env.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
            if apart:
                env["NCCL_HOSTID"] = "host%d" % rank
            if library:
                env.update((k, v) for k, v in os.environ.items() if k.startswith("LOONGCOMM_"))
                env.update(LD_PRELOAD=library, LOONGCOMM_REPORT="text" if rank == 0 else "off")
            env.update(settings)
            self.processes.append(subprocess.Popen(
                [sys.executable, os.path.abspath(script), "--worker", variant, *arguments], env=env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def answers(self):
        return [self._answer(process) for process in self.processes]

    def ask(self, line):
        try:
            for process in self.processes:
                process.stdin.write(line + "\n")
                process.stdin.flush()
        except OSError:
            raise Ended("a rank of %s has ended" % self.variant) from None
        return self.answers()

    def _answer(self, process):
        if not select.select([process.stdout], [], [], LIMIT)[0]:
            raise Ended("a rank of %s did not answer within %d s" % (self.variant, LIMIT))
        line = process.stdout.readline()
        if not line:
            raise Ended("a rank of %s ended early" % self.variant)
        return json.loads(line)

    def end(self):
        for process in self.processes:
            process.stdin.close()
        for rank, process in enumerate(self.processes):
            if process.wait(60):
                raise Ended("rank %d of %s ended with status %d" % (rank, self.variant, process.returncode))

    def kill(self):
        for process in self.processes:
            process.kill()


def say(about):
    print(json.dumps(about), flush=True)


def write(path, machine, records):
    with open(path, "w") as out:
        json.dump({"schema": "loongcomm.bench/1", "machine": machine, "command": [os.path.relpath(sys.argv[0], ROOT)] +
                   sys.argv[1:], "settings": {k: v for k, v in os.environ.items() if k.startswith(("LOONGCOMM_", "NCCL_"))},
                   "records": records}, out, indent=2)
