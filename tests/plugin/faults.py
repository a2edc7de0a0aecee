#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every check of the plugin's tests fails when what it looks for is wrong: faults.py PROGRAM LIBRARY.

The library has a transport that makes the mistake that LCFAKE names."""
import os
import subprocess
import sys

FAULTS = {
    "signal": "signals_stay_the_programs",
    "thread": "library_leaves_nothing_behind",
    "mapping": "load_and_unload",
    "device": "properties_are_as_nccl_needs_them",
    "text": "properties_are_as_nccl_needs_them",
    "speed": "properties_are_as_nccl_needs_them",
    "poll": "every_order_of_connect_and_accept",
    "sleep": "outputs_are_always_written",
    "descriptor": "descriptors_return_to_where_they_were",
    "cloexec": "forked_children_do_no_harm",
    "handle": "foreign_handles_are_refused",
    "handles": "connections_match_their_handles",
    "memory": "refused_memory_is_no_lost_message",
    "depth": "all_requests_at_once",
    "room": "all_requests_at_once",
    "silent": "longer_message_than_room_is_an_error",
    "overrun": "longer_message_than_room_is_an_error",
    "zero": "empty_and_single_bytes_are_kept_apart",
    "posted": "room_may_exceed_the_message",
    "corrupt": "empty_and_single_bytes_are_kept_apart",
    "behind": "deep_pipeline_tested_at_its_oldest",
    "lost": "empty_and_single_bytes_are_kept_apart",
}
program, library = sys.argv[1:]


def run(fault, rows):
    env = os.environ | {"LCFAKE": fault, "LCTEST_PATIENCE": "1" if fault else "60"}
    only = [word for row in sorted(rows) for word in ("--only", row)]
    return subprocess.run([program, "--library", library, *only], env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)


sound = run("", set(FAULTS.values()) - {"forked_children_do_no_harm", "load_and_unload"})
assert sound.returncode == 0, sound.stdout + sound.stderr
unseen = [f"{fault} by {row}" for fault, row in FAULTS.items() if run(fault, [row]).returncode != 1]
assert not unseen, f"not seen: {', '.join(unseen)}"
print(f"{len(FAULTS)} mistakes seen")
