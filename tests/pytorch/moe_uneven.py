# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer that sends exactly the routed rows: counts first, then all_to_all_single with
unequal parts. One expert is never chosen, so that some pairs of ranks exchange nothing."""
import torch
import torch.distributed as dist
from torch import nn

import job

WIDTH, TOKENS, LOCAL_EXPERTS, TOP = 256, 384, 2, 2


class AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, to_get, to_send):
        ctx.parts = (to_get, to_send)
        out = rows.new_empty((sum(to_get),) + rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), to_get, to_send)
        return out

    @staticmethod
    def backward(ctx, grad):
        to_get, to_send = ctx.parts
        return AllToAllRows.apply(grad, to_send, to_get), None, None


def exchange_counts(counts, world):
    """counts[e]: rows of this rank for each expert. Returns [source rank, own expert]."""
    got = torch.empty_like(counts)
    dist.all_to_all_single(got, counts)
    return got.view(world, LOCAL_EXPERTS)


class UnevenMoe(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.world = world
        self.gate = nn.Linear(WIDTH, world * LOCAL_EXPERTS, bias=False)
        shut = torch.zeros(world * LOCAL_EXPERTS)
        shut[-LOCAL_EXPERTS:] = -1e9 if world > 2 else 0.0  # the last rank's experts: nobody goes there
        shut[0] = -1e9
        self.register_buffer("shut", shut)
        torch.manual_seed(70 + dist.get_rank())
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LOCAL_EXPERTS))

    def forward(self, x):
        gates = (self.gate(x) + self.shut).softmax(-1)
        weight, expert = gates.topk(TOP, dim=-1)
        expert = expert.reshape(-1)
        order = expert.argsort(stable=True)
        counts = (expert[:, None] == torch.arange(gates.shape[-1], device=x.device)).sum(0)
        got = exchange_counts(counts, self.world)
        to_send = counts.view(self.world, -1).sum(1).tolist()
        to_get = got.sum(1).tolist()

        rows = AllToAllRows.apply(x.repeat_interleave(TOP, 0)[order], to_get, to_send)
        owner = torch.arange(LOCAL_EXPERTS, device=x.device).repeat(self.world)
        owner = owner.repeat_interleave(got.reshape(-1))
        out = torch.zeros_like(rows)
        for index, module in enumerate(self.experts):
            out = out + module(rows) * (owner == index)[:, None]
        back = AllToAllRows.apply(out, to_send, to_get)
        unsorted = back[order.argsort(stable=True)]
        return (unsorted.view(-1, TOP, WIDTH) * weight[..., None]).sum(1)


def main(rec):
    world = dist.get_world_size()
    torch.manual_seed(13)
    layer = UnevenMoe(world).to(job.device())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step in range(4):
        x = job.randn(TOKENS - 7 * dist.get_rank(), WIDTH, salt=step).requires_grad_()
        y = layer(x)
        loss = (y - x.detach().flip(-1)).square().mean()
        loss.backward()
        dist.all_reduce(layer.gate.weight.grad)
        layer.gate.weight.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
        rec.loss(loss.detach())
        rec.tensor("step %d out" % step, y)
        rec.tensor("step %d input gradient" % step, x.grad)
    for part, weight in layer.named_parameters():
        rec.tensor(part, weight)
        rec.check(part + " is not finite", bool(weight.isfinite().all()))


if __name__ == "__main__":
    job.run_alone(main)
