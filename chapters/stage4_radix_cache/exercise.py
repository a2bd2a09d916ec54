"""Stage 4, radix cache: your code.

`minisgl start 4` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 4` says how you stand, `minisgl hint 4.1` helps.
A method may use the rest of its class, and what is imported here; methods that you add beside it are yours too.

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
    def walk(self, input_ids: Tensor) -> tuple[RadixNode, int]:
        """Down the tree as far as input_ids agree with it, page by page: the last node, and the tokens up to its
        end. A node that agrees only in part is split there. Every node on the way counts as used now."""
        raise NotImplementedError("exercise 4.1")

    # 4.2 split a node
    def split(self, parent: RadixNode, node: RadixNode, length: int) -> RadixNode:
        """Put a new node between the two that takes the first `length` tokens of the lower one, and return it.
        Whoever locked or used the node did so with its beginning: the new one takes over its count and its time."""
        raise NotImplementedError("exercise 4.2")

    # 4.3 insert a prefix
    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        """Add the whole pages of input_ids. Returns how many leading tokens were here already, whose slots stay as
        they were, and the handle of the whole. Tokens and slots are copied: the caller may pass views of its own."""
        raise NotImplementedError("exercise 4.3")

    # 4.4 lock and unlock
    def lock(self, handle: CacheHandle) -> None:
        """Keep the prefix from being evicted, until `unlock`. Every node up to the root counts the lock, since a
        prefix is of no use without its beginning."""
        raise NotImplementedError("exercise 4.4")

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one `lock`. Raises RuntimeError when there is none."""
        raise NotImplementedError("exercise 4.4")

    # 4.5 evict the least recently used
    def evict(self, size: int) -> Tensor:
        """Drop at least `size` tokens, whole leaves at a time, least recently used first. Returns their slots, int32.
        Raises RuntimeError when fewer are evictable; nothing is dropped then."""
        raise NotImplementedError("exercise 4.5")
