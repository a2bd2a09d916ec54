"""4.3: keeps what does not fill a page."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode

kills = "tests/exercises/test_stage4.py::test_half_a_page_is_not_kept"
words = "half a page"


class MyRadixCache(RadixCache):
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        length = len(input_ids)
        node, known = self.walk(input_ids[:length])
        if known < length:
            leaf = RadixNode(input_ids[known:length], slots[known:length], node, self._tick)
            node.children[self._key(leaf.tokens)] = leaf
            self.evictable_size += leaf.length
            node = leaf
        return known, RadixHandle(length, node)
