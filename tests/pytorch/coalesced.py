# SPDX-License-Identifier: Apache-2.0
"""Many small operations in one: coalesced collectives, batched sends and receives, asynchronous ones."""
import warnings

import torch
import torch.distributed as dist

import job

SIZES = [1, 3, 17, 256, 1001, 4096, 65537, 20, 2]


def gradients(salt, dtype=torch.float32):
    return [job.randn(n, salt=salt + i, dtype=dtype) for i, n in enumerate(SIZES)]


def one_by_one(tensors):
    copies = [t.clone() for t in tensors]
    for copy in copies:
        dist.all_reduce(copy)
    return copies


def note(rec, name, tensors):
    rec.tensor(name, torch.cat([t.reshape(-1) for t in tensors]))


def close(rec, name, got, wanted):
    # NCCL may choose another order of addition for operations it sees together.
    tolerance = 1e-1 if got[0].dtype == torch.bfloat16 else 1e-5
    same = all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(got, wanted))
    rec.check(name + " differs from one by one", same)


def all_reduce_coalesced(rec):
    tensors = gradients(0)
    wanted = one_by_one(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
    close(rec, "all_reduce_coalesced", tensors, wanted)
    note(rec, "all_reduce_coalesced", tensors)


def coalescing_manager(rec, dtype, asynchronous):
    name = "manager %s%s" % (dtype, " async" if asynchronous else "")
    tensors = gradients(20, dtype)
    wanted = one_by_one(tensors)
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if asynchronous:
        manager.wait()
    close(rec, name, tensors, wanted)
    note(rec, name, tensors)


def coalesced_shards(rec):
    """reduce_scatter and all_gather, grouped as optimizers with sharded state do it."""
    world = dist.get_world_size()
    full = [job.randn(n * world, salt=40 + i) for i, n in enumerate(SIZES)]
    shards = [torch.empty(n, device=job.device()) for n in SIZES]
    with dist._coalescing_manager(async_ops=True) as manager:
        for shard, tensor in zip(shards, full):
            dist.reduce_scatter_tensor(shard, tensor)
    manager.wait()
    note(rec, "reduce_scatter in a manager", shards)
    back = [torch.empty_like(t) for t in full]
    with dist._coalescing_manager():
        for tensor, shard in zip(back, shards):
            dist.all_gather_into_tensor(tensor, shard)
    note(rec, "all_gather in a manager", back)
    mine = slice(dist.get_rank() * SIZES[4], (dist.get_rank() + 1) * SIZES[4])
    rec.check("all_gather in a manager: own part", torch.equal(back[4][mine], shards[4]))


def batched_p2p(rec):
    """A ring in both directions, as pipeline stages do it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    for n in (1, 3, 65537):
        to_right, to_left = job.randn(n, salt=60), job.randn(n, salt=61)
        from_left, from_right = torch.empty_like(to_right), torch.empty_like(to_left)
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, to_right, right), dist.P2POp(dist.irecv, from_left, left),
                dist.P2POp(dist.isend, to_left, left), dist.P2POp(dist.irecv, from_right, right)]):
            work.wait()
        wanted = torch.randn(n, generator=torch.Generator().manual_seed(60000 + 17 + left))
        rec.check("batched p2p %d" % n, torch.equal(from_left.cpu(), wanted))
        note(rec, "batched p2p %d" % n, [from_left, from_right])


def asynchronous(rec):
    """Several operations under way, computation between, waits in another order."""
    world = dist.get_world_size()
    tensors = gradients(80)
    wanted = one_by_one(tensors)
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    weight = job.randn(128, 128, salt=99)
    product = weight @ weight
    sent = job.randn(4 * world, 64, salt=100)
    got = torch.empty_like(sent)
    exchange = dist.all_to_all_single(got, sent, async_op=True)
    for work in reversed(works):
        work.wait()
    exchange.wait()
    close(rec, "asynchronous", tensors, wanted)
    note(rec, "asynchronous", tensors)
    note(rec, "asynchronous exchange", [got])
    note(rec, "computation between", [product])


def futures(rec):
    x = torch.full((1001,), float(dist.get_rank() + 1), device=job.device())
    work = dist.all_reduce(x, async_op=True)
    halved = work.get_future().then(lambda done: done.value()[0] / 2).wait()
    world = dist.get_world_size()
    rec.check("future", bool((halved == world * (world + 1) / 4).all()))


def objects(rec):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ["rank", dist.get_rank()])
    rec.check("all_gather_object", [o[1] for o in everyone] == list(range(len(everyone))))
    dist.barrier()


def main(rec):
    rec.case("all_reduce_coalesced", all_reduce_coalesced, rec)
    for dtype in (torch.float32, torch.bfloat16):
        for is_async in (False, True):
            rec.case("coalescing_manager", coalescing_manager, rec, dtype, is_async)
    if job.ON_GPU:
        rec.case("coalesced_shards", coalesced_shards, rec)
    for function in (batched_p2p, asynchronous, futures, objects):
        rec.case(function.__name__, function, rec)


if __name__ == "__main__":
    job.run_alone(main)
