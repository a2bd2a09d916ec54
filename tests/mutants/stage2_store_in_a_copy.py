"""2.1: assigns to a copy."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage2.contiguous_cache import ContiguousCache

kills = "tests/exercises/test_stage2.py::test_each_token_goes_to_its_slot"
words = "still zero"


class MyContiguousCache(ContiguousCache):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        self.k_cache(layer_id)[out_loc].copy_(k)
        self.v_cache(layer_id)[out_loc].copy_(v)
