"""Who has which row, and the tokens of every row on the device. Knows nothing of pages.

The token pool is parallel to the page table: the entry that holds a token's slot there holds its id here. A
sampled token is written to it on the device, and the next step reads it from there: no trip to the host.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from minisgl.kernel.device import to_device


class TableManager:
    """num_rows rows for requests; one more, the last, is the dummy's, and takes writes that must go nowhere."""

    def __init__(self, num_rows: int, max_seq_len: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.dummy_row = num_rows
        self.token_pool = torch.zeros((num_rows + 1, max_seq_len), dtype=torch.int32, device=device)
        self._free = list(range(num_rows))  # a heap: the lowest row first, the same on every rank

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Raises IndexError when no row is free: ask num_free first."""
        return heapq.heappop(self._free)

    def free(self, row: int) -> None:
        """Only when no launched batch can still write to the row. Raises RuntimeError if it is free already."""
        if row in self._free or not 0 <= row < self.num_rows:
            raise RuntimeError(f"row {row} freed twice, or not one of {self.num_rows}")
        heapq.heappush(self._free, row)

    def write_prompt(self, row: int, input_ids: Tensor) -> None:
        """input_ids: int32 [n], on the host."""
        self.token_pool[row, : len(input_ids)] = to_device(input_ids, self.token_pool.device)
