"""4.3: the leaf gets the first slots and not those after the known ones."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode

kills = "tests/exercises/test_stage4.py::test_known_tokens_keep_their_slots"
words = "keep their slots"


class MyRadixCache(RadixCache):
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        length = self._whole_pages(len(input_ids))
        node, known = self.walk(input_ids[:length])
        if known < length:
            leaf = RadixNode(input_ids[known:length], slots[: length - known], node, self._tick)
            node.children[self._key(leaf.tokens)] = leaf
            self.evictable_size += leaf.length
            node = leaf
        return known, RadixHandle(length, node)
