"""1.1: multiplies by the weight before it rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.norm import RMSNorm

kills = "tests/exercises/test_stage1.py::test_a_norm_is_that_of_transformers"
words = "a rounding is in another place"


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)  # [..., size]
