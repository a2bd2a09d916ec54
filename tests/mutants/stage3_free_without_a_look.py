"""3.2: frees what is free."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_a_page_that_is_free_is_not_freed_again"
words = "freed a second time"


class MyPageAllocator(PageAllocator):
    def free(self, pages: Tensor) -> None:
        if len(set(pages.tolist())) != len(pages):
            raise RuntimeError(f"pages freed twice: {pages.tolist()[:16]}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)
