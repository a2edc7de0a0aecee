#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""augment_torch.py LIBRARY: lk_augment_images() from Python, a batch alone and spread over ranks.

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

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
P, U32, U64, F32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float


class Numbers(ctypes.Structure):
    """struct lk_augment."""

    _fields_ = [("images", P), ("image_stride", U64), ("row_stride", U64), ("count", U32), ("height", U32), ("width", U32),
                ("channels", U32), ("samples", P), ("first_sample", U64), ("state", P), ("out", P),
                ("out_type", ctypes.c_int), ("out_height", U32), ("out_width", U32), ("crop_area", F32 * 2),
                ("crop_ratio", F32 * 2), ("flip", F32), ("brightness", F32), ("contrast", F32), ("saturation", F32),
                ("hue", F32), ("mean", F32 * 3), ("std", F32 * 3), ("erase", F32), ("erase_area", F32 * 2),
                ("erase_ratio", F32 * 2), ("erase_value", F32 * 3), ("choices", P)]


class Augment:
    """Images as they are read (uint8, N x H x W x 3) to what a network takes. state_dict() is all that a job has to keep to
    go on where it was; set_epoch() gives every sample new numbers."""

    def __init__(self, library, device, size, seed, dtype=torch.bfloat16, **numbers):
        self.library, self.size, self.dtype, self.numbers = library, size, dtype, numbers
        self.state = torch.tensor([seed, 0], dtype=torch.int64, device=device)

    def set_epoch(self, epoch):
        self.state[1] = epoch

    def state_dict(self):
        return {"state": self.state.clone()}

    def __call__(self, images, samples):
        n, height, width, channels = images.shape
        out = torch.empty(n, channels, *self.size, dtype=self.dtype, device=images.device)
        call = Numbers(images=images.data_ptr(), image_stride=images.stride(0), row_stride=images.stride(1), count=n,
                       height=height, width=width, channels=channels, samples=samples.data_ptr(),
                       state=self.state.data_ptr(), out=out.data_ptr(), out_type=TYPES[self.dtype],
                       out_height=self.size[0], out_width=self.size[1])
        for name, value in self.numbers.items():
            setattr(call, name, type(getattr(call, name))(*value) if isinstance(value, tuple) else value)
        stream = torch.cuda.current_stream().cuda_stream if images.is_cuda else None
        result = self.library.lk_augment_images(ctypes.byref(call), P(stream))
        if result:
            raise RuntimeError(self.library.lk_error_text(result).decode())
        return out


def main():
    library = ctypes.CDLL(sys.argv[1])
    library.lk_backend.restype = ctypes.c_char_p
    library.lk_error_text.restype = ctypes.c_char_p
    cuda = library.lk_backend() == b"cuda"
    if cuda and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(1)
    images = torch.randint(0, 256, (12, 60, 80, 3), dtype=torch.uint8, device=device)
    samples = torch.arange(12, dtype=torch.int64, device=device) * 1001
    one = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    augment = Augment(library, device, (32, 48), 7, crop_area=(0.08, 1), crop_ratio=(3 / 4, 4 / 3), flip=0.5,
                      brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, erase=0.25, erase_area=(0.02, 0.33),
                      erase_ratio=(0.3, 3.3), **one)
    before = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()
    whole = augment(images, samples)
    parts = torch.empty_like(whole)
    for rank in range(3):  # every rank has other samples, in an order of its own
        mine = torch.arange(rank, 12, 3, device=device).flip(0)
        parts[mine] = augment(images[mine].contiguous(), samples[mine].contiguous())
    assert torch.equal(parts, whole), "a sample depends on its batch"
    augment.set_epoch(1)
    assert not torch.equal(augment(images, samples), whole), "the same numbers in two epochs"
    after = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()
    assert torch.equal(before, after), "the training generator has moved"
    plain = Augment(library, device, (32, 48), 7, dtype=torch.float32, **one)(images, samples)
    mean, std = (torch.tensor(one[name], device=device).view(1, 3, 1, 1) for name in ("mean", "std"))
    want = torch.nn.functional.interpolate(images.permute(0, 3, 1, 2).float() / 255, (32, 48), mode="bilinear")
    worst = (plain - (want - mean) / std).abs().max().item()
    print(f"{device}: the same on one rank and on three; largest difference from torch's resize {worst:.3g}")
    return 0 if worst < 1e-4 else 1


sys.exit(main())
