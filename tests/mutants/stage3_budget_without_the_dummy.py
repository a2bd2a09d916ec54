"""3.6: forgets the dummy page."""

from __future__ import annotations

from minisgl.stage3.page_pool import KVCachePool

kills = "tests/exercises/test_stage3.py::test_the_dummy_page_has_its_share"
words = "dummy page"


class MyKVCachePool(KVCachePool):
    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        available = memory_ratio * free_before - model_bytes
        return int(available // bytes_per_page)
