"""6.3: each rank goes on with its own term."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.linear import LinearRowParallel

kills = "tests/exercises/test_stage6.py::test_the_sum_over_ranks_comes_back"
words = "the ranks meet once"


class MyLinearRowParallel(LinearRowParallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias if self.comm.rank == 0 else None)
