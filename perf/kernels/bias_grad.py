#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bias_grad.py [--rounds N]: what the gradient of a bias costs as a by-product of cuBLASLt's product that makes the gradient
of the weight, dout^T x, beside a pass of its own over dout. Of every kind the fastest of the methods that the library
names. Ends with 77 without a GPU."""
import argparse
import ctypes
import glob
import os
import statistics
import sys

try:
    import torch
except ImportError:
    print("SKIPPED: no torch")
    sys.exit(77)

TRANSB, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 4, 7, 8, 26
WORKSPACE_BYTES = 1  # a preference
COMPUTE_32F, FP32, BF16 = 68, 0, 14
BGRADB = 512
TYPES = {torch.float32: FP32, torch.bfloat16: BF16}
METHODS, SPACE = 8, 64 << 20


class Found(ctypes.Structure):
    _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


def open_library():
    names = ["libcublasLt.so.13"]
    for path in sys.path:
        names += glob.glob(os.path.join(path, "nvidia/*/lib/libcublasLt.so.13"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise SystemExit("no libcublasLt.so.13")


class Product:
    """d = dout^T x, with sums of dout's rows into `bias`, which may be None."""

    def __init__(self, lib, dout, x, d, bias):
        self.lib, self.keep = lib, (dout, x, d, bias)
        self.handle, self.product = ctypes.c_void_p(), ctypes.c_void_p()
        lib.cublasLtCreate(ctypes.byref(self.handle))
        lib.cublasLtMatmulDescCreate(ctypes.byref(self.product), COMPUTE_32F, FP32)
        self.set(TRANSB, ctypes.c_int32(1))
        if bias is not None:
            self.set(EPILOGUE, ctypes.c_int32(BGRADB))
            self.set(BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
            self.set(BIAS_TYPE, ctypes.c_int32(TYPES[bias.dtype]))
        self.layouts = [self.layout(t) for t in (x, dout, d)]
        self.space = torch.empty(SPACE, dtype=torch.uint8, device="cuda")
        preference, count = ctypes.c_void_p(), ctypes.c_int()
        lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        size = ctypes.c_size_t(SPACE)
        lib.cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE_BYTES, ctypes.byref(size), ctypes.sizeof(size))
        self.found = (Found * METHODS)()
        a, b, d_layout = self.layouts
        status = lib.cublasLtMatmulAlgoGetHeuristic(self.handle, self.product, a, b, d_layout, d_layout, preference, METHODS,
                                                    self.found, ctypes.byref(count))
        self.count = 0 if status else count.value

    def set(self, attribute, value):
        self.lib.cublasLtMatmulDescSetAttribute(self.product, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def layout(self, t):
        out = ctypes.c_void_p()
        self.lib.cublasLtMatrixLayoutCreate(ctypes.byref(out), TYPES[t.dtype], ctypes.c_uint64(t.shape[1]),
                                            ctypes.c_uint64(t.shape[0]), ctypes.c_int64(t.stride(0)))
        return out

    def run(self, method):
        dout, x, d, _ = self.keep
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a, b, d_layout = self.layouts
        at = lambda t: ctypes.c_void_p(t.data_ptr())
        return self.lib.cublasLtMatmul(self.handle, self.product, ctypes.byref(one), at(x), a, at(dout), b, ctypes.byref(zero),
                                       at(d), d_layout, at(d), d_layout, ctypes.byref(self.found[method].algo), at(self.space),
                                       ctypes.c_size_t(SPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def time_of(call, rounds):
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100000)
        begin.record()
        for _ in range(4):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 250)
    return statistics.median(found)


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def run_shape(lib, tokens, hidden, columns, rounds):
    dout = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    sums, want = dout.double().sum(0), dout.t().float() @ x.float()
    print("%d tokens, hidden %d, columns %d: torch's product %.1f us, torch's sum of dout %.1f us" % (
        tokens, hidden, columns, time_of(lambda: dout.t() @ x, rounds), time_of(lambda: dout.sum(0), rounds)), flush=True)
    for d_type in (torch.bfloat16, torch.float32):
        d = torch.empty(columns, hidden, device="cuda", dtype=d_type)
        for bias_type in (None, torch.bfloat16, torch.float32):
            bias = None if bias_type is None else torch.zeros(columns, device="cuda", dtype=bias_type)
            product = Product(lib, dout, x, d, bias)
            times = {}
            for method in range(product.count):
                if product.run(method) == 0:
                    times[method] = time_of(lambda: product.run(method), rounds)
            if not times:
                print("  %s, bias %s: no method" % (d_type, bias_type), flush=True)
                continue
            best = min(times, key=times.get)
            d.zero_()
            if bias is not None:
                bias.zero_()
            product.run(best)
            torch.cuda.synchronize()
            print("  %s, bias %s: %.1f us, the first method %.1f, of %d; errors %.1e%s" % (
                d_type, bias_type, times[best], times[min(times)], len(times), error(d, want),
                "" if bias is None else ", %.1e" % error(bias, sums)), flush=True)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("SKIPPED: no GPU on this machine")
        return 77
    lib = open_library()
    for shape in ((8192, 2048, 3072), (8192, 4096, 6144), (512, 4096, 6144)):
        run_shape(lib, *shape, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
