"""3.2: turns the pages round as `allocate` does, so that the first of them is on top."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_the_page_that_was_freed_last_is_given_first"
words = "freed last is on top"


class MyPageAllocator(PageAllocator):
    def free(self, pages: Tensor) -> None:
        if bool(self._is_free[pages].any()) or len(set(pages.tolist())) != len(pages):
            raise RuntimeError(f"pages freed twice: {pages.tolist()[:16]}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages.flip(0)
        self.num_free += len(pages)
