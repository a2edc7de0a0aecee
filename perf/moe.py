#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of mixture-of-experts layers whose dispatch is padded to a capacity (rows that no token took are zeros, and all
travel), in turns of one run: nodp (nothing is exchanged), plain, loongcomm (preloaded; nothing is rounded).

usage: perf/moe.py [--ranks N] [--rounds N] [--steps N] [--layers N] [--factor F] [--apart] [--variants LIST]
       [--library FILE] [--json FILE]

--factor: rows an expert has for one that it would get if all got alike (2). Variables LOONGCOMM_... are for the variant
loongcomm alone. Prints the step time, the share of it that nodp does not need, and whether plain and loongcomm had the same
losses to the bit; ends with 1 if not. Live: rows of the dispatch that are not zeros."""
import os
import statistics
import sys

import resident

WIDTH, INNER, TOKENS, LOCAL_EXPERTS, TOP = 2048, 4096, 4096, 8, 2
VARIANTS = ("nodp", "plain", "loongcomm")


def build_model(torch, dist, exchanged, layers, factor):
    nn, world = torch.nn, dist.get_world_size()
    experts = world * LOCAL_EXPERTS
    capacity = int(factor * TOP * TOKENS / experts)

    class AllToAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            out = torch.empty_like(rows)
            if exchanged:
                dist.all_to_all_single(out, rows.contiguous())
            else:
                out.copy_(rows)
            return out

        @staticmethod
        def backward(ctx, gradient):
            return AllToAll.apply(gradient)

    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.gate = nn.Linear(WIDTH, experts, bias=False)
            self.up = nn.Parameter(torch.randn(LOCAL_EXPERTS, WIDTH, INNER) * 0.02)
            self.down = nn.Parameter(torch.randn(LOCAL_EXPERTS, INNER, WIDTH) * 0.02)
            self.live = None

        def places(self, chosen):
            """The row of each (token, choice) among all experts' rows; the last one for those that come late."""
            ones = nn.functional.one_hot(chosen.flatten(), experts)
            slot = ((ones.cumsum(0) - 1) * ones).sum(-1)
            row = chosen.flatten() * capacity + slot
            return torch.where(slot < capacity, row, experts * capacity)

        def forward(self, x):
            y = self.norm(x)
            weights, chosen = self.gate(y).softmax(-1).topk(TOP)
            row = self.places(chosen)
            self.live = (row < experts * capacity).sum() / (experts * capacity)
            padded = y.new_zeros(experts * capacity + 1, WIDTH)
            sent = padded.index_copy(0, row, y.repeat_interleave(TOP, 0))[:-1]
            got = AllToAll.apply(sent).view(world, LOCAL_EXPERTS, capacity, WIDTH)
            rows = got.transpose(0, 1).reshape(LOCAL_EXPERTS, world * capacity, WIDTH)
            rows = torch.bmm(nn.functional.silu(torch.bmm(rows, self.up)), self.down)
            rows = rows.view(LOCAL_EXPERTS, world, capacity, WIDTH).transpose(0, 1).contiguous()
            back = AllToAll.apply(rows.view(experts * capacity, WIDTH))
            back = torch.cat([back, back.new_zeros(1, WIDTH)])[row].view(TOKENS, TOP, WIDTH)
            return x + (back * weights[..., None]).sum(1)

    return nn.Sequential(*(Moe() for _ in range(layers)))


def worker(variant, layers, factor):
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(rank)
    model = build_model(torch, dist, variant != "nodp", layers, factor).to(device, torch.bfloat16)
    for layer in model:
        dist.broadcast(layer.gate.weight.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tokens = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)

    def step():
        loss = (model(tokens) - tokens.roll(1, -1)).float().square().mean()
        loss.backward()
        if variant != "nodp":
            for layer in model:
                dist.all_reduce(layer.gate.weight.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    resident.serve_steps({"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
                          "nccl": ".".join(map(str, torch.cuda.nccl.version()))}, step, lambda loss: float(loss).hex(),
                         lambda: {"live": float(model[0].live)})
    dist.destroy_process_group()


def main(options):
    variants = {name: {} if name == "loongcomm" else None for name in options.variants}
    about, rounds, losses, last = resident.steps_in_turns(
        __file__, variants, options, ["--layers", str(options.layers), "--factor", str(options.factor)])
    print("# MoE, %d layers, %d tokens of %d, %d experts, top %d, capacity factor %g, %d ranks on %s, torch %s, NCCL %s" %
          (options.layers, TOKENS, WIDTH, options.ranks * LOCAL_EXPERTS, TOP, options.factor, options.ranks, about["gpu"],
           about["torch"], about["nccl"]))
    records = []
    for name, record in resident.step_records(rounds).items():
        live = statistics.mean(answer["live"] for answer in last[name])
        records.append({"op": "moe-step", "variant": name, "ranks": options.ranks, **record, "live": live,
                        "first_losses": losses[name]})
        print(resident.text_of_record(name, record) + "  live %.0f %%" % (100 * live))
    if options.json:
        resident.write(options.json, about, records)
    if "plain" in losses and "loongcomm" in losses:
        same = losses["plain"] == losses["loongcomm"]
        print("losses of plain and loongcomm: " + ("the same to the bit" if same else "DIFFERENT"))
        return 0 if same else 1
    return 0


if __name__ == "__main__":
    parser = resident.step_options(__doc__, 10, 10, 4, VARIANTS)
    parser.add_argument("--factor", type=float, default=2)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.layers, given.factor)
    else:
        sys.exit(main(given))
