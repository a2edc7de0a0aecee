# SPDX-License-Identifier: Apache-2.0
"""kernels/loongcompute.h by ctypes, on torch's tensors and torch's stream."""
import ctypes

import torch

FP32, BF16 = 0, 1
RMS, LAYER = 0, 1

P, F32, F64 = ctypes.c_void_p, ctypes.c_float, ctypes.c_double
U32, U64, INT = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int


def structure(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Scale = structure("Scale", value=F32, type=INT, device_value=P)
Rng = structure("Rng", seed=U64, offset=U64, device_offset=P)
Tensor = structure("Tensor", param=P, grad=P, master=P, m=P, v=P, count=U64, param_type=INT, grad_type=INT,
                   lr_factor=F32, weight_decay=F32)
Plan = structure("Plan", table=P, bytes=ctypes.c_size_t, device_table=P, elements=U64, tensors=U32, chunks=U32)
AdamW = structure("AdamW", lr=Scale, loss_scale=Scale, beta1=F64, beta2=F64, eps=F64, max_norm=F64, state=P,
                  workspace=P)
Swiglu = structure("Swiglu", z=P, z_stride=U64, row_scale=P, rows=U64, columns=U64, drop=F64, rng=Rng)
SwigluGrads = structure("SwigluGrads", dh=P, dh_stride=U64, dz=P, dz_stride=U64, h=P, h_stride=U64, row_dot=P)
Norm = structure("Norm", kind=INT, rows=U64, columns=U64, eps=F64, weight_type=INT, gamma=P, beta=P, gamma_offset=F32,
                 mean=P, rstd=P)
NormForward = structure("NormForward", x=P, x_stride=U64, residual=P, residual_stride=U64, sum=P, sum_stride=U64, y=P,
                        y_stride=U64)
NormBackward = structure("NormBackward", s=P, s_stride=U64, dy=P, dy_stride=U64, ds=P, ds_stride=U64, dx=P,
                         dx_stride=U64, dgamma=P, dbeta=P, workspace=P)
MoeRouting = structure("MoeRouting", experts=P, tokens=U64, choices=U32, expert_count=U32, capacity=U32, align=U32,
                       rows=U64, row_of_slot=P, slot_of_row=P, counts=P, offsets=P, live=P,
                       workspace=P)
MoeGrads = structure("MoeGrads", dtokens=P, dtoken_stride=U64, permuted=P, permuted_stride=U64, dpermuted=P,
                     dpermuted_stride=U64, columns=U64, weights=P, dweights=P, fill=INT)
MoeRows = structure("MoeRows", tokens=P, token_stride=U64, permuted=P, permuted_stride=U64, columns=U64, weights=P,
                    fill=INT)

Augment = structure("Augment", images=P, image_stride=U64, row_stride=U64, count=U32, height=U32, width=U32, channels=U32,
                    samples=P, first_sample=U64, state=P, out=P, out_type=INT, out_height=U32, out_width=U32,
                    crop_area=F32 * 2, crop_ratio=F32 * 2, flip=F32, brightness=F32, contrast=F32, saturation=F32,
                    hue=F32, mean=F32 * 3, std=F32 * 3, erase=F32, erase_area=F32 * 2, erase_ratio=F32 * 2,
                    erase_value=F32 * 3, choices=P)


def at(tensor):
    return tensor.data_ptr() if tensor is not None else None


class Library:
    """Functions of one kernels library; those that return an error raise it."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.lk_backend.restype = ctypes.c_char_p
        self.lib.lk_error_text.restype = ctypes.c_char_p
        self.lib.lk_compute_error.restype = ctypes.c_char_p
        for name in ("lk_adamw_table_bytes", "lk_adamw_workspace_bytes", "lk_norm_workspace_bytes",
                     "lk_moe_workspace_bytes"):
            getattr(self.lib, name).restype = ctypes.c_size_t
        self.lib.lk_adamw_table_bytes.argtypes = [P, ctypes.c_size_t]
        self.lib.lk_adamw_plan.argtypes = [P, ctypes.c_size_t, P]
        self.lib.lk_swiglu_forward.argtypes = [P, P, U64, P]
        self.device = torch.device("cuda" if self.lib.lk_backend() == b"cuda" else "cpu")

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else None

    def check(self, result):
        if result:
            raise RuntimeError("%s; %s" % (self.lib.lk_error_text(result).decode(), self.lib.lk_compute_error().decode()))

    def prepare(self, name, *arguments):
        """A call of `name` with these arguments, structures by reference, on the stream that is current now."""
        function = getattr(self.lib, name)
        passed = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
        passed.append(ctypes.c_void_p(self.stream()))

        def call(kept=arguments):
            result = function(*passed)
            if result:
                self.check(result)

        return call

    def adamw(self, params, lr, max_norm, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8):
        """A call of lk_adamw_step() over parameters with gradients; fp32 masters are made of bf16 ones."""
        masters = [p.detach().float() if p.dtype == torch.bfloat16 else None for p in params]
        m = [torch.zeros_like(p, dtype=torch.float32) for p in params]
        v = [torch.zeros_like(p, dtype=torch.float32) for p in params]
        kind = {torch.float32: FP32, torch.bfloat16: BF16}
        tensors = (Tensor * len(params))(*[
            Tensor(at(p), at(p.grad), at(w), at(a), at(b), p.numel(), kind[p.dtype], kind[p.grad.dtype], 1, weight_decay)
            for p, w, a, b in zip(params, masters, m, v)])
        size = self.lib.lk_adamw_table_bytes(tensors, len(params))
        table = torch.empty(size, dtype=torch.uint8)
        plan = Plan(table=at(table), bytes=size)
        self.check(self.lib.lk_adamw_plan(tensors, len(params), ctypes.byref(plan)))
        there = table.to(self.device)
        plan.device_table = at(there)
        state = torch.zeros(48, dtype=torch.uint8, device=self.device)
        workspace = torch.empty(self.lib.lk_adamw_workspace_bytes(ctypes.byref(plan)), dtype=torch.uint8,
                                device=self.device)
        call = self.prepare("lk_adamw_step", plan, AdamW(Scale(lr, FP32, None), Scale(1, FP32, None), *betas, eps,
                                                         max_norm, at(state), at(workspace)))
        call.kept = (masters, m, v, table, there, state, workspace)
        return call
