#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All-reduces and all-to-alls through torch.distributed between GPUs of one machine, in turns of one run: NCCL as it comes,
NCCL on registered windows, torch's symmetric-memory one-shot and two-shot, what torch's bf16_compress_hook does (cast, NCCL,
cast back), and loongcomm preloaded (exact, with bf16 on the wire, each also where the job allows 64 CTAs instead of 32, or
128 with --wide, and for all-to-alls told by loongcommSetMask).

usage: perf/peers_torch.py [--ranks N] [--rounds N] [--cases LIST] [--seconds N] [--wide] [--library FILE] [--json FILE]

Cases are numbers from 0; --list says them. Each call takes the next part of its buffers, which are twice what the L2 holds.
`graph`: twenty calls in a CUDA graph. Times are the device's for one call, the longest of the ranks: calls are queued while
the device is kept busy, as behind a job's computation, and timed from the end of the one in front of them, behind which all
ranks are level. Medians of rounds, p10 and p99 of them, NCCL's time over each in the same round, and what a call costs the
host (`host`). `one call`: the group by torch's all_reduce_coalesced instead of 500 calls. Results are checked first.
Variables LOONGCOMM_... are for the preloaded ones alone, which take LOONGCOMM_PEER=force if nothing is said. No case is
begun after --seconds. NCCL, its windows, torch's own and each form of loongcomm are sets of processes of their own: a set
whose rank ends is left out from then on, and the exit code is 1."""
import argparse
import os
import statistics
import sys
import time

import resident

KB, MB = 1 << 10, 1 << 20
SPAN = 128 * MB  # of the buffers: twice what the L2 holds, and a bit
# op, dtype, bytes, share of zero rows, graph
CASES = [
    ("allreduce", "float32", 1024, 0, True),
    ("allreduce", "float32", 65536, 0, True),
    ("allreduce", "float32", 256 * KB, 0, True),
    ("allreduce", "float32", 1 * MB, 0, True),
    ("allreduce", "float32", 1 * MB, 0, False),
    ("allreduce", "float32", 16 * MB, 0, False),
    ("allreduce", "float32", 256 * MB, 0, False),
    ("allreduce", "bfloat16", 16 * MB, 0, False),
    ("allreduce", "bfloat16", 128 * MB, 0, False),
    ("alltoall", "float32", 65536, 0, True),
    ("alltoall", "float32", 1 * MB, 0, True),
    ("alltoall", "float32", 16 * MB, 0, False),
    ("alltoall", "bfloat16", 32 * MB, 0, False),  # 4096 x 4096
    ("alltoall", "float32", 256 * MB, 0, False),
    ("alltoall", "float32", 256 * MB, 0.6, False),
    ("alltoall", "float32", 256 * MB, 0.75, False),
    ("alltoall", "float32", 256 * MB, 0.9, False),
    ("group", "float32", 302 * MB, 0, False),  # 500 tensors
    ("group, one call", "float32", 302 * MB, 0, False),
]
GRAPH_CALLS = 20
BUSY = (5_000_000, 100_000_000)  # cycles: 3 ms and 50 ms, in which the calls of a round are queued; groups take the host longer
AGREED = 300  # small calls, after which all of loongcomm's ranks have agreed and its memory has grown
ROW = 1024  # elements of a row of an all-to-all; an expert has 64 of them, the last ones zeros
SETS = {"NCCL": None, "windows": None, "torch": None, "loongcomm": {},
        "loongcomm, bf16 wire": {"LOONGCOMM_ALLREDUCE_WIRE": "bf16"},
        "loongcomm, 64 CTAs": {"NCCL_MAX_CTAS": "64"},
        "loongcomm, 64 CTAs, bf16 wire": {"LOONGCOMM_ALLREDUCE_WIRE": "bf16", "NCCL_MAX_CTAS": "64"}}
# Of sums alone: all-to-alls, which such a set does not measure, would have half of the multiprocessors.
WIDE = {"LOONGCOMM_MAX_CTAS": "128", "NCCL_MAX_CTAS": "4", "NCCL_CGA_CLUSTER_SIZE": "0",
        "LOONGCOMM_EXCHANGE_MIN_BYTES": "1000000g"}


def sets_of(wide):
    if not wide:
        return SETS
    return {name.replace("64", "128"): {**settings, **WIDE} if "64" in name else settings for name, settings in SETS.items()}


def calls_of(case):
    """Times that a case's call is made in a round: more than 10 ms where calls are large."""
    return 20 if case[4] else max(10, min(50, 512 * MB // case[2]))


class Worker:
    def __init__(self, variant):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.variant = torch, dist, variant
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.stream = torch.cuda.Stream()
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.ways, self.case, self.kept, self.at_end = {}, None, [], []
        small = torch.zeros(256, device=self.device)
        for _ in range(AGREED):
            dist.all_reduce(small)
        torch.cuda.synchronize()

    def prepare(self, number):
        """Buffers, and the ways of this variant to do the case; those that fail say why."""
        self.case = CASES[number]
        self.torch.cuda.synchronize()
        for end in self.at_end:
            end()
        self.ways, self.kept, self.at_end = {}, [], []
        self.torch.cuda.empty_cache()
        failed = {}
        for name, make in self.makers().items():
            try:
                call = make()
                self.check(name, call)
                self.ways[name] = self.captured(call) if self.case[4] else call
            except Exception as error:  # noqa: BLE001
                failed[name] = "%s: %s" % (type(error).__name__, str(error)[:160])
        return {"ways": list(self.ways), "failed": failed}

    def makers(self):
        op, dtype, _, zeros, graph = self.case
        reduces = op == "allreduce"
        if self.variant == "NCCL":
            ways = {"NCCL": self.plain}
            return {**ways, "NCCL, bf16 hook": self.hook} if reduces and dtype == "float32" else ways
        if self.variant == "windows":
            return {} if op.startswith("group") or graph else {"NCCL, windows": self.windows}
        if self.variant == "torch":
            both = {"torch one-shot": lambda: self.symmetric(True), "torch two-shot": lambda: self.symmetric(False)}
            return both if reduces else {}
        if self.variant.endswith("wire"):
            return {self.variant: self.plain} if dtype == "float32" and op != "alltoall" else {}
        if self.variant.endswith("CTAs"):
            return {} if op == "alltoall" else {self.variant: self.plain}
        return {"loongcomm": self.plain, **({"loongcomm, mask": self.masked} if zeros else {})}

    def buffers(self, empty=None):
        """(in, out) for each call in turn."""
        torch, (op, dtype, nbytes, zeros, _) = self.torch, self.case
        dtype = getattr(torch, dtype)
        count = nbytes // dtype.itemsize
        parts = max(1, SPAN // nbytes)
        whole = (empty or torch.empty)(parts * count, dtype=dtype, device=self.device)
        whole.normal_()
        if op == "alltoall" and zeros:
            self.rows(whole)[:, int(64 * (1 - zeros)):] = 0
        others = (empty or torch.empty)(parts * count, dtype=dtype, device=self.device) if op == "alltoall" else whole
        return list(zip(whole.split(count), others.split(count)))

    def rows(self, whole):
        return whole.view(-1, 64, ROW)

    def collective(self, pair):
        if self.case[0] == "alltoall":
            self.dist.all_to_all_single(pair[1], pair[0])
        else:  # an average, so that numbers stay what they are
            self.dist.all_reduce(pair[0], op=self.dist.ReduceOp.AVG)

    def plain(self):
        if self.case[0].startswith("group"):
            return self.group()
        pairs = self.buffers()
        return lambda i: self.collective(pairs[i % len(pairs)])

    def group(self):
        torch, dist = self.torch, self.dist
        sizes = [4096 * 2 ** (10 * ((i * 0.618033988749895) % 1)) for i in range(500)]
        tensors = [torch.randn(int(size * self.case[2] / sum(sizes)) // 4, device=self.device) for size in sizes]

        def call(_):
            with dist._coalescing_manager(device=self.device):
                for tensor in tensors:
                    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)

        def one_call(_):
            dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.AVG)
        return one_call if "one call" in self.case[0] else call

    def windows(self):
        torch = self.torch
        backend = self.dist.group.WORLD._get_backend(self.device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            pairs = self.buffers()
        backend.register_mem_pool(pool, symm=True)
        self.kept.append((pool, pairs))
        self.at_end.append(lambda: backend.deregister_mem_pool(pool))
        return lambda i: self.collective(pairs[i % len(pairs)])

    def hook(self):
        pairs = self.buffers()

        def call(i):
            whole = pairs[i % len(pairs)][0]
            half = whole.to(self.torch.bfloat16).div_(self.world)
            self.dist.all_reduce(half)
            whole.copy_(half)
        return call

    def symmetric(self, one_shot):
        import torch.distributed._symmetric_memory as symm
        torch, group = self.torch, self.dist.group.WORLD.group_name
        _, dtype, nbytes, _, graph = self.case
        if one_shot and nbytes > 4 * MB:
            raise ValueError("not meant for so much")
        dtype = getattr(torch, dtype)
        whole = symm.empty(nbytes // dtype.itemsize, dtype=dtype, device=self.device)
        symm.rendezvous(whole, group)
        whole.fill_(0)
        self.kept.append(whole)  # check() looks for it
        if one_shot:
            return lambda i: torch.ops.symm_mem.one_shot_all_reduce(whole, "sum", group)
        return lambda i: torch.ops.symm_mem.two_shot_all_reduce_(whole, "sum", group)

    def masked(self):
        import ctypes
        torch = self.torch
        set_mask = ctypes.CDLL(None).loongcommSetMask
        set_mask.restype = ctypes.c_int
        set_mask.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        pairs = self.buffers()
        handle = self.dist.group.WORLD._get_backend(self.device)._comm_ptr()
        live = (self.rows(pairs[0][0]) != 0).any(-1).flatten().to(torch.int64)
        bits = (torch.nn.functional.pad(live, (0, -live.numel() % 32)).view(-1, 32) <<
                torch.arange(32, device=self.device)).sum(-1)
        bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
        self.kept.append(bits)

        def call(i):
            status = set_mask(handle, bits.data_ptr(), live.numel(), ROW * pairs[0][0].element_size(),
                              torch.cuda.current_stream().cuda_stream)
            if status:
                raise RuntimeError("loongcommSetMask: %d" % status)
            self.collective(pairs[i % len(pairs)])
        return call

    def check(self, name, call):
        """Small numbers that bf16 holds: the average of all ranks, or what each rank has for this one."""
        if name.startswith("torch"):  # sums in buffers of its own
            whole = self.kept[-1]
            whole.fill_(self.rank + 1)
            out = call(0)
            self.same((out if out is not None else whole), self.world * (self.world + 1) / 2)
            whole.fill_(0)
            return
        for cell in (c.cell_contents for c in call.__closure__):
            if isinstance(cell, list) and isinstance(cell[0], tuple):
                source, target = cell[0]
                before = source.clone()
                if self.case[0] == "allreduce":
                    source.fill_(self.rank + 1)
                    call(0)
                    self.same(source, (self.world + 1) / 2)
                else:
                    call(0)
                    self.exchanged(source, target)
                source.copy_(before)
            elif isinstance(cell, list):  # the group's tensors
                saved = cell[-1].clone()
                cell[-1].fill_(self.rank + 1)
                call(0)
                self.same(cell[-1], (self.world + 1) / 2)
                cell[-1].copy_(saved)

    def exchanged(self, source, target):
        """The sum of the bits of each part is the one that its sender has."""
        torch = self.torch
        sums = [tensor.view(torch.int16).view(self.world, -1).sum(-1, dtype=torch.int64) for tensor in (source, target)]
        of_all = [torch.empty_like(sums[0]) for _ in range(self.world)]
        self.dist.all_gather(of_all, sums[0])
        if [int(theirs[self.rank]) for theirs in of_all] != sums[1].tolist():
            raise ValueError("wrong result")

    @staticmethod
    def same(tensor, value):
        if not bool((tensor == value).all()):
            raise ValueError("wrong result: %s instead of %s" % (tensor.flatten()[:2].tolist(), value))

    def captured(self, call):
        """A graph of calls. It holds addresses only: what it uses lives as long as the closure here does."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            for i in range(3):
                call(i)
        torch.cuda.synchronize()
        self.dist.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(GRAPH_CALLS):
                call(i)

        def replay(_, uses=call):
            graph.replay()
        return replay

    def measure(self, name):
        """Microseconds of a call on the device, and of the host."""
        torch, times, call = self.torch, calls_of(self.case), self.ways[name]
        call(0)
        torch.cuda.synchronize()
        self.dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY[self.case[0].startswith("group")])
        call(0)
        self.begin.record()
        begun = time.perf_counter()
        for i in range(times):
            call(i)
        host = time.perf_counter() - begun
        self.end.record()
        torch.cuda.synchronize()
        times *= GRAPH_CALLS if self.case[4] else 1
        return {"us": self.begin.elapsed_time(self.end) * 1000 / times, "host": host * 1e6 / times}


def worker(variant):
    self = Worker(variant)
    resident.say({"gpu": self.torch.cuda.get_device_name(self.device), "torch": self.torch.__version__,
                  "nccl": ".".join(map(str, self.torch.cuda.nccl.version()))})
    for line in sys.stdin:
        what, _, argument = line.strip().partition(" ")
        resident.say(self.prepare(int(argument)) if what == "prepare" else self.measure(argument))
    self.dist.destroy_process_group()


def text_of(case):
    op, dtype, nbytes, zeros, graph = case
    size = "%d MB" % (nbytes // MB) if nbytes >= MB else "%d KB" % (nbytes // 1024)
    return "%s %s %s%s%s" % (op, dtype, size, ", %d %% zeros" % round(100 * zeros) if zeros else "", ", graph" if graph else "")


def asked(sets, variant, line):
    """The answers of a set's ranks; none once one of them has ended, then the set is left out."""
    try:
        return sets[variant].ask(line)
    except resident.Ended as ended:
        print("    left out from here on: %s" % ended, flush=True)
        sets.pop(variant).kill()
        return []


def measure_case(number, sets, rounds):
    """{way: [us]} of the device and of the host, and the reasons of those that are missing."""
    ways, failed = [], {}
    for variant in list(sets):
        answers = asked(sets, variant, "prepare %d" % number)
        first = answers[0]["ways"] if answers else []
        ways += [(variant, way) for way in first if all(way in answer["ways"] for answer in answers)]
        for answer in answers:
            failed.update(answer["failed"])
    times, host = {way: [] for _, way in ways}, {}
    for _ in range(rounds):
        for variant, way in ways:
            answers = asked(sets, variant, "measure " + way) if variant in sets else []
            if answers:
                times[way].append(max(answer["us"] for answer in answers))
                host.setdefault(way, []).append(max(answer["host"] for answer in answers))
    return {way: us for way, us in times.items() if len(us) == rounds}, host, failed


def main(options):
    begun, sets, records = time.monotonic(), {}, []
    os.environ.setdefault("LOONGCOMM_PEER", "force")
    try:
        for variant, settings in sets_of(options.wide).items():
            sets[variant] = resident.Set(__file__, variant, options.ranks, settings=settings or {},
                                         library=options.library if settings is not None else None)
        about = [ranks.answers()[0] for ranks in sets.values()][0]
        wanted = len(sets)
        print("# %d ranks on %s, torch %s, NCCL %s; us of a call" % (options.ranks, about["gpu"], about["torch"], about["nccl"]))
        for number in options.cases:
            if time.monotonic() - begun > options.seconds:
                print("# left out for time: " + text_of(CASES[number]))
                continue
            times, host, failed = measure_case(number, sets, options.rounds)
            print(text_of(CASES[number]), flush=True)
            for way, us in sorted(times.items(), key=lambda item: statistics.median(item[1])):
                ratio = statistics.median(n / u for n, u in zip(times.get("NCCL", us), us))
                op, dtype, nbytes, zeros, graph = CASES[number]
                records.append({"op": "torch-" + op, "dtype": dtype, "bytes": nbytes, "live": 1 - zeros, "graph": graph,
                                "ranks": options.ranks, "variant": way, "median_us": statistics.median(us),
                                "p10_us": resident.quantile(us, 0.1), "p99_us": resident.quantile(us, 0.99), "ratio": ratio,
                                "host_us": statistics.median(host[way])})
                print("    %-30s %9.1f (%.1f..%.1f)  %.2f  host %.1f" %
                      (way, statistics.median(us), resident.quantile(us, 0.1), resident.quantile(us, 0.99), ratio, statistics.median(host[way])))
            for way, why in failed.items():
                print("    %-30s failed: %s" % (way, why))
        for ranks in sets.values():
            ranks.end()
    finally:
        for ranks in sets.values():
            ranks.kill()
    if options.json:
        resident.write(options.json, about, records)
    return 0 if len(sets) == wanted else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--cases", type=lambda text: [int(n) for n in text.split(",")], default=list(range(len(CASES))))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--library", default=resident.LIBRARY)
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.list:
        for i, one in enumerate(CASES):
            print("%2d  %s" % (i, text_of(one)))
    elif given.worker:
        worker(given.worker)
    else:
        sys.exit(main(given))
