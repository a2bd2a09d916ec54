"""3.5: returns a view where pages are neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention

kills = "tests/exercises/test_stage3.py::test_what_is_gathered_is_a_copy"
words = "is a copy"


class MyPagedTorchAttention(PagedTorchAttention):
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        by_page = cache.view(-1, self.page_size * self.num_kv_heads * self.head_dim)
        first, last = int(pages[0]), int(pages[-1])
        if out is None and pages.tolist() == list(range(first, last + 1)):
            return by_page[first : last + 1].view(-1, self.num_kv_heads, self.head_dim)
        return torch.index_select(by_page, 0, pages, out=out).view(-1, self.num_kv_heads, self.head_dim)
