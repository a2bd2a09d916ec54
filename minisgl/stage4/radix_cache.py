"""The tree of cached prefixes: tokens on its edges, and the slots of their KV. Knows nothing of requests or rows.

    root ── [the cat sat] ──┬── [on the mat]
                            └── [down]          a node is the edge above it; a prefix is a path from the root

All of it is on the host, in whole pages. From SGLang's RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.kernel.prefix import common_length
from minisgl.learn import exercise

PageKey = tuple[int, ...]


class RadixNode:
    """An edge: tokens and slots, both int32 [n] on the host, n a multiple of the page size."""

    def __init__(self, tokens: Tensor, slots: Tensor, parent: RadixNode | None, timestamp: int) -> None:
        self.tokens = tokens.clone()  # a view would change when the caller's row does
        self.slots = slots.clone()
        self.parent = parent  # None for the root, and for a node that was evicted
        self.children: dict[PageKey, RadixNode] = {}  # by the tokens of their first page
        self.ref_count = 0  # locks on this node and on all below it: never less than a child's
        self.timestamp = timestamp  # when it was last used: never less than a child's

    @property
    def length(self) -> int:
        return self.tokens.size(0)

    @property
    def is_evictable(self) -> bool:
        return not self.children and self.ref_count == 0

    def __lt__(self, other: RadixNode) -> bool:
        """The order of eviction. No two leaves are equal: one tick touches one path, and that has one leaf."""
        return self.timestamp < other.timestamp


@dataclass(eq=False)
class RadixHandle:
    """The prefix that ends with `node`. A split moves the start of a node, never its end, so this stays true."""

    cached_len: int
    node: RadixNode

    def slots(self) -> Tensor:
        """int32 [cached_len], on the host."""
        parts = [node.slots for node in path_to_root(self.node)]
        return torch.cat(parts[::-1]) if parts else torch.empty(0, dtype=torch.int32)


class RadixCache:
    """A `PrefixCache`. Time is a counter of operations, not a clock: all ranks must evict the same pages."""

    def __init__(self, page_size: int) -> None:
        empty = torch.empty(0, dtype=torch.int32)
        self.page_size = page_size
        self.root = RadixNode(empty, empty, None, timestamp=0)
        self.evictable_size = 0
        self.protected_size = 0
        self._tick = 0
        common_length(empty, empty)  # what it compiles is compiled before a request waits for it

    def match_prefix(self, input_ids: Tensor) -> RadixHandle:
        """The longest cached prefix of input_ids (int32, on the host), in whole pages. Does not lock it."""
        node, length = self.walk(input_ids)
        return RadixHandle(length, node)

    @exercise("4.3")
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

    @exercise("4.4")
    def lock(self, handle: CacheHandle) -> None:
        """Keep the prefix from being evicted, until `unlock`. Every node up to the root counts the lock, since a
        prefix is of no use without its beginning."""
        for node in self._path(handle):
            if node.ref_count == 0:
                self.evictable_size -= node.length
                self.protected_size += node.length
            node.ref_count += 1

    @exercise("4.4")
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

    @exercise("4.5")
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

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, each after its parent: for eviction, checks and figures."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def all_slots(self) -> Tensor:
        """The slots of every cached token, int32."""
        return torch.cat([self.root.slots, *(node.slots for node in self.nodes())])

    @exercise("4.1")
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

    @exercise("4.2")
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        """Put a new node between the two that takes the first `length` tokens of the lower one, and return it.
        Whoever locked or used the node did so with its beginning: the new one takes over its count and its time."""
        upper = RadixNode(node.tokens[:length], node.slots[:length], parent, node.timestamp)
        upper.ref_count = node.ref_count
        parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:].clone(), node.slots[length:].clone(), upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _path(self, handle: CacheHandle) -> list[RadixNode]:
        """The nodes of a prefix, last first. Raises RuntimeError if it was evicted: it had to be locked at once."""
        node = getattr(handle, "node", None)
        if not isinstance(node, RadixNode):
            raise TypeError(f"a handle of a radix cache is wanted, not {handle!r:.80}")
        if node is not self.root and node.parent is None:
            raise RuntimeError(f"a prefix of {handle.cached_len} tokens was evicted before it was locked")
        return list(path_to_root(node))

    def _key(self, tokens: Tensor) -> PageKey:
        return tuple(tokens[: self.page_size].tolist())

    def _whole_pages(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def check_integrity(self) -> None:
        """Walk the whole tree; raises AssertionError naming what is wrong."""
        for node in self.nodes():
            self._check_node(node)
        evictable = sum(node.length for node in self.nodes() if node.ref_count == 0)
        protected = sum(node.length for node in self.nodes() if node.ref_count > 0)
        _check((evictable, protected) == (self.evictable_size, self.protected_size), "sizes differ from the nodes'")
        slots = self.all_slots()
        _check(len(slots.unique()) == len(slots), "two tokens share a slot")
        leaves = [node.timestamp for node in self.nodes() if not node.children]
        _check(len(set(leaves)) == len(leaves), "two leaves were used at the same time: which goes first is undefined")

    def _check_node(self, node: RadixNode) -> None:
        parent, size = node.parent, self.page_size
        _check(
            parent is not None and parent.children.get(self._key(node.tokens)) is node, "a node is under a wrong key"
        )
        _check(node.length > 0 and node.length % size == 0, f"a node has {node.length} tokens, pages have {size}")
        _check(len(node.slots) == node.length, f"a node has {node.length} tokens and {len(node.slots)} slots")
        firsts = node.slots[::size]
        whole = bool((node.slots.view(-1, size) - firsts[:, None] == torch.arange(size)).all())
        _check(whole and not bool((firsts % size).any()), "the slots of a node are not those of whole pages")
        locks_below = sum(child.ref_count for child in node.children.values())
        _check(node.ref_count >= locks_below, f"a node has {node.ref_count} locks and those below it {locks_below}")
        newest = max([child.timestamp for child in node.children.values()], default=0)
        _check(newest <= node.timestamp <= self._tick, "a node was used after its parent, or in the future")


def path_to_root(node: RadixNode) -> Iterator[RadixNode]:
    """The node and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _check(condition: bool, message: str) -> None:
    """Unlike the statement, it also checks under `python -O`."""
    if not condition:
        raise AssertionError(f"radix cache: {message}")
