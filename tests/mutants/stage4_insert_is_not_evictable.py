"""4.3: does not count what is new."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode

kills = "tests/exercises/test_stage4.py::test_new_tokens_can_be_evicted"
words = "2 are new"


class MyRadixCache(RadixCache):
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        length = self._whole_pages(len(input_ids))
        node, known = self.walk(input_ids[:length])
        if known < length:
            leaf = RadixNode(input_ids[known:length], slots[known:length], node, self._tick)
            node.children[self._key(leaf.tokens)] = leaf
            node = leaf
        return known, RadixHandle(length, node)
