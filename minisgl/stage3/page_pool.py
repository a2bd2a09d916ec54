"""The memory all requests share, in pages, and who may write where. Knows nothing of requests or prefixes.

The one layout: [K or V, layer, page, offset in page, head, head_dim]. A slot is page * page_size + offset, and
holds one token's K (or V) of one layer. From PagedAttention (vLLM), which calls a page a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.device import zeros
from minisgl.learn import exercise


class KVCachePool:
    """num_pages usable pages, and one more: the dummy page takes every write that must go nowhere."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_kv_heads: those of this rank."""
        self.page_size = page_size
        self.num_pages = num_pages
        self.dummy_slot = num_pages * page_size
        # Zeros, because attention reads whole pages: garbage could be NaN, and 0 * NaN is not 0.
        self._kv = zeros((2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim), dtype, device)

    def k_cache(self, layer_id: int) -> Tensor:
        """[slots, kv_heads, head_dim], a view."""
        return self._kv[0, layer_id].flatten(0, 1)

    def v_cache(self, layer_id: int) -> Tensor:
        return self._kv[1, layer_id].flatten(0, 1)

    @exercise("3.4")
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Scatter k and v, [tokens, kv_heads, head_dim], to the slots out_loc, int32 [tokens]."""
        self.k_cache(layer_id)[out_loc] = k
        self.v_cache(layer_id)[out_loc] = v

    @staticmethod
    @exercise("3.6")
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one page costs on this rank: K and V of page_size tokens in every layer."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @staticmethod
    @exercise("3.6")
    def pages_in_budget(memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int) -> int:
        """How many usable pages fit (bytes throughout): memory_ratio of what was free before the model was loaded,
        less the model, less the dummy page. What is left over is for activations. Can be negative: the caller refuses
        that.

        For example: ratio 0.9, 78 GiB free, a model of 16 GiB and pages of 128 KiB (one token of Llama-3-8B's shape)
        leave 54.2 GiB, which is 444 thousand pages.
        """
        available = memory_ratio * free_before - model_bytes
        return int(available // bytes_per_page) - 1


class PageAllocator:
    """A stack of free pages, on the host. Both operations take and give many pages at once."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32)  # page 0 on top
        self._is_free = torch.ones(num_pages, dtype=torch.bool)
        self.num_free = num_pages

    @exercise("3.1")
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

    @exercise("3.2")
    def free(self, pages: Tensor) -> None:
        """Put pages, int32 [n] on the host, back on the stack, the last of them on top. Raises RuntimeError, and frees
        none, if one of them is free already or is twice in it: two requests would be given it."""
        if bool(self._is_free[pages].any()) or len(set(pages.tolist())) != len(pages):
            raise RuntimeError(f"pages freed twice: {pages.tolist()[:16]}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def free_pages(self) -> Tensor:
        """int32 [num_free], a copy: for checks and figures."""
        return self._stack[: self.num_free].clone()

    def check_integrity(self) -> None:
        free = self.free_pages()
        if len(free.unique()) != self.num_free or int(self._is_free.sum()) != self.num_free:
            raise AssertionError(f"the stack of {self.num_free} free pages and their marks disagree")
