"""Sums of few bytes by kernels that read the other GPUs' memory. Knows NCCL only as what takes the larger ones.

A decode step's sums are of some kilobytes, and NCCL's time for them is latency. torch's symmetric memory gives every
rank a buffer at which all others can look, over NVLink; kernels meet at flags there:

    one-shot   every rank reads all buffers and adds up all of it       one exchange; (ranks - 1) x the bytes
    two-shot   every rank adds up its part, then reads the others' sums two exchanges; each byte crosses twice

The first is ours (`kernel/triton_all_reduce`), the second torch's. Both add in the order of the ranks, so all get the
same bits. Buffers stay where they are, and so a CUDA graph can record the calls; nothing may be left in one, so a sum
is written to where its terms were.
"""

from __future__ import annotations

from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.kernel.triton_runs import triton_runs
from minisgl.stage6.communicators import DistributedCommunicator

# Up to how many bytes of a rank's terms one-shot is the fastest, by ranks (those that torch's two-shot is made for).
# Two: `benchmark all_reduce`, two H200 (NV18), torch 2.11, NCCL 2.28.9, in a CUDA graph, 2026-11-30: 16 MiB take 64 µs,
# by two-shot 72, by NCCL 81, and what is larger was not measured. Four and eight: not measured, vLLM's limits.
ONE_SHOT_MOST = {2: 16 << 20, 4: 512 << 10, 8: 256 << 10}
TWO_SHOT_MOST = 16 << 20
_DTYPES = (torch.bfloat16, torch.float32)  # that they add
_ALIGNMENT = 16  # bytes: they read as many at once


class SymmetricBuffer:
    """Memory of this GPU that the others' kernels read, and the two sums by way of it."""

    def __init__(self, ranks: DistributedCommunicator, one_shot_most: int, two_shot_most: int) -> None:
        """ranks: all of the world, and all must come. The others: bytes, multiples of 16."""
        from torch.distributed import _symmetric_memory

        from minisgl.kernel.triton_all_reduce import PROGRAMS, flag_bytes

        world = dist.group.WORLD
        assert world is not None  # whoever has ranks has made it
        self.group, self._rank, self._half = world.group_name, ranks.rank, one_shot_most
        num_bytes = two_shot_most + 2 * one_shot_most + flag_bytes(ranks.size)
        memory = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
        addresses = _symmetric_memory.rendezvous(memory, self.group).buffer_ptrs
        memory.zero_()
        torch.cuda.synchronize(ranks.device)
        ranks.barrier()  # nobody tells a flag before it is zero
        self._memory, self._bytes = memory, memory[:two_shot_most]
        ours = memory.data_ptr() - addresses[ranks.rank] + two_shot_most  # from where an address points
        self._peers = torch.tensor([address + ours for address in addresses], device=ranks.device)
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=ranks.device)

    def like(self, x: Tensor) -> Tensor:
        """The first bytes, in the shape and dtype of x."""
        return self._bytes[: x.nbytes].view(x.dtype).view(x.shape)

    def one_shot(self, x: Tensor) -> Tensor:
        """In place, and the way into the buffer is part of it: one kernel."""
        from minisgl.kernel.triton_all_reduce import one_shot_sum

        return one_shot_sum(x, self._peers, self._turns, self._half, self._rank)

    def two_shot(self, x: Tensor) -> Tensor:
        """In place: a copy into the buffer, and a kernel that leaves the sums where the terms were."""
        shared = self.like(x).copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self.group, x)


class SymmetricCommunicator(DistributedCommunicator):
    """Sums of up to TWO_SHOT_MOST bytes through symmetric memory; all else as its base does."""

    def connect(self) -> None:
        self._one_shot_most = ONE_SHOT_MOST[self.size]
        self._buffer = SymmetricBuffer(self, self._one_shot_most, TWO_SHOT_MOST)

    def sum(self, x: Tensor) -> Tensor:
        if not takes(x):
            return super().sum(x)
        return self._buffer.one_shot(x) if x.nbytes <= self._one_shot_most else self._buffer.two_shot(x)

    def by_nccl(self, x: Tensor) -> bool:
        return not takes(x)


def takes(x: Tensor) -> bool:
    """Whether both kernels can add it up."""
    if x.dtype not in _DTYPES or not x.is_contiguous() or not 0 < x.nbytes <= TWO_SHOT_MOST:
        return False
    return x.nbytes % _ALIGNMENT == 0 and x.storage_offset() * x.itemsize % _ALIGNMENT == 0


def why_not(size: int) -> str | None:
    """What this machine lacks for symmetric memory between its first `size` GPUs; None: nothing. It looks at all of
    them: were the answer not the same on every rank, some would wait for ever for the others to come."""
    if size not in ONE_SHOT_MOST:
        return f"it is made for {', '.join(map(str, ONE_SHOT_MOST))} ranks, not for {size}"
    if not hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"):
        return f"torch {torch.__version__} does not have it"
    for gpu in range(size):
        if not triton_runs(torch.device("cuda", gpu)):
            return f"Triton does not run on GPU {gpu}"
    for gpu, other in permutations(range(size), 2):
        if not torch.cuda.can_device_access_peer(gpu, other):
            return f"GPU {gpu} cannot read the memory of GPU {other}"
    return None
