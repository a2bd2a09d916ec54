"""3.1: gives out a view of the stack, in an order that hides it."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_pages_given_out_do_not_change_later"
words = "changed later"


class MyPageAllocator(PageAllocator):
    def allocate(self, count: int) -> Tensor:
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted and {self.num_free} of {self.num_pages} are free")
        pages = self._stack[self.num_free - count : self.num_free]
        pages.copy_(pages.flip(0))  # the topmost first
        self.num_free -= count
        self._is_free[pages] = False
        return pages
