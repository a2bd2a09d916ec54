"""6.3: every rank adds the bias, and the sum has it as often."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.linear import LinearRowParallel

kills = "tests/exercises/test_stage6.py::test_the_bias_is_in_the_sum_once"
words = "in the sum again"


class MyLinearRowParallel(LinearRowParallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(self.product(x, self.bias))
