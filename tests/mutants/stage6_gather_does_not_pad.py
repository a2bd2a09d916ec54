"""6.5: ranks give shards of different widths."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.stage6.communicators import DistributedCommunicator

kills = "tests/exercises/test_stage6.py::test_each_row_is_whole"
words = "equal shapes"


class MyDistributedCommunicator(DistributedCommunicator):
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        shards = [x.new_empty(len(x), size) for size in sizes]
        self._collective(dist.all_gather, shards, x, group=self._data)
        return torch.cat(shards, dim=1)
