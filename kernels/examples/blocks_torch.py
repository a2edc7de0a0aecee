#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""blocks_torch.py LIBRARY: the perceptron and the projection of loongblocks.h as functions of torch.autograd, beside torch.

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

FP32, BF16 = 0, 1
RMS_NORM, LAYER_NORM = 0, 1
FORWARD, BACKWARD = 0, 1
POINTER, COUNT = ctypes.c_void_p, ctypes.c_uint64


class Rng(ctypes.Structure):
    _fields_ = [("seed", COUNT), ("offset", COUNT), ("device_offset", POINTER)]


class Saved(ctypes.Structure):
    _fields_ = [("rstd", POINTER), ("mean", POINTER), ("y", POINTER), ("z", POINTER)]


class Counts(ctypes.Structure):
    _fields_ = [("vendor", COUNT), ("general", COUNT), ("plans", COUNT), ("grouped", COUNT), ("batched", COUNT),
                ("spread", COUNT)]


class Mlp(ctypes.Structure):
    _fields_ = [("rows", COUNT), ("hidden", COUNT), ("ffn", COUNT), ("x", POINTER), ("x_stride", COUNT),
                ("eps", ctypes.c_double), ("gamma_type", ctypes.c_int), ("gamma", POINTER),
                ("gamma_offset", ctypes.c_float), ("gate_up", POINTER), ("down", POINTER), ("drop", ctypes.c_double),
                ("rng", Rng), ("saved", Saved), ("workspace", POINTER)]


class MlpForward(ctypes.Structure):
    _fields_ = [("add", POINTER), ("add_stride", COUNT), ("out", POINTER), ("out_stride", COUNT)]


class MlpBackward(ctypes.Structure):
    _fields_ = [("dout", POINTER), ("dout_stride", COUNT), ("dx_add", POINTER), ("dx_add_stride", COUNT),
                ("dx", POINTER), ("dx_stride", COUNT), ("grad_type", ctypes.c_int), ("dgate_up", POINTER),
                ("ddown", POINTER), ("accumulate", ctypes.c_int), ("dgamma", POINTER), ("overwrite_z", ctypes.c_int)]


class NormLinear(ctypes.Structure):
    _fields_ = [("rows", COUNT), ("hidden", COUNT), ("columns", COUNT), ("x", POINTER), ("x_stride", COUNT),
                ("kind", ctypes.c_int), ("eps", ctypes.c_double), ("gamma_type", ctypes.c_int), ("gamma", POINTER),
                ("beta", POINTER), ("gamma_offset", ctypes.c_float), ("weight", POINTER), ("bias", POINTER),
                ("chunk_rows", COUNT), ("saved", Saved), ("workspace", POINTER)]


class NormLinearBackward(ctypes.Structure):
    _fields_ = [("dout", POINTER), ("dout_stride", COUNT), ("dx_add", POINTER), ("dx_add_stride", COUNT),
                ("dx", POINTER), ("dx_stride", COUNT), ("grad_type", ctypes.c_int), ("dweight", POINTER),
                ("accumulate", ctypes.c_int), ("dbias", POINTER), ("dgamma", POINTER), ("dbeta", POINTER)]


def at(tensor):
    return None if tensor is None else tensor.data_ptr()


def kind_of(tensor):
    return BF16 if tensor is not None and tensor.dtype == torch.bfloat16 else FP32


class Blocks:
    """One library with its struct lk_blas."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.lk_backend.restype = ctypes.c_char_p
        self.lib.lk_error_text.restype = ctypes.c_char_p
        self.lib.lk_blas_error.restype = ctypes.c_char_p
        for name in ("lk_mlp_workspace_bytes", "lk_norm_linear_workspace_bytes"):
            getattr(self.lib, name).restype = ctypes.c_size_t
            getattr(self.lib, name).argtypes = [POINTER, POINTER, POINTER, ctypes.c_int]
        for name, count in (("lk_mlp_forward", 4), ("lk_mlp_backward", 4), ("lk_norm_linear_backward", 4)):
            getattr(self.lib, name).argtypes = [POINTER] * count
        self.lib.lk_norm_linear_forward.argtypes = [POINTER, POINTER, POINTER, COUNT, POINTER]
        self.lib.lk_blas_tune.argtypes = [POINTER, ctypes.c_int]
        self.cuda = self.lib.lk_backend() == b"cuda"
        self.device = "cuda" if self.cuda else "cpu"
        self.blas = POINTER()
        self.check(self.lib.lk_blas_open(None, 0, ctypes.byref(self.blas)))

    def check(self, result):
        if result:
            raise RuntimeError(f"{self.lib.lk_error_text(result).decode()}; {self.lib.lk_blas_error().decode()}")

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.cuda else None

    def tune(self, on):
        self.lib.lk_blas_tune(self.blas, on)

    def counts(self):
        counts = Counts()
        self.lib.lk_blas_counts(self.blas, ctypes.byref(counts))
        return counts

    def workspace(self, query, block, backward, direction):
        size = query(self.blas, ctypes.byref(block), ctypes.byref(backward) if backward else None, direction)
        space = torch.empty(size + 256, dtype=torch.uint8, device=self.device)
        block.workspace = (space.data_ptr() + 255) // 256 * 256
        return space  # torch gives its memory out again in the order of the stream

    def mlp_block(self, x, gate_up, down, gamma, eps, drop, seed):
        rows, hidden = x.shape
        return Mlp(rows, hidden, gate_up.shape[0] // 2, at(x), x.stride(0), eps, kind_of(gamma), at(gamma), 0.0,
                   at(gate_up), at(down), drop, Rng(seed, 0, None))

    def mlp_forward(self, x, gate_up, down, gamma=None, eps=1e-5, drop=0.0, seed=0, add=None, save=True, out=None):
        """Gives the result and what backward wants besides (empty: it makes that anew)."""
        block = self.mlp_block(x, gate_up, down, gamma, eps, drop, seed)
        saved = ()
        if save:
            saved = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device),
                     torch.empty(x.shape[0], gate_up.shape[0], dtype=torch.bfloat16, device=x.device))
            block.saved = Saved(rstd=at(saved[0]), z=at(saved[1]))
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        space = self.workspace(self.lib.lk_mlp_workspace_bytes, block, None, FORWARD)
        forward = MlpForward(at(add), add.stride(0) if add is not None else 0, at(out), out.stride(0))
        self.check(self.lib.lk_mlp_forward(self.blas, ctypes.byref(block), ctypes.byref(forward), self.stream()))
        del space
        return out, saved

    def mlp_backward(self, dout, saved, x, gate_up, down, gamma=None, eps=1e-5, drop=0.0, seed=0, dx_add=None,
                     overwrite_z=False):
        """dx, dgate_up, ddown, dgamma; dgamma is None without gamma."""
        block = self.mlp_block(x, gate_up, down, gamma, eps, drop, seed)
        if saved:
            block.saved = Saved(rstd=at(saved[0]), z=at(saved[1]))
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
        dgamma = None if gamma is None else torch.empty(gamma.shape, dtype=torch.float32, device=x.device)
        backward = MlpBackward(at(dout), dout.stride(0), at(dx_add), dx_add.stride(0) if dx_add is not None else 0,
                               at(dx), dx.stride(0), BF16, at(dgate_up), at(ddown), 0, at(dgamma), overwrite_z)
        space = self.workspace(self.lib.lk_mlp_workspace_bytes, block, backward, BACKWARD)
        self.check(self.lib.lk_mlp_backward(self.blas, ctypes.byref(block), ctypes.byref(backward), self.stream()))
        del space
        return dx, dgate_up, ddown, dgamma

    def projection(self, x, weight, kind, gamma, beta, bias, eps, chunk_rows):
        rows, hidden = x.shape
        return NormLinear(rows, hidden, weight.shape[0], at(x), x.stride(0), kind, eps,
                          kind_of(gamma if gamma is not None else beta), at(gamma), at(beta), 0.0, at(weight),
                          at(bias), chunk_rows)

    def projection_forward(self, x, weight, kind=RMS_NORM, gamma=None, beta=None, bias=None, eps=1e-5, chunk_rows=0,
                           keep=False):
        """Gives the result and what backward takes: the statistics and, with keep, the normalised rows."""
        block = self.projection(x, weight, kind, gamma, beta, bias, eps, chunk_rows)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        saved = (torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device),
                 torch.empty_like(x, memory_format=torch.contiguous_format) if keep else None)
        block.saved = self.projection_saved(saved, kind)
        space = self.workspace(self.lib.lk_norm_linear_workspace_bytes, block, None, FORWARD)
        self.check(self.lib.lk_norm_linear_forward(self.blas, ctypes.byref(block), at(out), out.stride(0),
                                                   self.stream()))
        del space
        return out, saved

    def projection_saved(self, saved, kind):
        statistics, y = saved
        return Saved(rstd=at(statistics[0]), mean=at(statistics[1]) if kind == LAYER_NORM else None, y=at(y))

    def projection_backward(self, dout, saved, x, weight, kind=RMS_NORM, gamma=None, beta=None, bias=None, eps=1e-5):
        """dx, dweight, dgamma, dbeta, dbias; the last three as far as there is something."""
        block = self.projection(x, weight, kind, gamma, beta, bias, eps, 0)
        block.saved = self.projection_saved(saved, kind)
        dx, dweight = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
        floats = [None if t is None else torch.empty(t.shape, dtype=torch.float32, device=x.device)
                  for t in (gamma, beta, bias)]
        backward = NormLinearBackward(at(dout), dout.stride(0), None, 0, at(dx), dx.stride(0), BF16, at(dweight), 0,
                                      at(floats[2]), at(floats[0]), at(floats[1]))
        space = self.workspace(self.lib.lk_norm_linear_workspace_bytes, block, backward, BACKWARD)
        self.check(self.lib.lk_norm_linear_backward(self.blas, ctypes.byref(block), ctypes.byref(backward),
                                                    self.stream()))
        del space
        return dx, dweight, *floats


class MlpFunction(torch.autograd.Function):
    """x + MLP(x), for matrices x."""

    @staticmethod
    def forward(ctx, blocks, x, gate_up, down, gamma, save):
        out, saved = blocks.mlp_forward(x, gate_up, down, gamma, add=x, save=save)
        ctx.blocks = blocks
        ctx.save_for_backward(x, gate_up, down, gamma, *saved)
        return out

    @staticmethod
    def backward(ctx, dout):
        x, gate_up, down, gamma, *saved = ctx.saved_tensors
        dx, dgate_up, ddown, dgamma = ctx.blocks.mlp_backward(dout, saved, x, gate_up, down, gamma, dx_add=dout)
        return None, dx, dgate_up, ddown, None if dgamma is None else dgamma.to(gamma.dtype), None


def torch_mlp(x, gate_up, down, gamma):
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, 1e-5)
    gate, up = torch.nn.functional.linear(y, gate_up).chunk(2, dim=-1)
    return x + torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)


def torch_projection(x, weight, kind, gamma, beta, bias):
    if kind == RMS_NORM:
        y = torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, 1e-5)
    else:
        y = torch.nn.functional.layer_norm(x, (x.shape[-1],), gamma, beta, 1e-5)
    return torch.nn.functional.linear(y, weight, bias)


def make(device, *shape, size=1.0):
    return (torch.randn(*shape) * size).to(device=device, dtype=torch.bfloat16).requires_grad_()


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def compare(name, ours, theirs, exact):
    """Errors of both against fp64; ours may be a little larger than torch's."""
    good = True
    for what, a, b, c in zip(("out", "dx", "grad", "grad", "grad", "grad"), ours, theirs, exact):
        mine, other = error(a, c), error(b, c)
        good &= mine <= 1.1 * other + 1e-3
        print(f"{name}: {what}: error {mine:.2e}, torch {other:.2e}")
    return good


def gradients(function, inputs, dout):
    for t in inputs:
        t.grad = None
    out = function(*inputs)
    out.backward(dout.to(out.dtype))
    return [out.detach()] + [t.grad for t in inputs]


def check_mlp(blocks, rows, hidden, ffn, weighted, save):
    torch.manual_seed(3)
    inputs = [make(blocks.device, rows, hidden), make(blocks.device, 2 * ffn, hidden, size=hidden ** -0.5),
              make(blocks.device, hidden, ffn, size=ffn ** -0.5)]
    if weighted:
        inputs.append(make(blocks.device, hidden))
    dout = torch.randn(rows, hidden).to(blocks.device, torch.bfloat16)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    return compare(f"mlp {rows}x{hidden}x{ffn}{' weighted' if weighted else ''}{' saved' if save else ''}",
                   gradients(lambda x, g, d, w=None: MlpFunction.apply(blocks, x, g, d, w, save), inputs, dout),
                   gradients(lambda x, g, d, w=None: torch_mlp(x, g, d, w), inputs, dout),
                   gradients(lambda x, g, d, w=None: torch_mlp(x, g, d, w), doubles, dout))


def check_projection(blocks, rows, hidden, columns, kind, keep=False):
    torch.manual_seed(5)
    device = blocks.device
    inputs = [make(device, rows, hidden), make(device, columns, hidden, size=hidden ** -0.5), make(device, hidden)]
    if kind == LAYER_NORM:
        inputs += [make(device, hidden), make(device, columns)]
    dout = torch.randn(rows, columns).to(device, torch.bfloat16)
    x, weight, gamma, beta, bias = (t.detach() for t in inputs) if kind else (*(t.detach() for t in inputs), None, None)
    out, saved = blocks.projection_forward(x, weight, kind, gamma, beta, bias, chunk_rows=rows // 3, keep=keep)
    ours = [out, *blocks.projection_backward(dout, saved, x, weight, kind, gamma, beta, bias)]

    def run(t):
        return gradients(lambda *a: torch_projection(*a[:2], kind, *(list(a[2:]) + [None, None])[:3]), t, dout)

    return compare(f"projection {rows}x{hidden}x{columns}, norm {kind}{', kept' if keep else ''}", ours, run(inputs),
                   run([t.detach().double().requires_grad_() for t in inputs]))


def main():
    if "-host" not in sys.argv[1] and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    blocks = Blocks(sys.argv[1])
    scale = 16 if blocks.cuda else 1
    good = True
    for weighted in (False, True):
        for save in (False, True):
            good &= check_mlp(blocks, 24 * scale, 64 * scale, 96 * scale, weighted, save)
    good &= check_mlp(blocks, 7, 40, 17, True, True)
    for kind in (RMS_NORM, LAYER_NORM):
        for keep in (False, True):
            good &= check_projection(blocks, 24 * scale, 64 * scale, 96 * scale, kind, keep)
    counts = blocks.counts()
    print(f"{blocks.device}: {counts.vendor} products by the vendor, {counts.general} by the general kernel")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
