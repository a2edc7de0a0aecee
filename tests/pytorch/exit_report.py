# SPDX-License-Identifier: Apache-2.0
"""Reads what LOONGCOMM_REPORT=json leaves in LOONGCOMM_DIR: one file for each process that used NCCL."""
import json
import os


def add_calls(node, calls):
    """Adds up the calls of each operation over all communicators of one report."""
    if isinstance(node, list):
        for item in node:
            add_calls(item, calls)
    elif isinstance(node, dict):
        if "op" in node:
            made = sum(path["calls"] for path in node["paths"])
            calls[node["op"]] = calls.get(node["op"], 0) + made
            return
        for item in node.values():
            add_calls(item, calls)


def add_paths(node, paths):
    """Adds up the calls of each path ("nccl", "cast", "packed") over all operations of one report."""
    for item in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
        add_paths(item, paths)
    if isinstance(node, dict) and "op" in node:
        for path in node["paths"]:
            paths[path["path"]] = paths.get(path["path"], 0) + path["calls"]


def read_paths(folder):
    """{path: calls} of all processes together."""
    paths = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        with open(os.path.join(folder, name)) as text:
            add_paths(json.load(text), paths)
    return paths


def read_all(folder, problems):
    """[{operation: calls}], one for each process that counted any."""
    reports = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        try:
            with open(os.path.join(folder, name)) as text:
                report = json.load(text)
        except ValueError as error:
            problems.append("report %s: %s" % (name, error))
            continue
        if report.get("schema") != "loongcomm.report/1":
            problems.append("report %s has schema %s" % (name, report.get("schema")))
        calls = {}
        add_calls(report, calls)
        if calls:
            reports.append(calls)
    return reports
