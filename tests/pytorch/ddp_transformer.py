# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel over a small decoder-only transformer: buckets, accumulation, unused parameters,
and torch's own bf16 compression hook."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import job

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 512, 256, 4, 3, 64, 8


class Attention(nn.Module):
    """Written out: the fused kernels' backward pass adds with atomics, so that no two runs agree."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e9).triu(1), persistent=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask[:length, :length]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.out(mixed)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.spare = nn.Linear(WIDTH, VOCAB)  # used by some batches only

    def forward(self, tokens, spare=False):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) + self.spare(x) if spare else self.head(x)


def batch(step):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=job.rank_generator(step))
    return tokens.to(job.device())


def loss_of(model, step, **kwargs):
    tokens = batch(step)
    logits = model(tokens[:, :-1], **kwargs)
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def new_model(**kwargs):
    torch.manual_seed(7)
    model = Transformer().to(job.device())
    # Small buckets: several all-reduces for each backward pass.
    return DistributedDataParallel(model, bucket_cap_mb=2, **kwargs)


def train(rec, name, steps, ddp, loss=loss_of, accumulate=1):
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        for part in range(accumulate - 1):
            with ddp.no_sync():
                loss(ddp, 100 * step + part + 50).backward()
        value = loss(ddp, step)
        value.backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = value.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if job.ON_GPU else dist.ReduceOp.SUM)
        rec.loss(mean)
        rec.loss(norm)
    weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    rec.tensor(name + " weights", weights)
    first = weights.clone()
    dist.broadcast(first, 0)
    rec.check(name + ": ranks hold different weights", torch.equal(first, weights))
    rec.check(name + ": weights are not finite", bool(weights.isfinite().all()))


def main(rec):
    used = {"find_unused_parameters": True}
    train(rec, "unused", 6, new_model(**used))
    train(rec, "views", 4, new_model(gradient_as_bucket_view=True, **used), accumulate=2)
    train(rec, "static", 4, new_model(static_graph=True),
          loss=lambda model, step: loss_of(model, step, spare=True))
    hooked = new_model()
    hooked.register_comm_hook(None, bf16_compress_hook)
    train(rec, "bf16 hook", 3, hooked, loss=lambda model, step: loss_of(model, step, spare=True))


if __name__ == "__main__":
    job.run_alone(main)
