#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds configurations of the project, runs their suites and adds up what meson reports."""
import argparse
import collections
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHOWN_LINES = 60  # of the output of a failed test

# Seconds that a suite may take on two idle cores, without sanitizers. A suite over its budget is named. Suites and tests
# are stopped, which is a failure, only when they must be hanging: other people's machines are busy.
STOP_FACTOR, STOP_EXTRA = 4, 120
BUDGETS = {
    "unit": 30, "headers": 30, "symbols": 30, "lint": 300, "fuzz": 30, "interpose": 120, "cli": 90, "kernels": 60,
    "control": 90, "topology": 60, "plugin": 120, "model": 120, "rig": 180, "perf": 120, "roce": 180, "pytorch": 300, "gpu": 600,
}
DEFAULT_BUDGET = 60
SOAK_FACTOR = 20


@dataclasses.dataclass
class Config:
    folder: str
    suites: tuple = ()  # empty: every suite that the build has, but for `threads`
    cc: str = "gcc"
    options: tuple = ()
    wheels: bool = False
    slow: int = 1  # how much slower than plain code


CONFIGS = {
    "gcc": Config("build"),  # the folder and options that perf/run uses, too
    "clang": Config("build-clang", ("unit", "headers", "symbols", "fuzz", "kernels"), cc="clang",
                    options=("-Dkernels=disabled",)),
    "asan": Config("build-asan", ("unit", "interpose", "control", "rig", "cli", "kernels", "topology", "plugin"), slow=3,
                   options=("-Db_sanitize=address,undefined", "-Db_lundef=false", "-Dkernels=disabled")),
    "tsan": Config("build-tsan", ("threads",), slow=5,
                   options=("-Db_sanitize=thread", "-Db_lundef=false", "-Dkernels=disabled")),
    # No toolkit, only the vendor's header wheels; built as it is released, assertions off.
    "wheels": Config("build-wheels", ("unit", "symbols"), wheels=True,
                     options=("-Dbuildtype=release", "-Dkernels=disabled")),
}


class Totals:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.notes = []

    def fail(self, note):
        self.failed += 1
        self.notes.append(note)
        print(f"  {note}", flush=True)

    def skip(self, note):
        self.skipped += 1
        print(f"  {note}", flush=True)

    def line(self):
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


def build(config, ci):
    env = os.environ | {"CC": config.cc}
    flags = (["--wheels"] if config.wheels else []) + (["--werror"] if ci else [])
    options = [*config.options, *(["-Dgpu_arch=90"] if ci else [])]
    command = ["tools/build", *flags, config.folder, *options]
    return subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode == 0


def tests_by_suite(folder):
    listed = subprocess.run(["meson", "introspect", folder, "--tests"], cwd=ROOT, capture_output=True,
                            text=True, check=True)
    found = collections.defaultdict(list)
    for test in json.loads(listed.stdout):
        for suite in test["suite"]:
            found[suite.split(":")[-1]].append(test["name"])
    return found


def read_results(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(results, label, totals):
    kinds = collections.Counter()
    for result in results:
        name = f"{label} {result['name'].split(' / ')[-1]}"
        output = (result.get("stdout") or "") + (result.get("stderr") or "")
        lines = output.strip().splitlines()
        if result["result"] in ("OK", "EXPECTEDFAIL"):
            kinds["passed"] += 1
        elif result["result"] == "SKIP":
            kinds["skipped"] += 1
            print(f"  skipped: {name}: {lines[-1] if lines else 'no reason given'}")
        else:
            kinds["failed"] += 1
            print("\n".join(f"    | {line}" for line in lines[-SHOWN_LINES:]))
            totals.notes.append(f"failed: {name} ({result['result'].lower()})")
            print(f"  {totals.notes[-1]}")
    totals.passed += kinds["passed"]
    totals.failed += kinds["failed"]
    totals.skipped += kinds["skipped"]
    return kinds


def run_suite(name, config, suite, soak, totals):
    label = f"{name} {suite}"
    factor = config.slow * (SOAK_FACTOR if soak else 1)
    budget = BUDGETS.get(suite, DEFAULT_BUDGET) * factor
    env = os.environ | ({"LCTEST_SOAK": "1"} if soak else {})
    log = ROOT / config.folder / "meson-logs" / f"testlog-{suite}.json"
    log.unlink(missing_ok=True)
    command = ["meson", "test", "-C", config.folder, "--no-rebuild", "--quiet", "--suite", suite,
               "--logbase", f"testlog-{suite}", "--timeout-multiplier", str(STOP_FACTOR * factor)]
    begin = time.monotonic()
    child = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    stopped = False
    try:
        said = child.communicate(timeout=STOP_FACTOR * budget + STOP_EXTRA)[0]
    except subprocess.TimeoutExpired:
        stopped = True
        child.send_signal(signal.SIGINT)  # meson then ends its tests and writes its log
        try:
            said = child.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said = child.communicate()[0]
    took = time.monotonic() - begin
    results = read_results(log)
    kinds = count(results, label, totals)
    if stopped:
        totals.fail(f"stopped: {label} far beyond its budget of {budget} s")
    elif not results or (child.returncode != 0 and not kinds["failed"]):
        totals.fail(f"failed: {label}: meson test ended with {child.returncode}\n{said}")
    elif took > budget:
        print(f"  over budget: {label} took {took:.0f} s of {budget}")
    print(f"{label:20} {kinds['passed']:4} passed {kinds['failed']:4} failed {kinds['skipped']:4} skipped"
          f" {took:7.1f} s", flush=True)


def run_config(name, config, options, totals):
    if not shutil.which(config.cc):
        totals.skip(f"skipped: configuration {name}: {config.cc} is not installed")
        return
    begin = time.monotonic()
    if not build(config, options.ci):
        totals.fail(f"failed: configuration {name} does not build")
        return
    print(f"{name} built in {time.monotonic() - begin:.1f} s", flush=True)
    found = tests_by_suite(config.folder)
    known = sorted(found, key=lambda suite: (list(BUDGETS).index(suite) if suite in BUDGETS else 99, suite))
    wanted = options.suite or config.suites or [suite for suite in known if suite != "threads"]
    for suite in known:
        if options.list:
            print(f"  {suite}{'' if suite in wanted else ' (not by default)'}: {' '.join(found[suite])}")
        elif suite in wanted:
            run_suite(name, config, suite, options.soak, totals)


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
    names = options.config or ["gcc"]
    totals = Totals()
    for name in CONFIGS if "all" in names else names:
        run_config(name, CONFIGS[name], options, totals)
    if options.list:
        return 0
    if totals.passed + totals.failed == 0:
        totals.fail("failed: no test was run" + (f" ({', '.join(options.suite)})" if options.suite else ""))
    for note in totals.notes if len(totals.notes) > 1 else []:
        print(note.splitlines()[0])
    print(totals.line(), flush=True)
    return int(totals.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
