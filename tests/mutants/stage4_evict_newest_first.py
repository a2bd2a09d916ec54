"""4.5: drops what was used last."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache

kills = "tests/exercises/test_stage4.py::test_the_oldest_leaf_goes_first"
words = "the oldest, cd"


class MyRadixCache(RadixCache):
    def evict(self, size: int) -> Tensor:
        if size > self.evictable_size:
            raise RuntimeError(f"{size} tokens are to be evicted, and only {self.evictable_size} can be")
        heap = [node for node in self.nodes() if node.is_evictable]
        heapq.heapify(heap)
        evicted: list[Tensor] = []
        left = size
        while left > 0:
            node = heap.pop(heap.index(max(heap)))
            parent = node.parent
            assert parent is not None  # only the root has none
            del parent.children[self._key(node.tokens)]
            node.parent = None
            evicted.append(node.slots)
            left -= node.length
            if parent is not self.root and parent.is_evictable:
                heapq.heappush(heap, parent)
        self.evictable_size -= size - left
        return torch.cat(evicted) if evicted else torch.empty(0, dtype=torch.int32)
