#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: tests/gpu/peer_dies.py [--library FILE] [--ranks N]
A rank that is killed in the middle of reductions through mapped memory takes nobody's device with it: two ranks (or more)
on as many GPUs, preloaded with LOONGCOMM_PEER=force, call all-reduces; the last rank kills itself. The others must say so
and end with a failure within 40 seconds, beside the 20 that a job may take to begin; a job on the same GPUs must then end
well. Ends with `N passed, N failed`; 77 where there are too few GPUs."""
import argparse
import os
import subprocess
import sys
import time

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "perf"))
import resident  # noqa: E402

LIMIT = 40
START = 20  # seconds that a job may take to begin and end


def worker(dies):
    import datetime
    import signal
    import torch
    import torch.distributed as dist
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=20))
    data = torch.ones(8 << 20, device=device)
    for _ in range(30):  # until the ranks have agreed
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
        torch.cuda.synchronize()
        time.sleep(0.1)
    for i in range(400):
        if dies and i == 200 and rank == ranks - 1:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
        if i % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert bool((data == 1).all())
    dist.destroy_process_group()


def job(options, dies):
    """(exit status, or None if it had to be ended, seconds, output) of each rank."""
    port, running, results = resident.free_port(), [], []
    for rank in range(options.ranks):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port), LD_PRELOAD=options.library, LOONGCOMM_PEER="force")
        running.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", "dies" if dies else "lives"],
                                        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    begun = time.monotonic()
    for process in running:
        try:
            output = process.communicate(timeout=max(1, LIMIT + START - (time.monotonic() - begun)))[0]
            results.append((process.returncode, time.monotonic() - begun, output))
        except subprocess.TimeoutExpired:
            process.kill()
            results.append((None, time.monotonic() - begun, process.communicate()[0]))
    return results


def main(options):
    import torch
    if torch.cuda.device_count() < options.ranks:
        print("SKIPPED: fewer than %d GPUs on this machine" % options.ranks)
        return 77
    killed = job(options, True)
    rows = [("the rank was killed", killed[-1][0] == -9)]
    for rank, (status, seconds, output) in enumerate(killed[:-1]):
        rows.append(("rank %d ended with status %s after %.0f s" % (rank, status, seconds),
                     status not in (0, None) and seconds < LIMIT + START))
        said = [line for line in output.splitlines() if "loongcomm" in line and "rank %d" % (options.ranks - 1) in line]
        rows.append(("rank %d says who is gone: %s" % (rank, (said or ["nothing"])[0][:160]), bool(said)))
        if status in (0, None) or not said:
            print("\n".join("    | " + line for line in output.splitlines()[:40]))
    after = job(options, False)
    rows.append(("a job afterwards ends well", all(status == 0 for status, _, _ in after)))
    for name, good in rows:
        print("%s: %s" % ("passed" if good else "FAILED", name))
    failed = sum(not good for _, good in rows)
    print("%d passed, %d failed" % (len(rows) - failed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--library", default=resident.LIBRARY)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker == "dies")
    else:
        sys.exit(main(given))
