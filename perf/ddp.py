#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of a DDP job (a transformer of 554 M fp32 parameters, AdamW, bf16 autocast), four ways in one run:
nodp (no communication), plain, loongcomm (preloaded, bf16 on the wire) and hook (PyTorch's bf16_compress_hook).

usage: perf/ddp.py [--ranks N] [--rounds N] [--steps N] [--layers N] [--variants LIST] [--library FILE] [--json FILE]

Every variant is a resident set of processes; the sets take turns, so that drift of the machine meets all alike. Ranks
share a GPU where there are too few (run it under tests/gpu/mps.sh then) and are hosts of their own for NCCL. Variables
LOONGCOMM_... are for the variant loongcomm alone."""
import argparse
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import time

WIDTH, VOCABULARY, LENGTH, BATCH = 1280, 32000, 512, 4
VARIANTS = ("nodp", "plain", "loongcomm", "hook")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def build_model(torch, layers):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Model()


def worker(variant, layers):
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model = build_model(torch, layers).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    if variant != "nodp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    if variant == "hook":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(100 + rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    print(json.dumps({"parameters": parameters, "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
                      "nccl": ".".join(map(str, torch.cuda.nccl.version()))}), flush=True)
    for line in sys.stdin:
        times, losses = [], []
        for _ in range(int(line)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            loss = step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
            losses.append(loss.item())
        print(json.dumps({"ms": times, "loss": losses}), flush=True)
    dist.destroy_process_group()


def free_port():
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                pass
    raise OSError("no free port")


def start(variant, options, shared):
    port, running = free_port(), []
    for rank in range(options.ranks):
        env = {k: v for k, v in os.environ.items() if not k.startswith("LOONGCOMM_") and k != "LD_PRELOAD"}
        env.update(RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port))
        if shared:
            env["NCCL_HOSTID"] = "host%d" % rank
        if variant == "loongcomm":
            env.update((k, v) for k, v in os.environ.items() if k.startswith("LOONGCOMM_"))
            env.update(LD_PRELOAD=options.library, LOONGCOMM_ALLREDUCE_WIRE="bf16",
                       LOONGCOMM_REPORT="text" if rank == 0 else "off")
        running.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", variant, "--layers",
                                         str(options.layers)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True))
    return running


def answer(process, seconds):
    """The next line; a job that hangs ends the run."""
    if not select.select([process.stdout], [], [], seconds)[0]:
        sys.exit("perf/ddp.py: a rank did not answer within %d s" % seconds)
    line = process.stdout.readline()
    if not line:
        sys.exit("perf/ddp.py: a rank ended early")
    return json.loads(line)


def turn(ranks, steps):
    for process in ranks:
        process.stdin.write("%d\n" % steps)
        process.stdin.flush()
    answers = [answer(process, 180) for process in ranks]
    return [max(times) for times in zip(*(a["ms"] for a in answers))], answers[0]["loss"]


def main(options):
    import torch
    shared = torch.cuda.device_count() < options.ranks
    sets = {variant: start(variant, options, shared) for variant in options.variants}
    try:
        about = {variant: [answer(process, 180) for process in ranks][0] for variant, ranks in sets.items()}
        times, losses = {variant: [] for variant in sets}, {}
        for variant, ranks in sets.items():
            losses[variant] = turn(ranks, 4)[1]
        for _ in range(options.rounds):
            for variant, ranks in sets.items():
                ms, _ = turn(ranks, options.steps)
                times[variant].append(statistics.median(ms))
        for ranks in sets.values():
            for process in ranks:
                process.stdin.close()
        for ranks in sets.values():
            for process in ranks:
                process.wait(60)
    finally:
        for ranks in sets.values():
            for process in ranks:
                process.kill()
    first = next(iter(about.values()))
    print("# DDP, %.0f M fp32 parameters, %d ranks on %s, torch %s, NCCL %s" %
          (first["parameters"] / 1e6, options.ranks, first["gpu"], first["torch"], first["nccl"]))
    records = []
    for variant in sets:
        ratios = [plain / own for plain, own in zip(times.get("plain", times[variant]), times[variant])]
        records.append({"op": "ddp-step", "variant": variant, "ranks": options.ranks, "parameters": first["parameters"],
                        "median_ms": statistics.median(times[variant]), "rounds_ms": times[variant],
                        "ratio": statistics.median(ratios), "first_losses": losses[variant]})
        print("%-10s %9.1f ms (%.1f..%.1f)  plain / this %.2f  losses %s" %
              (variant, records[-1]["median_ms"], min(times[variant]), max(times[variant]), records[-1]["ratio"],
               " ".join("%.5f" % loss for loss in losses[variant])))
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"schema": "loongcomm.bench/1", "machine": first, "command": sys.argv, "records": records}, out,
                      indent=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--library", default=os.path.join(ROOT, "build/interpose/libloongcomm.so"))
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.layers)
    else:
        main(given)
