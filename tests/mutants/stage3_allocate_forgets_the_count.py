"""3.1: does not lower num_free."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_no_page_is_given_twice"
words = "given twice"


class MyPageAllocator(PageAllocator):
    def allocate(self, count: int) -> Tensor:
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted and {self.num_free} of {self.num_pages} are free")
        pages = self._stack[self.num_free - count : self.num_free].flip(0)  # a copy: the stack will be written to
        self._is_free[pages] = False
        return pages
