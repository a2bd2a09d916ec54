"""1.1: one mean over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.norm import RMSNorm

kills = "tests/exercises/test_stage1.py::test_each_token_has_a_norm_of_its_own"
words = "without keepdim"
likely = "keepdim=True"


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean_square = wide.square().mean()
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight  # [..., size]
