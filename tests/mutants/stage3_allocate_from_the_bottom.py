"""3.1: takes the bottom of the stack."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage3.page_pool import PageAllocator

kills = "tests/exercises/test_stage3.py::test_the_top_of_the_stack_is_given_first"
words = "topmost comes first"


class MyPageAllocator(PageAllocator):
    def allocate(self, count: int) -> Tensor:
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted and {self.num_free} of {self.num_pages} are free")
        pages = self._stack[:count].clone()
        self.num_free -= count
        self._is_free[pages] = False
        return pages
