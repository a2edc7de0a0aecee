#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""grouped_torch.py LIBRARY [--json FILE] [--seconds N] [--samples N] [--shapes N,...]

Groups of products of loongblocks.h (lk_gemm_groups_run()) beside torch, on a GPU, in bf16: tokens of experts times their
matrices, of uneven and of even numbers of tokens. In every way that there is: in a row, on several streams (also with
methods for a share of the multiprocessors), grouped by cuBLAS, batched (even only; also with weights anywhere), and as the
library chooses. Of torch: a loop, bmm (even only) and _grouped_mm where it is there. As graphs, replayed in turn; medians.
`host` is what a call costs the thread that makes it. Under each shape: which way was chosen, and torch's best time over
that of the choice (1 and more is the aim). No shape is begun after --seconds (25). Ends with 1 if a result is wrong, 77
without a GPU.
"""
import argparse
import ctypes
import itertools
import json
import pathlib
import statistics
import sys
import time

import torch
from graphs_torch import capture, measure

P, F32, INT, U32, U64 = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64
BF16 = 1
AUTO, IN_A_ROW, GROUPED, STREAMS, BATCHED = range(5)
# experts, tokens of all of them, hidden, columns
SHAPES = [(8, 8192, 4096, 14336), (64, 32768, 2048, 1536), (128, 65536, 2048, 1536), (128, 8192, 2048, 1536)]
SAMPLE_MS = 8
CHOSEN = "as it chooses"


class Gemm(ctypes.Structure):
    _fields_ = [("rows", U64), ("columns", U64), ("depth", U64), ("type", INT), ("out_type", INT), ("a", P), ("b", P),
                ("a_stride", U64), ("b_stride", U64), ("a_transposed", INT), ("b_transposed", INT), ("alpha", F32),
                ("beta", F32), ("c", P), ("c_stride", U64), ("bias", P), ("d", P), ("d_stride", U64), ("workspace", P),
                ("workspace_bytes", ctypes.c_size_t), ("sms", U32)]


class Groups(ctypes.Structure):
    _fields_ = [("gemms", P), ("count", U32), ("grouping", INT), ("workspace", P), ("streams", U32), ("sms", U32)]


class Counts(ctypes.Structure):
    _fields_ = [(name, U64) for name in ("vendor", "general", "plans", "grouped", "batched", "spread")]


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        for name in ("lk_error_text", "lk_blas_error"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.lib.lk_gemm_groups_workspace_bytes.restype = ctypes.c_size_t
        self.lib.lk_gemm_groups_run.argtypes = [P, P, P]
        self.blas = P()
        self.check(self.lib.lk_blas_open(None, 0, ctypes.byref(self.blas)))
        self.space = torch.empty(self.lib.lk_gemm_groups_workspace_bytes(self.blas) + 256, dtype=torch.uint8,
                                 device="cuda")

    def check(self, result):
        if result:
            raise RuntimeError(f"{self.lib.lk_error_text(result).decode()}; {self.lib.lk_blas_error().decode()}")

    def way(self, x, weights, counts, out, grouping, streams=0, sms=0):
        """A function that makes out = x weights^T, expert by expert."""
        first, gemms = 0, []
        for weight, rows in zip(weights, counts):
            gemms.append(Gemm(rows=rows, columns=weight.shape[0], depth=weight.shape[1], type=BF16, out_type=BF16,
                              a=x.data_ptr() + first * x.stride(0) * 2, a_stride=x.stride(0), b=weight.data_ptr(),
                              b_stride=weight.stride(0), b_transposed=1, alpha=1,
                              d=out.data_ptr() + first * out.stride(0) * 2, d_stride=out.stride(0)))
            first += rows
        array = (Gemm * len(gemms))(*gemms)
        space = (self.space.data_ptr() + 255) // 256 * 256
        groups = Groups(ctypes.cast(array, P), len(gemms), grouping, space, streams, sms)

        def call():
            self.check(self.lib.lk_gemm_groups_run(self.blas, ctypes.byref(groups),
                                                   torch.cuda.current_stream().cuda_stream))
            return out
        call.keep = array, groups, weights
        return call

    def counts(self):
        counts = Counts()
        self.lib.lk_blas_counts(self.blas, ctypes.byref(counts))
        return {name: getattr(counts, name) for name, _ in Counts._fields_}

    def taken(self, call):
        """Which way a call takes."""
        before = self.counts()
        call()
        after = self.counts()
        names = [("grouped", "grouped"), ("batched", "batched"), ("spread", "on streams")]
        return ", ".join(text for name, text in names if after[name] > before[name]) or "in a row"


def draw_counts(experts, tokens):
    """Uneven, with one expert that has none."""
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(7)) + 0.2
    shares[experts // 2] = 0
    counts = (shares / shares.sum() * tokens).long()
    counts[0] += tokens - counts.sum()
    return counts.tolist()


def ours(library, x, weights, counts, out, even):
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def way(*args):
        return library.way(x, weights, counts, out, *args)
    ways = {"in a row": way(IN_A_ROW), "2 streams": way(STREAMS, 2), "4 streams": way(STREAMS, 4),
            "8 streams": way(STREAMS, 8), "4 streams, 1/4": way(STREAMS, 4, sms // 4),
            "8 streams, 1/4": way(STREAMS, 8, sms // 4), "8 streams, 1/8": way(STREAMS, 8, sms // 8),
            "grouped": way(GROUPED)}
    if even:
        apart = [None] * len(weights)
        for i in torch.randperm(len(weights)).tolist():  # so that they do not lie evenly
            apart[i] = weights[i].clone()
        ways["batched"] = way(BATCHED)
        ways["batched, lists"] = library.way(x, apart, counts, out, BATCHED)
    ways[CHOSEN] = way(AUTO)
    return ways


def make_ways(library, shape, even):
    experts, tokens, hidden, columns = shape
    counts = [tokens // experts] * experts if even else draw_counts(experts, tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(experts, columns, hidden, device="cuda", dtype=torch.bfloat16) * hidden ** -0.5
    out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)

    def loop():
        pieces = [a @ w.t() for a, w in zip(x.split(counts), weights) if len(a)]
        return torch.cat(pieces)

    ways = ours(library, x, weights, counts, out, even)
    ways["torch, loop"] = loop
    if even:
        ways["torch, bmm"] = lambda: torch.bmm(x.view(experts, -1, hidden), weights.transpose(1, 2)).view(tokens, columns)
    if hasattr(torch, "_grouped_mm"):
        ways["torch, grouped"] = lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return ways, 2 * tokens * hidden * columns


def host_us(way, times=5):
    """What a call takes of the calling thread, while the device has nothing to do."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        way()
        found.append((time.perf_counter() - begun) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def prepare(ways, want):
    """Graphs of all ways, what they cost the host, and whether results are right."""
    graphs, hosts, good = {}, {}, True
    for name, way in ways.items():
        try:
            got = way()
            error = ((got.float() - want).norm() / want.norm()).item()
            good &= error < 0.01
            if not error < 0.01:
                print(f"FAILED: {name}: error {error:.1e}")
            hosts[name] = host_us(way)
            graphs[name] = capture(way)
        except RuntimeError as reason:
            good &= name.startswith("torch")
            print(f"{'' if name.startswith('torch') else 'FAILED: '}{name}: {str(reason).splitlines()[0]}")
    return graphs, hosts, good


def run_shape(library, shape, even, samples):
    ways, flops = make_ways(library, shape, even)
    graphs, hosts, good = prepare(ways, ways["torch, loop"]().float())
    print(f"\n{shape[0]} experts, {shape[1]} tokens, {'even' if even else 'uneven'}, {shape[2]} x {shape[3]}")
    times = {name: us for name, (us, _, _) in measure(graphs, samples, SAMPLE_MS).items()}
    for name, us in times.items():
        print(f"{name:16} {us:9.1f} us, {flops / us / 1e6:6.0f} TFLOP/s, host {hosts[name]:7.1f} us", flush=True)
    best = min((us, name) for name, us in times.items() if name.startswith("torch"))
    fastest = min((us, name) for name, us in times.items() if not name.startswith("torch") and name != CHOSEN)
    row = {"op": "groups", "experts": shape[0], "tokens": shape[1], "even": even, "hidden": shape[2], "columns": shape[3]}
    rows = [dict(row, variant=name, median_us=us, host_us=hosts[name]) for name, us in times.items()]
    if CHOSEN in times:
        taken, ratio = library.taken(ways[CHOSEN]), best[0] / times[CHOSEN]
        rows.append(dict(row, variant="choice", taken=taken, ratio=ratio, best_of_torch=best[1], best_of_ours=fastest[1],
                         best_ratio=best[0] / fastest[0]))
        print(f"  chosen: {taken}; {best[1]} / that {ratio:.2f}; our fastest: {fastest[1]}, {best[0] / fastest[0]:.2f}")
    return rows, good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--shapes", default="0,1,2,3")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    begun, rows, good = time.monotonic(), [], True
    library = Library(args.library)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine)
    for shape, even in itertools.product([SHAPES[int(n)] for n in args.shapes.split(",")], (False, True)):
        if time.monotonic() - begun > args.seconds:
            print(f"left out for want of time: {shape}")
            continue
        found, right = run_shape(library, shape, even, args.samples)
        rows += found
        good &= right
        torch.cuda.empty_cache()
    for row in rows:
        if row["variant"] == "choice":
            print(f"{row['experts']:4} x {row['tokens']:6} {'even' if row['even'] else 'uneven':6}: {row['taken']}, "
                  f"{row['ratio']:.2f} of {row['best_of_torch']}; {row['best_of_ours']} {row['best_ratio']:.2f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s; {'all results agree' if good else 'FAILED, see above'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
