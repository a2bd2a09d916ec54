"""2.1: stores K in both caches."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage2.contiguous_cache import ContiguousCache

kills = "tests/exercises/test_stage2.py::test_each_token_goes_to_its_slot"
words = "V holds"


class MyContiguousCache(ContiguousCache):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        self.k_cache(layer_id)[out_loc] = k
        self.v_cache(layer_id)[out_loc] = k
