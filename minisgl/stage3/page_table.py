"""Which slots hold the tokens of each row. Knows nothing of who owns a row, or how pages were found.

An entry is a token's slot, not its page (the walk-through says both): kernels that want pages take every
page_size-th entry and divide. The host keeps a copy, so that freeing a row never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.req import Req
from minisgl.core.trace import Tracer
from minisgl.kernel.device import to_device
from minisgl.learn import exercise


class PageTable:
    """Rows of width align_up(max_seq_len, page_size); the last row belongs to the dummy request."""

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int, dummy_slot: int, device: torch.device) -> None:
        self.page_size = page_size
        self.dummy_row = num_rows
        width = -(-max_seq_len // page_size) * page_size
        self.host = torch.full((num_rows + 1, width), dummy_slot, dtype=torch.int32)
        self.device = self.host.to(device)  # the same tensor when the device is the CPU
        self._host_numpy = self.host.numpy()  # the same memory: a few entries are written three times as fast
        self._offsets = torch.arange(page_size)

    def pages_needed(self, req: Req) -> int:
        """Pages the next forward of this request needs and its row does not have yet."""
        return -(-req.device_len // self.page_size) - -(-req.cached_len // self.page_size)

    @exercise("3.3")
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        """Give each request the pages it needs, in order. pages: int32 [sum of pages_needed], on the host. Raises
        RuntimeError, and writes nothing, if there are more or fewer.

        A row has whole pages for its first cached_len tokens, so its next page begins at the page border at or after
        cached_len, and there is one for every page_size tokens up to device_len. All of a page's slots are written.
        """
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
            self._write(torch.tensor(rows)[:, None], columns, self._slots(pages, self.page_size))

    def set_prefix(self, row: int, slots: Tensor) -> None:
        """Begin the row with slots that already hold the KV of its first tokens. slots: int32 [n]."""
        self.host[row, : len(slots)] = slots
        if self.device is not self.host:
            self.device[row, : len(slots)] = to_device(slots, self.device.device)

    def slots(self, row: int, length: int) -> Tensor:
        """The first `length` slots of a row: int32 [length], a copy on the host."""
        return self.host[row, :length].clone()

    def pages(self, row: int, start: int, end: int) -> Tensor:
        """The pages that hold the tokens [start, end) of a row: int32, on the host. start is a page border."""
        return self.host[row, start : end : self.page_size] // self.page_size

    def trace_row(self, tracer: Tracer, req: Req, start: int, end: int) -> None:
        """For figures: the pages of the row's tokens from `start`, a page border, to `end`. It has none after them."""
        if tracer.enabled:
            pages = self.pages(req.table_idx, start, end).tolist()
            tracer.instant("row_pages", "cache", req.uid, start=start // self.page_size, pages=pages)

    def _slots(self, firsts: Tensor, scale: int) -> Tensor:
        """[n] -> [n, page_size]: firsts * scale, and the page_size - 1 numbers after each."""
        return torch.add(self._offsets, firsts[:, None], alpha=scale)

    def _write(self, rows: Tensor, columns: Tensor, slots: Tensor) -> None:
        self._host_numpy[rows.numpy(), columns.numpy()] = slots.numpy()
        if self.device is not self.host:
            rows, columns, slots = to_device(torch.stack((rows.expand_as(slots), columns, slots)), self.device.device)
            self.device[rows, columns] = slots.int()
