"""4.1: ends at a node that agrees only in part."""

from __future__ import annotations

from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixNode, common_length

kills = "tests/exercises/test_stage4.py::test_walk_splits_a_node_that_agrees_in_part"
words = "to be split"


class MyRadixCache(RadixCache):
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        self._tick += 1
        node, length = self.root, 0
        while len(input_ids) - length >= self.page_size:
            child = node.children.get(self._key(input_ids[length:]))
            if child is None:
                break
            common = self._whole_pages(common_length(child.tokens, input_ids[length:]))
            node = child
            node.timestamp = self._tick
            length += common
            if common < child.length:
                break
        return node, length
