# SPDX-License-Identifier: Apache-2.0
"""What the job scripts share: start-up from the launcher's environment, and the record of what came out.

A script is an ordinary torch.distributed program: it knows nothing of the library under test. Each has
main(rec) and runs alone (`torchrun ... script.py`) or in turn with the others in one set of processes
(all.py). With JOB_OUT set, every rank writes JOB_OUT/rank<N>.json: losses and hashes of tensor bytes.
JOB_BACKEND=gloo runs on the processor; it serves to shake out mistakes in the scripts, nothing else.
"""
import hashlib
import json
import os
import sys
import time
import traceback

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used

import torch
import torch.distributed as dist

BACKEND = os.environ.get("JOB_BACKEND", "nccl")
ON_GPU = BACKEND == "nccl"


def device():
    if not ON_GPU:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def share_gpus():
    """NCCL refuses two ranks of one machine on one GPU. Where ranks must share, each round of ranks over the
    GPUs says that it is another machine."""
    gpus = torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus:
        os.environ.setdefault("NCCL_HOSTID", "node%d" % (int(os.environ["LOCAL_RANK"]) // gpus))


def start(eager):
    """eager: the communicator is made at once (device_id given), new groups are then split from it."""
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.set_num_threads(1)
    kwargs = {}
    if ON_GPU:
        share_gpus()
        # Not only set_device: a device mesh takes LOCAL_RANK for the device unless CUDA is in use already.
        torch.cuda.set_device(device())
        torch.zeros(1, device=device())
        if eager:
            kwargs["device_id"] = device()
    dist.init_process_group(BACKEND, **kwargs)


def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()


def rank_generator(salt=0):
    """Numbers that differ from rank to rank and are the same in every run."""
    return torch.Generator().manual_seed(1000 * salt + 17 + dist.get_rank())


def randn(*shape, salt=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rank_generator(salt)).to(device(), dtype)


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()


class Record:
    """Losses as exact hexadecimal floats, tensors as hashes of their bytes, failures as text."""

    def __init__(self):
        self.losses = []
        self.hashes = {}
        self.failures = []
        self.skipped = []
        self.seconds = 0.0

    def loss(self, value):
        self.losses.append(float(value).hex())

    def tensor(self, name, tensor):
        shape = "x".join(str(n) for n in tensor.shape)
        key = "%s %s[%s]" % (name, str(tensor.dtype).replace("torch.", ""), shape)
        assert key not in self.hashes, "recorded twice: " + key
        self.hashes[key] = hashlib.sha256(bytes_of(tensor)).hexdigest()

    def check(self, name, ok):
        if not ok:
            self.failures.append(name)

    def case(self, name, function, *args):
        """One case of several. What raises is written down, and the next one is tried: an argument that
        torch or NCCL refuses is refused on all ranks alike."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.failures.append("%s: %s: %s" % (name, type(error).__name__, str(error)[:300]))

    def skip(self, why):
        self.skipped.append(why)


def run_case(name, main):
    rec = Record()
    begun = time.monotonic()
    torch.manual_seed(1234)
    rec.case(name, main, rec)
    rec.case(name, synchronize)
    rec.seconds = round(time.monotonic() - begun, 2)
    return rec


def finish(records):
    folder = os.environ.get("JOB_OUT")
    rank = dist.get_rank()
    if folder:
        path = os.path.join(folder, "rank%d.json" % rank)
        with open(path + ".part", "w") as out:
            json.dump({name: vars(rec) for name, rec in records.items()}, out, indent=1)
        os.rename(path + ".part", path)
    failed = [name for name, rec in records.items() if rec.failures]
    for name in failed:
        for failure in records[name].failures[:10]:
            print("rank %d: %s: %s" % (rank, name, failure), file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


def run_alone(main):
    """What `if __name__ == "__main__"` of each script calls."""
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    start(eager=False)
    sys.exit(finish({name: run_case(name, main)}))
