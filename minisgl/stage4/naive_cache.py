"""The prefix cache that remembers nothing (`--cache naive`): what the radix tree is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle


class EmptyHandle:
    cached_len = 0

    def slots(self) -> Tensor:
        return torch.empty(0, dtype=torch.int32)


class NaiveCache:
    """A `PrefixCache` without state: every page goes back to the allocator when its request ends."""

    evictable_size = 0
    protected_size = 0

    def match_prefix(self, input_ids: Tensor) -> EmptyHandle:
        return EmptyHandle()

    def lock(self, handle: CacheHandle) -> None:
        """Nothing is kept, so nothing can be evicted."""

    def unlock(self, handle: CacheHandle) -> None: ...

    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, EmptyHandle]:
        return 0, EmptyHandle()

    def evict(self, size: int) -> Tensor:
        if size > 0:
            raise RuntimeError(f"{size} tokens are to be evicted from a cache that keeps none")
        return torch.empty(0, dtype=torch.int32)

    def all_slots(self) -> Tensor:
        return torch.empty(0, dtype=torch.int32)

    def check_integrity(self) -> None: ...
