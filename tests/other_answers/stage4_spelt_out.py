"""Stage 4 by hand: pages compared one by one, parents followed one by one, the oldest leaf looked for each time."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode


class MyRadixCache(RadixCache):
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        size, ids = self.page_size, input_ids.tolist()
        self._tick = self._tick + 1
        node, length = self.root, 0
        while length + size <= len(ids):
            key = tuple(ids[length : length + size])
            if key not in node.children:
                return node, length
            child, agreed = node.children[key], size
            theirs = child.tokens.tolist()
            while agreed < len(theirs) and ids[length + agreed :][:size] == theirs[agreed : agreed + size]:
                agreed += size
            if agreed < len(theirs):
                child = self.split(node, child, agreed)
            child.timestamp = self._tick
            node, length = child, length + agreed
        return node, length

    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        first_tokens, last_tokens = node.tokens[:length], node.tokens[length:]
        first_slots, last_slots = node.slots[:length], node.slots[length:]
        middle = RadixNode(first_tokens, first_slots, parent, node.timestamp)
        middle.ref_count = node.ref_count
        middle.children = {tuple(last_tokens[: self.page_size].tolist()): node}
        parent.children[tuple(first_tokens[: self.page_size].tolist())] = middle
        node.parent = middle
        node.tokens = last_tokens
        node.slots = last_slots
        return middle

    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        whole = len(input_ids) - len(input_ids) % self.page_size
        node, known = self.walk(input_ids)
        if known == whole:
            return known, RadixHandle(known, node)
        new = RadixNode(input_ids[known:whole], slots[known:whole], node, self._tick)
        node.children[self._key(new.tokens)] = new
        self.evictable_size += whole - known
        return known, RadixHandle(whole, new)

    def lock(self, handle: CacheHandle) -> None:
        node = handle.node  # type: ignore[attr-defined]
        while node is not self.root:
            node.ref_count += 1
            if node.ref_count == 1:
                self.evictable_size -= len(node.tokens)
                self.protected_size += len(node.tokens)
            node = node.parent

    def unlock(self, handle: CacheHandle) -> None:
        node = handle.node  # type: ignore[attr-defined]
        while node is not self.root:
            if node.ref_count == 0:
                raise RuntimeError("not locked")
            node.ref_count -= 1
            if node.ref_count == 0:
                self.evictable_size += len(node.tokens)
                self.protected_size -= len(node.tokens)
            node = node.parent

    def evict(self, size: int) -> Tensor:
        if self.evictable_size < size:
            raise RuntimeError("not enough to evict")
        gone: list[int] = []
        while len(gone) < size:
            oldest = None
            for node in self.nodes():
                if node.children or node.ref_count > 0:
                    continue
                if oldest is None or node.timestamp < oldest.timestamp:
                    oldest = node
            assert oldest is not None
            gone += oldest.slots.tolist()
            self.evictable_size -= oldest.length
            oldest.parent.children.pop(self._key(oldest.tokens))  # type: ignore[union-attr]
            oldest.parent = None
        return torch.tensor(gone, dtype=torch.int32)
