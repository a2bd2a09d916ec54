"""How ranks reach each other: sums and gathers of tensors, small agreements of integers. Knows nothing of models.

Two groups of the same ranks: `data` for the layers (gloo on CPUs, NCCL on GPUs) and `control` for the scheduler
(always gloo). They are apart because with overlap two threads communicate at once, and a group matches calls by
their order alone. mini-sglang's pair of NCCL and gloo groups is the same.

What is here works everywhere. `communicators_nccl` and `communicators_symm` sum faster on GPUs, and take the place of
`sum` alone; which of them a run has is `communicators_by_name`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from minisgl.kernel.device import resolve_device
from minisgl.learn import exercise

NEVER = timedelta(days=365)  # a rank that dies is noticed by its parent; one that is only slow is no error
MOST_IMBALANCE = 2 << 30  # bytes


class PeerLost(RuntimeError):
    """A collective failed, most likely because another rank has ended: that rank knows the reason."""


class DistributedCommunicator:
    """A `Communicator` over torch.distributed. One a process, since torch has one world a process."""

    def __init__(self, rank: int, size: int, device: torch.device, rendezvous: Path) -> None:
        """Returns once all `size` ranks have come. rendezvous: a path that no file has yet, the same on all of them."""
        self.rank, self.size, self.device = rank, size, device
        init = f"file://{rendezvous}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=NEVER)
        self._control = dist.group.WORLD
        self._data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=NEVER)
        self.connect()
        self.sum(torch.zeros(8, device=device))  # connect now: an error belongs to the start
        self.num_all_reduces = 0

    def connect(self) -> None:
        """What a faster one needs beside the two groups."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place. The same bits on every rank."""
        self.num_all_reduces += 1
        return self.sum(x)

    def sum(self, x: Tensor) -> Tensor:
        """`all_reduce`, not counted."""
        self._collective(dist.all_reduce, x, group=self._data)
        return x

    def by_nccl(self, x: Tensor) -> bool:
        """Whether it is NCCL that adds up what is like x, which may be on meta."""
        return self.device.type == "cuda"

    @exercise("6.5")
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x: [rows, sizes[rank]] on each rank. Returns [rows, sum(sizes)], the same on all.

        The collective wants equal shapes, so each shard is padded to the widest.
        """
        widest = max(sizes)
        shard = F.pad(x, (0, widest - x.shape[1])).contiguous()  # [rows, widest]
        shards = list(x.new_empty(self.size, len(x), widest).unbind())
        self._collective(dist.all_gather, shards, shard, group=self._data)
        return torch.cat([shard[:, :size] for shard, size in zip(shards, sizes, strict=True)], dim=1)

    def minimum(self, value: int) -> int:
        """The least of what the ranks gave."""
        return self.extremes(value)[0]

    def extremes(self, value: int) -> tuple[int, int]:
        """The least and the most of what the ranks gave, in one collective: the most is the least of the negatives."""
        both = torch.tensor([value, -value], dtype=torch.int64)
        self._collective(dist.all_reduce, both, op=dist.ReduceOp.MIN, group=self._control)
        return int(both[0]), -int(both[1])

    def broadcast(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        told = torch.tensor(value, dtype=torch.int64)
        self.broadcast_tensor(told)
        return int(told)

    def broadcast_tensor(self, told: Tensor) -> None:
        """Rank 0's, in place, on the host."""
        self._collective(dist.broadcast, told, src=0, group=self._control)

    def barrier(self) -> None:
        """Returns once every rank is here. The hosts meet; what they asked of their devices may not be done."""
        self._collective(dist.barrier, group=self._control)

    def close(self) -> None:
        dist.destroy_process_group()

    def _collective(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} lost the others: {str(error).splitlines()[0]:.200}") from error


def check_balance(device: torch.device, least: int, most: int) -> None:
    """least, most: bytes free on the ranks' devices. Raises ValueError when GPUs differ by more than MOST_IMBALANCE:
    the pool is as large as the least has room for, so what another process holds there is lost on all of them."""
    if device.type == "cuda" and most - least > MOST_IMBALANCE:
        raise ValueError(
            f"the ranks' GPUs have from {least / 2**30:.1f} to {most / 2**30:.1f} GiB free, more than "
            f"{MOST_IMBALANCE >> 30} GiB apart: end what else runs there (nvidia-smi shows it), or choose other GPUs "
            f"with CUDA_VISIBLE_DEVICES"
        )


def own_share(device: torch.device, free: int, size: int) -> int:
    """Of `free` bytes, what is for one of `size` ranks: a GPU is a rank's own, a CPU's memory is everybody's."""
    return free if device.type == "cuda" else free // size


def rank_device(name: str, rank: int) -> torch.device:
    """Rank r computes on GPU r, or on the CPU. name: "auto", "cpu" or "cuda"."""
    if name == "cpu" or not torch.cuda.is_available():
        return resolve_device(name)
    torch.cuda.set_device(rank)
    return resolve_device(name)


def check_devices(name: str, size: int) -> None:
    """Raises ValueError when there are fewer GPUs than ranks. Makes no CUDA context: the caller computes nothing."""
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else size
    if size > gpus:
        raise ValueError(f"--tp {size} needs as many GPUs, and there are {gpus}: use --tp {gpus}, or --device cpu")
