"""1.1: takes the mean away first, as LayerNorm does."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.norm import RMSNorm

kills = "tests/exercises/test_stage1.py::test_a_row_of_threes_and_fours"
words = "came     [-2, 2, -2, 2]"
likely = "LayerNorm"


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight  # [..., size]
