"""3.2: does not see a page that is twice in one call."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_a_page_twice_in_one_call_is_refused"
words = "twice in one call"


class MyPageAllocator(PageAllocator):
    def free(self, pages: Tensor) -> None:
        if bool(self._is_free[pages].any()):
            raise RuntimeError(f"pages freed twice: {pages.tolist()[:16]}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)
