#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the job scripts plain and with libloongcomm.so preloaded, and compares every loss and every output
bit for bit. Each rank's exit report must have counted the calls that the scripts are known to make.

By default all scripts run in one set of processes per rank count and variant (all.py). One script also goes
through torchrun, and through `loongcomm run -- torchrun`. Variables LOONGCOMM_... of the environment do not reach them.
Exit code 77 where there is no GPU or no torch.
"""
import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import exit_report

HERE = os.path.dirname(os.path.abspath(__file__))
SKIP = 77
# What each rank must be seen to call, as the exit report names it.
EXPECTED = {"AllReduce", "ReduceScatter", "AllGather", "AlltoAll", "Broadcast", "Reduce", "Send", "Recv"}
EXPECTED_DDP = {"AllReduce", "Broadcast"}
MAX_SHOWN = 6


class Outcome:
    def __init__(self):
        self.problems = []
        self.records = {}  # rank -> script -> what job.py wrote
        self.seconds = 0.0
        self.output = {}  # rank -> path of its output


BF16_SCRIPTS = ["ddp_transformer", "fsdp2", "moe_padded"]
BF16_BOUND = 2e-2  # of a loss, relative


def free_port():
    """Below the range that outgoing connections take theirs from, since the rank that listens starts later."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise OSError("no free port between 20000 and 32000")


def signal_groups(processes, number):
    for process in processes:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass


def wait_all(processes, limit, outcome):
    """Waits for all; once one has failed the others get a while to notice. Then their groups are ended."""
    deadline = time.monotonic() + limit
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + 15)
        if time.monotonic() > deadline:
            late = [str(i) for i, process in enumerate(processes) if process.poll() is None]
            outcome.problems.append("%s did not end (%s)" % (
                "process " + ", ".join(late), "another failed" if failed else "limit of %d s" % limit))
            signal_groups(processes, signal.SIGTERM)
            time.sleep(2)
            break
        time.sleep(0.05)
    signal_groups(processes, signal.SIGKILL)
    for index, process in enumerate(processes):
        code = process.wait()
        if code != 0:
            outcome.problems.append("process %d: %s" % (
                index, "signal %d" % -code if code < 0 else "exit code %d" % code))


started = []  # every process, for the way out by a signal


def start(command, env, log):
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    started.append(process)
    return process


def stopped(number, _frame):
    """Ranks lead process groups of their own: they would stay behind."""
    signal_groups([process for process in started if process.returncode is None], signal.SIGKILL)
    raise SystemExit(128 + number)


def read_records(folder, ranks, outcome):
    for rank in range(ranks):
        path = os.path.join(folder, "rank%d.json" % rank)
        try:
            with open(path) as text:
                outcome.records[rank] = json.load(text)
        except (OSError, ValueError) as error:
            outcome.problems.append("rank %d left no record: %s" % (rank, error))
    for rank, scripts in outcome.records.items():
        for name, record in scripts.items():
            outcome.problems += ["rank %d: %s: %s" % (rank, name, f) for f in record["failures"]]


class Runner:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.rows = []
        self.failed = 0

    def environment(self, out, variant, settings=None):
        env = dict(os.environ, JOB_OUT=out, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        for name in [n for n in env if n.startswith("LOONGCOMM_")] + ["LD_PRELOAD"]:
            env.pop(name, None)
        if variant != "plain":
            env.update(LOONGCOMM_REPORT="json", LOONGCOMM_DIR=os.path.join(out, "report"),
                       LOONGCOMM_HOSTID="one")  # whatever NCCL_HOSTID says: see job.share_gpus
            os.mkdir(env["LOONGCOMM_DIR"], 0o700)
            env.update(settings or {})
            if variant == "preloaded":
                env["LD_PRELOAD"] = self.options.library
        return env

    def new_folder(self, name):
        out = os.path.join(self.folder, name)
        os.mkdir(out)
        return out

    def launch(self, name, variant, ranks, command, settings=None):
        """One process per rank."""
        out = self.new_folder(name)
        env = self.environment(out, variant, settings)
        env.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(free_port()))
        outcome = Outcome()
        begun = time.monotonic()
        processes = []
        for rank in range(ranks):
            outcome.output[rank] = os.path.join(out, "output%d" % rank)
            processes.append(start(command, dict(env, RANK=str(rank), LOCAL_RANK=str(rank)),
                                   outcome.output[rank]))
        wait_all(processes, self.options.limit, outcome)
        return self.collect(outcome, out, ranks, begun)

    def launch_torchrun(self, name, variant, ranks, prefix, script):
        """The launcher that users have. All its workers write to one output."""
        out = self.new_folder(name)
        command = prefix + [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
                            "--master-addr", "127.0.0.1", "--master-port", str(free_port()), script]
        outcome = Outcome()
        begun = time.monotonic()
        outcome.output[0] = os.path.join(out, "output")
        wait_all([start(command, self.environment(out, variant), outcome.output[0])],
                 self.options.limit, outcome)
        return self.collect(outcome, out, ranks, begun)

    def collect(self, outcome, out, ranks, begun):
        outcome.seconds = time.monotonic() - begun
        outcome.report = os.path.join(out, "report")
        read_records(out, ranks, outcome)
        return outcome

    def row(self, name, ranks, outcome, compared, problems):
        self.rows.append((name, ranks, outcome.seconds, compared, "FAIL" if problems else "ok"))
        if not problems:
            return
        self.failed += 1
        print("FAIL %s, %d ranks:" % (name, ranks))
        for problem in problems[:MAX_SHOWN]:
            print("    " + problem)
        if len(problems) > MAX_SHOWN:
            print("    and %d more" % (len(problems) - MAX_SHOWN))
        for rank, path in sorted(outcome.output.items())[:2]:
            with open(path, errors="replace") as text:
                lines = text.read().splitlines()[-20:]
            print("    last lines of %s:" % os.path.basename(path))
            print("\n".join("        " + line[:240] for line in lines))
        sys.stdout.flush()


def differences(one, other, scripts=None):
    """(number compared, what differs) of two outcomes. A script must have recorded something."""
    compared, differ = 0, []
    for rank in sorted(set(one.records) & set(other.records)):
        for name in scripts or sorted(set(one.records[rank]) | set(other.records[rank])):
            a, b = one.records[rank].get(name), other.records[rank].get(name)
            where = "rank %d: %s" % (rank, name)
            if a is None or b is None:
                differ.append(where + ": ran in one of the two only")
                continue
            if not a["hashes"] and not a["skipped"]:
                differ.append(where + ": recorded nothing")
            if a["losses"] != b["losses"]:
                differ.append(where + ": losses %s, then %s" % (a["losses"][:4], b["losses"][:4]))
            keys = set(a["hashes"]) | set(b["hashes"])
            differ += ["%s: %s differs" % (where, key) for key in sorted(keys)
                       if a["hashes"].get(key) != b["hashes"].get(key)]
            compared += len(a["losses"]) + len(keys)
    return compared, differ


def check_reports(outcome, ranks, expected):
    problems = []
    reports = exit_report.read_all(outcome.report, problems)
    if len(reports) != ranks:
        problems.append("%d reports with calls for %d ranks" % (len(reports), ranks))
    for calls in reports:
        missing = sorted(op for op in expected if not calls.get(op))
        if missing:
            problems.append("a report counts no %s (it has %s)" % (", ".join(missing), calls))
    if len({calls.get("AllReduce") for calls in reports}) > 1:
        problems.append("ranks counted different numbers of all-reduces: %s" % [
            calls.get("AllReduce") for calls in reports])
    total = {}
    for calls in reports:
        for op, n in calls.items():
            total[op] = total.get(op, 0) + n
    if not problems:
        print("    counted at %d ranks together: %s" % (ranks, ", ".join(
            "%s %d" % item for item in sorted(total.items()))))
    return problems


def run_set(runner, ranks, scripts):
    command = [sys.executable, os.path.join(HERE, "all.py")] + scripts
    label = "set"
    plain = runner.launch("plain%d" % ranks, "plain", ranks, command)
    runner.row(label + " plain", ranks, plain, 0, plain.problems)
    # With more than two ranks NCCL adds a packed group in another order than its parts one by one.
    settings = {"LOONGCOMM_COALESCE": "no"} if ranks > 2 else {}
    loaded = runner.launch("preloaded%d" % ranks, "preloaded", ranks, command, settings)
    compared, differ = differences(plain, loaded)
    problems = loaded.problems + differ
    if differ:
        again = runner.launch("again%d" % ranks, "plain", ranks, command)
        unstable = differences(plain, again)[1]
        problems.insert(0, "two plain runs %s" % (
            "differ too: %s" % "; ".join(unstable[:3]) if unstable else "are equal"))
    if not scripts and not runner.options.no_report:
        problems += check_reports(loaded, ranks, EXPECTED)
        problems += check_path(loaded, "packed", ranks == 2)
    runner.row(label + " preloaded", ranks, loaded, compared, problems)
    first = loaded.records.get(0, {})
    print("    seconds, preloaded, rank 0: " + ", ".join(
        "%s %.1f" % (name, record["seconds"]) for name, record in first.items()), flush=True)
    return plain


def check_path(outcome, path, wanted):
    calls = exit_report.read_paths(outcome.report)
    if (calls.get(path, 0) > 0) != wanted:
        return ["%s calls took the path \"%s\": %s" % ("no" if wanted else "some", path, calls)]
    return []


def compare_losses(outcome, plain):
    """(problems, number compared, largest relative difference) of training that need not be equal to the bit."""
    problems, compared, largest = [], 0, 0.0
    for rank, scripts in sorted(outcome.records.items()):
        for name in BF16_SCRIPTS:
            ours, theirs = (one.records.get(rank, {}).get(name, {}).get("losses", []) for one in (outcome, plain))
            if len(ours) != len(theirs) or not ours:
                problems.append("rank %d: %s: %d losses, plain %d" % (rank, name, len(ours), len(theirs)))
                continue
            for a, b in zip(ours, theirs):
                error = abs(float.fromhex(a) - float.fromhex(b)) / max(abs(float.fromhex(b)), 1e-6)
                largest = max(largest, error)
                compared += 1
                if not error <= BF16_BOUND:
                    problems.append("rank %d: %s: loss %s, plain %s" % (rank, name, float.fromhex(a), float.fromhex(b)))
    return problems, compared, largest


def run_bf16(runner, ranks, plain):
    """Training with bf16 on the wire: the same losses but for rounding."""
    command = [sys.executable, os.path.join(HERE, "all.py")] + BF16_SCRIPTS
    settings = {"LOONGCOMM_ALLREDUCE_WIRE": "bf16", "LOONGCOMM_MIN_BYTES": "1k"}
    outcome = runner.launch("bf16_%d" % ranks, "preloaded", ranks, command, settings)
    problems, compared, largest = compare_losses(outcome, plain)
    problems = outcome.problems + problems
    if not runner.options.no_report:
        problems += check_path(outcome, "cast", True)
    print("    bf16 on the wire, %d ranks: largest relative difference of a loss %.1e (bound %.0e)" %
          (ranks, largest, BF16_BOUND))
    runner.row("set bf16 wire", ranks, outcome, compared, problems)


def run_peers(runner, ranks, plain):
    """All scripts through memory that the ranks map from each other: between two the bits are NCCL's, since each sum has two
    terms; of more they are added up in another order than NCCL's."""
    command = [sys.executable, os.path.join(HERE, "all.py")]
    outcome = runner.launch("peers%d" % ranks, "preloaded", ranks, command, {"LOONGCOMM_PEER": "force"})
    if ranks == 2:
        compared, problems = differences(plain, outcome)
    else:
        problems, compared, largest = compare_losses(outcome, plain)
        print("    peers, %d ranks: largest relative difference of a loss %.1e (bound %.0e)" % (ranks, largest, BF16_BOUND))
    problems = outcome.problems + problems
    if not runner.options.no_report:
        problems += check_reports(outcome, ranks, EXPECTED) + check_path(outcome, "rings", True)
        print("    peers, %d ranks: calls by path: %s" % (ranks, exit_report.read_paths(outcome.report)))
    runner.row("set peers", ranks, outcome, compared, problems)


def run_torchrun(runner, plain):
    """Against what the processes of run_set recorded: the launcher must not matter."""
    name, script = "ddp_transformer", os.path.join(HERE, "ddp_transformer.py")
    cases = [("torchrun preloaded", "preloaded", [])]
    if runner.options.command:
        cases.append(("loongcomm run -- torchrun", "run", [runner.options.command, "run", "--"]))
    for label, variant, prefix in cases:
        outcome = runner.launch_torchrun(label.replace(" ", "_"), variant, 2, prefix, script)
        compared, differ = differences(plain, outcome, [name])
        problems = outcome.problems + differ
        if not runner.options.no_report:
            problems += check_reports(outcome, 2, EXPECTED_DDP)
        runner.row(label, 2, outcome, compared, problems)


def why_not_here():
    if importlib.util.find_spec("torch") is None:
        return "this Python (%s) has no torch" % sys.executable
    if os.environ.get("JOB_BACKEND", "nccl") != "nccl":
        return None
    try:
        seen = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
                              stdout=subprocess.PIPE, timeout=120, text=True).stdout.strip()
    except subprocess.TimeoutExpired:
        return "torch did not start within 120 s"
    return None if seen.isdigit() and int(seen) > 0 else "torch sees no GPU"


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, type=os.path.abspath, help="libloongcomm.so")
    parser.add_argument("--command", type=os.path.abspath, help="the loongcomm command")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--limit", type=int, default=150, help="seconds for one set of processes")
    parser.add_argument("--keep", help="new folder for outputs, records and reports")
    parser.add_argument("--no-report", action="store_true", help="do not look at the exit reports")
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--peers", action="store_true",
                        help="one more set with LOONGCOMM_PEER=force, whose ranks must be able to map each other's memory")
    parser.add_argument("scripts", nargs="*", help="default: all")
    return parser.parse_args()


def main():
    options = parse()
    why = why_not_here()
    if why:
        print("SKIPPED: the PyTorch jobs were not run: %s" % why)
        return SKIP
    if not os.path.exists(options.library):
        print("no such library: %s" % options.library)
        return 1
    folder = options.keep or tempfile.mkdtemp(prefix="lc-jobs.")
    os.makedirs(folder, exist_ok=True)
    runner = Runner(options, folder)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stopped)
    try:
        for ranks in [int(n) for n in options.ranks.split(",")]:
            plain = run_set(runner, ranks, options.scripts)
            if ranks <= 4 and not options.scripts and not plain.problems:
                run_bf16(runner, ranks, plain)
            if options.peers and not options.scripts and not plain.problems:
                run_peers(runner, ranks, plain)
            if ranks == 2 and not options.no_torchrun and not options.scripts:
                run_torchrun(runner, plain)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("%-28s %5s %8s %9s  %s" % ("PyTorch jobs", "ranks", "seconds", "compared", "result"))
    for name, ranks, seconds, compared, result in runner.rows:
        print("%-28s %5d %8.1f %9s  %s" % (name, ranks, seconds, compared or "-", result))
    print("%d passed, %d failed" % (len(runner.rows) - runner.failed, runner.failed))
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
