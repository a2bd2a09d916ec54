"""1.1: adds eps after the root."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.norm import RMSNorm

kills = "tests/exercises/test_stage1.py::test_eps_is_added_under_the_root"
words = "under the root"


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide / (mean_square.sqrt() + self.eps)).to(x.dtype) * self.weight  # [..., size]
