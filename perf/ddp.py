#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of a DDP job (a transformer of 554 M fp32 parameters, AdamW, bf16 autocast), in turns of one run:
nodp (no communication), plain, loongcomm (preloaded, bf16 on the wire), exact (preloaded, not that) and hook (PyTorch's
bf16_compress_hook). Share: what of a step nodp does not need.

usage: perf/ddp.py [--ranks N] [--rounds N] [--steps N] [--layers N] [--apart] [--variants LIST] [--library FILE]
       [--json FILE]

Every variant is a resident set of processes; the sets take turns, so that drift of the machine meets all alike. Ranks
share a GPU where there are too few (run it under tests/gpu/mps.sh then) and are hosts of their own for NCCL; with --apart
they are that anyway. Variables LOONGCOMM_... are for the preloaded variants alone."""
import argparse
import os
import statistics
import sys
import time

import resident

WIDTH, VOCABULARY, LENGTH, BATCH = 1280, 32000, 512, 4
VARIANTS = ("nodp", "plain", "loongcomm", "hook")  # unless told otherwise
WIRES = {"loongcomm": "bf16", "exact": "data"}


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

    resident.say({"parameters": parameters, "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))})
    for line in sys.stdin:
        times, losses = [], []
        for _ in range(int(line)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            loss = step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
            losses.append(loss.item())
        resident.say({"ms": times, "loss": losses})
    dist.destroy_process_group()


def turn(ranks, steps):
    answers = ranks.ask(str(steps))
    return [max(times) for times in zip(*(a["ms"] for a in answers))], answers[0]["loss"]


def main(options):
    import torch
    apart = options.apart or torch.cuda.device_count() < options.ranks
    sets = {}
    try:
        for variant in options.variants:
            wire = WIRES.get(variant)
            sets[variant] = resident.Set(__file__, variant, options.ranks, ["--layers", str(options.layers)],
                                         {"LOONGCOMM_ALLREDUCE_WIRE": wire} if wire else {},
                                         options.library if wire else None, apart)
        about = {variant: ranks.answers()[0] for variant, ranks in sets.items()}
        times, losses = {variant: [] for variant in sets}, {}
        for variant, ranks in sets.items():
            losses[variant] = turn(ranks, 4)[1]
        for _ in range(options.rounds):
            for variant, ranks in sets.items():
                ms, _ = turn(ranks, options.steps)
                times[variant].append(statistics.median(ms))
        for ranks in sets.values():
            ranks.end()
    finally:
        for ranks in sets.values():
            ranks.kill()
    first = next(iter(about.values()))
    print("# DDP, %.0f M fp32 parameters, %d ranks on %s, torch %s, NCCL %s" %
          (first["parameters"] / 1e6, options.ranks, first["gpu"], first["torch"], first["nccl"]))
    records = []
    for variant in sets:
        ratios = [plain / own for plain, own in zip(times.get("plain", times[variant]), times[variant])]
        least = statistics.median(times.get("nodp", times[variant]))
        records.append({"op": "ddp-step", "variant": variant, "ranks": options.ranks, "parameters": first["parameters"],
                        "median_ms": statistics.median(times[variant]), "rounds_ms": times[variant],
                        "ratio": statistics.median(ratios), "first_losses": losses[variant],
                        "share": 1 - least / statistics.median(times[variant])})
        print("%-10s %9.1f ms (%.1f..%.1f)  share %4.1f %%  plain / this %.2f  losses %s" %
              (variant, records[-1]["median_ms"], min(times[variant]), max(times[variant]), 100 * records[-1]["share"],
               records[-1]["ratio"],
               " ".join("%.5f" % loss for loss in losses[variant])))
    if options.json:
        resident.write(options.json, first, records)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--library", default=resident.LIBRARY)
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.layers)
    else:
        main(given)
