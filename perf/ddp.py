#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of a DDP job (a transformer of 554 M fp32 parameters, AdamW, bf16 autocast), in turns of one run:
nodp (no communication), plain, loongcomm (preloaded, bf16 on the wire), exact (preloaded, not that) and hook (PyTorch's
bf16_compress_hook). Share: what of a step nodp does not need.

usage: perf/ddp.py [--ranks N] [--rounds N] [--steps N] [--layers N] [--apart] [--variants LIST] [--library FILE]
       [--json FILE]

Every variant is a resident set of processes; the sets take turns, so that drift of the machine meets all alike. Times are
the device's for a step (the longest of the ranks): median of all, p10 and p90. Ranks share a GPU where there are too few (run it under tests/gpu/mps.sh then) and are hosts of their own for NCCL; with --apart
they are that anyway. Variables LOONGCOMM_... are for the preloaded variants alone."""
import os

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

    resident.serve_steps({"parameters": parameters, "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
                          "nccl": ".".join(map(str, torch.cuda.nccl.version()))}, step, lambda loss: loss.item())
    dist.destroy_process_group()


def main(options):
    variants = {name: {"LOONGCOMM_ALLREDUCE_WIRE": WIRES[name]} if name in WIRES else None for name in options.variants}
    about, rounds, losses, _ = resident.steps_in_turns(__file__, variants, options, ["--layers", str(options.layers)])
    print("# DDP, %.0f M fp32 parameters, %d ranks on %s, torch %s, NCCL %s" %
          (about["parameters"] / 1e6, options.ranks, about["gpu"], about["torch"], about["nccl"]))
    records = []
    for name, record in resident.step_records(rounds).items():
        records.append({"op": "ddp-step", "variant": name, "ranks": options.ranks, "parameters": about["parameters"], **record,
                        "first_losses": losses[name][0]})
        print(resident.text_of_record(name, record) + "  losses " + " ".join("%.5f" % loss for loss in losses[name][0]))
    if options.json:
        resident.write(options.json, about, records)


if __name__ == "__main__":
    given = resident.step_options(__doc__, 8, 6, 24, VARIANTS).parse_args()
    if given.worker:
        worker(given.worker, given.layers)
    else:
        main(given)
