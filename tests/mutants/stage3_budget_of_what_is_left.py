"""3.6: takes the ratio of what the model leaves."""

from __future__ import annotations

from minisgl.stage3.page_pool import KVCachePool

kills = "tests/exercises/test_stage3.py::test_the_model_comes_out_of_the_ratios_share"
words = "before the model"


class MyKVCachePool(KVCachePool):
    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        available = memory_ratio * (free_before - model_bytes)
        return int(available // bytes_per_page) - 1
