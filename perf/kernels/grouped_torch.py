#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""grouped_torch.py LIBRARY [--json FILE] [--seconds N] [--samples N]

Groups of products of loongblocks.h (lk_gemm_groups_run()) beside torch, on a GPU, in bf16: tokens of experts times their
matrices. One by one by cuBLASLt, in groups by cuBLAS, and what torch has: a loop, and _grouped_mm where it is there. As graphs,
replayed in turn; medians. No shape is begun after --seconds (25). Ends with 1 if a result is wrong, 77 without a GPU.
"""
import argparse
import ctypes
import json
import pathlib
import sys
import time

import torch
from graphs_torch import capture, measure

P, F32, INT, U64 = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_uint64
BF16, AUTO, NEVER, ALWAYS = 1, 0, 1, 2
# experts, tokens of all of them, hidden, columns
SHAPES = [(8, 8192, 4096, 14336), (64, 32768, 2048, 1536), (128, 65536, 2048, 1536), (128, 8192, 2048, 1536)]
SAMPLE_MS = 8


class Gemm(ctypes.Structure):
    _fields_ = [("rows", U64), ("columns", U64), ("depth", U64), ("type", INT), ("out_type", INT), ("a", P), ("b", P),
                ("a_stride", U64), ("b_stride", U64), ("a_transposed", INT), ("b_transposed", INT), ("alpha", F32),
                ("beta", F32), ("c", P), ("c_stride", U64), ("bias", P), ("d", P), ("d_stride", U64), ("workspace", P),
                ("workspace_bytes", ctypes.c_size_t)]


class Groups(ctypes.Structure):
    _fields_ = [("gemms", P), ("count", ctypes.c_uint32), ("grouping", INT), ("workspace", P)]


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

    def forward(self, x, weights, counts, out, grouping):
        """out = x weights^T, expert by expert."""
        first, gemms = 0, []
        for weight, rows in zip(weights, counts):
            gemms.append(Gemm(rows=rows, columns=weight.shape[0], depth=weight.shape[1], type=BF16, out_type=BF16,
                              a=x[first:].data_ptr(), a_stride=x.stride(0), b=weight.data_ptr(),
                              b_stride=weight.stride(0), b_transposed=1, alpha=1, d=out[first:].data_ptr(),
                              d_stride=out.stride(0)))
            first += rows
        array = (Gemm * len(gemms))(*gemms)
        groups = Groups(ctypes.cast(array, P), len(gemms), grouping, (self.space.data_ptr() + 255) // 256 * 256)
        self.check(self.lib.lk_gemm_groups_run(self.blas, ctypes.byref(groups), torch.cuda.current_stream().cuda_stream))
        return out


def draw_counts(experts, tokens):
    """Uneven, with one expert that has none."""
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(7)) + 0.2
    shares[experts // 2] = 0
    counts = (shares / shares.sum() * tokens).long()
    counts[0] += tokens - counts.sum()
    return counts.tolist()


def make_ways(library, shape):
    experts, tokens, hidden, columns = shape
    counts = draw_counts(experts, tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(experts, columns, hidden, device="cuda", dtype=torch.bfloat16) * hidden ** -0.5
    out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)

    def loop():
        pieces = [a @ w.t() for a, w in zip(x.split(counts), weights) if len(a)]
        return torch.cat(pieces)

    ways = {"one by one": lambda: library.forward(x, weights, counts, out, NEVER),
            "in groups": lambda: library.forward(x, weights, counts, out, ALWAYS),
            "as it chooses": lambda: library.forward(x, weights, counts, out, AUTO), "torch, loop": loop}
    if hasattr(torch, "_grouped_mm"):
        ways["torch, grouped"] = lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return ways, 2 * tokens * hidden * columns


def run_shape(library, shape, samples):
    ways, flops = make_ways(library, shape)
    want, good, graphs, rows = ways["torch, loop"]().double(), True, {}, []
    print(f"\n{shape[0]} experts, {shape[1]} tokens, {shape[2]} x {shape[3]}")
    for name, way in ways.items():
        try:
            error = ((way().double() - want).norm() / want.norm()).item()
            good &= error < 0.01
            if not error < 0.01:
                print(f"FAILED: {name}: error {error:.1e}")
            graphs[name] = capture(way)
        except RuntimeError as reason:
            good &= name.startswith("torch")
            print(f"{'' if name.startswith('torch') else 'FAILED: '}{name}: {str(reason).splitlines()[0]}")
    for name, (us, _, _) in measure(graphs, samples, SAMPLE_MS).items():
        print(f"{name:16} {us:9.1f} us, {flops / us / 1e6:6.0f} TFLOP/s", flush=True)
        rows.append({"op": "groups", "variant": name, "experts": shape[0], "tokens": shape[1], "hidden": shape[2],
                     "columns": shape[3], "median_us": us})
    return rows, good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--samples", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    begun, rows, good = time.monotonic(), [], True
    library = Library(args.library)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine)
    for shape in SHAPES:
        if time.monotonic() - begun > args.seconds:
            print(f"left out for want of time: {shape}")
            continue
        found, right = run_shape(library, shape, args.samples)
        rows += found
        good &= right
        torch.cuda.empty_cache()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s; {'all results agree' if good else 'FAILED, see above'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
