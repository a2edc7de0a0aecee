#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: verify_report.py VERIFY LIBRARY [options of verify]
Runs verify with the library preloaded and holds the exit report of every rank against the calls that the
rank says it made: each must have been counted, once."""
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "pytorch"))
import exit_report  # noqa: E402


def calls_made(output):
    """verify's lines `calls rank N: AllReduce=5 ...`."""
    made = []
    for line in output.splitlines():
        if line.startswith("calls rank "):
            pairs = (word.split("=") for word in line.split(":")[1].split())
            made.append({name: int(n) for name, n in pairs if int(n)})
    return made


def main():
    verify, library = sys.argv[1], os.path.abspath(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="lc-verify.") as folder:
        env = dict(os.environ, LD_PRELOAD=library, LOONGCOMM_REPORT="json", LOONGCOMM_DIR=folder)
        run = subprocess.run([verify, "--loongcomm"] + sys.argv[3:], env=env, stdout=subprocess.PIPE,
                             stdin=subprocess.DEVNULL, text=True)
        sys.stdout.write(run.stdout)
        if run.returncode:
            return run.returncode
        problems = []
        counted = exit_report.read_all(folder, problems)
    made = calls_made(run.stdout)

    def key(calls):
        return sorted(calls.items())

    if not made or sorted(map(key, made)) != sorted(map(key, counted)):
        problems.append("calls made and calls counted differ\n    made    %s\n    counted %s" % (made, counted))
    for problem in problems:
        print("FAIL: " + problem)
    if not problems:
        print("every call was counted: %d on %d ranks" % (sum(sum(c.values()) for c in counted), len(made)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
