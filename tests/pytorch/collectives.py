# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed, by type and by size, against values that sum exactly."""
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import job

BIG = 2**20 + 1
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
           torch.int32, torch.int64]
MOVED = REDUCED + [torch.bool, torch.complex64] + (
    [torch.float8_e4m3fn, torch.float8_e5m2] if job.ON_GPU else [])
BIG_TYPES = [torch.float32, torch.bfloat16, torch.int8]


def sizes(dtype, odd=(0, 1, 3, 1001)):
    return list(odd) + ([BIG] if dtype in BIG_TYPES else [])


def numbers(count, rank, dtype, salt=0, modulus=5):
    """Small whole numbers that depend on place and rank: every sum of them over 8 ranks is exact."""
    base = torch.arange(count, device=job.device()) * 7 + 3 * rank + salt
    return (base % modulus).float().to(dtype)


def every(count, dtype, salt=0, modulus=5):
    return torch.stack([numbers(count, r, torch.int64, salt, modulus)
                        for r in range(dist.get_world_size())])


def joined(parts):
    """torch.cat, by bytes: not every kernel of torch knows the one-byte floats."""
    dtype = parts[0].dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.cat([p.view(torch.uint8) for p in parts]).view(dtype)
    return torch.cat(parts)


class Collectives:
    def __init__(self, rec):
        self.rec = rec
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def expect(self, name, got, wanted):
        if got.dtype.itemsize == 1:  # one-byte floats have no equality of their own
            got, wanted = got.view(torch.uint8), wanted.view(torch.uint8)
        self.rec.check("%s: wrong result" % name, torch.equal(got, wanted))

    def done(self, name, got, wanted):
        self.expect(name, got, wanted)
        self.rec.tensor(name, got)

    # Reductions

    def all_reduce(self, dtype, count):
        operations = {"sum": (dist.ReduceOp.SUM, 5, lambda v: v.sum(0)),
                      "max": (dist.ReduceOp.MAX, 5, lambda v: v.amax(0)),
                      "min": (dist.ReduceOp.MIN, 5, lambda v: v.amin(0)),
                      "product": (dist.ReduceOp.PRODUCT, 2, lambda v: (v + 1).prod(0))}
        if job.ON_GPU and dtype.is_floating_point:
            operations["avg"] = (dist.ReduceOp.AVG, 5, lambda v: v.sum(0).double() / self.world)
        for name, (op, modulus, reference) in operations.items():
            mine = numbers(count, self.rank, dtype, modulus=modulus)
            mine = mine + 1 if name == "product" else mine
            dist.all_reduce(mine, op=op)
            self.done("all_reduce %s" % name, mine, reference(every(count, dtype, 0, modulus)).to(dtype))

    def premul_sum(self, dtype):
        mine = numbers(1001, self.rank, dtype)
        dist.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))
        self.done("all_reduce premul", mine, (every(1001, dtype).sum(0) * 0.5).to(dtype))

    def all_reduce_bool(self):
        mine = numbers(1001, self.rank, torch.int64, modulus=3) == 2
        dist.all_reduce(mine)
        self.done("all_reduce bool", mine, (every(1001, torch.int64, 0, 3) == 2).any(0))

    def all_reduce_complex(self):
        mine = torch.complex(numbers(77, self.rank, torch.float32),
                             numbers(77, self.rank, torch.float32, salt=1))
        dist.all_reduce(mine)
        wanted = torch.complex(every(77, None).sum(0).float(), every(77, None, 1).sum(0).float())
        self.done("all_reduce complex", mine, wanted)

    def reduce(self, dtype, count):
        root = self.world - 1
        mine = numbers(count, self.rank, dtype)
        dist.reduce(mine, root)
        if self.rank == root:
            self.done("reduce", mine, every(count, dtype).sum(0).to(dtype))

    def reduce_scatter(self, dtype, count):
        mine = numbers(count * self.world, self.rank, dtype)
        wanted = every(count * self.world, dtype).sum(0).to(dtype)
        wanted = wanted[count * self.rank:count * (self.rank + 1)]
        out = torch.empty(count, dtype=dtype, device=job.device())
        dist.reduce_scatter_tensor(out, mine)
        self.done("reduce_scatter_tensor", out, wanted)
        out = torch.empty_like(out)
        dist.reduce_scatter(out, list(mine.chunk(self.world)) if count else [out.clone()] * self.world)
        self.done("reduce_scatter", out, wanted)

    # Movement

    def broadcast(self, dtype, count):
        root = 1 % self.world
        mine = numbers(count, self.rank, dtype)
        dist.broadcast(mine, root)
        self.done("broadcast", mine, numbers(count, root, dtype))

    def all_gather(self, dtype, count):
        mine = numbers(count, self.rank, dtype)
        wanted = joined([numbers(count, r, dtype) for r in range(self.world)])
        out = torch.empty(count * self.world, dtype=dtype, device=job.device())
        dist.all_gather_into_tensor(out, mine)
        self.done("all_gather_into_tensor", out, wanted)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        self.done("all_gather", joined(parts), wanted)

    def all_gather_uneven(self):
        mine = numbers(10 + self.rank, self.rank, torch.float32)
        parts = [torch.empty(10 + r, device=job.device()) for r in range(self.world)]
        dist.all_gather(parts, mine)
        wanted = [numbers(10 + r, r, torch.float32) for r in range(self.world)]
        self.done("all_gather uneven", joined(parts), joined(wanted))

    def all_to_all(self, dtype, count):
        mine = numbers(count * self.world, self.rank, dtype)
        wanted = joined([numbers(count * self.world, r, dtype)[count * self.rank:
                                                                  count * (self.rank + 1)]
                            for r in range(self.world)])
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine)
        self.done("all_to_all_single", out, wanted)
        if not job.ON_GPU:
            return
        out = [torch.empty(count, dtype=dtype, device=job.device()) for _ in range(self.world)]
        dist.all_to_all(out, [mine[count * r:count * (r + 1)] for r in range(self.world)])
        self.done("all_to_all", joined(out), wanted)

    def all_to_all_uneven(self, dtype):
        def rows(source, target):  # some of these are 0
            return (source * 3 + target * 5) % 4

        def part(source, target):
            return numbers(rows(source, target) * 33, 10 * source + target, dtype).view(-1, 33)

        to_send = [rows(self.rank, r) for r in range(self.world)]
        to_get = [rows(r, self.rank) for r in range(self.world)]
        mine = joined([part(self.rank, r) for r in range(self.world)])
        out = torch.empty(sum(to_get), 33, dtype=dtype, device=job.device())
        dist.all_to_all_single(out, mine, to_get, to_send)
        wanted = joined([part(r, self.rank) for r in range(self.world)])
        self.done("all_to_all_single uneven", out, wanted)

    def gather_scatter(self, dtype, count):
        root = self.world - 1
        mine = numbers(count, self.rank, dtype)
        wanted = [numbers(count, r, dtype) for r in range(self.world)]
        parts = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == root else None
        dist.gather(mine, parts, dst=root)
        if self.rank == root:
            self.done("gather", joined(parts), joined(wanted))
        out = torch.empty_like(mine)
        dist.scatter(out, wanted if self.rank == root else None, src=root)
        self.done("scatter", out, mine)

    def send_recv(self, dtype, count):
        peer = self.rank ^ 1
        mine = numbers(count, self.rank, dtype)
        out = torch.empty_like(mine)
        if self.rank < peer:
            dist.send(mine, peer)
            dist.recv(out, peer)
        else:
            dist.recv(out, peer)
            dist.send(mine, peer)
        self.done("send recv", out, numbers(count, peer, dtype))

    def unaligned(self):
        """Views that begin one element into their storage, and values a sum would not keep."""
        odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42, 3.0], device=job.device())
        room = torch.empty(5 * self.world + 1, device=job.device())
        shifted = torch.empty(6, device=job.device())
        shifted[1:] = odd
        dist.all_gather_into_tensor(room[1:], shifted[1:])
        self.done("unaligned all_gather", room[1:].view(torch.int32),
                  odd.repeat(self.world).view(torch.int32))
        mine = torch.empty(1002, device=job.device())
        mine[1:] = numbers(1001, self.rank, torch.float32)
        dist.all_reduce(mine[1:])
        self.done("unaligned all_reduce", mine[1:], every(1001, None).sum(0).float())

    # The rest of the interface

    def objects(self):
        everyone = [None] * self.world
        dist.all_gather_object(everyone, {"rank": self.rank, "text": "x" * self.rank})
        self.rec.check("all_gather_object", [o["rank"] for o in everyone] == list(range(self.world)))
        said = [("from", 0, 1.5)] if self.rank == 0 else [None]
        dist.broadcast_object_list(said, src=0)
        self.rec.check("broadcast_object_list", said == [("from", 0, 1.5)])
        got = [None]
        dist.scatter_object_list(got, [[r] for r in range(self.world)] if self.rank == 0 else None)
        self.rec.check("scatter_object_list", got == [[self.rank]])
        into = [None] * self.world if self.rank == 0 else None
        dist.gather_object(self.rank, into)
        self.rec.check("gather_object", into is None or into == list(range(self.world)))

    def groups(self):
        halves = [list(range(0, self.world, 2)), list(range(1, self.world, 2))]
        made = [dist.new_group(ranks) for ranks in halves]
        mine = made[self.rank % 2]
        x = numbers(1001, self.rank, torch.float32)
        dist.all_reduce(x, group=mine)
        wanted = sum(numbers(1001, r, torch.float32) for r in halves[self.rank % 2])
        self.done("all_reduce in a new group", x, wanted)
        dist.barrier(group=mine)
        if job.ON_GPU and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            split = dist.split_group(split_ranks=halves)
            x = numbers(33, self.rank, torch.float32)
            dist.all_reduce(x, group=split)
            wanted = sum(numbers(33, r, torch.float32) for r in halves[self.rank % 2])
            self.done("all_reduce in a split group", x, wanted)
            dist.destroy_process_group(split)
        dist.destroy_process_group(mine)

    def functional(self):
        world = dist.group.WORLD
        x = numbers(8 * self.world, self.rank, torch.float32)
        total = every(8 * self.world, None).sum(0).float()
        mine = slice(8 * self.rank, 8 * (self.rank + 1))
        self.done("functional all_reduce", functional.all_reduce(x, "sum", world) + 0, total)
        got = functional.reduce_scatter_tensor(x, "sum", 0, world) + 0
        self.done("functional reduce_scatter", got, total[mine])
        got = functional.all_gather_tensor(x[mine].contiguous(), 0, world) + 0
        wanted = [numbers(8 * self.world, r, torch.float32)[8 * r:8 * r + 8] for r in range(self.world)]
        self.done("functional all_gather", got, joined(wanted))
        got = functional.all_to_all_single(x, None, None, world) + 0
        wanted = [numbers(8 * self.world, r, torch.float32)[mine] for r in range(self.world)]
        self.done("functional all_to_all", got, joined(wanted))

    def side_stream(self):
        """Work before and behind the collective on a stream that is not the default one."""
        x = numbers(BIG, self.rank, torch.float32)
        if not job.ON_GPU:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.mul_(2)
            dist.all_reduce(x)
            y = x + 1
        torch.cuda.current_stream().wait_stream(stream)
        self.done("all_reduce on a side stream", y, (2 * every(BIG, None).sum(0) + 1).float())


def main(rec):
    tests = Collectives(rec)

    def both(function, types, odd=(0, 1, 3, 1001)):
        for dtype in types:
            for count in sizes(dtype, odd):
                rec.case("%s %s %d" % (function.__name__, dtype, count), function, dtype, count)

    both(tests.all_reduce, REDUCED)
    both(tests.reduce, REDUCED)
    both(tests.reduce_scatter, REDUCED)
    both(tests.broadcast, MOVED)
    both(tests.all_gather, MOVED)
    both(tests.all_to_all, MOVED)
    both(tests.gather_scatter, [torch.float32, torch.int8, torch.bfloat16], odd=(1, 3, 1001))
    both(tests.send_recv, [torch.float32, torch.int8, torch.bfloat16], odd=(1, 3, 1001))
    if job.ON_GPU:
        for dtype in (torch.float32, torch.float64, torch.float16):
            rec.case("premul_sum %s" % dtype, tests.premul_sum, dtype)
        rec.case("all_reduce_bool", tests.all_reduce_bool)
        rec.case("all_gather_uneven", tests.all_gather_uneven)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rec.case("all_to_all_uneven %s" % dtype, tests.all_to_all_uneven, dtype)
    for function in (tests.all_reduce_complex, tests.unaligned, tests.objects, tests.groups,
                     tests.functional, tests.side_stream):
        rec.case(function.__name__, function)
    dist.barrier()


if __name__ == "__main__":
    job.run_alone(main)
