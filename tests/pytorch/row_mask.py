# SPDX-License-Identifier: Apache-2.0
"""How a program tells which rows of an all-to-all are live: those that no token took hold whatever was in memory, are
not read, and arrive as zeros. The same result without the library, or while its ranks have not agreed yet: then the
program writes the zeros itself."""
import ctypes

import torch
import torch.distributed as dist

import job

WIDTH, ROWS = 512, 128  # bf16; rows to each rank


def find_set_mask():
    """None where the library is not loaded."""
    try:
        set_mask = ctypes.CDLL(None).loongcommSetMask
    except AttributeError:
        return None
    set_mask.restype = ctypes.c_int
    set_mask.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
                         ctypes.c_void_p]
    return set_mask


SET_MASK = find_set_mask()


def bits_of(live):
    """Bit r % 32 of word r // 32, as int32 on the device of `live`."""
    words = torch.nn.functional.pad(live.to(torch.int64), (0, -live.numel() % 32)).view(-1, 32)
    value = (words << torch.arange(32, device=live.device)).sum(-1)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32)


def communicator():
    """PyTorch's ncclComm_t, which is there from its first call on; None where it is not shown."""
    backend = dist.group.WORLD._get_backend(job.device())
    return backend._comm_ptr() if hasattr(backend, "_comm_ptr") else None


def mask_next(rows, live):
    """True: the next all_to_all_single of `rows` on the current stream leaves out those that are not live. `bits` has to
    live until it has run; the caching allocator sees to that on one stream."""
    handle = communicator() if SET_MASK and job.ON_GPU else None
    if not handle:
        return False
    bits = bits_of(live)
    return SET_MASK(handle, bits.data_ptr(), rows.shape[0], rows[0].numel() * rows.element_size(),
                    torch.cuda.current_stream().cuda_stream) == 0


def exchange(rows, live):
    if not mask_next(rows, live):
        rows.masked_fill_(~live[:, None], 0)
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows)
    return out


def main(rec):
    world = dist.get_world_size()
    masked = 0
    for step in range(40):
        rows = job.randn(world * ROWS, WIDTH, salt=step, dtype=torch.bfloat16)
        live = job.randn(world * ROWS, salt=1000 + step) > 0.5
        want = torch.empty_like(rows)
        dist.all_to_all_single(want, rows.masked_fill(~live[:, None], 0))
        got = exchange(rows, live)
        masked += bool((rows[~live] != 0).any())
        rec.check("step %d" % step, torch.equal(want.view(torch.int16), got.view(torch.int16)))
        rec.tensor("step %d" % step, got)
    if dist.get_rank() == 0:
        print("row_mask: %d of 40 all-to-alls with a mask" % masked, flush=True)


if __name__ == "__main__":
    job.run_alone(main)
