"""1.4: takes the score after the k-th."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.sampling.filters import TokenFilters

kills = "tests/exercises/test_stage1.py::test_top_k_is_the_kth_highest_score"
words = "Off by one"


class MyTokenFilters(TokenFilters):
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        n = ranked.shape[1]
        kth = ranked.gather(1, top_k.clamp(max=n)[:, None])  # [rows, 1]
        return kth.masked_fill(top_k[:, None] > n, -torch.inf)
