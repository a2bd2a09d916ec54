"""3.3: begins a page at cached_len."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.req import Req
from minisgl.stage3.page_table import PageTable

kills = "tests/exercises/test_stage3.py::test_a_page_that_is_not_full_is_filled_first"
words = "not full"


class MyPageTable(PageTable):
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        rows: list[int] = []
        firsts: list[int] = []
        for req in reqs:
            first = req.cached_len if len(pages) else req.device_len
            starts = range(first, req.device_len, self.page_size)
            rows += [req.table_idx] * len(starts)
            firsts += starts
        if len(rows) != len(pages):
            raise RuntimeError(f"{len(pages)} pages were given to requests that need {len(rows)}")
        if rows:
            columns = self._slots(torch.tensor(firsts), 1)  # [pages, page_size]
            self._write(torch.tensor(rows)[:, None], columns, self._slots(pages, self.page_size))
