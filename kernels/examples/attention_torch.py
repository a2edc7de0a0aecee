#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attention_torch.py LIBRARY: attention of loongattention.h as a function of torch.autograd, beside torch.

LIBRARY is libloongkernels.so (tensors on the GPU) or libloongkernels-host.so (tensors on the processor). Ends with 77
where torch or the GPU is missing.
"""
import ctypes
import math
import sys

try:
    import torch
except ImportError:
    print("skipped: no torch")
    sys.exit(77)

BF16, FP16 = 1, 2
NOT_CAUSAL, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32


class Heads(ctypes.Structure):
    _fields_ = [("base", POINTER), ("sequence_stride", COUNT), ("head_stride", COUNT), ("row_stride", COUNT)]


class Counts(ctypes.Structure):
    _fields_ = [("vendor", COUNT), ("general", COUNT), ("plans", COUNT)]


class Call(ctypes.Structure):
    _fields_ = [("sequences", NUMBER), ("heads", NUMBER), ("kv_heads", NUMBER), ("queries", NUMBER), ("keys", NUMBER),
                ("depth", NUMBER), ("value_depth", NUMBER), ("type", ctypes.c_int), ("causal", ctypes.c_int),
                ("scale", ctypes.c_float), ("query_lengths", POINTER), ("key_lengths", POINTER),
                ("query_offsets", POINTER), ("key_offsets", POINTER), ("q", Heads), ("k", Heads), ("v", Heads),
                ("o", Heads), ("lse", POINTER), ("most_workspace", COUNT), ("workspace", POINTER)]


class Grads(ctypes.Structure):
    _fields_ = [("dout", Heads), ("dq", Heads), ("dk", Heads), ("dv", Heads), ("deterministic", ctypes.c_int)]


def heads_of(tensor):
    """Tensors are sequence, row, head, column; packed ones row, head, column."""
    strides = tensor.stride()
    if tensor.dim() == 3:
        return Heads(tensor.data_ptr(), 0, strides[1], strides[0])
    return Heads(tensor.data_ptr(), strides[0], strides[2], strides[1])


class Attention:
    """One library with its struct lk_attention_library."""

    def __init__(self, path, flags=0):
        self.lib = ctypes.CDLL(path)
        for name in ("lk_backend", "lk_error_text", "lk_blas_error", "lk_attention_why"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.lib.lk_attention_workspace_bytes.restype = ctypes.c_size_t
        self.lib.lk_attention_workspace_bytes.argtypes = [POINTER] * 3
        self.lib.lk_attention_forward.argtypes = [POINTER] * 3
        self.lib.lk_attention_backward.argtypes = [POINTER] * 4
        self.lib.lk_attention_open.argtypes = [ctypes.c_char_p, NUMBER, POINTER]
        self.device = "cuda" if self.lib.lk_backend() == b"cuda" else "cpu"
        self.handle = POINTER()
        self.check(self.lib.lk_attention_open(None, flags, ctypes.byref(self.handle)))

    def check(self, result):
        if result:
            raise RuntimeError(f"{self.lib.lk_error_text(result).decode()}; {self.lib.lk_blas_error().decode()}")

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None

    def why(self):
        return self.lib.lk_attention_why().decode()

    def counts(self):
        counts = Counts()
        self.lib.lk_attention_counts(self.handle, ctypes.byref(counts))
        return counts

    def workspace(self, call, grads):
        size = self.lib.lk_attention_workspace_bytes(self.handle, ctypes.byref(call),
                                                     ctypes.byref(grads) if grads else None)
        if not size:
            raise RuntimeError(self.lib.lk_blas_error().decode())
        space = torch.empty(size + 256, dtype=torch.uint8, device=self.device)
        call.workspace = (space.data_ptr() + 255) // 256 * 256
        return space  # torch gives its memory out again in the order of the stream

    def call(self, q, k, v, o, lse, causal, scale, offsets, lengths, longest):
        packed = q.dim() == 3
        sequences = offsets.numel() - 1 if packed else q.shape[0]
        call = Call(sequences=sequences, heads=q.shape[-2], kv_heads=k.shape[-2],
                    queries=longest or (q.shape[0] if packed else q.shape[1]),
                    keys=longest or (k.shape[0] if packed else k.shape[1]), depth=q.shape[-1], value_depth=v.shape[-1],
                    type=BF16 if q.dtype == torch.bfloat16 else FP16, causal=causal,
                    scale=scale or 1 / math.sqrt(q.shape[-1]), q=heads_of(q), k=heads_of(k), v=heads_of(v),
                    o=heads_of(o), lse=lse.data_ptr())
        if packed:
            call.query_offsets = call.key_offsets = offsets.data_ptr()
        if lengths is not None:
            call.query_lengths = call.key_lengths = lengths.data_ptr()
        return call

    def forward(self, q, k, v, causal=NOT_CAUSAL, scale=0.0, offsets=None, lengths=None, longest=0):
        """o and lse. offsets: int32, of packed q, k and v, with the rows of the longest sequence; or lengths of each."""
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        rows = (offsets.numel() - 1) * longest if q.dim() == 3 else q.shape[0] * q.shape[1]
        lse = torch.empty(rows * q.shape[-2], dtype=torch.float32, device=q.device)
        call = self.call(q, k, v, o, lse, causal, scale, offsets, lengths, longest)
        space = self.workspace(call, None)
        self.check(self.lib.lk_attention_forward(self.handle, ctypes.byref(call), self.stream()))
        del space
        return o, lse

    def backward(self, dout, q, k, v, o, lse, causal=NOT_CAUSAL, scale=0.0, offsets=None, lengths=None, longest=0,
                 deterministic=False):
        """dq, dk, dv."""
        if dout.stride() != o.stride():  # cuDNN wants them alike
            dout = dout.contiguous()
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        call = self.call(q, k, v, o, lse, causal, scale, offsets, lengths, longest)
        back = Grads(heads_of(dout), *map(heads_of, grads), deterministic)
        space = self.workspace(call, back)
        self.check(self.lib.lk_attention_backward(self.handle, ctypes.byref(call), ctypes.byref(back), self.stream()))
        del space
        return grads


class AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention, q, k, v, settings):
        o, lse = attention.forward(q, k, v, **settings)
        ctx.attention, ctx.settings = attention, settings
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, dout):
        return None, *ctx.attention.backward(dout, *ctx.saved_tensors, **ctx.settings), None


def torch_attention(q, k, v, causal):
    """The same by torch, on tensors as ours."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal == TOP_LEFT, enable_gqa=True)
    return out.transpose(1, 2)


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def gradients(function, inputs, dout):
    for t in inputs:
        t.grad = None
    out = function(*inputs)
    out.backward(dout.to(out.dtype))
    return [out.detach()] + [t.grad for t in inputs]


def compare(name, ours, theirs, exact):
    good = True
    for what, a, b, c in zip(("out", "dq", "dk", "dv"), ours, theirs, exact):
        mine, other = error(a, c), error(b, c)
        right = mine <= 1.5 * other + 1e-3
        good &= right
        print(f"{'' if right else 'FAILED: '}{name}: {what}: error {mine:.2e}, torch {other:.2e}", flush=True)
    return good


def make(device, *shape):
    return torch.randn(*shape).to(device, torch.bfloat16).requires_grad_()


def check_whole(attention, sequences, queries, heads, kv_heads, depth, causal):
    torch.manual_seed(3)
    inputs = [make(attention.device, sequences, queries, n, depth) for n in (heads, kv_heads, kv_heads)]
    dout = torch.randn(sequences, queries, heads, depth).to(attention.device, torch.bfloat16)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    settings = {"causal": causal}
    ours = gradients(lambda q, k, v: AttentionFunction.apply(attention, q, k, v, settings), inputs, dout)
    why = attention.why()
    name = f"{sequences} x {queries} rows, {heads} / {kv_heads} heads of {depth}, causal {causal}"
    if why:
        print(f"{name}: not by cuDNN: {why}")
    return compare(name, ours, gradients(lambda *t: torch_attention(*t, causal), inputs, dout),
                   gradients(lambda *t: torch_attention(*t, causal), doubles, dout))


def check_packed(attention, lengths, heads, depth):
    """Each sequence as if it were alone."""
    torch.manual_seed(5)
    first = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    offsets = torch.tensor(first, dtype=torch.int32, device=attention.device)
    inputs = [make(attention.device, first[-1], heads, depth) for _ in range(3)]
    dout = torch.randn(first[-1], heads, depth).to(attention.device, torch.bfloat16)
    settings = {"causal": TOP_LEFT, "offsets": offsets, "longest": max(lengths)}
    ours = gradients(lambda q, k, v: AttentionFunction.apply(attention, q, k, v, settings), inputs, dout)

    def alone(q, k, v):
        return torch.cat([torch_attention(*(t[b:e].unsqueeze(0) for t in (q, k, v)), TOP_LEFT)[0]
                          for b, e in zip(first, first[1:]) if e > b])

    return compare(f"packed {lengths}", ours, gradients(alone, inputs, dout),
                   gradients(alone, [t.detach().double().requires_grad_() for t in inputs], dout))


def main():
    if "-host" not in sys.argv[1] and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    attention = Attention(sys.argv[1])
    scale = 8 if attention.device == "cuda" else 1
    good = True
    for causal in (NOT_CAUSAL, TOP_LEFT):
        good &= check_whole(attention, 2, 24 * scale, 4, 2, 64 if scale > 1 else 16, causal)
    good &= check_whole(attention, 1, 33 * scale, 2, 2, 128 if scale > 1 else 32, TOP_LEFT)
    good &= check_whole(attention, 1, 9, 3, 1, 20, TOP_LEFT)
    good &= check_packed(attention, [16 * scale, 5 * scale, 0, 11], 2, 64 if scale > 1 else 16)
    counts = attention.counts()
    print(f"{attention.device}: {counts.vendor} calls by cuDNN, {counts.general} by the general kernels")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
