#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: tests/gpu/link_bytes.py [--library FILE] [--calls N]
Do NVLink's own counters agree with the ledger? Jobs of two ranks on two GPUs, preloaded with LOONGCOMM_PEER=force, call
all-reduces (exact, and bf16 on the wire) and all-to-alls (dense, and with zeros) of 64 MB CALLS times (400); what the links
of GPU 0 sent and received (`nvidia-smi nvlink -gt d`) is compared with the bytes that the exit reports of the ranks say
were written to peers. More than 2 % apart is a failure. Ends with `N passed, N failed`; 77 where there are not two GPUs or no
such counters."""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "perf"))
import resident  # noqa: E402

BYTES = 64 << 20
WARM = 30  # calls of a 64th, in three seconds: until the ranks have agreed their bytes go by NCCL, which has no ledger
BOUND = 0.02
CASES = {  # operation, share of zero rows, settings
    "all-reduce": ("allreduce", 0, {}),
    "all-reduce, bf16 wire": ("allreduce", 0, {"LOONGCOMM_ALLREDUCE_WIRE": "bf16"}),
    "all-to-all": ("alltoall", 0, {}),
    "all-to-all, 3/4 zeros": ("alltoall", 0.75, {}),
}


def worker(operation, zeros, calls):
    import torch
    import torch.distributed as dist
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = torch.randn(BYTES // 4096, 1024, device=device)
    rows.view(-1, 64, 1024)[:, int(64 * (1 - zeros)):] = 0
    out = torch.empty_like(rows)

    def call(part):
        if operation == "allreduce":
            dist.all_reduce(rows[:part], op=dist.ReduceOp.AVG)
        else:
            dist.all_to_all_single(out[:part], rows[:part])
        torch.cuda.synchronize()

    for _ in range(WARM):
        call(len(rows) // 64)
        time.sleep(0.1)
    for _ in range(calls):
        call(len(rows))
    dist.destroy_process_group()


def counted():
    """(sent, received) bytes of GPU 0 over all its links; None where nothing says."""
    run = subprocess.run(["nvidia-smi", "nvlink", "-gt", "d", "-i", "0"], stdout=subprocess.PIPE, text=True)
    found = {way: [int(n) for n in re.findall(r"Data %s: (\d+) KiB" % way, run.stdout)] for way in ("Tx", "Rx")}
    if not found["Tx"]:
        print(run.stdout.strip()[:400])
        return None
    return sum(found["Tx"]) * 1024, sum(found["Rx"]) * 1024


def written(node):
    """Bytes written to peers by all communicators of one report."""
    if isinstance(node, list):
        return sum(map(written, node))
    if not isinstance(node, dict):
        return 0
    own = node["rings"]["bytes_written"] if "rings" in node else 0
    return own + sum(written(value) for value in node.values())


def job(library, operation, zeros, settings, calls):
    """What the ranks say that they wrote, by rank."""
    port, sent = resident.free_port(), []
    with tempfile.TemporaryDirectory(prefix="lc-link.") as folder:
        ranks = []
        for rank in range(2):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                       LD_PRELOAD=library, LOONGCOMM_PEER="force", LOONGCOMM_REPORT="json",
                       LOONGCOMM_DIR=os.path.join(folder, str(rank)), **settings)
            os.mkdir(os.path.join(folder, str(rank)))
            ranks.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", operation, str(zeros),
                                           "--calls", str(calls)], env=env))
        status = [rank.wait(120) for rank in ranks]
        if any(status):
            raise OSError("the job failed")
        for rank in range(2):
            reports = os.listdir(os.path.join(folder, str(rank)))
            sent.append(sum(written(json.load(open(os.path.join(folder, str(rank), name)))) for name in reports))
    return sent


def main(options):
    import torch
    if torch.cuda.device_count() < 2 or counted() is None:
        print("SKIPPED: not two GPUs with counters of NVLink on this machine")
        return 77
    passed = failed = 0
    for name, (operation, zeros, settings) in CASES.items():
        before = counted()
        said = job(options.library, operation, zeros, settings, options.calls)
        seen = [after - then for after, then in zip(counted(), before)]
        apart = [abs(link / ledger - 1) if ledger else 1.0 for link, ledger in zip(seen, said)]
        good = max(apart) <= BOUND
        passed, failed = passed + good, failed + (not good)
        print("%s: %s: sent %.1f MB by the ledger, %.1f by the link (%.2f %%); received %.1f, %.1f (%.2f %%)" %
              ("passed" if good else "FAILED", name, said[0] / 1e6, seen[0] / 1e6, 100 * apart[0], said[1] / 1e6,
               seen[1] / 1e6, 100 * apart[1]), flush=True)
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--library", default=resident.LIBRARY)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker[0], float(given.worker[1]), given.calls)
    else:
        sys.exit(main(given))
