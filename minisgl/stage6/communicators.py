"""How ranks reach each other: sums and gathers of tensors, small agreements of integers. Knows nothing of models.

Two groups of the same ranks: `data` for the layers (gloo on CPUs, NCCL on GPUs) and `control` for the scheduler
(always gloo). They are apart because with overlap two threads communicate at once, and a group matches calls by
their order alone. mini-sglang's pair of NCCL and gloo groups is the same.
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


class PeerLost(RuntimeError):
    """A collective failed, most likely because another rank has ended: that rank knows the reason."""


class DistributedCommunicator:
    """A `Communicator` over torch.distributed. One a process, since torch has one world a process."""

    def __init__(self, rank: int, size: int, device: torch.device, rendezvous: Path) -> None:
        """Returns once all `size` ranks have come. rendezvous: a path that no file has yet, the same on all of them."""
        self.rank, self.size = rank, size
        self.num_all_reduces = 0
        init = f"file://{rendezvous}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=NEVER)
        self._control = dist.group.WORLD
        self._data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=NEVER)
        self.all_reduce(torch.zeros(1, device=device))  # connect now: an error belongs to the start
        self.num_all_reduces = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place. The same bits on every rank."""
        self.num_all_reduces += 1
        self._collective(dist.all_reduce, x, group=self._data)
        return x

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
        least = torch.tensor(value, dtype=torch.int64)
        self._collective(dist.all_reduce, least, op=dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def broadcast(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        told = torch.tensor(value, dtype=torch.int64)
        self._collective(dist.broadcast, told, src=0, group=self._control)
        return int(told)

    def close(self) -> None:
        dist.destroy_process_group()

    def _collective(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} lost the others: {str(error).splitlines()[0]:.200}") from error


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
