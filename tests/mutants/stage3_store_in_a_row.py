"""3.4: writes the tokens one after the other."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import KVCachePool

kills = "tests/exercises/test_stage3.py::test_tokens_are_scattered_to_their_slots"
words = "in this order"


class MyKVCachePool(KVCachePool):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        self.k_cache(layer_id)[int(out_loc.min()) : int(out_loc.min()) + len(k)] = k
        self.v_cache(layer_id)[out_loc] = v
