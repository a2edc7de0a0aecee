#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""blocks_torch.py LIBRARY [--compile MODE] [--blocks NAME,...] [--shapes N,...] [--seconds N] [--samples N] [--untuned] [--json FILE]

The perceptron and the projection of loongblocks.h beside torch, eager and compiled, on a GPU: bf16, four shapes each.
Each way is captured as a graph (so the times are the device's), the graphs are replayed in turn, medians count. Backward is
forward and backward together less forward. Beside them the matrix products alone, by torch, and a limit: the same products
and, in place of our kernels, copies of as many bytes as those must move. Memory: what forward leaves for
backward beside input, weights and result.

Verdicts: of each of our ways, torch's time over ours, for torch the faster one of eager and compiled in each direction; the
same of what is left when the products' time is taken off (>: nothing measurable is left of ours); memory kept as a part of
what eager keeps. The limit's own line says what ours would reach if they were copies.

Ours are, of the perceptron, with the norm's weight folded into the matrix or applied; of the projection, with y made anew
by backward, with y kept as torch does, and in chunks of rows.

MODE: max-autotune-no-cudagraphs (several minutes to compile), default (about a minute), none. Shapes are numbers from 0,
each compiled for itself. No shape is begun after --seconds. Prints tables, verdicts, and one JSON line per row, all of it
to FILE as well. Ends with 1 if a result is wrong, 77 without a GPU.
"""
import argparse
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels/examples"))
import blocks_torch as blocks_module  # noqa: E402
import torch  # noqa: E402
from graphs_torch import capture, measure  # noqa: E402

# hidden, ffn, columns of the projection, tokens
SHAPES = [(2048, 5632, 3072, 512), (2048, 5632, 3072, 8192), (4096, 14336, 6144, 512), (4096, 14336, 6144, 8192)]
SAMPLE_MS = 10


def kept(forward):
    """Bytes that forward leaves beside its result."""
    forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = forward()
    out = result[0] if isinstance(result, tuple) else result
    bytes_kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    del result, out
    return bytes_kept


class Way:
    """forward() gives the result and what backward wants; backward(that) gives the gradients."""

    def __init__(self, forward, backward):
        self.forward = forward
        self.backward = backward

    def both(self):
        result = self.forward()
        return result, self.backward(result)


def by_torch(function, inputs, dout):
    return Way(lambda: function(*inputs), lambda out: torch.autograd.grad(out, inputs, dout))


def compile_alone(function, mode):
    """For one shape: of several torch would make one for all."""
    torch._dynamo.reset()
    return torch.compile(function, mode=mode, dynamic=False)


class Copies:
    """Copies that move so many bytes each, half of them read."""

    def __init__(self, *sizes):
        self.pairs = [[torch.empty(size // 2, device="cuda", dtype=torch.uint8).fill_(1) for _ in range(2)] for size in sizes]

    def __call__(self, number):
        to, of = self.pairs[number]
        to.copy_(of)


def mlp_ways(blocks, shape, compiled):
    hidden, ffn, _, tokens = shape
    make = blocks_module.make
    x, gate_up = make("cuda", tokens, hidden), make("cuda", 2 * ffn, hidden, size=hidden ** -0.5)
    down, gamma = make("cuda", hidden, ffn, size=ffn ** -0.5), make("cuda", hidden)
    dout = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = [x, gate_up, down, gamma]
    raw = [t.detach() for t in weights]
    folded = (raw[1].float() * raw[3].float()).to(torch.bfloat16)

    def ours(first, *rest):
        return Way(lambda: blocks.mlp_forward(raw[0], first, raw[2], *rest, add=raw[0]),
                   lambda result: blocks.mlp_backward(dout, result[1], raw[0], first, raw[2], *rest, dx_add=dout))

    ways = {"folded": ours(folded), "weighted": ours(raw[1], raw[3]),
            "eager": by_torch(blocks_module.torch_mlp, weights, dout)}
    if compiled:
        ways["compiled"] = by_torch(compile_alone(blocks_module.torch_mlp, compiled), weights, dout)
    h, z = torch.randn(tokens, ffn, device="cuda", dtype=torch.bfloat16), torch.randn(
        tokens, 2 * ffn, device="cuda", dtype=torch.bfloat16)
    products = Way(lambda: (raw[0] @ raw[1].t(), h @ raw[2].t()),
                   lambda _: (dout @ raw[2], dout.t() @ h, z.t() @ raw[0], z @ raw[1]))
    # statistics; SwiGLU; its backward: dh and z to h and dz; x and dout to dx
    copies = Copies(2 * tokens * hidden, 6 * tokens * ffn, 12 * tokens * ffn, 6 * tokens * hidden)
    limit = Way(lambda: (copies(0), raw[0] @ raw[1].t(), copies(1), h @ raw[2].t()),
                lambda _: (dout @ raw[2], copies(2), dout.t() @ h, z.t() @ raw[0], copies(3), z @ raw[1]))
    return ways, {"products": products, "limit": limit}, 6 * tokens * hidden * ffn


def projection_ways(blocks, shape, compiled):
    hidden, _, columns, tokens = shape
    make, norm = blocks_module.make, blocks_module.LAYER_NORM
    inputs = [make("cuda", tokens, hidden), make("cuda", columns, hidden, size=hidden ** -0.5), make("cuda", hidden),
              make("cuda", hidden), make("cuda", columns)]
    x, weight, gamma, beta, bias = [t.detach() for t in inputs]
    dout = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)

    def function(*a):
        return blocks_module.torch_projection(a[0], a[1], norm, *a[2:])

    def ours(chunk_rows, keep=False):
        return Way(lambda: blocks.projection_forward(x, weight, norm, gamma, beta, bias, chunk_rows=chunk_rows, keep=keep),
                   lambda result: blocks.projection_backward(dout, result[1], x, weight, norm, gamma, beta, bias))

    ways = {"whole": ours(0), "kept": ours(0, True), "eager": by_torch(function, inputs, dout)}
    if tokens > 2048:
        ways["chunks"] = ours(2048)
    if compiled:
        ways["compiled"] = by_torch(compile_alone(function, compiled), inputs, dout)
    products = Way(lambda: torch.addmm(bias, x, weight.t()), lambda _: (dout @ weight, dout.t() @ x))
    # x to y; dout to dbias; x and dy to dx and y
    copies = Copies(4 * tokens * hidden, 2 * tokens * columns, 8 * tokens * hidden)
    limit = Way(lambda: (copies(0), torch.addmm(bias, x, weight.t())),
                lambda _: (copies(1), dout @ weight, copies(2), dout.t() @ x))
    return ways, {"products": products, "limit": limit}, 2 * tokens * hidden * columns


def check(ways):
    """Results of all ways are near to each other; folded weights differ in what their gradients mean."""
    def flat(way):
        out, gradients = way.both()
        return [out[0] if isinstance(out, tuple) else out, gradients[0]]

    want = flat(ways["eager"])
    worst = max(blocks_module.error(got, w) for way in ways.values() for got, w in zip(flat(way), want))
    return worst


def ratio(theirs, ours):
    """Of what is left beside the products. Below a tenth of a microsecond is nothing."""
    return theirs / ours if ours > 0.1 else None


def judge(rows):
    """Our ways against the best of torch, of one block and shape."""
    ways = {row["way"]: row for row in rows}
    theirs = [ways.pop(name) for name in ("eager", "compiled") if name in ways]
    ways.pop("products")
    best = {key: min(row[key] for row in theirs) for key in
            ("forward_us", "backward_us", "both_us", "rest_forward_us", "rest_backward_us", "rest_both_us")}
    found = []
    for name, row in ways.items():
        verdict = {key: row[key] for key in ("block", "way", "hidden", "ffn", "columns", "tokens")}
        for key, value in best.items():
            verdict[key.replace("_us", "_ratio")] = ratio(value, row[key])
        verdict["kept_share"] = (row["kept_bytes"] or 0) / theirs[0]["kept_bytes"]
        found.append(verdict)
    return found


def show(verdict):
    def text(key):
        value = verdict[key + "_ratio"]
        return f"{value:5.2f}" if value is not None else "    >"
    print(f"{verdict['block']:10} {verdict['hidden']:5} x {verdict['tokens']:5} {verdict['way']:9} "
          f"forward {text('forward')}, backward {text('backward')}, both {text('both')}; without products "
          f"{text('rest_forward')}, {text('rest_backward')}, {text('rest_both')}; kept {verdict['kept_share']:4.0%}")


def run(name, make_ways, blocks, number, args):
    shape = SHAPES[number]
    begun = time.monotonic()
    ways, beside, flops = make_ways(blocks, shape, None if args.compile == "none" else args.compile)
    worst = check(ways)
    if not args.untuned:
        blocks.tune(1)
        for way in ways.values():
            way.both()
        blocks.tune(0)
    memory = {key: kept(way.forward) for key, way in ways.items()}
    ways.update(beside)
    rows = []
    timed = {}
    for direction in ("forward", "both"):
        graphs = {key: capture(getattr(way, direction)) for key, way in ways.items()}
        timed[direction] = measure(graphs, args.samples, SAMPLE_MS)
        del graphs
    print(f"\n{name}: hidden {shape[0]}, ffn {shape[1]}, columns {shape[2]}, {shape[3]} tokens; largest difference "
          f"from eager {worst:.1e}; {time.monotonic() - begun:.0f} s")
    print(f"{'':10} {'forward':>9} {'10%..90%':>17} {'backward':>9} {'TFLOP/s':>8} {'no product':>17} {'kept':>9}")
    floor = (timed["forward"]["products"][0], timed["both"]["products"][0])
    for key in ways:
        forward, low, high = timed["forward"][key]
        both = timed["both"][key][0]
        rest = (forward - floor[0], both - forward - (floor[1] - floor[0]))
        print(f"{key:10} {forward:7.1f}us {low:7.1f} .. {high:6.1f} {both - forward:7.1f}us {3 * flops / both / 1e6:8.1f} "
              f"{rest[0]:7.1f} {rest[1]:7.1f}us {memory.get(key, 0) / 2**20:6.1f}MB", flush=True)
        rows.append({"block": name, "way": key, "hidden": shape[0], "ffn": shape[1], "columns": shape[2],
                     "tokens": shape[3], "forward_us": forward, "forward_p10_us": low, "forward_p90_us": high,
                     "backward_us": both - forward, "both_us": both, "rest_forward_us": rest[0],
                     "rest_backward_us": rest[1], "rest_both_us": rest[0] + rest[1], "kept_bytes": memory.get(key),
                     "difference": worst})
    if worst >= 0.02:
        print(f"FAILED: {name}, shape {number}: results differ by {worst:.1e}")
    return rows, worst < 0.02


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--compile", default="default")
    parser.add_argument("--shapes", default="0,1,2,3")
    parser.add_argument("--blocks", default="mlp,projection")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--untuned", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    begun = time.monotonic()
    blocks = blocks_module.Blocks(args.library)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, compiled: {args.compile}")
    rows, verdicts, good = [], [], True
    for number in (int(n) for n in args.shapes.split(",")):
        for name, make_ways in (("mlp", mlp_ways), ("projection", projection_ways)):
            if name not in args.blocks.split(","):
                continue
            if time.monotonic() - begun > args.seconds:
                print(f"left out: {name}, shape {number}")
                continue
            try:
                found, right = run(name, make_ways, blocks, number, args)
            except RuntimeError as reason:
                print(f"FAILED: {name}, shape {number}: {str(reason).splitlines()[0]}")
                found, right = [], False
            rows += found
            verdicts += judge(found) if found else []
            good &= right
            torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - begun:.0f} s; torch's time over ours")
    for verdict in verdicts:
        show(verdict)
    counts = blocks.counts()
    print(f"{counts.vendor} products by cuBLASLt, {counts.general} by the general kernel, {counts.plans} plans")
    for row in rows:
        print(json.dumps(row))
    if args.json:
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        written = {"machine": machine, "compiled": args.compile, "rows": rows, "verdicts": verdicts}
        pathlib.Path(args.json).write_text(json.dumps(written, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
