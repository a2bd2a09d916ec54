"""4.2: the rest stays under its old key."""

from __future__ import annotations

from minisgl.stage4.radix_cache import RadixCache, RadixNode

kills = "tests/exercises/test_stage4.py::test_a_split_links_up_and_down"
words = "under the key"


class MyRadixCache(RadixCache):
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        upper = RadixNode(node.tokens[:length], node.slots[:length], parent, node.timestamp)
        upper.ref_count = node.ref_count
        parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:].clone(), node.slots[length:].clone(), upper
        upper.children[self._key(upper.tokens)] = node
        return upper
