"""A step with prompts as our kernels read it, and the buffers that recorded ones read. Knows no kernel.

A graph knows nothing of a step but its number of tokens. So it has as many rows as there may be of both kinds, most of
them without a token; and as many tiles of queries as so many tokens of so many prompts can make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.paged_rows import ExtendRows, PagedRows, RecordedRows, extend_rows
from minisgl.core.req import Req
from minisgl.kernel.device import to_device

_NOWHERE = 1 << 30  # a first query that no row has


class StepRows(NamedTuple):
    prompts: ExtendRows
    tiles: Tensor  # int32 [tiles, 2]: a row of prompts, and the first of a tile of its queries
    decode: PagedRows | None = None  # of a recorded step: its first tokens' rows


def step_rows(reqs: Sequence[Req], page_table: Tensor, page_size: int, tile: int) -> StepRows:
    """reqs: prompts. tile: queries."""
    prompts = extend_rows(reqs, page_table, page_size)
    return StepRows(prompts, to_device(torch.from_numpy(tiles_of(reqs, tile)), page_table.device))


def tiles_of(reqs: Sequence[Req], tile: int) -> np.ndarray:
    """int32 [tiles, 2]. Those with most keys first, so that none of them is left over at the end."""
    counts = np.array([req.extend_len for req in reqs])
    each = -(-counts // tile)
    row = np.repeat(np.arange(len(reqs)), each)
    first = (np.arange(len(row)) - np.repeat(each.cumsum() - each, each)) * tile
    cached = np.array([req.cached_len for req in reqs])[row]
    order = np.argsort(-(cached + first), kind="stable")
    return np.stack((row, first), axis=1)[order].astype(np.int32)


class RecordedSteps:
    """The StepRows that graphs of different numbers of tokens read, each the first of the same buffers."""

    def __init__(
        self, max_decode: int, max_prompts: int, max_tokens: int, page_table: Tensor, page_size: int, tile: int
    ) -> None:
        """max_decode, max_prompts: rows of each kind. page_table: see RecordedRows."""
        device = page_table.device
        self._max_decode, self._max_prompts, self._tile = max_decode, max_prompts, tile
        self._decode = RecordedRows(max_decode, page_table, page_size)
        self._prompts = RecordedRows(max_prompts, page_table, page_size)
        self._starts = torch.zeros(max_prompts + 1, dtype=torch.int32, device=device)
        self._tiles = torch.zeros(self._most_tiles(max_tokens), 2, dtype=torch.int32, device=device)
        self._tiles[:, 1] = _NOWHERE

    def of(self, tokens: int) -> StepRows:
        pages, lengths, _ = self._prompts.first(self._max_prompts)
        decode = self._decode.first(min(tokens, self._max_decode))
        return StepRows(
            ExtendRows(pages, lengths, self._starts, tokens), self._tiles[: self._most_tiles(tokens)], decode
        )

    def fill(self, decode: PagedRows | None, step: StepRows) -> None:
        """decode: of the step's first tokens; step: of the others, whose `starts` count from their own first."""
        num_decode = 0
        if decode is not None:
            num_decode = len(decode.lengths)
            self._decode.put(decode)
        self._decode.clear(num_decode)
        rows = step.prompts
        self._prompts.put(PagedRows(rows.pages, rows.lengths, rows.lengths))  # in any order: the tiles have theirs
        size = len(rows.lengths)
        torch.add(rows.starts, num_decode, out=self._starts[: size + 1])
        self._starts[size + 1 :] = self._starts[size]  # rows of no tokens
        self._tiles[: len(step.tiles)] = step.tiles
        self._tiles[len(step.tiles) :, 1] = _NOWHERE

    def _most_tiles(self, tokens: int) -> int:
        return tokens // self._tile + self._max_prompts
