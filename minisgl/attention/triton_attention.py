"""Our own paged attention, for `--attn triton`: any CUDA GPU, any dtype, no compiler but Triton's. Knows no graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minisgl.attention.hybrid import PrefillPart
from minisgl.attention.paged_rows import ExtendRows, PagedRows, RecordedExtend, RecordedRows, extend_rows, paged_rows
from minisgl.attention.triton_kernels import decode, decode_splits, extend
from minisgl.core.batch import Batch
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req


class TritonPrefill:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def prepare(self, reqs: list[Req], page_table: Tensor) -> ExtendRows:
        return extend_rows(reqs, page_table, self.page_size)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: ExtendRows) -> Tensor:
        return extend(q, cache.k_cache(layer_id), cache.v_cache(layer_id), *metadata[:3], self.page_size, metadata.most)

    def init_capture_graph(self, max_rows: int, page_table: Tensor) -> None:
        self._recorded = RecordedExtend(max_rows, page_table, self.page_size)

    def record(self, tokens: int) -> ExtendRows:
        return self._recorded.of(tokens)

    def replay(self, metadata: ExtendRows) -> None:
        self._recorded.fill(metadata)


class PrefillBySize:
    """Few tokens by our kernel, which graphs can record: they are launches more than work. Many by the faster one."""

    def __init__(self, small: TritonPrefill, large: PrefillPart, most: int) -> None:
        """most: tokens that still are few."""
        self.small, self.large, self.most = small, large, most

    def prepare(self, reqs: list[Req], page_table: Tensor) -> Any:
        tokens = sum(req.extend_len for req in reqs)
        return (self.small if tokens <= self.most else self.large).prepare(reqs, page_table)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: Any) -> Tensor:
        part = self.small if isinstance(metadata, ExtendRows) else self.large
        return part.attend(q, layer_id, cache, metadata)


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


class TritonDecode(PagedDecode):
    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        k_cache, v_cache = cache.k_cache(layer_id), cache.v_cache(layer_id)
        splits = decode_splits(len(q), k_cache.shape[1])
        return decode(q, k_cache, v_cache, *metadata, self.page_size, splits)
