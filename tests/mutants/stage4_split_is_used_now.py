"""4.2: the upper part counts as used now."""

from __future__ import annotations

from minisgl.stage4.radix_cache import RadixCache, RadixNode

kills = "tests/exercises/test_stage4.py::test_a_split_keeps_the_time"
words = "last used at 2"


class MyRadixCache(RadixCache):
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        upper = RadixNode(node.tokens[:length], node.slots[:length], parent, self._tick)
        upper.ref_count = node.ref_count
        parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:].clone(), node.slots[length:].clone(), upper
        upper.children[self._key(node.tokens)] = node
        return upper
