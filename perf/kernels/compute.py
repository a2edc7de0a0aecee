#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The memory-bound compute kernels of the kernels library: the bytes they must move per second as a share of what a copy
moves in the same round, and the time beside torch's, eager and compiled. Some have a limit beside them, which touches the
bytes that the case has to, or a part of them, in order and does nothing else.

usage: perf/kernels/compute.py [--library FILE] [--only LIST] [--rounds N] [--limit SECONDS] [--no-compile]
       [--json FILE] [--small]

Beside it stands the share of what a copy of that many bytes moves (cudaMemcpyAsync, as cold): where that is small, so is the
copy's rate. Every round times the copies and all variants of a case in turn; a figure is the median over rounds. The GPU sleeps while a
sample is put onto the stream, so that the host's time for it does not count. A case that touches little has several sets of
tensors, which take turns, so that its data comes from memory and not from L2. Results are checked before they are timed
against torch in fp32. --only: names of cases, or the beginning of them. --limit: no case is begun and nothing is
compiled after so long. --small: small shapes, to try the program out (with the host library, without a GPU). Ends with
77 where torch or the GPU is missing, 1 if a result is wrong."""
import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMPILE_MODE = "max-autotune-no-cudagraphs"
COLD = 400 << 20  # bytes that the sets of a case touch together: several times L2
SAMPLE_US = 1000

try:
    import torch
    import torch._functorch.config
    import torch.nn.functional as F
    import loongcompute as lk
except ImportError as missing:
    print("SKIPPED: no %s" % missing.name)
    sys.exit(77)


class Bench:
    """What cases use: the library, the device, how they make data."""

    def __init__(self, options):
        self.options = options
        self.lib = lk.Library(options.library)
        self.device = self.lib.device
        self.cuda = self.device.type == "cuda"
        self.begun = time.monotonic()
        self.shrink = 64 if options.small else 1
        self.compiling = self.cuda and not options.no_compile
        self.generator = torch.Generator(self.device).manual_seed(1)
        size = (256 << 20) // (self.shrink * self.shrink)
        self.copy_from, self.copy_to = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.copy_best = 0

    def late(self):
        return time.monotonic() - self.begun > self.options.limit

    def rows(self, rows):
        return max(rows // self.shrink, 1)

    def random(self, *shape, dtype=torch.bfloat16, scale=1.0):
        out = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return out.mul_(scale).to(dtype)

    def empty(self, *shape, dtype=torch.bfloat16):
        return torch.empty(*shape, device=self.device, dtype=dtype)

    def compile(self, function):
        """None where there is no time for it."""
        if not self.compiling or time.monotonic() - self.begun > self.options.limit * 0.6:
            return None
        return torch.compile(function, mode=COMPILE_MODE, dynamic=False)

    def copy(self):
        self.copy_to.copy_(self.copy_from)

    # -- timing --

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def sample(self, calls, count, host_us):
        """Microseconds of one call out of `count`."""
        if not self.cuda:
            begun = time.perf_counter()
            for i in range(count):
                calls[i % len(calls)]()
            return (time.perf_counter() - begun) * 1e6 / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((host_us * count * 1.5 + 100) * 2000))
        begin.record()
        for i in range(count):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    def prepare(self, calls):
        """Warms up; calls of one sample, and the host's time of one."""
        for call in calls:
            call()
        self.wait()
        begun = time.perf_counter()
        for call in calls:
            call()
        host_us = (time.perf_counter() - begun) * 1e6 / len(calls)
        self.wait()
        us = self.sample(calls, max(len(calls), 3), host_us)
        count = 1 if self.options.small else min(max(int(SAMPLE_US / us) + 1, 2), 200)
        return calls, count, host_us

    def copies_of(self, moved):
        """Copies that move so many bytes each, one behind another through what copy() copies: as cold as a case's sets."""
        size = min(max(moved // 2, 1), self.copy_from.numel())
        count = min(self.copy_from.numel() // size, 16)
        pairs = [(self.copy_to[i * size:(i + 1) * size], self.copy_from[i * size:(i + 1) * size]) for i in range(count)]
        return [lambda to=to, source=source: to.copy_(source) for to, source in pairs], 2 * size

    def measure(self, variants, moved):
        """Times per variant and round, with those of a large copy and GB/s of one that moves as many bytes as a call does."""
        prepared = {name: self.prepare(calls) for name, calls in variants.items()}
        prepared["copy"] = self.prepare([self.copy])
        copies, size = self.copies_of(moved)
        prepared["same size"] = self.prepare(copies)
        times = {name: [] for name in prepared}
        for _ in range(self.options.rounds):
            for name, arguments in prepared.items():
                times[name].append(self.sample(*arguments))
        times["same size"] = [size / us * 1e-3 for us in times["same size"]]
        return times


def error(got, want):
    """Largest difference, of the largest value."""
    got, want = got.float(), want.float()
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


class Case:
    """One shape of one operation. `sets` hold the tensors; make(set) gives the call of the library; `rivals` gives
    functions of a set, `limits` the same with the bytes that they move; check() gives errors, each to be within its
    bound."""

    dtype = "bf16"

    def __init__(self, op, shape, bytes_moved):
        self.op, self.shape, self.bytes = op, shape, bytes_moved

    def limits(self, bench):
        return {}

    def count_sets(self):
        return min(max(math.ceil(COLD / self.bytes), 1), 16)


# ---- norms ----


class NormForward(Case):
    def __init__(self, bench, kind, rows, columns, residual=False, statistics_only=False, compiled=False):
        rows = bench.rows(rows)
        self.kind, self.rows, self.columns, self.residual = kind, rows, columns, residual
        self.statistics_only, self.compiled = statistics_only, compiled
        name = ("rms" if kind == lk.RMS else "layer") + " norm"
        name += " residual" if residual else " statistics" if statistics_only else ""
        moved = 2 * rows * columns * (4 if residual else 1 if statistics_only else 2)
        super().__init__(name, "%d x %d" % (rows, columns), moved + (8 if kind else 4) * rows)

    def make_set(self, bench):
        s = argparse.Namespace(x=bench.random(self.rows, self.columns), gamma=bench.random(self.columns) + 1)
        s.beta = bench.random(self.columns) if self.kind == lk.LAYER else None
        s.residual = bench.random(self.rows, self.columns) if self.residual else None
        s.sum = torch.empty_like(s.x) if self.residual else None
        s.y = None if self.statistics_only else torch.empty_like(s.x)
        s.mean, s.rstd = (bench.empty(self.rows, dtype=torch.float32) for _ in range(2))
        return s

    def make(self, bench, s):
        n = self.columns
        norm = lk.Norm(self.kind, self.rows, n, 1e-5, lk.BF16, lk.at(s.gamma), lk.at(s.beta), 0,
                       lk.at(s.mean) if self.kind else None, lk.at(s.rstd))
        forward = lk.NormForward(lk.at(s.x), n, lk.at(s.residual), n, lk.at(s.sum), n, lk.at(s.y), n)
        return bench.lib.prepare("lk_norm_forward", norm, forward)

    def torch(self, x, residual, gamma, beta):
        s = x + residual if residual is not None else x
        if self.kind == lk.RMS:
            y = F.rms_norm(s, (self.columns,), gamma, 1e-5)
        else:
            y = F.layer_norm(s, (self.columns,), gamma, beta, 1e-5)
        return (s, y) if residual is not None else y

    def rivals(self, bench):
        if self.statistics_only:
            return {}
        out = {"eager": lambda s: self.torch(s.x, s.residual, s.gamma, s.beta)}
        fast = bench.compile(self.torch) if self.compiled else None
        if fast:
            out["compiled"] = lambda s: fast(s.x, s.residual, s.gamma, s.beta)
        return out

    def check(self, bench, s):
        total = s.x.float() if s.residual is None else (s.x + s.residual).float()
        if self.statistics_only:
            want = (total.var(1, correction=0) if self.kind else total.square().mean(1)).add(1e-5).rsqrt()
            return [(error(s.rstd, want), 1e-5)]
        y = self.torch(total, None, s.gamma.float(), None if s.beta is None else s.beta.float())
        return [(error(s.y, y), 1e-2)] + ([(error(s.sum, total), 1e-6)] if self.residual else [])


class NormBackward(Case):
    def __init__(self, bench, kind, rows, columns, residual=False, compiled=False):
        rows = bench.rows(rows)
        self.kind, self.rows, self.columns, self.residual, self.compiled = kind, rows, columns, residual, compiled
        name = ("rms" if kind == lk.RMS else "layer") + (" norm back resid" if residual else " norm backward")
        super().__init__(name[:20], "%d x %d" % (rows, columns),
                         2 * rows * columns * (4 if residual else 3) + (8 if kind else 4) * rows)

    def make_set(self, bench):
        s = NormForward.make_set(self.forward(bench), bench)
        s.dy = bench.random(self.rows, self.columns)
        s.ds = bench.random(self.rows, self.columns) if self.residual else None
        s.dx = torch.empty_like(s.x)
        s.dgamma = bench.empty(self.columns, dtype=torch.float32)
        s.dbeta = torch.empty_like(s.dgamma) if self.kind == lk.LAYER else None
        NormForward.make(self.forward(bench), bench, s)()
        return s

    def forward(self, bench):
        out = NormForward.__new__(NormForward)
        out.kind, out.rows, out.columns, out.residual, out.statistics_only = (self.kind, self.rows, self.columns,
                                                                             False, False)
        return out

    def make(self, bench, s):
        n = self.columns
        norm = lk.Norm(self.kind, self.rows, n, 1e-5, lk.BF16, lk.at(s.gamma), lk.at(s.beta), 0,
                       lk.at(s.mean) if self.kind else None, lk.at(s.rstd))
        s.workspace = bench.empty(bench.lib.lib.lk_norm_workspace_bytes(lk.ctypes.byref(norm)), dtype=torch.uint8)
        backward = lk.NormBackward(lk.at(s.x), n, lk.at(s.dy), n, lk.at(s.ds), n, lk.at(s.dx), n, lk.at(s.dgamma),
                                   lk.at(s.dbeta), lk.at(s.workspace))
        return bench.lib.prepare("lk_norm_backward", norm, backward)

    def graph(self, function, s, convert=lambda t: t):
        """Gradients of one set as a function without arguments. With a residual x reaches the end in two ways."""
        leaves = [convert(t).detach().clone().requires_grad_() for t in (s.x, s.gamma, s.beta) if t is not None]
        y = function(leaves[0], None, leaves[1], leaves[2] if len(leaves) > 2 else None)
        outputs, gradients = [y], [convert(s.dy)]
        if s.ds is not None:
            outputs, gradients = [y, leaves[0].view_as(leaves[0])], [gradients[0], convert(s.ds)]
        return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)

    def rivals(self, bench):
        torch_norm = self.forward(bench).torch

        def with_graph(function):
            def call(s, name=object()):
                graphs = s.__dict__.setdefault("graphs", {})
                if name not in graphs:
                    graphs[name] = self.graph(function, s)
                return graphs[name]()
            return call

        out = {"eager": with_graph(torch_norm)}
        fast = bench.compile(torch_norm) if self.compiled else None
        if fast:
            out["compiled"] = with_graph(fast)
        return out

    def limits(self, bench):
        if self.residual:
            return {}
        return {"addition": (lambda s: torch.add(s.x, s.dy, out=s.dx), self.bytes)}

    def check(self, bench, s):
        want = self.graph(self.forward(bench).torch, s, lambda t: t.float())()
        out = [(error(s.dx, want[0]), 1e-2), (error(s.dgamma, want[1]), 1e-3)]
        return out + ([(error(s.dbeta, want[2]), 1e-3)] if self.kind == lk.LAYER else [])


# ---- SwiGLU ----


class Swiglu(Case):
    def __init__(self, bench, rows, columns, backward=False, drop=0.0, scaled=False, compiled=False):
        rows = bench.rows(rows)
        self.rows, self.columns, self.backward, self.drop, self.scaled = rows, columns, backward, drop, scaled
        self.compiled = compiled
        name = "swiglu" + (" back" if backward else "") + (" drop" if drop else "") + (" rms" if scaled else "")
        moved = 2 * rows * columns * (5 if backward else 3) + (4 * rows * (2 if backward else 1) if scaled else 0)
        super().__init__(name, "%d x %d" % (rows, columns), moved)

    def make_set(self, bench):
        s = argparse.Namespace(z=bench.random(self.rows, 2 * self.columns), h=bench.empty(self.rows, self.columns))
        s.scale = bench.random(self.rows, dtype=torch.float32).abs_().add_(0.5) if self.scaled else None
        if self.backward:
            s.dh, s.dz = bench.random(self.rows, self.columns), torch.empty_like(s.z)
            s.dot = bench.empty(self.rows, dtype=torch.float32) if self.scaled else None
        return s

    def make(self, bench, s):
        n = self.columns
        swiglu = lk.Swiglu(lk.at(s.z), 2 * n, lk.at(s.scale), self.rows, n, self.drop, lk.Rng(5, 0, None))
        if not self.backward:
            return bench.lib.prepare("lk_swiglu_forward", swiglu, lk.at(s.h), n)
        grads = lk.SwigluGrads(lk.at(s.dh), n, lk.at(s.dz), 2 * n, None, 0, lk.at(s.dot))
        return bench.lib.prepare("lk_swiglu_backward", swiglu, grads)

    def torch(self, z, scale, drop):
        if scale is not None:
            z = z * scale[:, None].to(z.dtype)
        gate, up = z.chunk(2, 1)
        h = F.silu(gate) * up
        return F.dropout(h, drop) if drop else h

    def graph(self, function, s, convert=lambda t: t):
        z = convert(s.z).detach().clone().requires_grad_()
        h, dh = function(z, s.scale, self.drop), convert(s.dh)
        return lambda: torch.autograd.grad(h, z, dh, retain_graph=True)

    def rivals(self, bench):
        def wrap(function):
            if not self.backward:
                return lambda s: function(s.z, s.scale, self.drop)

            def call(s, name=object()):
                graphs = s.__dict__.setdefault("graphs", {})
                if name not in graphs:
                    graphs[name] = self.graph(function, s)
                return graphs[name]()
            return call

        out = {"eager": wrap(self.torch)}
        fast = bench.compile(self.torch) if self.compiled else None
        if fast:
            out["compiled"] = wrap(fast)
        return out

    def check(self, bench, s):
        if self.drop:  # torch drops others
            kept = (s.dz[:, :self.columns] if self.backward else s.h) != 0
            share = kept.float().mean().item()
            return [(abs(share - (1 - self.drop)), 0.02)]
        if self.backward:
            return [(error(s.dz, self.graph(self.torch, s, lambda t: t.float())()[0]), 1e-2)]
        return [(error(s.h, self.torch(s.z.float(), s.scale, 0)), 1e-2)]


# ---- AdamW ----


class Adamw(Case):
    """The parts of a transformer's layer with 1024 columns: 25 of them are 399 million parameters in 300 tensors."""

    parts = (3072 * 1024, 3072, 1024 * 1024, 1024, 1024, 1024, 5760 * 1024, 5760, 5760 * 1024, 1024, 1024, 1024)

    def __init__(self, bench, dtype, rival=True):
        self.torch_dtype, self.rival = dtype, rival
        self.dtype = "f32" if dtype == torch.float32 else "bf16"
        self.counts = [bench.rows(n) for n in self.parts] * (1 if bench.options.small else 25)
        # the norm reads gradients; the update reads and writes the parameter (or its master), m and v
        each = 32 if dtype == torch.float32 else 30
        super().__init__("adamw clip", "%d tensors" % len(self.counts), each * sum(self.counts))

    def make_set(self, bench):
        s = argparse.Namespace()
        for name in ("ours", "theirs") if self.rival else ("ours",):
            bench.generator.manual_seed(3)
            params = [torch.nn.Parameter(bench.random(n, dtype=self.torch_dtype)) for n in self.counts]
            for p in params:
                p.grad = bench.random(p.numel(), dtype=self.torch_dtype)
            setattr(s, name, params)
        return s

    def make(self, bench, s):
        s.keep = bench.lib.adamw(s.ours, lr=1e-4, max_norm=1.0)
        return s.keep

    def rivals(self, bench):
        if not self.rival:
            return {}

        def step(s, clip):
            if not hasattr(s, "optimizer"):
                s.optimizer = torch.optim.AdamW(s.theirs, lr=1e-4, weight_decay=0.01, fused=True)
            if clip:
                torch.nn.utils.clip_grad_norm_(s.theirs, 1.0, foreach=True)
            s.optimizer.step()

        return {"fused and clip_grad_norm_": lambda s: step(s, True), "fused, not clipped": lambda s: step(s, False)}

    def check(self, bench, s):
        masters = [p.detach().float() for p in s.ours]
        fresh = self.make_set(bench)
        step = bench.lib.adamw(fresh.ours, lr=1e-2, max_norm=1.0)
        step()
        bench.generator.manual_seed(3)
        theirs = [torch.nn.Parameter(bench.random(n, dtype=self.torch_dtype).float()) for n in self.counts]
        for p in theirs:
            p.grad = bench.random(p.numel(), dtype=self.torch_dtype).float()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0, foreach=True)
        torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.01, foreach=True).step()
        del masters
        got = [w if w is not None else p for p, w in zip(fresh.ours, step.kept[0])]
        return [(max(error(a.detach(), b.detach()) for a, b in zip(got, theirs)), 1e-5)]


# ---- rows of tokens to experts ----


class Moe(Case):
    def __init__(self, bench, op, tokens, columns, choices, experts, capacity=False, weights=True):
        self.op, self.tokens, self.columns, self.choices = op, bench.rows(tokens), columns, choices
        self.experts, self.weights = experts, weights
        slots = self.tokens * choices
        self.capacity = max(slots // experts * 5 // 4, 1) if capacity else 0
        self.rows = self.capacity * experts if capacity else slots
        filled = min(slots, self.rows)
        shape = "%d tokens, %d of %d experts, %d columns%s" % (self.tokens, choices, experts, columns,
                                                                ", capacity" if capacity else "")
        moved = {"moe route": 4 * (3 * slots), "moe permute": 2 * columns * (filled + self.tokens),
                 "moe combine": 2 * columns * (filled + self.tokens),
                 "moe combine back": 2 * columns * (2 * filled + self.tokens)}[op]
        super().__init__(op, shape, moved)

    def make_set(self, bench):
        s, slots = argparse.Namespace(), self.tokens * self.choices
        scores = torch.rand(self.tokens, self.experts, generator=bench.generator, device=bench.device)
        s.weights, chosen = scores.topk(self.choices, dim=1)
        s.experts = chosen.to(torch.int32).contiguous()
        s.weights = (s.weights / s.weights.sum(1, keepdim=True)).contiguous()
        ints = lambda n: torch.empty(max(n, 1), dtype=torch.int32, device=bench.device)
        s.row_of_slot, s.slot_of_row = ints(slots), ints(self.rows)
        s.counts, s.offsets, s.live = ints(self.experts), ints(self.experts + 1), ints((self.rows + 31) // 32)
        s.routing = lk.MoeRouting(lk.at(s.experts), self.tokens, self.choices, self.experts, self.capacity, 1,
                                  self.rows, lk.at(s.row_of_slot), lk.at(s.slot_of_row), lk.at(s.counts),
                                  lk.at(s.offsets), lk.at(s.live))
        s.workspace = bench.empty(bench.lib.lib.lk_moe_workspace_bytes(ctypes.byref(s.routing)), dtype=torch.uint8)
        s.routing.workspace = lk.at(s.workspace)
        bench.lib.prepare("lk_moe_route", s.routing)()
        s.x = bench.random(self.tokens, self.columns)
        s.permuted = torch.zeros(self.rows, self.columns, dtype=torch.bfloat16, device=bench.device)
        s.token_of_row = (s.slot_of_row.clamp_min(0) // self.choices).long()
        s.long_rows = s.row_of_slot.clamp_min(0).long()
        s.row_weights = s.weights.flatten()[s.slot_of_row.clamp_min(0).long()] * (s.slot_of_row >= 0)
        s.slot_weights = (s.weights.flatten() * (s.row_of_slot >= 0)).view(self.tokens, self.choices)
        if self.op.startswith("moe combine"):
            s.permuted.copy_(bench.random(self.rows, self.columns))
            s.out = torch.empty_like(s.x)
        if self.op == "moe combine back":
            s.dpermuted, s.dweights = torch.empty_like(s.permuted), torch.empty_like(s.weights)
        return s

    def make(self, bench, s):
        if self.op == "moe route":
            return bench.lib.prepare("lk_moe_route", s.routing)
        if self.op == "moe combine back":
            n = self.columns
            return bench.lib.prepare("lk_moe_unpermute_backward", s.routing, lk.MoeGrads(
                lk.at(s.x), n, lk.at(s.permuted), n, lk.at(s.dpermuted), n, n, lk.at(s.weights), lk.at(s.dweights), 0))
        combine = self.op == "moe combine"
        rows = lk.MoeRows(lk.at(s.out if combine else s.x), self.columns, lk.at(s.permuted), self.columns, self.columns,
                          lk.at(s.weights) if combine else None, 0)
        return bench.lib.prepare("lk_moe_unpermute" if combine else "lk_moe_permute", s.routing, rows)

    def route(self, s):
        order = s.experts.flatten().argsort(stable=True)
        return order, torch.bincount(s.experts.flatten(), minlength=self.experts).cumsum(0)

    def scatter(self, s):
        out = torch.zeros_like(s.x)
        return out.index_add_(0, s.token_of_row, s.permuted * s.row_weights[:, None].to(torch.bfloat16))

    def gather(self, s):
        rows = s.permuted.index_select(0, s.long_rows).view(self.tokens, self.choices, self.columns)
        return (rows * s.slot_weights[:, :, None].to(torch.bfloat16)).sum(1)

    def rivals(self, bench):
        if self.op == "moe route":
            return {"argsort and bincount": self.route}
        if self.op == "moe permute":
            return {"index_select": lambda s: s.x.index_select(0, s.token_of_row)}
        if self.op == "moe combine back":
            out = {"eager": lambda s: self.back(s.x, s.permuted, s.token_of_row, s.row_weights, s.long_rows)}
            fast = bench.compile(self.back) if not self.capacity else None
            if fast:
                out["compiled"] = lambda s: fast(s.x, s.permuted, s.token_of_row, s.row_weights, s.long_rows)
            return out
        out = {"scatter": self.scatter, "gather": self.gather}
        fast = bench.compile(self.gather_of) if not self.capacity else None
        if fast:
            out["compiled gather"] = lambda s: fast(s.permuted, s.long_rows, s.slot_weights)
        return out

    def limits(self, bench):
        """Every token's rows one behind another, and no token's."""
        if self.op != "moe permute":
            return {}
        groups, size = self.columns // 8, 2 * self.columns * self.rows
        slots = min(self.tokens * self.choices, self.rows) // self.choices * self.choices
        wide = lambda t: t.view(torch.complex128).view(-1, groups)
        to = lambda s: wide(s.permuted)[:slots].view(-1, self.choices, groups)
        return {"rows in order": (lambda s: to(s).copy_(wide(s.x)[:slots // self.choices, None]), self.bytes),
                "zeros alone": (lambda s: s.permuted.zero_(), size)}

    def back(self, x, permuted, token_of_row, row_weights, long_rows):
        rows = x.index_select(0, token_of_row)
        dots = (rows.float() * permuted.float()).sum(1)
        return (rows * row_weights[:, None]).to(torch.bfloat16), dots.index_select(0, long_rows)

    def gather_of(self, permuted, long_rows, slot_weights):
        rows = permuted.index_select(0, long_rows).view(self.tokens, self.choices, self.columns)
        return (rows * slot_weights[:, :, None]).sum(1).to(torch.bfloat16)

    def check(self, bench, s):
        filled = s.slot_of_row >= 0
        if self.op == "moe route":
            order = s.experts.flatten().argsort(stable=True).to(torch.int32)
            wrong = 0 if self.capacity else (order != s.slot_of_row).sum().item()
            return [(wrong + abs(filled.sum().item() - s.counts.sum().item()), 0)]
        if self.op == "moe permute":
            want = s.x.index_select(0, s.token_of_row) * filled[:, None]
            return [((s.permuted * filled[:, None] != want).sum().item(), 0)]
        if self.op == "moe combine back":
            rows, dots = self.back(s.x, s.permuted, s.token_of_row, s.row_weights, s.long_rows)
            return [((s.dpermuted != rows)[filled].sum().item(), 0),
                    (error(s.dweights.flatten(), dots * (s.row_of_slot >= 0)), 1e-4)]
        rows = s.permuted.float().index_select(0, s.long_rows).view(self.tokens, self.choices, self.columns)
        return [(error(s.out, (rows * s.slot_weights[:, :, None]).sum(1)), 1e-2)]


# ---- augmentation ----


class Augment(Case):
    """256 x 256 to 224 x 224. The rival does the same steps, but hue, for a whole batch at a time."""

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self, bench, images, jitter):
        self.images, self.jitter = max(images // bench.shrink, 4), jitter
        read = 0.5 * 256 * 256 * 3  # half of an image, on average
        super().__init__("augment" + (" jitter" if jitter else ""), "%d x 256 x 256" % self.images,
                         int(self.images * (read + 224 * 224 * 3 * 2)))

    def make_set(self, bench):
        s = argparse.Namespace()
        s.images = torch.randint(0, 256, (self.images, 256, 256, 3), generator=bench.generator, device=bench.device,
                                 dtype=torch.uint8)
        s.state = torch.tensor([1, 0], dtype=torch.int64, device=bench.device)
        s.out = bench.empty(self.images, 3, 224, 224)
        s.mean, s.std = (torch.tensor(x, device=bench.device).view(1, 3, 1, 1) for x in (self.mean, self.std))
        return s

    def call(self, bench, s, out, out_type, **numbers):
        call = lk.Augment(images=lk.at(s.images), image_stride=256 * 256 * 3, row_stride=256 * 3, count=out.shape[0],
                          height=256, width=256, channels=3, state=lk.at(s.state), out=lk.at(out), out_type=out_type,
                          out_height=224, out_width=224)
        for name, value in dict(numbers, mean=self.mean, std=self.std).items():
            setattr(call, name, type(getattr(call, name))(*value) if isinstance(value, tuple) else value)
        return bench.lib.prepare("lk_augment_images", call)

    def make(self, bench, s):
        colours = dict(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1) if self.jitter else {}
        return self.call(bench, s, s.out, lk.BF16, crop_area=(0.2, 0.8), crop_ratio=(3 / 4, 4 / 3), flip=0.5, erase=0.25,
                         erase_area=(0.02, 0.33), erase_ratio=(0.3, 3.3), **colours)

    def torch(self, images, mean, std):
        n, device = images.shape[0], images.device
        draw = lambda low, high: torch.rand(n, device=device) * (high - low) + low
        x = images.permute(0, 3, 1, 2).float() / 255
        size, ratio, flip = draw(0.2, 0.8), torch.exp(draw(math.log(3 / 4), math.log(4 / 3))), draw(0, 1) < 0.5
        w, h = (size * ratio).sqrt().clamp(max=1), (size / ratio).sqrt().clamp(max=1)
        zero = torch.zeros_like(w)
        theta = torch.stack([torch.where(flip, -w, w), zero, (1 - w) * draw(-1, 1), zero, h, (1 - h) * draw(-1, 1)], 1)
        grid = F.affine_grid(theta.view(n, 2, 3), (n, 3, 224, 224), align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
        if self.jitter:
            x = (x * draw(0.6, 1.4).view(n, 1, 1, 1)).clamp(0, 1)
            gray = lambda t: (t * torch.tensor([0.2989, 0.587, 0.114], device=device).view(1, 3, 1, 1)).sum(1, keepdim=True)
            for other in (gray(x).mean((2, 3), keepdim=True), gray(x)):
                f = draw(0.6, 1.4).view(n, 1, 1, 1)
                x = (f * x + (1 - f) * other).clamp(0, 1)
        x = (x - mean) / std
        top, left, size = draw(0, 160).view(n, 1, 1), draw(0, 160).view(n, 1, 1), draw(32, 128).view(n, 1, 1)
        size = torch.where(draw(0, 1).view(n, 1, 1) < 0.25, size, zero.view(n, 1, 1))
        y = torch.arange(224, device=device)
        gone = ((y[None, :, None] - top).clamp(min=0) < size) & ((y[None, None, :] - left).clamp(min=0) < size)
        return x.masked_fill(gone[:, None] & (size > 0)[:, None], 0).to(torch.bfloat16)

    def rivals(self, bench):
        out = {"eager": lambda s: self.torch(s.images, s.mean, s.std)}
        fast = bench.compile(self.torch)
        if fast:
            out["compiled"] = lambda s: fast(s.images, s.mean, s.std)
        return out

    def check(self, bench, s):
        plain = bench.empty(4, 3, 224, 224, dtype=torch.float32)
        self.call(bench, s, plain, lk.FP32)()
        bench.wait()
        want = F.interpolate(s.images[:4].permute(0, 3, 1, 2).float() / 255, (224, 224), mode="bilinear")
        return [(error(plain, (want - s.mean) / s.std), 1e-4), (0 if torch.isfinite(s.out.float()).all() else 1, 0)]


def list_cases(b):
    """In the order in which they are worth their time."""
    f32 = torch.float32
    shapes = ((16384, 4096), (65536, 1024), (4096, 8192), (2048, 1024))
    yield lambda: Adamw(b, f32)
    for op in ("moe permute", "moe combine", "moe combine back", "moe route"):
        yield lambda: Moe(b, op, 8192, 2048, 8, 128)
        yield lambda: Moe(b, op, 16384, 4096, 2, 8)
    yield lambda: Augment(b, 1024, jitter=True)
    yield lambda: Augment(b, 1024, jitter=False)
    for kind in (lk.RMS, lk.LAYER):
        for rows, columns in shapes:
            first = (rows, columns) == shapes[0]
            yield lambda: NormForward(b, kind, rows, columns, compiled=first)
            yield lambda: NormBackward(b, kind, rows, columns, compiled=first)
    for rows, columns in ((8192, 14336), (65536, 768), (1024, 4096)):
        first = columns == 14336
        yield lambda: Swiglu(b, rows, columns, compiled=first)
        yield lambda: Swiglu(b, rows, columns, backward=True, compiled=first)
    yield lambda: Swiglu(b, 8192, 14336, drop=0.1)
    yield lambda: Swiglu(b, 8192, 14336, scaled=True)
    yield lambda: Swiglu(b, 8192, 14336, backward=True, drop=0.1, scaled=True)
    yield lambda: NormForward(b, lk.RMS, 16384, 4096, residual=True)
    yield lambda: NormForward(b, lk.RMS, 16384, 4096, statistics_only=True)
    yield lambda: NormForward(b, lk.LAYER, 16384, 4096, statistics_only=True)
    yield lambda: NormBackward(b, lk.RMS, 16384, 4096, residual=True)
    yield lambda: NormForward(b, lk.RMS, 4096, 5120)
    yield lambda: NormForward(b, lk.LAYER, 4096, 2050)
    for op in ("moe permute", "moe combine"):
        yield lambda: Moe(b, op, 8192, 2048, 8, 128, capacity=True)
    yield lambda: Adamw(b, torch.bfloat16, rival=False)


def quantile(values, share):
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def describe(values):
    return {"median": statistics.median(values), "p10": quantile(values, 0.1), "p90": quantile(values, 0.9),
            "rounds": values}


def figures(case, size, us, copy_gbs, same_gbs):
    """Of one variant that moves so many bytes, by the times of its rounds, beside those of the copies."""
    gbs = [size / t * 1e-3 for t in us]
    share = lambda of: statistics.median([g / c for g, c in zip(gbs, of)])
    return {"op": case.op, "case": case.shape, "bytes": size, "dtype": case.dtype, "ranks": 1, "live": 1,
            "median_us": statistics.median(us), "p10": quantile(us, 0.1), "p90": quantile(us, 0.9), "p99": quantile(us, 0.99),
            "algbw": statistics.median(gbs), "copy_gbs": statistics.median(copy_gbs), "copy_share": share(copy_gbs),
            "same_size_gbs": statistics.median(same_gbs), "same_size_share": share(same_gbs)}


def copy_rates(bench, times):
    """Takes the copies' rounds out of what measure() gives: GB/s of the large one and of those of the case's size."""
    return [2 * bench.copy_from.numel() / us * 1e-3 for us in times.pop("copy")], times.pop("same size")


def run_case(bench, case):
    """Records of one case."""
    sets = [case.make_set(bench) for _ in range(1 if isinstance(case, Adamw) else case.count_sets())]
    ours = [case.make(bench, s) for s in sets]
    ours[0]()
    bench.wait()
    errors = case.check(bench, sets[0])
    verified = all(got <= bound for got, bound in errors)
    variants = {"loongcomm": ours}
    for name, function in case.rivals(bench).items():
        try:
            function(sets[0])
        except Exception as failure:  # a compiler is not everywhere
            print("# %s, %s: %s" % (case.op, name, str(failure).splitlines()[0]))
            continue
        variants[name] = [lambda s=s, function=function: function(s) for s in sets]
    sizes = {}
    for name, (function, size) in case.limits(bench).items():
        sizes["limit: " + name] = size
        variants["limit: " + name] = [lambda s=s, function=function: function(s) for s in sets]
    times = bench.measure(variants, case.bytes)
    copy_gbs, same_gbs = copy_rates(bench, times)
    bench.copy_best = max(bench.copy_best, statistics.median(copy_gbs))
    records = [dict(figures(case, sizes.get(name, case.bytes), us, copy_gbs, same_gbs), variant=name, sets=len(sets))
               for name, us in times.items()]
    records[0].update(verified=verified, errors=[got for got, _ in errors])
    rivals = [name for name in times if name not in sizes and name not in ("loongcomm", "fused, not clipped")]
    if rivals:
        best = min(rivals, key=lambda name: statistics.median(times[name]))
        records[0].update(rival=best, ratio=describe([t / o for t, o in zip(times[best], times["loongcomm"])]))
    return records


def print_case(records):
    for r in records:
        line = "%-20s %-44s %-26s %9.1f %8.0f %5.1f %% %5.1f %%" % (
            r["op"], r["case"], r["variant"], r["median_us"], r["algbw"], 100 * r["copy_share"], 100 * r["same_size_share"])
        if "ratio" in r:
            line += "  %.2f (%.2f..%.2f) of %s" % (r["ratio"]["median"], r["ratio"]["p10"], r["ratio"]["p90"], r["rival"])
        if not r.get("verified", True):
            line += "  WRONG: %s" % r["errors"]
        print(line, flush=True)


def write(options, machine, records):
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"schema": "loongcomm.bench/1", "machine": machine, "command": sys.argv, "records": records}, out,
                      indent=1)


def main(options):
    bench = Bench(options)
    if bench.cuda and not torch.cuda.is_available():
        print("SKIPPED: no GPU on this machine")
        return 77
    bench.lib.check(bench.lib.lib.lk_compute_load_all())
    torch._functorch.config.donated_buffer = False  # graphs are gone through again and again
    machine = {"gpu": torch.cuda.get_device_name() if bench.cuda else None, "torch": torch.__version__}
    print("# %s, torch %s, %s" % (machine["gpu"] or "host library", machine["torch"], COMPILE_MODE))
    print("%-20s %-44s %-26s %9s %8s %7s %7s  %s" % ("operation", "case", "variant", "median us", "GB/s", "of copy", "of same",
                                                 "best of torch / ours (p10..p90)"))
    records, left_out = [], 0
    for make in list_cases(bench):
        case = make()
        if options.only and not any(case.op.startswith(name) for name in options.only):
            continue
        if bench.late():
            left_out += 1
            continue
        records += run_case(bench, case)
        print_case([r for r in records if (r["op"], r["case"], r["dtype"]) == (case.op, case.shape, case.dtype)])
        write(options, machine, records)
        del case
    right = all(r.get("verified", True) for r in records)
    print("# copy %.0f GB/s; %d cases left out for time; %.0f s; results %s" % (
        bench.copy_best, left_out, time.monotonic() - bench.begun, "right" if right else "WRONG"))
    return 0 if right else 1


def find_library():
    places = [os.path.join(ROOT, build, "kernels/libloongkernels.so") for build in ("build-gpu-kernels", "build")]
    return next((place for place in places if os.path.exists(place)), places[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--library", default=find_library())
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--limit", type=float, default=80)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--small", action="store_true")
    sys.exit(main(parser.parse_args()))
