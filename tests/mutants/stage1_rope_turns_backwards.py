"""1.2: turns the other way round."""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.rotary import Rotation

kills = "tests/exercises/test_stage1.py::test_a_quarter_turn"
words = "the other way round"


class MyRotation(Rotation):
    def apply(self, x: Tensor) -> Tensor:
        exchanged = x.roll(x.shape[-1] // 2, dims=-1)  # [tokens, heads, head_dim]
        return x * self.cos - exchanged * self.signed_sin
