"""What a kernel is chosen and compiled for. Knows no kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.core.protocols import KVCache


class Shape(NamedTuple):
    """Heads of this rank, and where they are."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def by_page(self, cache: KVCache, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V, each [pages, page_size, kv_heads, head_dim]."""
        shape = (-1, self.page_size, self.kv_heads, self.head_dim)
        return cache.k_cache(layer_id).view(shape), cache.v_cache(layer_id).view(shape)
