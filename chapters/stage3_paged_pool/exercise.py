"""Stage 3, paged pool: your code.

`minisgl start 3` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 3` says how you stand, `minisgl hint 3.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

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
    #   self._stack      int32 [num_pages], on the host: only its first num_free entries count
    #   self._is_free    bool [num_pages], on the host
    #   self.num_free, self.num_pages   int
    def allocate(self, count: int) -> Tensor:
        """Take count pages from the stack, the topmost first, and mark them: int32 [count], the caller's own. Raises
        RuntimeError, and takes none, when there are too few.

        The free pages are `_stack[:num_free]`, the top at the end; `_is_free[page]` says the same of each page.
        """
        raise NotImplementedError("exercise 3.1")

    # 3.2 free pages
    #   self._stack, self._is_free, self.num_free   as in 3.1
    def free(self, pages: Tensor) -> None:
        """Put pages, int32 [n] on the host, back on the stack, the last of them on top. Raises RuntimeError, and frees
        none, if one of them is free already or is twice in it: two requests would be given it."""
        raise NotImplementedError("exercise 3.2")


class MyPageTable(PageTable):
    # 3.3 slots of pages
    #   self.page_size   int
    #   self._slots(firsts, scale)   [n] -> [n, page_size]: firsts * scale, and the page_size - 1 numbers after each
    #   self._write(rows, columns, slots)   into the table; int64 [n, 1], int64 [n, page_size], and what to write there,
    #       like columns
    #   req.table_idx   its row; req.cached_len, req.device_len
    def assign(self, reqs: list[Req], pages: Tensor) -> None:
        """Give each request the pages it needs, in order. pages: int32 [sum of pages_needed], on the host. Raises
        RuntimeError, and writes nothing, if there are more or fewer.

        A row has whole pages for its first cached_len tokens, so its next page begins at the page border at or after
        cached_len, and there is one for every page_size tokens up to device_len. All of a page's slots are written.
        """
        raise NotImplementedError("exercise 3.3")


class MyKVCachePool(KVCachePool):
    # 3.4 scatter K and V
    #   self.k_cache(layer_id), self.v_cache(layer_id)   [slots, kv_heads, head_dim], views: what is written to them is
    #       kept
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Scatter k and v, [tokens, kv_heads, head_dim], to the slots out_loc, int32 [tokens]."""
        raise NotImplementedError("exercise 3.4")

    # 3.6 the memory budget
    #   Nothing but the arguments; dtype.itemsize is the bytes of one number.
    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one page costs on this rank: K and V of page_size tokens in every layer."""
        raise NotImplementedError("exercise 3.6")

    @staticmethod
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        """How many usable pages fit (bytes throughout): memory_ratio of what was free before the model was loaded,
        less the model, less the dummy page. What is left over is for activations. Can be negative: the caller refuses
        that.

        For example: ratio 0.9, 78 GiB free, a model of 16 GiB and pages of 128 KiB (one token of Llama-3-8B's shape)
        leave 54.2 GiB, which is 444 thousand pages.
        """
        raise NotImplementedError("exercise 3.6")


class MyPagedTorchAttention(PagedTorchAttention):
    # 3.5 gather pages
    #   self.page_size, self.num_kv_heads, self.head_dim   int
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        """The contents of some pages, in their order, as one sequence: [pages * page_size, kv_heads, head_dim].

        cache: [slots, kv_heads, head_dim], page p in the slots [p * page_size, (p + 1) * page_size). By whole pages: a
        few large copies instead of many small ones. pages: int32 [pages]. out: where to copy to, [pages, page_size *
        kv_heads * head_dim].
        """
        raise NotImplementedError("exercise 3.5")
