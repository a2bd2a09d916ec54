"""Sums of few bytes by a kernel that reads the other GPUs' memory. Knows NCCL only as what takes the larger ones.

A decode step's sums are of some kilobytes, and NCCL's time for them is latency. torch's symmetric memory gives every
rank a buffer at which all others can look, over NVLink; its kernels meet at flags there:

    one-shot   every rank reads all buffers and adds up all of it       one exchange; (ranks - 1) x the bytes
    two-shot   every rank adds up its part, then reads the others' sums two exchanges; each byte crosses twice

Both add in the order of the ranks, so all get the same bits. The buffer is persistent, and so a CUDA graph can record
the call; nothing may stay in it, so a sum is written back to where its terms were.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.stage6.communicators import DistributedCommunicator

# Where the next way is faster, in bytes of a rank's terms: two H200 (NV18), torch 2.11, NCCL 2.28.9, in a CUDA graph.
# For [rows, 4096] of bfloat16, rows 1 / 64 / 256: NCCL 9.6 / 13.1 / 30 µs, one-shot 7.7 / 10.9 / 20, two-shot without
# the copies 6.4 / 7.8 / 13.1 (2026-11-29).
ONE_SHOT_MOST = 128 << 10
TWO_SHOT_MOST = 8 << 20
SIZES = (2, 4, 8)  # ranks that torch's kernels are made for
_DTYPES = (torch.bfloat16, torch.float32)  # that they add
_ALIGNMENT = 16  # bytes: they read as many at once


class SymmetricBuffer:
    """Memory of this GPU that the others' kernels read, and the two sums by way of it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """All ranks of the world must come."""
        from torch.distributed import _symmetric_memory

        world = dist.group.WORLD
        assert world is not None  # whoever has ranks has made it
        self.group = world.group_name
        self._bytes = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._bytes, self.group)

    def like(self, x: Tensor) -> Tensor:
        """The first bytes, in the shape and dtype of x."""
        return self._bytes[: x.nbytes].view(x.dtype).view(x.shape)

    def takes(self, x: Tensor) -> bool:
        if x.dtype not in _DTYPES or not x.is_contiguous() or not 0 < x.nbytes <= len(self._bytes):
            return False
        return x.nbytes % _ALIGNMENT == 0 and x.storage_offset() * x.itemsize % _ALIGNMENT == 0

    def one_shot(self, x: Tensor) -> Tensor:
        """In place, and the way into the buffer is part of it: one kernel."""
        return torch.ops.symm_mem.one_shot_all_reduce_copy_out(self.like(x), x, "sum", self.group, x)

    def two_shot(self, x: Tensor) -> Tensor:
        """In place: a copy into the buffer, and a kernel that leaves the sums where the terms were."""
        shared = self.like(x).copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self.group, x)


class SymmetricCommunicator(DistributedCommunicator):
    """Sums of up to TWO_SHOT_MOST bytes through symmetric memory; all else as its base does."""

    def connect(self) -> None:
        self._buffer = SymmetricBuffer(TWO_SHOT_MOST, self.device)

    def sum(self, x: Tensor) -> Tensor:
        if not self._buffer.takes(x):
            return super().sum(x)
        return self._buffer.one_shot(x) if x.nbytes <= ONE_SHOT_MOST else self._buffer.two_shot(x)


def why_not(rank: int, size: int) -> str | None:
    """What this machine lacks for symmetric memory between its first `size` GPUs; None: nothing."""
    if size not in SIZES:
        return f"it is made for {', '.join(map(str, SIZES))} ranks, not for {size}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out"):
        return f"torch {torch.__version__} does not have it"
    apart = [other for other in range(size) if other != rank and not torch.cuda.can_device_access_peer(rank, other)]
    return f"GPU {rank} cannot read the memory of GPU {apart[0]}" if apart else None
