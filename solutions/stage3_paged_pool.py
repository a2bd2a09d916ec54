"""Stage 3, paged pool: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.req import Req
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable


class MyPageAllocator(PageAllocator):
    # 3.1 allocate pages
    def allocate(self, count: int) -> Tensor:
        """Take count pages from the stack, the topmost first, and mark them: int32 [count], the caller's own. Raises
        RuntimeError, and takes none, when there are too few.

        The free pages are `_stack[:num_free]`, the top at the end; `_is_free[page]` says the same of each page.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted and {self.num_free} of {self.num_pages} are free")
        pages = self._stack[self.num_free - count : self.num_free].flip(0)  # a copy: the stack will be written to
        self.num_free -= count
        self._is_free[pages] = False
        return pages

    # 3.2 free pages
    def free(self, pages: Tensor) -> None:
        """Put pages, int32 [n] on the host, back on the stack, the last of them on top. Raises RuntimeError, and frees
        none, if one of them is free already or is twice in it: two requests would be given it."""
        if bool(self._is_free[pages].any()) or len(set(pages.tolist())) != len(pages):
            raise RuntimeError(f"pages freed twice: {pages.tolist()[:16]}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)


class MyPageTable(PageTable):
    # 3.3 slots of pages
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


class MyKVCachePool(KVCachePool):
    # 3.4 scatter K and V
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Scatter k and v, [tokens, kv_heads, head_dim], to the slots out_loc, int32 [tokens]."""
        self.k_cache(layer_id)[out_loc] = k
        self.v_cache(layer_id)[out_loc] = v

    # 3.6 the memory budget
    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one page costs on this rank: K and V of page_size tokens in every layer."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        """How many usable pages fit (bytes throughout): memory_ratio of what was free before the model was loaded,
        less the model, less the dummy page. What is left over is for activations. Can be negative: the caller refuses
        that.

        For example: ratio 0.9, 78 GiB free, a model of 16 GiB and pages of 128 KiB (one token of Llama-3-8B's shape)
        leave 54.2 GiB, which is 444 thousand pages.
        """
        available = memory_ratio * free_before - model_bytes
        return int(available // bytes_per_page) - 1


class MyPagedTorchAttention(PagedTorchAttention):
    # 3.5 gather pages
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        """The contents of some pages, in their order, as one sequence: [pages * page_size, kv_heads, head_dim].

        cache: [slots, kv_heads, head_dim], page p in the slots [p * page_size, (p + 1) * page_size). By whole pages: a
        few large copies instead of many small ones. pages: int32 [pages]. out: where to copy to, [pages, page_size *
        kv_heads * head_dim].
        """
        by_page = cache.view(-1, self.page_size * self.num_kv_heads * self.head_dim)
        return torch.index_select(by_page, 0, pages, out=out).view(-1, self.num_kv_heads, self.head_dim)
