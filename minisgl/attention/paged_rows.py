"""What kernels that read pages need to know of a batch, and the buffers of recorded graphs. Knows no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.req import Req
from minisgl.kernel.device import device_tensor, to_device


class PagedRows(NamedTuple):
    """Decode: one new token a row. A page past a row's length is never read."""

    pages: Tensor  # int32 [rows, most pages]
    lengths: Tensor  # int32 [rows]: tokens in the cache, the new one included
    order: Tensor  # int32 [rows]: rows from the longest to the shortest, the order to begin them in


class ExtendRows(NamedTuple):
    """Any number of new tokens a row, the last of its `lengths`."""

    pages: Tensor
    lengths: Tensor
    starts: Tensor  # int32 [rows + 1]: where a row's new tokens begin in the batch
    most: int  # new tokens of one row at most


def paged_rows(reqs: Sequence[Req], page_table: Tensor, page_size: int) -> PagedRows:
    """One copy to the device, and two kernels there: no length is ever asked of it."""
    sizes = [req.device_len for req in reqs]
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    numbers = torch.tensor([[req.table_idx for req in reqs], sizes, order], dtype=torch.int32)
    rows, lengths, begin = to_device(numbers, page_table.device)
    pages = page_table[:, : sizes[order[0]] : page_size].index_select(0, rows) // page_size
    return PagedRows(pages, lengths, begin)


def extend_rows(reqs: Sequence[Req], page_table: Tensor, page_size: int) -> ExtendRows:
    counts = [req.extend_len for req in reqs]
    starts = device_tensor(list(accumulate(counts, initial=0)), torch.int32, page_table.device)
    rows = paged_rows(reqs, page_table, page_size)
    return ExtendRows(rows.pages, rows.lengths, starts, max(counts))


class RecordedRows:
    """The PagedRows that recorded graphs read, each the first rows of the same buffers."""

    def __init__(self, max_size: int, page_table: Tensor, page_size: int) -> None:
        """page_table: its last row is the dummy's, whose one token every row has until it is given others."""
        dummy_page = page_table[-1, :1] // page_size
        self._pages = dummy_page.expand(max_size, page_table.shape[1] // page_size).contiguous()
        self._lengths = torch.ones(max_size, dtype=torch.int32, device=page_table.device)
        self._order = torch.arange(max_size, dtype=torch.int32, device=page_table.device)

    def first(self, size: int) -> PagedRows:
        return PagedRows(self._pages[:size], self._lengths[:size], self._order[:size])

    def fill(self, batch: Batch, rows: PagedRows) -> None:
        if len(rows.lengths) != batch.padded_size:
            raise RuntimeError(f"metadata of {len(rows.lengths)} rows for a batch padded to {batch.padded_size}")
        self.put(rows)

    def put(self, rows: PagedRows) -> None:
        """As the first rows."""
        size, most = rows.pages.shape
        self._pages[:size, :most].copy_(rows.pages)
        self._lengths[:size].copy_(rows.lengths)
        self._order[:size].copy_(rows.order)

    def clear(self, size: int) -> None:
        """All rows but the first `size` are left without a token, in their own order."""
        self._lengths[size:] = 0
        torch.arange(size, len(self._order), out=self._order[size:])


class PagedDecode:
    """A decode kernel that reads nothing but PagedRows: it can be recorded as it is."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def prepare(self, reqs: list[Req], page_table: Tensor) -> PagedRows:
        return paged_rows(reqs, page_table, self.page_size)

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        self._recorded = RecordedRows(max_size, page_table, self.page_size)

    def record(self, size: int) -> PagedRows:
        return self._recorded.first(size)

    def replay(self, batch: Batch, metadata: PagedRows) -> None:
        self._recorded.fill(batch, metadata)
