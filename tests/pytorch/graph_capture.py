# SPDX-License-Identifier: Apache-2.0
"""Collectives inside a captured CUDA graph, replayed with new data, with eager calls in between."""
import gc

import torch
import torch.distributed as dist
from torch import nn

import job

REPLAYS = 4


def warm_up(step, times=3):
    """On a side stream, as torch's manual asks: what is made at first use must not be made in a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def capture(step):
    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def whole_numbers(n, salt):
    generator = job.rank_generator(salt)
    return torch.randint(-8, 8, (n,), generator=generator).float().to(job.device())


def collectives(rec):
    world = dist.get_world_size()
    n = 1024 * world
    x = torch.zeros(n, device=job.device())
    exchanged, total, whole = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    shard = torch.empty(n // world, device=job.device())

    def step():
        y = x * 2
        dist.all_to_all_single(exchanged, y)
        work = dist.all_reduce(y, async_op=True)
        dist.reduce_scatter_tensor(shard, exchanged)
        work.wait()
        total.copy_(y)
        dist.all_gather_into_tensor(whole, shard + 1)

    graph = capture(step)
    for replay in range(REPLAYS):
        x.copy_(whole_numbers(n, replay))
        graph.replay()
        eager = x * 2
        dist.all_reduce(eager)  # behind the replay, on the same communicator
        other = torch.empty_like(x)
        dist.all_to_all_single(other, x * 2)
        rec.check("replay %d: all_reduce" % replay, torch.equal(total, eager))
        rec.check("replay %d: all_to_all" % replay, torch.equal(exchanged, other))
        rec.tensor("replay %d all_reduce" % replay, total)
        rec.tensor("replay %d all_to_all" % replay, exchanged)
        rec.tensor("replay %d reduce_scatter all_gather" % replay, whole)
    for _ in range(8):  # back to back, nothing between
        graph.replay()
    rec.tensor("after more replays", whole)
    torch.cuda.synchronize()
    del graph


def training(rec):
    """A whole step: forward, backward, all-reduce of the gradients, update."""
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 16)).to(job.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size()
    x = job.randn(64, 128, salt=1)
    loss = torch.zeros((), device=job.device())

    def step():
        optimizer.zero_grad(set_to_none=True)
        value = model(x).square().mean()
        value.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
        optimizer.step()
        loss.copy_(value.detach())

    graph = capture(step)
    for replay in range(REPLAYS):
        x.copy_(job.randn(64, 128, salt=10 + replay))
        graph.replay()
        rec.loss(loss)
    for name, parameter in model.named_parameters():
        rec.tensor("trained " + name, parameter)
    torch.cuda.synchronize()
    del graph


def main(rec):
    if not job.ON_GPU:
        rec.skip("no GPU: nothing to capture")
        return
    rec.case("collectives", collectives, rec)
    gc.collect()  # a communicator waits for the graphs that use it before it goes
    rec.case("training", training, rec)
    gc.collect()


if __name__ == "__main__":
    job.run_alone(main)
