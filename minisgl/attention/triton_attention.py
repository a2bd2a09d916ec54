"""Our own paged attention, for `--attn triton`: Ampere and later, any dtype, no nvcc. Knows no graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.hybrid import PrefillPart
from minisgl.attention.paged_rows import PagedDecode, PagedRows
from minisgl.attention.step_rows import StepRows, step_rows
from minisgl.attention.triton_kernels import TILE, decode, decode_splits, extend
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req


class TritonPrefill:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def prepare(self, reqs: list[Req], page_table: Tensor) -> StepRows:
        return step_rows(reqs, page_table, self.page_size, TILE)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: StepRows) -> Tensor:
        k_cache, v_cache, rows = cache.k_cache(layer_id), cache.v_cache(layer_id), metadata.decode
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows is not None:  # first: what it says of rows that a step does not have is then written over
            first = q[: len(rows.lengths)]
            splits = decode_splits(len(first), k_cache.shape[1])
            decode(first, k_cache, v_cache, *rows, self.page_size, splits, out[: len(first)])
        return extend(q, k_cache, v_cache, *metadata.prompts[:3], metadata.tiles, self.page_size, out)


class PrefillBySize:
    """Few tokens by our kernel, which graphs can record: they are launches more than work. Many by the faster one."""

    def __init__(self, small: TritonPrefill, large: PrefillPart, most: int) -> None:
        """most: tokens that still are few."""
        self.small, self.large, self.most = small, large, most

    def prepare(self, reqs: list[Req], page_table: Tensor) -> Any:
        tokens = sum(req.extend_len for req in reqs)
        return (self.small if tokens <= self.most else self.large).prepare(reqs, page_table)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: Any) -> Tensor:
        part = self.small if isinstance(metadata, StepRows) else self.large
        return part.attend(q, layer_id, cache, metadata)


class TritonDecode(PagedDecode):
    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        k_cache, v_cache = cache.k_cache(layer_id), cache.v_cache(layer_id)
        splits = decode_splits(len(q), k_cache.shape[1])
        return decode(q, k_cache, v_cache, *metadata, self.page_size, splits)
