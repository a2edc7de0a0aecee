#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the TCP transport has done is in the report of its process: counted.py PROGRAM LIBLOONGCOMM LOONGCOMM."""
import glob
import json
import os
import subprocess
import sys
import tempfile

program, library, command = sys.argv[1:]


def run(folder, report):
    env = os.environ | {"LD_PRELOAD": library, "LOONGCOMM_REPORT": report, "LOONGCOMM_DIR": folder}
    subprocess.run([program, "1"], env=env, check=True, timeout=100)


with tempfile.TemporaryDirectory() as folder:
    run(folder, "json")
    path, = glob.glob(folder + "/loongcomm-*.json")
    with open(path) as file:
        link, = json.load(file)["network"]
    assert (link["source"], link["device"], link["peer"]) == ("tcp", "lo", "127.0.0.1"), link
    counters = link["counters"]
    # Some messages are lost on purpose, and one side of some connections is closed early.
    assert counters["messages_received"] > 20000 and counters["bytes_received"] > 50e6, counters
    assert counters["messages_sent"] >= counters["messages_received"], counters
    assert counters["bytes_sent"] >= counters["bytes_received"], counters
    assert counters["waits"] > 0, counters
    merged = subprocess.run([command, "report", folder], capture_output=True, text=True)
    assert merged.returncode == 0 and "network lo of " in merged.stdout, merged
    print(merged.stdout)
with tempfile.TemporaryDirectory() as folder:
    run(folder, "text")
    path, = glob.glob(folder + "/loongcomm-*.txt")
    with open(path) as file:
        text = file.read()
    assert "network lo, 127.0.0.1 (tcp): messages_" in text, text
