"""Ranks that are threads of one process: all of tensor parallelism but its transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class ThreadCommunicator:
    """A `Communicator` between threads. Sums in the order of the ranks, so that all get the same bits."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier
        self.num_all_reduces = 0

    def exchange(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._shared)
        self._barrier.wait(timeout=60)  # nobody writes again before all have read
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_all_reduces += 1
        return torch.stack(self.exchange(x)).sum(0)

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        shards = self.exchange(x)
        assert [shard.shape[1] for shard in shards] == sizes
        return torch.cat(shards, dim=1)

    def minimum(self, value: int) -> int:
        return min(self.exchange(value))

    def broadcast(self, value: int) -> int:
        return self.exchange(value)[0]


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """What `work(communicator)` returned on each rank. Raises the error of the rank that failed, not of its victims."""
    shared, barrier = [None] * size, threading.Barrier(size)

    def one(rank: int) -> Result:
        try:
            return work(ThreadCommunicator(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
