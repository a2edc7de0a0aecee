# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer with capacity-padded dispatch: every expert gets the same number of rows from
every rank, rows that no token took are zeros, and all of them travel (all_to_all_single with equal parts)."""
import torch
import torch.distributed as dist
from torch import nn

import job

WIDTH, TOKENS, LOCAL_EXPERTS, TOP, FACTOR = 256, 512, 2, 2, 1.25


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


def route(logits, capacity):
    """The combine weights [token, expert, slot] of the TOP best experts of each token; who comes late to a
    full expert is dropped."""
    gates = logits.softmax(-1)
    experts = gates.shape[-1]
    taken = torch.zeros(experts, dtype=torch.int64, device=gates.device)
    weights = torch.zeros(gates.shape[0], experts, capacity, device=gates.device)
    rest = gates
    for _ in range(TOP):
        choice = nn.functional.one_hot(rest.argmax(-1), experts)
        rest = rest.masked_fill(choice.bool(), 0.0)
        slot = (choice.cumsum(0) - 1 + taken) * choice
        kept = choice * (slot < capacity)
        taken = taken + kept.sum(0)
        slot = (slot * kept).sum(-1)
        in_slot = nn.functional.one_hot(slot, capacity).to(gates.dtype)
        weights = weights + torch.einsum("se,sc->sec", gates * kept, in_slot)
    return weights


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(LOCAL_EXPERTS, WIDTH, 2 * WIDTH) * 0.05)
        self.down = nn.Parameter(torch.randn(LOCAL_EXPERTS, 2 * WIDTH, WIDTH) * 0.05)

    def forward(self, rows):  # [local expert, row, width]; without biases: zero rows stay zero
        return torch.bmm(nn.functional.silu(torch.bmm(rows, self.up)), self.down)


class PaddedMoe(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.world = world
        self.capacity = int(FACTOR * TOP * TOKENS / (world * LOCAL_EXPERTS))
        self.gate = nn.Linear(WIDTH, world * LOCAL_EXPERTS, bias=False)
        # A routing as lopsided as those met in practice: the last experts stay almost empty.
        self.register_buffer("lean", -0.6 * torch.arange(world * LOCAL_EXPERTS).float())
        torch.manual_seed(50 + dist.get_rank())
        self.experts = Experts()

    def forward(self, x):
        weights = route(self.gate(x) + self.lean, self.capacity)
        sent = torch.einsum("sec,sm->ecm", (weights > 0).to(x.dtype), x)
        got = AllToAll.apply(sent).view(self.world, LOCAL_EXPERTS, self.capacity, WIDTH)
        rows = got.transpose(0, 1).reshape(LOCAL_EXPERTS, self.world * self.capacity, WIDTH)
        rows = self.experts(rows).view(LOCAL_EXPERTS, self.world, self.capacity, WIDTH)
        back = AllToAll.apply(rows.transpose(0, 1).reshape_as(sent).contiguous())
        return torch.einsum("sec,ecm->sm", weights.to(x.dtype), back), sent


def shared_gradients(layer, world):
    """The gate is the same on every rank; experts belong to one rank each."""
    grad = layer.gate.weight.grad
    dist.all_reduce(grad)
    grad.div_(world)


def train(rec, name, dtype, steps):
    world = dist.get_world_size()
    torch.manual_seed(11)
    layer = PaddedMoe(world).to(job.device(), dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step in range(steps):
        x = job.randn(TOKENS, WIDTH, salt=step, dtype=dtype).requires_grad_()
        y, sent = layer(x)
        target = x.detach().roll(1, -1)
        loss = (y - target).float().square().mean()
        loss.backward()
        shared_gradients(layer, world)
        optimizer.step()
        optimizer.zero_grad()
        rec.loss(loss.detach())
        rec.tensor("%s step %d out" % (name, step), y)
        rec.tensor("%s step %d input gradient" % (name, step), x.grad)
    for part, weight in layer.named_parameters():
        rec.tensor("%s %s" % (name, part), weight)
        rec.check("%s %s is not finite" % (name, part), bool(weight.isfinite().all()))
    rec.check(name + ": no padding row was sent", bool((sent == 0).all(-1).any()))


def main(rec):
    train(rec, "fp32", torch.float32, 4)
    train(rec, "bf16", torch.bfloat16, 2)


if __name__ == "__main__":
    job.run_alone(main)
