#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds configurations of the project, runs their suites and adds up what meson reports."""
import argparse
import atexit
import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import typing

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHOWN_LINES = 60  # of the output of a failed test


@dataclasses.dataclass
class Suite:
    budget: int = 60  # seconds that it may take on two cores beside others, without sanitizers; then it is named
    share: int = 40  # per cent of the machine that it keeps busy: many wait more than they compute


ALONE = 1000
SUITES = {
    "rig": Suite(300, 55), "lint": Suite(300, 70), "roce": Suite(240, 45), "threads": Suite(120, 60),
    "model": Suite(120, 70), "kernels": Suite(120, 70), "plugin": Suite(120, 50), "fuzz": Suite(60, 70),
    "interpose": Suite(120, 20), "control": Suite(90, 15), "cli": Suite(90, 30), "topology": Suite(60, 60),
    "perf": Suite(120), "unit": Suite(30), "headers": Suite(30), "symbols": Suite(30),
    "pytorch": Suite(300, ALONE), "gpu": Suite(600, ALONE),
}
# One build at a time, since builds keep the processors busy beside suites that wait.
BUILD_SHARE, FULL = 65, 125
# Suites and tests are stopped, which is a failure, only when they must be hanging: other people's machines are busy.
STOP_FACTOR, STOP_EXTRA = 4, 120
BUILD_STOP = 3600
SOAK_FACTOR = 20
OTHER_SUITE = Suite()
GROUPS = set()  # of processes that would outlive this one


@dataclasses.dataclass
class Config:
    folder: str
    suites: tuple = ()  # empty: every suite that the build has, but for `threads`
    cc: str = "gcc"
    options: tuple = ()
    builds: str = "all"  # or what its suites need ("tested"), or that and what is installed ("shipped")
    wheels: bool = False
    slow: int = 1  # how much slower than plain code


# Half the time of a build, and a stack trace still has its lines. Instrumented code and less optimisation make gcc warn
# of what is not so; the configuration gcc looks for warnings.
QUICK = ("-Doptimization=1", "-Dc_args=-g1")
QUICK_GCC = ("-Doptimization=1", "-Dc_args=-g1 -w")

CONFIGS = {
    "gcc": Config("build"),  # the folder and options that perf/run uses, too
    "asan": Config("build-asan", ("unit", "interpose", "control", "rig", "cli", "kernels", "topology", "plugin"),
                   slow=3, builds="tested",
                   options=("-Db_sanitize=address,undefined", "-Db_lundef=false", "-Dkernels=disabled", *QUICK_GCC)),
    "tsan": Config("build-tsan", ("threads",), slow=5, builds="tested",
                   options=("-Db_sanitize=thread", "-Db_lundef=false", "-Dkernels=disabled", *QUICK_GCC)),
    # No toolkit, only the vendor's header wheels, which are older: everything must compile with them.
    "clang": Config("build-clang", ("unit", "headers", "symbols", "fuzz", "kernels"), cc="clang", wheels=True,
                    options=("-Dkernels=disabled", *QUICK)),
    # As it is released, assertions off; without a toolkit, too.
    "wheels": Config("build-wheels", ("unit", "symbols"), builds="shipped", wheels=True,
                     options=("-Dbuildtype=release", "-Dkernels=disabled")),
}


class Report:
    """What a job says, and what it counted."""

    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.notes = []
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def fail(self, note):
        self.failed += 1
        self.notes.append(note)
        self.say(f"  {note}")

    def skip(self, note):
        self.skipped += 1
        self.say(f"  {note}")

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.notes += other.notes

    def line(self):
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


@dataclasses.dataclass(eq=False)
class Job:
    run: typing.Callable  # of a Report; returns jobs that can be done only after this one
    share: int  # per cent of the machine
    rank: int  # the lowest starts first


def work(job, ended):
    report, more = Report(), []
    try:
        more = job.run(report) or []
    except Exception:
        report.fail(f"failed: {traceback.format_exc()}")
    ended.put((job, report, more))


def run_jobs(waiting, totals):
    """Runs jobs at the same time, as far as the machine has room for them."""
    running, ended = [], queue.SimpleQueue()
    while waiting or running:
        for job in sorted(waiting, key=lambda one: one.rank):
            if not running or sum(other.share for other in running) + job.share <= FULL:
                waiting.remove(job)
                running.append(job)
                threading.Thread(target=work, args=(job, ended), daemon=True).start()
        job, report, more = ended.get()
        running.remove(job)
        waiting += more
        print("\n".join(report.lines), flush=True)
        totals.add(report)


def introspect(folder, what):
    listed = subprocess.run(["meson", "introspect", folder, f"--{what}"], cwd=ROOT, capture_output=True, text=True,
                            check=True)
    return json.loads(listed.stdout)


def suites_of(test):
    return [suite.split(":")[-1] for suite in test["suite"]]


def tests_by_suite(tests):
    found = collections.defaultdict(list)
    for test in tests:
        for suite in suites_of(test):
            found[suite].append(test["name"])
    return found


def files_for(folder, tests, suites, shipped):
    """What has to be built for these suites."""
    needed = {name for test in tests if not suites.isdisjoint(suites_of(test)) for name in test["depends"]}
    return sorted(os.path.relpath(file, ROOT / folder) for target in introspect(folder, "targets")
                  if target["id"] in needed or (shipped and target["installed"]) for file in target["filename"])


def read_results(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(results, label, report):
    kinds = collections.Counter()
    for result in results:
        name = f"{label} {result['name'].split(' / ')[-1]}"
        output = (result.get("stdout") or "") + (result.get("stderr") or "")
        lines = output.strip().splitlines()
        if result["result"] in ("OK", "EXPECTEDFAIL"):
            kinds["passed"] += 1
        elif result["result"] == "SKIP":
            kinds["skipped"] += 1
            report.say(f"  skipped: {name}: {lines[-1] if lines else 'no reason given'}")
        else:
            kinds["failed"] += 1
            for line in lines[-SHOWN_LINES:]:
                report.say(f"    | {line}")
            report.notes.append(f"failed: {name} ({result['result'].lower()})")
            report.say(f"  {report.notes[-1]}")
    report.passed += kinds["passed"]
    report.failed += kinds["failed"]
    report.skipped += kinds["skipped"]
    return kinds


def run_for(command, seconds, env=None):
    """What it printed, its status, whether it was stopped for taking longer, and the processor time it took."""
    def stop(how):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, how)

    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        GROUPS.add(child.pid)
        # meson ends its tests and writes its log when it is told to end; an interrupt is for one test only
        timers = [threading.Timer(seconds, stop, [signal.SIGTERM]),
                  threading.Timer(seconds + 20, stop, [signal.SIGKILL])]
        for timer in timers:
            timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        stopped = timers[0].finished.is_set()
        for timer in timers:
            timer.cancel()
        GROUPS.discard(child.pid)
        out.seek(0)
        return out.read().decode(errors="replace"), child.returncode, stopped, usage.ru_utime + usage.ru_stime


def run_to_end(command, report, env=None):
    """The processor time it took, or none when it failed. Says what it printed when it fails or warns."""
    said, status, _, processor = run_for(command, BUILD_STOP, env)
    if status or "warning:" in said:
        report.say(said.rstrip())
    return None if status else processor


def run_suite(name, config, suite, soak, report):
    label = f"{name} {suite}"
    factor = config.slow * (SOAK_FACTOR if soak else 1)
    budget = SUITES.get(suite, OTHER_SUITE).budget * factor
    env = os.environ | ({"LCTEST_SOAK": "1"} if soak else {})
    log = ROOT / config.folder / "meson-logs" / f"testlog-{suite}.json"
    log.unlink(missing_ok=True)
    command = ["meson", "test", "-C", config.folder, "--no-rebuild", "--quiet", "--suite", suite,
               "--logbase", f"testlog-{suite}", "--timeout-multiplier", str(STOP_FACTOR * factor)]
    begin = time.monotonic()
    said, status, stopped, processor = run_for(command, STOP_FACTOR * budget + STOP_EXTRA, env)
    took = time.monotonic() - begin
    results = read_results(log)
    kinds = count(results, label, report)
    if stopped:
        report.fail(f"stopped: {label} far beyond its budget of {budget} s")
    elif not results or (status != 0 and not kinds["failed"]):
        report.fail(f"failed: {label}: meson test ended with {status}\n{said}")
    elif took > budget:
        report.say(f"  over budget: {label} took {took:.0f} s of {budget}")
    report.say(f"{label:20} {kinds['passed']:4} passed {kinds['failed']:4} failed {kinds['skipped']:4} skipped"
               f" {took:7.1f} s, {processor:.1f} s of processor time")


def configure(config, ci, report):
    flags = (["--wheels"] if config.wheels else []) + (["--werror"] if ci else [])
    options = [*config.options, *(["-Dgpu_arch=90"] if ci else [])]
    return run_to_end(["tools/build", "--configure", *flags, config.folder, *options], report,
                      env=os.environ | {"CC": config.cc})


def run_config(name, config, rank, options, report):
    """Builds a configuration; its suites are what is left to do."""
    if not shutil.which(config.cc):
        report.skip(f"skipped: configuration {name}: {config.cc} is not installed")
        return []
    begin = time.monotonic()
    configured = configure(config, options.ci, report)
    if configured is None:
        report.fail(f"failed: configuration {name} cannot be set up")
        return []
    tests = introspect(config.folder, "tests")
    found = tests_by_suite(tests)
    known = sorted(found, key=lambda suite: (list(SUITES).index(suite) if suite in SUITES else len(SUITES), suite))
    wanted = options.suite or config.suites or [suite for suite in known if suite != "threads"]
    if options.list:
        for suite in known:
            report.say(f"  {suite}{'' if suite in wanted else ' (not by default)'}: {' '.join(found[suite])}")
        return []
    files = []
    if options.suite or config.builds != "all":
        files = files_for(config.folder, tests, set(wanted), config.builds == "shipped" and not options.suite)
    built = run_to_end(["ninja", "--quiet", "-C", config.folder, *files], report)
    if built is None:
        report.fail(f"failed: configuration {name} does not build")
        return []
    report.say(f"{name} built in {time.monotonic() - begin:.1f} s, {configured + built:.1f} s of processor time")
    return [Job(functools.partial(run_suite, name, config, suite, options.soak),
                SUITES.get(suite, OTHER_SUITE).share, 100 * (1 + known.index(suite)) + rank)
            for suite in known if suite in wanted]


def end_all():
    for group in GROUPS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def main():
    parser = argparse.ArgumentParser(prog="tests/run", description=__doc__)
    parser.add_argument("--config", action="append", choices=[*CONFIGS, "all"], default=[],
                        help="may be given several times (default: gcc)")
    parser.add_argument("--suite", action="append", default=[],
                        help="only this suite; may be given several times")
    parser.add_argument("--soak", action="store_true", help="long forms of the tests that have one")
    parser.add_argument("--ci", action="store_true",
                        help="compiler warnings are errors; device code for one architecture only")
    parser.add_argument("--list", action="store_true", help="only list what would be run")
    options = parser.parse_args()
    atexit.register(end_all)
    names = options.config or ["gcc"]
    totals = Report()
    run_jobs([Job(functools.partial(run_config, name, CONFIGS[name], rank, options), BUILD_SHARE, rank)
              for rank, name in enumerate(CONFIGS if "all" in names else names)], totals)
    if options.list:
        return 0
    if totals.passed + totals.failed == 0:
        totals.fail("failed: no test was run" + (f" ({', '.join(options.suite)})" if options.suite else ""))
        print(totals.lines[-1])
    for note in totals.notes if len(totals.notes) > 1 else []:
        print(note.splitlines()[0])
    print(totals.line(), flush=True)
    return int(totals.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
