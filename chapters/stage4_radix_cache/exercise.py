"""Stage 4, radix cache: your code.

`minisgl start 4` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 4` says how you stand, `minisgl hint 4.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
from __future__ import annotations

import heapq

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.kernel.prefix import common_length
from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode


class MyRadixCache(RadixCache):
    # 4.1 walk down the tree
    #   self.root        the node of no tokens
    #   self.page_size   int; self._whole_pages(length): rounded down to whole pages
    #   self._key(tokens)   what children are found by: the first page of these tokens
    #   self._tick       int, the time: one more for every operation
    #   self.split(parent, node, length)   exercise 4.2
    #   node.tokens      int32 [node.length]; node.children, a dict from key to node; node.timestamp
    #   common_length(a, b)   how many leading elements of two tensors agree
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        """Down the tree as far as input_ids agree with it, page by page: the last node, and the tokens up to its
        end. A node that agrees only in part is split there. Every node on the way counts as used now."""
        raise NotImplementedError("exercise 4.1")

    # 4.2 split a node
    #   self._key(tokens)   what children are found by: the first page of these tokens
    #   node.tokens, node.slots   int32 [n]; node.parent; node.children, a dict from key to node
    #   node.ref_count (its locks), node.timestamp (when it was used)
    #   RadixNode(tokens, slots, parent, timestamp)   copies both tensors; has no children and no locks, and no parent
    #       knows it
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        """Put a new node between the two that takes the first `length` tokens of the lower one, and return it.
        Whoever locked or used the node did so with its beginning: the new one takes over its count and its time."""
        raise NotImplementedError("exercise 4.2")

    # 4.3 insert a prefix
    #   self.walk(input_ids) -> (node, known)   exercise 4.1: the last node, and the tokens up to its end
    #   self._whole_pages(length)   rounded down to whole pages; self._tick, the time that walk has set
    #   self._key(tokens)   what node.children, a dict, has nodes by; node.tokens, node.length
    #   self.evictable_size   int: tokens of all nodes that nobody has locked
    #   RadixNode(tokens, slots, parent, timestamp)   copies both tensors; no parent knows it yet
    #   RadixHandle(cached_len, node)   a prefix: how many tokens, and the node that it ends with
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        """Add the whole pages of input_ids. Returns how many leading tokens were here already, whose slots stay as
        they were, and the handle of the whole. Tokens and slots are copied: the caller may pass views of its own."""
        raise NotImplementedError("exercise 4.3")

    # 4.4 lock and unlock
    #   self._path(handle)   the nodes of a prefix, the last first, without the root (an empty prefix has none)
    #   self.evictable_size, self.protected_size   int: tokens of all nodes with no lock; with one or more
    #   node.ref_count (its locks), node.length; handle.cached_len
    def lock(self, handle: CacheHandle) -> None:
        """Keep the prefix from being evicted, until `unlock`. Every node up to the root counts the lock, since a
        prefix is of no use without its beginning."""
        raise NotImplementedError("exercise 4.4")

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one `lock`. Raises RuntimeError when there is none."""
        raise NotImplementedError("exercise 4.4")

    # 4.5 evict the least recently used
    #   self.nodes()   all nodes but the root; self.root
    #   self.evictable_size   int: tokens of all nodes that nobody has locked
    #   self._key(tokens)   what children are found by
    #   node.is_evictable   no children and no locks; node < other: used longer ago, so that nodes can lie in a heap
    #   node.tokens, node.slots   int32 [node.length]; node.parent, which becomes None for a node that is gone;
    #       node.children
    def evict(self, size: int) -> Tensor:
        """Drop at least `size` tokens, whole leaves at a time, least recently used first. Returns their slots, int32.
        Raises RuntimeError when fewer are evictable; nothing is dropped then."""
        raise NotImplementedError("exercise 4.5")
