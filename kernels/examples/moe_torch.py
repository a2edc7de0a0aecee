#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""moe_torch.py LIBRARY: a layer of experts with lk_moe_*, with gradients of tokens, probabilities and weights, beside torch.

LIBRARY is libloongkernels.so (tensors on the GPU) or libloongkernels-host.so (tensors on the processor). Ends with 77
where torch or the GPU is missing.
"""
import ctypes
import sys

try:
    import torch
except ImportError:
    print("skipped: no torch")
    sys.exit(77)

POINTER, COUNT, WORD = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32


class Routing(ctypes.Structure):
    _fields_ = [("experts", POINTER), ("tokens", COUNT), ("choices", WORD), ("expert_count", WORD), ("capacity", WORD),
                ("align", WORD), ("rows", COUNT), ("row_of_slot", POINTER), ("slot_of_row", POINTER), ("counts", POINTER),
                ("offsets", POINTER), ("live", POINTER), ("workspace", POINTER)]


class Rows(ctypes.Structure):
    _fields_ = [("tokens", POINTER), ("token_stride", COUNT), ("permuted", POINTER), ("permuted_stride", COUNT),
                ("columns", COUNT), ("weights", POINTER), ("fill", ctypes.c_int)]


class Grads(ctypes.Structure):
    _fields_ = [("dtokens", POINTER), ("dtoken_stride", COUNT), ("permuted", POINTER), ("permuted_stride", COUNT),
                ("dpermuted", POINTER), ("dpermuted_stride", COUNT), ("columns", COUNT), ("weights", POINTER),
                ("dweights", POINTER), ("fill", ctypes.c_int)]


def at(tensor):
    return None if tensor is None else tensor.data_ptr()


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        for name in ("lk_backend", "lk_error_text", "lk_compute_error"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.lib.lk_moe_workspace_bytes.restype = ctypes.c_size_t
        self.cuda = self.lib.lk_backend() == b"cuda"
        self.device = "cuda" if self.cuda else "cpu"

    def call(self, name, *structures):
        stream = torch.cuda.current_stream().cuda_stream if self.cuda else None
        result = getattr(self.lib, name)(*[ctypes.byref(s) for s in structures], POINTER(stream))
        if result:
            raise RuntimeError(f"{self.lib.lk_error_text(result).decode()}; {self.lib.lk_compute_error().decode()}")


class Route:
    """Which row each choice of each token has: expert after expert, `capacity` rows each; the mask of those that are filled
    is what loongcommSetMask() takes."""

    def __init__(self, library, chosen, expert_count, capacity):
        self.library, self.chosen = library, chosen.to(torch.int32).contiguous()
        tokens, choices = chosen.shape
        ints = lambda n: torch.empty(max(n, 1), dtype=torch.int32, device=chosen.device)
        self.rows = expert_count * capacity
        self.row_of_slot, self.slot_of_row = ints(tokens * choices), ints(self.rows)
        self.counts, self.offsets, self.live = ints(expert_count), ints(expert_count + 1), ints((self.rows + 31) // 32)
        self.struct = Routing(at(self.chosen), tokens, choices, expert_count, capacity, 1, self.rows, at(self.row_of_slot),
                              at(self.slot_of_row), at(self.counts), at(self.offsets), at(self.live))
        space = torch.empty(library.lib.lk_moe_workspace_bytes(ctypes.byref(self.struct)), dtype=torch.uint8,
                            device=chosen.device)
        self.struct.workspace = at(space)
        library.call("lk_moe_route", self.struct)

    def permute(self, x):
        out = torch.empty(self.rows, x.shape[1], dtype=x.dtype, device=x.device)
        self.library.call("lk_moe_permute", self.struct, Rows(at(x), x.stride(0), at(out), out.stride(0), x.shape[1], None, 1))
        return out

    def unpermute(self, rows, weights):
        out = torch.empty(self.chosen.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
        self.library.call("lk_moe_unpermute", self.struct,
                          Rows(at(out), out.stride(0), at(rows), rows.stride(0), rows.shape[1], at(weights), 0))
        return out


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, route):
        ctx.route = route
        return route.permute(x)

    @staticmethod
    def backward(ctx, drows):  # without weights the way back is the sum of a token's rows
        return ctx.route.unpermute(drows.contiguous(), None), None


class Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, route):
        ctx.route = route
        ctx.save_for_backward(rows, weights)
        return route.unpermute(rows, weights)

    @staticmethod
    def backward(ctx, dout):
        rows, weights = ctx.saved_tensors
        dout, drows, dweights = dout.contiguous(), torch.empty_like(rows), torch.empty_like(weights)
        ctx.route.library.call("lk_moe_unpermute_backward", ctx.route.struct, Grads(
            at(dout), dout.stride(0), at(rows), rows.stride(0), at(drows), drows.stride(0), rows.shape[1], at(weights),
            at(dweights), 1))
        return drows, dweights, None


def ours(library, x, probabilities, matrices, choices, capacity):
    weights, chosen = probabilities.topk(choices, dim=1)
    route = Route(library, chosen, matrices.shape[0], capacity)
    rows = Permute.apply(x, route).view(matrices.shape[0], capacity, -1)
    made = torch.bmm(rows, matrices).view(route.rows, -1)
    return Unpermute.apply(made, weights.contiguous(), route), route


def by_torch(x, probabilities, matrices, choices, capacity):
    """A loop over experts, each of which takes its first `capacity` choices in the order of tokens."""
    weights, chosen = probabilities.topk(choices, dim=1)
    out = torch.zeros(x.shape[0], matrices.shape[2], dtype=torch.float32, device=x.device)
    for expert in range(matrices.shape[0]):
        token, choice = (t[:capacity] for t in (chosen == expert).nonzero(as_tuple=True))
        made = (x[token] @ matrices[expert]).float() * weights[token, choice][:, None]
        out = out.index_add(0, token, made)
    return out.to(x.dtype)


def error(got, want):
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def main():
    library = Library(sys.argv[1])
    if library.cuda and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    torch.manual_seed(1)
    tokens, hidden, width, experts, choices = 300, 64, 48, 8, 2
    make = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, device=library.device).to(dtype)
    x, matrices, dout = make(tokens, hidden), make(experts, hidden, width), make(tokens, width)
    scores = make(tokens, experts, dtype=torch.float32)
    worst = 0
    for capacity in (tokens, 40):  # room for all; so little that choices are dropped
        results = []
        for function in (lambda *a: ours(library, *a)[0], by_torch):
            leaves = [t.clone().requires_grad_() for t in (x, scores, matrices)]
            out = function(leaves[0], leaves[1].softmax(1), leaves[2], choices, capacity)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        errors = [error(got, want) for got, want in zip(*results)]
        route = ours(library, x, scores.softmax(1), matrices, choices, capacity)[1]
        bits = (route.live[torch.arange(route.rows) // 32].cpu() >> (torch.arange(route.rows) % 32)) & 1
        assert torch.equal(bits.bool(), route.slot_of_row.cpu() >= 0), "the mask of rows"
        print(f"capacity {capacity}: {int(bits.sum())} of {tokens * choices} choices have a row; out, gradients of tokens, "
              f"scores and weights differ from torch's by " + ", ".join(f"{e:.1e}" for e in errors))
        worst = max([worst] + errors)
    return 0 if worst < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
