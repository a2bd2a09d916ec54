"""3.5: takes page numbers for slots."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention

kills = "tests/exercises/test_stage3.py::test_pages_are_gathered_in_their_order"
words = "page 2, not slot 2"


class MyPagedTorchAttention(PagedTorchAttention):
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        slots = (pages.long()[:, None] + torch.arange(self.page_size)).flatten()
        return torch.index_select(cache, 0, slots)
