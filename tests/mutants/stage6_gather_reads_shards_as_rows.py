"""6.5: takes the shards, which lie one after another, for rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from minisgl.stage6.communicators import DistributedCommunicator

kills = "tests/exercises/test_stage6.py::test_each_row_is_whole"
words = "every row has its 10 columns"


class MyDistributedCommunicator(DistributedCommunicator):
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        widest = max(sizes)
        shard = F.pad(x, (0, widest - x.shape[1])).contiguous()
        shards = list(x.new_empty(self.size, len(x), widest).unbind())
        self._collective(dist.all_gather, shards, shard, group=self._data)
        return torch.cat(shards).view(len(x), -1)[:, : sum(sizes)]
