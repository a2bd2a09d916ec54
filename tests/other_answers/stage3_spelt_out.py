"""Stage 3 one page, one slot at a time; errors in other words than the package's."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.req import Req
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable


class MyPageAllocator(PageAllocator):
    def allocate(self, count: int) -> Tensor:
        if self.num_free < count:
            raise RuntimeError("out of memory")
        taken = []
        for _ in range(count):
            self.num_free -= 1
            page = int(self._stack[self.num_free])
            self._is_free[page] = False
            taken.append(page)
        return torch.tensor(taken, dtype=torch.int32)

    def free(self, pages: Tensor) -> None:
        seen = set()
        for page in pages.tolist():
            if page in seen or self._is_free[page]:
                raise RuntimeError(f"page {page} is not in use")
            seen.add(page)
        for page in pages.tolist():
            self._is_free[page] = True
            self._stack[self.num_free] = page
            self.num_free += 1


class MyPageTable(PageTable):
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        size = self.page_size
        wanted = []
        for req in reqs:
            at = req.cached_len
            while at % size:
                at += 1
            while at < req.device_len:
                wanted.append((req.table_idx, at))
                at += size
        if len(wanted) != len(pages):
            raise RuntimeError("wrong number of pages")
        for (row, at), page in zip(wanted, pages.tolist(), strict=True):
            slots = torch.arange(page * size, (page + 1) * size, dtype=torch.int32)
            self.host[row, at : at + size] = slots
            self.device[row, at : at + size] = slots.to(self.device.device)


class MyKVCachePool(KVCachePool):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        k_cache, v_cache = self.k_cache(layer_id), self.v_cache(layer_id)
        for i, slot in enumerate(out_loc.tolist()):
            k_cache[slot], v_cache[slot] = k[i], v[i]

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        numbers_a_token = num_kv_heads * head_dim * 2
        return numbers_a_token * page_size * num_layers * (torch.finfo(dtype).bits // 8)

    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        left = int(free_before * memory_ratio) - model_bytes - bytes_per_page
        return left // bytes_per_page


class MyPagedTorchAttention(PagedTorchAttention):
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        size = self.page_size
        if not len(pages):
            return cache[:0].clone()
        found = torch.cat([cache[page * size : (page + 1) * size] for page in pages.tolist()])
        if out is None:
            return found
        out.copy_(found.view(out.shape))
        return out.view(found.shape)
