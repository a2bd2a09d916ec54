"""Stage 4, radix cache: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.kernel.prefix import common_length
from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode


class MyRadixCache(RadixCache):
    # 4.1 walk down the tree
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        """Down the tree as far as input_ids agree with it, page by page: the last node, and the tokens up to its
        end. A node that agrees only in part is split there. Every node on the way counts as used now."""
        self._tick += 1
        node, length = self.root, 0
        while len(input_ids) - length >= self.page_size:
            child = node.children.get(self._key(input_ids[length:]))
            if child is None:
                break
            common = self._whole_pages(common_length(child.tokens, input_ids[length:]))
            node = child if common == child.length else self.split(node, child, common)
            node.timestamp = self._tick
            length += common
        return node, length

    # 4.2 split a node
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        """Put a new node between the two that takes the first `length` tokens of the lower one, and return it.
        Whoever locked or used the node did so with its beginning: the new one takes over its count and its time."""
        upper = RadixNode(node.tokens[:length], node.slots[:length], parent, node.timestamp)
        upper.ref_count = node.ref_count
        parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:].clone(), node.slots[length:].clone(), upper
        upper.children[self._key(node.tokens)] = node
        return upper

    # 4.3 insert a prefix
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        """Add the whole pages of input_ids. Returns how many leading tokens were here already, whose slots stay as
        they were, and the handle of the whole. Tokens and slots are copied: the caller may pass views of its own."""
        length = self._whole_pages(len(input_ids))
        node, known = self.walk(input_ids[:length])
        if known < length:
            leaf = RadixNode(input_ids[known:length], slots[known:length], node, self._tick)
            node.children[self._key(leaf.tokens)] = leaf
            self.evictable_size += leaf.length
            node = leaf
        return known, RadixHandle(length, node)

    # 4.4 lock and unlock
    def lock(self, handle: CacheHandle) -> None:
        """Keep the prefix from being evicted, until `unlock`. Every node up to the root counts the lock, since a
        prefix is of no use without its beginning."""
        for node in self._path(handle):
            if node.ref_count == 0:
                self.evictable_size -= node.length
                self.protected_size += node.length
            node.ref_count += 1

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one `lock`. Raises RuntimeError when there is none."""
        path = self._path(handle)
        if path and path[0].ref_count == 0:
            raise RuntimeError(f"a prefix of {handle.cached_len} tokens is unlocked more often than it was locked")
        for node in path:
            node.ref_count -= 1
            if node.ref_count == 0:
                self.protected_size -= node.length
                self.evictable_size += node.length

    # 4.5 evict the least recently used
    def evict(self, size: int) -> Tensor:
        """Drop at least `size` tokens, whole leaves at a time, least recently used first. Returns their slots, int32.
        Raises RuntimeError when fewer are evictable; nothing is dropped then."""
        if size > self.evictable_size:
            raise RuntimeError(f"{size} tokens are to be evicted, and only {self.evictable_size} can be")
        heap = [node for node in self.nodes() if node.is_evictable]
        heapq.heapify(heap)
        evicted: list[Tensor] = []
        left = size
        while left > 0:
            node = heapq.heappop(heap)
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
