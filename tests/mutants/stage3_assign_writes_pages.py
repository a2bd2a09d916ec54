"""3.3: writes page numbers instead of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.req import Req
from minisgl.stage3.page_table import PageTable

kills = "tests/exercises/test_stage3.py::test_a_prompt_gets_the_slots_of_its_pages"
words = "page numbers"


class MyPageTable(PageTable):
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        rows: list[int] = []
        firsts: list[int] = []
        for req in reqs:
            first = -(-req.cached_len // self.page_size) * self.page_size
            starts = range(first, req.device_len, self.page_size)
            rows += [req.table_idx] * len(starts)
            firsts += starts
        if len(rows) != len(pages):
            raise RuntimeError(f"{len(pages)} pages were given to requests that need {len(rows)}")
        if rows:
            columns = self._slots(torch.tensor(firsts), 1)  # [pages, page_size]
            self._write(torch.tensor(rows)[:, None], columns, pages[:, None].expand(columns.shape))
