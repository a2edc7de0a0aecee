#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attention_torch.py LIBRARY [--json FILE] [--seconds N] [--samples N]

Attention of loongattention.h beside the back ends of torch's scaled_dot_product_attention, on a GPU, in bf16. Each way is
captured as a graph (so the times are the device's), the graphs are replayed in turn, medians count; backward is forward and
backward together less forward. No shape is begun after --seconds (70), so that all ends within 90. What a way cannot do is
said and left out. Prints a table; --json stores it. Ends with 1 if a result is wrong or a way of ours was not cuDNN's, 77
without a GPU.
"""
import argparse
import importlib.util
import json
import pathlib
import sys
import time

import torch
from graphs_torch import capture, measure

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("attention_example", ROOT / "kernels/examples/attention_torch.py")
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

# sequences, rows, heads, heads of keys, depth, causal
SHAPES = [(1, 2048, 64, 8, 128, True), (1, 8192, 64, 8, 128, True), (1, 4096, 32, 32, 128, False),
          (8, 2048, 16, 16, 64, True), (16, 512, 16, 16, 64, False), (1, 4096, 64, 8, 128, True)]
SAMPLE_MS = 8
BACK_ENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


class Ours:
    def __init__(self, attention, tensors, dout, causal, deterministic):
        self.attention, self.tensors, self.dout, self.deterministic = attention, tensors, dout, deterministic
        self.causal = example.TOP_LEFT if causal else example.NOT_CAUSAL

    def forward(self):
        return self.attention.forward(*self.tensors, causal=self.causal)

    def both(self):
        o, lse = self.forward()
        return [o, *self.attention.backward(self.dout, *self.tensors, o, lse, causal=self.causal,
                                            deterministic=self.deterministic)]


class Theirs:
    """Tensors lie as ours do; torch takes heads before rows."""

    def __init__(self, back_end, tensors, dout, causal):
        self.back_end = getattr(torch.nn.attention.SDPBackend, back_end)
        self.tensors = [t.transpose(1, 2).requires_grad_() for t in (t.detach() for t in tensors)]
        self.dout, self.causal = dout.transpose(1, 2), causal
        if back_end == "EFFICIENT_ATTENTION" and self.tensors[0].shape[1] != self.tensors[1].shape[1]:
            raise RuntimeError("it has no groups of heads")

    def forward(self):
        with torch.nn.attention.sdpa_kernel(self.back_end):
            return torch.nn.functional.scaled_dot_product_attention(
                *self.tensors, is_causal=self.causal, enable_gqa=self.tensors[0].shape[1] != self.tensors[1].shape[1])

    def both(self):
        o = self.forward()
        return [t.transpose(1, 2) for t in (o, *torch.autograd.grad(o, self.tensors, self.dout))]


def make_ways(attention, shape, notes):
    sequences, rows, heads, kv_heads, depth, causal = shape
    tensors = [torch.randn(sequences, rows, n, depth, device="cuda", dtype=torch.bfloat16)
               for n in (heads, kv_heads, kv_heads)]
    dout = torch.randn(sequences, rows, heads, depth, device="cuda", dtype=torch.bfloat16)
    makers = {"ours": lambda: Ours(attention, tensors, dout, causal, False)}
    if 2 * heads * rows * rows * sequences <= 4 << 30:
        makers["ours, deterministic"] = lambda: Ours(attention, tensors, dout, causal, True)
    for name, back_end in BACK_ENDS.items():
        makers[name] = lambda back_end=back_end: Theirs(back_end, tensors, dout, causal)
    ways, results = {}, {}
    for name, maker in makers.items():
        try:
            ways[name] = maker()
            before = attention.counts().general
            results[name] = ways[name].both()
            torch.cuda.synchronize()
            if attention.counts().general != before:
                notes.append(f"{name} was not cuDNN's: {attention.why()}")
        except RuntimeError as reason:
            ways.pop(name, None)
            notes.append(f"{name} left out: {str(reason).splitlines()[0]}")
    return ways, results


def largest_difference(results):
    """Of all ways from the first one of torch's."""
    want = next((r for name, r in results.items() if not name.startswith("ours")), None)
    if want is None:
        return float("nan")
    return max(example.error(got, w) for r in results.values() for got, w in zip(r, want))


def run_shape(attention, shape, samples):
    sequences, rows, heads, kv_heads, depth, causal = shape
    notes, begun = [], time.monotonic()
    ways, results = make_ways(attention, shape, notes)
    worst = largest_difference(results)
    del results
    timed = {direction: measure({name: capture(getattr(way, direction)) for name, way in ways.items()}, samples, SAMPLE_MS)
             for direction in ("forward", "both")}
    flops = 4 * sequences * heads * rows * rows * depth / (2 if causal else 1)
    print(f"\n{sequences} x {rows} rows, {heads} / {kv_heads} heads of {depth}, {'causal' if causal else 'whole'}; "
          f"largest difference {worst:.1e}; {time.monotonic() - begun:.0f} s")
    for note in notes:
        print(f"  {note}")
    found = []
    for name in ways:
        forward, low, high = timed["forward"][name]
        backward = timed["both"][name][0] - forward
        print(f"{name:20} forward {forward:9.1f} us ({low:.1f} .. {high:.1f}), {flops / forward / 1e6:6.0f} TFLOP/s; "
              f"backward {backward:9.1f} us, {2.5 * flops / backward / 1e6:6.0f} TFLOP/s", flush=True)
        found.append({"op": "attention", "variant": name, "sequences": sequences, "rows": rows, "heads": heads,
                      "kv_heads": kv_heads, "depth": depth, "causal": causal, "forward_us": forward,
                      "forward_p10_us": low, "forward_p90_us": high, "backward_us": backward,
                      "both_us": timed["both"][name][0], "difference": worst})
    theirs = [row for row in found if not row["variant"].startswith("ours")]
    ours = next((row for row in found if row["variant"] == "ours"), None)
    if ours and theirs:
        for what in ("forward_us", "backward_us"):
            best = min(theirs, key=lambda row: row[what])
            ours[f"{what}_over_best"] = ours[what] / best[what]
            print(f"  ours over torch's best ({best['variant']}), {what[:-3]}: {ours[what] / best[what]:.3f}")
    return found, worst < 0.02 and not any("not cuDNN's" in note for note in notes) and ours is not None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--samples", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    begun, rows, good = time.monotonic(), [], True
    attention = example.Attention(args.library)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    print(machine)
    for shape in SHAPES:
        if time.monotonic() - begun > args.seconds:
            print(f"left out for want of time: {shape}")
            continue
        try:
            found, right = run_shape(attention, shape, args.samples)
        except RuntimeError as reason:
            found, right = [], False
            print(f"FAILED: {shape}: {str(reason).splitlines()[0]}", flush=True)
        rows += found
        good &= right
        torch.cuda.empty_cache()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s; {'all results agree' if good else 'FAILED, see above'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
