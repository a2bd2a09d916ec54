"""4.1: does not round down to whole pages."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixNode, common_length

kills = "tests/exercises/test_stage4.py::test_walk_counts_whole_pages"
words = "whole pages"


class MyRadixCache(RadixCache):
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        self._tick += 1
        node, length = self.root, 0
        while len(input_ids) - length >= self.page_size:
            child = node.children.get(self._key(input_ids[length:]))
            if child is None:
                break
            common = common_length(child.tokens, input_ids[length:])
            node = child if common == child.length else self.split(node, child, common)
            node.timestamp = self._tick
            length += common
        return node, length
