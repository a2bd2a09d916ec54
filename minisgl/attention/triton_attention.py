"""Our own paged attention, for `--attn triton`: any CUDA GPU, any dtype, no compiler but Triton's. Knows no graphs."""

from __future__ import annotations

from torch import Tensor

from minisgl.attention.paged_rows import ExtendRows, PagedDecode, PagedRows, extend_rows
from minisgl.attention.triton_kernels import decode, decode_splits, extend
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req


class TritonPrefill:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def prepare(self, reqs: list[Req], page_table: Tensor) -> ExtendRows:
        return extend_rows(reqs, page_table, self.page_size)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: ExtendRows) -> Tensor:
        return extend(q, cache.k_cache(layer_id), cache.v_cache(layer_id), *metadata[:3], self.page_size, metadata.most)


class TritonDecode(PagedDecode):
    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        k_cache, v_cache = cache.k_cache(layer_id), cache.v_cache(layer_id)
        splits = decode_splits(len(q), k_cache.shape[1])
        return decode(q, k_cache, v_cache, *metadata, self.page_size, splits)
