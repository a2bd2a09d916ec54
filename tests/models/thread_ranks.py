"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class ThreadCommunicator:
    """A `Communicator` between threads."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier
        self.num_all_reduces = 0

    def _exchange(self, value: Tensor) -> list[Tensor]:
        self._shared[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._shared)
        self._barrier.wait(timeout=60)
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_all_reduces += 1
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        shards = self._exchange(x)
        assert [shard.shape[1] for shard in shards] == sizes
        return torch.cat(shards, dim=1)

    def minimum(self, value: int) -> int:
        raise NotImplementedError("no layer asks for it")


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What `work(communicator)` returned on each rank."""
    shared, barrier = [None] * size, threading.Barrier(size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadCommunicator(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()  # the others must not wait for a rank that failed
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
