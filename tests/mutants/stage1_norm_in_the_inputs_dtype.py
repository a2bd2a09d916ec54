"""1.1: squares in x's own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.norm import RMSNorm

kills = "tests/exercises/test_stage1.py::test_squares_are_summed_in_float32"
words = "not in x's own dtype"


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight  # [..., size]
