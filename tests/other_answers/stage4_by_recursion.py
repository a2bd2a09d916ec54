"""Stage 4 with paths as lists and a walk that calls itself; the root's time is kept too."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode, common_length, path_to_root


class MyRadixCache(RadixCache):
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        self._tick += 1
        return self.walk_from(self.root, input_ids, 0)

    def walk_from(self, node: RadixNode, ids: Tensor, length: int) -> tuple[RadixNode, int]:
        node.timestamp = self._tick
        child = node.children.get(self._key(ids)) if len(ids) >= self.page_size else None
        if child is None:
            return node, length
        agreed = common_length(child.tokens, ids) // self.page_size * self.page_size
        if agreed < len(child.tokens):
            child = self.split(node, child, agreed)
        return self.walk_from(child, ids[agreed:], length + agreed)

    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        upper = RadixNode(node.tokens[:length], node.slots[:length], parent, 0)
        upper.timestamp, upper.ref_count = node.timestamp, node.ref_count
        del parent.children[self._key(node.tokens)]
        for above, below in ((parent, upper), (upper, node)):
            if below is node:
                node.tokens, node.slots = node.tokens[length:].clone(), node.slots[length:].clone()
            above.children[self._key(below.tokens)] = below
            below.parent = above
        return upper

    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        end = self._whole_pages(len(input_ids))
        input_ids, slots = input_ids[:end].clone(), slots[:end].clone()
        last, known = self.walk(input_ids)
        rest = input_ids[known:]
        if len(rest) > 0:
            last.children[self._key(rest)] = RadixNode(rest, slots[known:], last, self._tick)
            last = last.children[self._key(rest)]
            self.evictable_size = self.evictable_size + len(rest)
        return known, RadixHandle(cached_len=end, node=last)

    def lock(self, handle: CacheHandle) -> None:
        path = self._path(handle)
        fresh = sum(node.length for node in path if not node.ref_count)
        self.evictable_size -= fresh
        self.protected_size += fresh
        for node in path:
            node.ref_count += 1

    def unlock(self, handle: CacheHandle) -> None:
        path = self._path(handle)
        if any(node.ref_count < 1 for node in path):
            raise RuntimeError
        for node in reversed(path):
            node.ref_count -= 1
        free = sum(node.length for node in path if not node.ref_count)
        self.evictable_size, self.protected_size = self.evictable_size + free, self.protected_size - free

    def evict(self, size: int) -> Tensor:
        if size > self.evictable_size:
            raise RuntimeError(size)
        parts: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
        while sum(map(len, parts)) < size:
            node = min((node for node in self.nodes() if node.is_evictable), key=lambda node: node.timestamp)
            parent = next(path_to_root(node)).parent or self.root
            del parent.children[self._key(node.tokens)]
            node.parent = None
            parts.append(node.slots)
            self.evictable_size -= len(node.slots)
        return torch.cat(parts)
