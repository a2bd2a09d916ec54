"""1.2: pairs neighbours instead of halves."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.rotary import Rotation

kills = "tests/exercises/test_stage1.py::test_a_quarter_turn"
words = "neighbours were turned as pairs"


class MyRotation(Rotation):
    def apply(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)).flip(-1)
        sign = pairs.new_tensor([-1.0, 1.0])
        exchanged = (pairs * sign).flatten(-2) * self.signed_sin.abs()
        return x * self.cos + exchanged
