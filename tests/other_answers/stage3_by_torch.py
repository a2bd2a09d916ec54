"""Stage 3 without a loop; every slot is computed by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.req import Req
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable


class MyPageAllocator(PageAllocator):
    def allocate(self, count: int) -> Tensor:
        left = self.num_free - count
        if left < 0:
            raise RuntimeError(f"no {count} pages")
        pages = torch.flip(self._stack[left : self.num_free], (0,))
        self._is_free.index_fill_(0, pages.long(), False)
        self.num_free = left
        return pages

    def free(self, pages: Tensor) -> None:
        n = pages.numel()
        if pages.unique().numel() < n or self._is_free[pages].sum() > 0:
            raise RuntimeError("double free")
        self._stack.narrow(0, self.num_free, n).copy_(pages)
        self._is_free[pages] = True
        self.num_free += n


class MyPageTable(PageTable):
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        counts = [self.pages_needed(req) for req in reqs]
        if sum(counts) != len(pages):
            raise RuntimeError(f"{sum(counts)} != {len(pages)}")
        for req, own in zip(reqs, pages.split(counts), strict=True):
            start = math.ceil(req.cached_len / self.page_size) * self.page_size
            slots = (own[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            columns = torch.arange(start, start + len(slots))
            self._write(torch.full_like(columns, req.table_idx), columns, slots.long())


class MyKVCachePool(KVCachePool):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        self.k_cache(layer_id).index_copy_(0, out_loc.long(), k)
        self.v_cache(layer_id).index_copy_(0, out_loc.long(), v)

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return torch.empty(2, num_layers, page_size, num_kv_heads, head_dim, dtype=dtype, device="meta").nbytes

    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        return math.floor((memory_ratio * free_before - model_bytes) / bytes_per_page) - 1


class MyPagedTorchAttention(PagedTorchAttention):
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        slots = (pages.long()[:, None] * self.page_size + torch.arange(self.page_size, device=pages.device)).flatten()
        found = cache[slots]
        return found if out is None else out.copy_(found.view_as(out)).view_as(found)
