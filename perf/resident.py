# SPDX-License-Identifier: Apache-2.0
"""Resident sets of processes that take turns: a set for each variant, all of one job script, so that drift of the machine
meets all alike. A worker first says a line of JSON about itself, then answers each line that it gets with one."""
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys

STEPS_FIRST = 4  # of each variant, not timed
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


def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


# ---- steps of a training job ----

def serve_steps(about, step, loss_of, more=lambda: {}):
    """The worker of a job: for each line, a number, so many steps. Their times are the device's, from one step's end to the
    next one's, and the host runs ahead as it does in a job. more: what else to say."""
    import torch

    say(about)
    for line in sys.stdin:
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(int(line) + 1)]
        step()
        marks[0].record()
        losses = []
        for mark in marks[1:]:
            losses.append(step())
            mark.record()
        torch.cuda.synchronize()
        say({"ms": [a.elapsed_time(b) for a, b in zip(marks, marks[1:])], "loss": [loss_of(loss) for loss in losses], **more()})


def steps_in_turns(script, variants, options, arguments):
    """variants: {name: settings, or None: not preloaded}. Returns what a rank said about itself and {name: rounds of step
    times, the longest of the ranks}, {name: each rank's first losses}, {name: each rank's last answer}."""
    import torch

    apart = options.apart or torch.cuda.device_count() < options.ranks
    sets = {}
    try:
        for name, settings in variants.items():
            sets[name] = Set(script, name, options.ranks, arguments, settings or {},
                             None if settings is None else options.library, apart)
        about = [ranks.answers()[0] for ranks in sets.values()][0]
        losses = {name: [a["loss"] for a in ranks.ask(str(STEPS_FIRST))] for name, ranks in sets.items()}
        rounds, last = {name: [] for name in sets}, {}
        for _ in range(options.rounds):
            for name, ranks in sets.items():
                last[name] = ranks.ask(str(options.steps))
                rounds[name].append([max(times) for times in zip(*(a["ms"] for a in last[name]))])
        for ranks in sets.values():
            ranks.end()
    finally:
        for ranks in sets.values():
            ranks.kill()
    return about, rounds, losses, last


def step_records(rounds):
    """{name: record}: of all steps the median, p10 and p90; of the rounds' medians how many times `plain` takes as long in the
    same round, and the share that `nodp` does not need."""
    medians = {name: [statistics.median(times) for times in turns] for name, turns in rounds.items()}
    records = {}
    for name, turns in rounds.items():
        steps = [ms for times in turns for ms in times]
        ratios = [plain / own for plain, own in zip(medians.get("plain", medians[name]), medians[name])]
        shares = [1 - least / own for least, own in zip(medians.get("nodp", medians[name]), medians[name])]
        records[name] = {"median_ms": statistics.median(steps), "p10_ms": quantile(steps, 0.1), "p90_ms": quantile(steps, 0.9),
                         "rounds_ms": medians[name], "ratio": statistics.median(ratios), "ratio_p10": quantile(ratios, 0.1),
                         "ratio_p90": quantile(ratios, 0.9), "share": statistics.median(shares)}
    return records


def text_of_record(name, record):
    return "%-10s %8.2f ms (%.2f..%.2f)  share %4.1f %%  plain / this %.3f (%.3f..%.3f)" % (
        name, record["median_ms"], record["p10_ms"], record["p90_ms"], 100 * record["share"], record["ratio"],
        record["ratio_p10"], record["ratio_p90"])


def step_options(usage, rounds, steps, layers, variants):
    import argparse

    parser = argparse.ArgumentParser(usage=usage)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(variants))
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--json")
    return parser


def write(path, machine, records):
    with open(path, "w") as out:
        json.dump({"schema": "loongcomm.bench/1", "machine": machine, "command": [os.path.relpath(sys.argv[0], ROOT)] +
                   sys.argv[1:], "settings": {k: v for k, v in os.environ.items() if k.startswith(("LOONGCOMM_", "NCCL_"))},
                   "records": records}, out, indent=2)
