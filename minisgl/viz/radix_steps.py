"""The radix tree at one moment, and what an operation did to it. From a live cache; draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode

Mark = Literal["", "new", "used"]  # by the last operation


@dataclass(frozen=True)
class TreeNode:
    tokens: tuple[int, ...]
    ref_count: int
    timestamp: int
    children: tuple[TreeNode, ...]
    mark: Mark = ""

    @property
    def is_evictable(self) -> bool:
        return not self.children and self.ref_count == 0


@dataclass(frozen=True)
class TreeSnapshot:
    """finding: what the last operation did, in words; empty if there was none."""

    roots: tuple[TreeNode, ...]  # the children of the root, which itself holds nothing
    page_size: int
    finding: str = ""

    def nodes(self) -> Iterator[TreeNode]:
        """Each after its parent."""
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def next_to_go(self) -> TreeNode | None:
        """What eviction would drop first."""
        return min((n for n in self.nodes() if n.is_evictable), key=lambda n: n.timestamp, default=None)


def snapshot_tree(cache: RadixCache) -> TreeSnapshot:
    """The tree now. What happens to the cache later does not change it."""
    return TreeSnapshot(_copy(cache.root, {}), cache.page_size)


def radix_steps(cache: RadixCache, actions: Sequence[tuple[str, Callable[[RadixCache], object]]]) -> list[TreeSnapshot]:
    """The tree before, and after each action: (name, what to do with the cache). Each snapshot says what changed and
    marks the nodes that are new and those that were used: a list for `slider`."""
    snapshots = [snapshot_tree(cache)]
    for name, act in actions:
        before = {node: (node.length, node.timestamp, node.ref_count) for node in cache.nodes()}
        with _found(cache) as found:
            act(cache)
        after = {node: (node.length, node.timestamp, node.ref_count) for node in cache.nodes()}
        marks: dict[RadixNode, Mark] = {node: "used" for node in after if node in before and _used(before, after, node)}
        marks |= dict.fromkeys(after.keys() - before.keys(), "new")
        finding = f"{name}: {_finding(before, after, found)}"
        snapshots.append(TreeSnapshot(_copy(cache.root, marks), cache.page_size, finding))
    return snapshots


_State = dict["RadixNode", tuple[int, int, int]]  # length, timestamp, locks


def _used(before: _State, after: _State, node: RadixNode) -> bool:
    return before[node][1] != after[node][1]


@contextmanager
def _found(cache: RadixCache) -> Iterator[dict[str, int]]:
    """Tokens that the cache finds meanwhile, the most of any call: "hit" by who looks for a prefix, "known already" of
    one that is inserted."""
    found = {"hit": 0, "known already": 0}
    match, insert = cache.match_prefix, cache.insert_prefix

    def match_prefix(input_ids: Tensor) -> RadixHandle:
        handle = match(input_ids)
        found["hit"] = max(found["hit"], handle.cached_len)
        return handle

    def insert_prefix(input_ids: Tensor, slots: Tensor) -> tuple[int, RadixHandle]:
        known, handle = insert(input_ids, slots)
        found["known already"] = max(found["known already"], known)
        return known, handle

    vars(cache).update(match_prefix=match_prefix, insert_prefix=insert_prefix)
    try:
        yield found
    finally:
        del cache.match_prefix, cache.insert_prefix


def _finding(before: _State, after: _State, found: dict[str, int]) -> str:
    old, new = (sum(length for length, _, _ in state.values()) for state in (before, after))
    split = [node for node in after if node in before and after[node][0] < before[node][0]]
    locked = [sum(length for length, _, locks in state.values() if locks) for state in (before, after)]
    words = [f"{tokens} tokens {how}" for how, tokens in found.items() if tokens]
    words += [f"{len(split)} node split" if len(split) == 1 else f"{len(split)} nodes split"] if split else []
    words += [f"{new - old} tokens inserted"] if new > old else []
    words += [f"{old - new} tokens evicted"] if new < old else []
    words += [f"{locked[1] - locked[0]} more tokens locked"] if locked[1] > locked[0] else []
    words += [f"{locked[0] - locked[1]} tokens unlocked"] if locked[1] < locked[0] else []
    return ", ".join(words) or "nothing found, nothing changed"


def _copy(node: RadixNode, marks: dict[RadixNode, Mark]) -> tuple[TreeNode, ...]:
    """The node's children, oldest key first. Recursion is as deep as the tree, whose paths are short in figures."""
    return tuple(
        TreeNode(tuple(c.tokens.tolist()), c.ref_count, c.timestamp, _copy(c, marks), marks.get(c, ""))
        for c in node.children.values()
    )
