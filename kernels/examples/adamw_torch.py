#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""adamw_torch.py LIBRARY: lk_adamw_step() from Python, beside torch's AdamW and clip_grad_norm_.

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


class Tensor(ctypes.Structure):
    _fields_ = [("param", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("master", ctypes.c_void_p),
                ("m", ctypes.c_void_p), ("v", ctypes.c_void_p), ("count", ctypes.c_uint64),
                ("param_type", ctypes.c_int), ("grad_type", ctypes.c_int),
                ("lr_factor", ctypes.c_float), ("weight_decay", ctypes.c_float)]


class Plan(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("device_table", ctypes.c_void_p),
                ("elements", ctypes.c_uint64), ("tensors", ctypes.c_uint32), ("chunks", ctypes.c_uint32)]


class Scale(ctypes.Structure):
    _fields_ = [("value", ctypes.c_float), ("type", ctypes.c_int), ("device_value", ctypes.c_void_p)]


class AdamW(ctypes.Structure):
    _fields_ = [("lr", Scale), ("loss_scale", Scale), ("beta1", ctypes.c_double), ("beta2", ctypes.c_double),
                ("eps", ctypes.c_double), ("max_norm", ctypes.c_double), ("state", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p)]


class FusedAdamW:
    """Holds fp32 masters of bf16 parameters. Gradients must stay where they are (zero_grad(set_to_none=False))."""

    def __init__(self, library, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, max_norm=1.0):
        self.lib = library
        self.params = list(params)
        device = self.params[0].device
        self.masters = [p.detach().float().clone() if p.dtype == torch.bfloat16 else None for p in self.params]
        self.m = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.v = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.tensors = (Tensor * len(self.params))(*[
            Tensor(p.data_ptr(), p.grad.data_ptr(), master.data_ptr() if master is not None else None, m.data_ptr(),
                   v.data_ptr(), p.numel(), BF16 if p.dtype == torch.bfloat16 else FP32,
                   BF16 if p.grad.dtype == torch.bfloat16 else FP32, 1.0, weight_decay)
            for p, master, m, v in zip(self.params, self.masters, self.m, self.v)])
        size = library.lk_adamw_table_bytes(self.tensors, len(self.params))
        table = torch.empty(size, dtype=torch.uint8)
        self.plan = Plan(table=table.data_ptr(), bytes=size)
        self.check(library.lk_adamw_plan(self.tensors, len(self.params), ctypes.byref(self.plan)))
        self.table = table.to(device)
        self.plan.device_table = self.table.data_ptr()
        self.state = torch.zeros(48, dtype=torch.uint8, device=device)
        self.workspace = torch.empty(library.lk_adamw_workspace_bytes(ctypes.byref(self.plan)), dtype=torch.uint8,
                                     device=device)
        self.lr = torch.tensor([lr], dtype=torch.float32, device=device)
        self.call = AdamW(Scale(0, FP32, self.lr.data_ptr()), Scale(1, FP32, None), *betas, eps, max_norm,
                          self.state.data_ptr(), self.workspace.data_ptr())

    def check(self, result):
        if result:
            raise RuntimeError(self.lib.lk_error_text(result).decode())

    def step(self):
        stream = torch.cuda.current_stream().cuda_stream if self.lr.is_cuda else None
        self.check(self.lib.lk_adamw_step(ctypes.byref(self.plan), ctypes.byref(self.call), ctypes.c_void_p(stream)))


def load(path):
    library = ctypes.CDLL(path)
    library.lk_backend.restype = ctypes.c_char_p
    library.lk_error_text.restype = ctypes.c_char_p
    library.lk_adamw_table_bytes.restype = ctypes.c_size_t
    library.lk_adamw_table_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.lk_adamw_workspace_bytes.restype = ctypes.c_size_t
    library.lk_adamw_plan.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def make_params(device, dtypes):
    torch.manual_seed(1)
    params = []
    for count, dtype in dtypes:
        param = torch.nn.Parameter(torch.randn(count).to(device=device, dtype=dtype))
        param.grad = torch.zeros_like(param)
        params.append(param)
    return params


def main():
    library = load(sys.argv[1])
    cuda = library.lk_backend() == b"cuda"
    if cuda and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    device = "cuda" if cuda else "cpu"
    kinds = [(1000, torch.float32), (7, torch.float32), (40000, torch.bfloat16)]
    ours, theirs = make_params(device, kinds), make_params(device, [(n, torch.float32) for n, _ in kinds])
    for a, b in zip(ours, theirs):  # torch works on the masters
        b.data.copy_(a.data.float())
    mine = FusedAdamW(library, ours, lr=1e-2)
    other = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.01)
    worst = 0.0
    for step in range(20):
        torch.manual_seed(100 + step)
        for a, b in zip(ours, theirs):
            a.grad.copy_(torch.randn(a.shape).to(device))
            b.grad.copy_(a.grad.float())
        mine.step()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        other.step()
        for a, master, b in zip(ours, mine.masters, theirs):
            values = a.data if master is None else master
            worst = max(worst, (values - b.data).abs().max().item())
            assert master is None or torch.equal(a.data, master.to(torch.bfloat16))
    print(f"{device}: 20 steps, largest difference from torch's masters {worst:.3g}")
    return 0 if worst < 1e-5 else 1


sys.exit(main())
