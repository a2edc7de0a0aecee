# SPDX-License-Identifier: Apache-2.0
"""fully_shard: parameters gathered, gradients reduce-scattered; with 4 and more ranks also sharded inside
half of the ranks and replicated over both halves (an all-reduce behind the reduce-scatter)."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import job

WIDTH, LAYERS, BATCH = 384, 4, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def new_model(mesh, policy):
    torch.manual_seed(17)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 33)).to(job.device())
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(rec, name, mesh, policy, steps=3):
    model = new_model(mesh, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        y = model(job.randn(BATCH, WIDTH, salt=step))
        loss = y.float().square().mean() + y.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.loss(loss.detach())
    for part, weight in model.named_parameters():
        whole = weight.full_tensor()
        rec.tensor("%s %s" % (name, part), whole)
        rec.check("%s %s is not finite" % (name, part), bool(whole.isfinite().all()))


def main(rec):
    world = dist.get_world_size()
    kind = job.device().type
    flat = init_device_mesh(kind, (world,))
    train(rec, "fp32", flat, MixedPrecisionPolicy())
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(rec, "bf16 parameters", flat, mixed)
    train(rec, "bf16", flat, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if world >= 4:
        halves = init_device_mesh(kind, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        train(rec, "halves", halves, MixedPrecisionPolicy())


if __name__ == "__main__":
    job.run_alone(main)
