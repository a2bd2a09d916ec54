"""Stage 4's exercises, each claim in words: walking, splitting, inserting, locking, evicting.

They hold for the package's own code; `minisgl check 4` runs them on a learner's. Trees are built by hand, so that no
exercise needs another. A letter is a token; the slots of a node are given.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrong import refused

from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode, path_to_root


def letters(word: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in word], dtype=torch.int32)


def word_of(node: RadixNode) -> str:
    return "".join(map(chr, node.tokens.tolist()))


def add(cache: RadixCache, parent: RadixNode, word: str, slot: int, time: int) -> RadixNode:
    """A node, linked by hand, used at that time, as are those above it if they were used before."""
    node = RadixNode(letters(word), torch.arange(slot, slot + len(word), dtype=torch.int32), parent, time)
    parent.children[cache._key(node.tokens)] = node
    cache.evictable_size += len(word)
    for above in path_to_root(node):
        above.timestamp = max(above.timestamp, time)
    cache._tick = max(cache._tick, time)
    return node


def tree(page_size: int = 1) -> tuple[RadixCache, dict[str, RadixNode]]:
    """root - ab - (cd, xy) and root - q, used in the order cd, xy, q."""
    cache = RadixCache(page_size)
    ab = add(cache, cache.root, "ab", 0, 1)
    return cache, {"ab": ab, "cd": add(cache, ab, "cd", 10, 1), "xy": add(cache, ab, "xy", 20, 2),
                   "q": add(cache, cache.root, "q", 30, 3)}  # fmt: skip


def handle(node: RadixNode) -> RadixHandle:
    return RadixHandle(sum(above.length for above in path_to_root(node)), node)


def shape(cache: RadixCache) -> dict[str, list[int]]:
    """Word that a node ends -> its own slots."""
    return {
        "".join(word_of(part) for part in list(path_to_root(node))[::-1]): node.slots.tolist() for node in cache.nodes()
    }


def sizes(cache: RadixCache) -> tuple[int, int]:
    return cache.evictable_size, cache.protected_size


# 4.1 walk


def test_walk_in_an_empty_tree_stays_at_the_root() -> None:
    cache = RadixCache(1)
    node, length = cache.walk(letters("abc"))
    assert node is cache.root, "nothing is cached: the walk ends at the root"
    assert length == 0, f"nothing is cached: 0 tokens agree, not {length}"


@pytest.mark.parametrize(
    ("word", "end", "length"), [("abcd", "cd", 4), ("abxyz", "xy", 4), ("abz", "ab", 2), ("zab", "", 0), ("q", "q", 1)]
)
def test_walk_goes_as_far_as_tokens_agree(word: str, end: str, length: int) -> None:
    cache, _ = tree()
    node, found = cache.walk(letters(word))
    assert found == length, f"{length} tokens of {word!r} are in a tree of abcd, abxy and q, not {found}"
    assert word_of(node) == end, f"the walk along {word!r} ends at node {end!r}, not {word_of(node)!r}"


def test_walk_counts_whole_pages() -> None:
    cache = RadixCache(2)
    add(cache, cache.root, "aabbcc", 0, 1)
    node, length = cache.walk(letters("aabbcx"))
    assert length == 4, f"'aabbc' agrees, which are 2 whole pages of 2 tokens: 4, not {length}"
    node, length = cache.walk(letters("a"))
    assert (node, length) == (cache.root, 0), "half a page cannot be looked up: whole pages only"


def test_walk_splits_a_node_that_agrees_in_part() -> None:
    cache, nodes = tree()
    node, length = cache.walk(letters("abcz"))
    assert length == 3, f"'abc' of 'abcz' is cached: 3 tokens, not {length}"
    assert word_of(node) == "c", (
        f"node 'cd' agrees in part and is to be split: the walk ends at 'c', not {word_of(node)!r}"
    )
    assert word_of(nodes["cd"]) == "d", "after the split the old node has the rest, 'd'"


def test_walk_uses_what_it_passes() -> None:
    cache, nodes = tree()
    before = cache._tick
    cache.walk(letters("abcd"))
    times = {name: node.timestamp for name, node in nodes.items()}
    now = before + 1
    assert cache._tick == now, f"a walk is one tick of the tree's clock: {now}, not {cache._tick}"
    assert (times["ab"], times["cd"]) == (now, now), (
        f"every node on the way is used now ({now}): timestamps are {times}"
    )
    assert (times["xy"], times["q"]) == (2, 3), f"nodes beside the way keep their timestamp: {times}"


# 4.2 split


def test_the_upper_part_is_new_and_the_lower_part_stays() -> None:
    cache, nodes = tree()
    held = handle(nodes["cd"])
    upper = cache.split(nodes["ab"], nodes["cd"], 1)
    assert upper is not nodes["cd"], "the old node stays the end of its prefix: the new node is the upper one"
    assert (word_of(upper), word_of(nodes["cd"])) == ("c", "d"), (
        f"'cd' cut at 1: the new node has 'c' and the old one stays the end, 'd'; here {word_of(upper)!r} and "
        f"{word_of(nodes['cd'])!r}"
    )
    assert (upper.slots.tolist(), nodes["cd"].slots.tolist()) == ([10], [11]), "the slots are cut where the tokens are"
    assert held.slots().tolist() == [0, 1, 10, 11], (
        f"a handle stays true: slots 0, 1, 10, 11, not {held.slots().tolist()}"
    )


def test_a_split_keeps_the_locks() -> None:
    cache, nodes = tree()
    nodes["cd"].ref_count = nodes["ab"].ref_count = 2
    upper = cache.split(nodes["ab"], nodes["cd"], 1)
    counts = upper.ref_count, nodes["cd"].ref_count
    assert counts == (2, 2), f"two locks on 'cd' are two locks on 'c' and on 'd', not {counts}"


def test_a_split_keeps_the_time() -> None:
    cache, nodes = tree()
    upper = cache.split(nodes["ab"], nodes["xy"], 1)
    assert upper.timestamp == 2, f"'xy' was last used at 2, and so was its beginning, not at {upper.timestamp}"


def test_a_split_links_up_and_down() -> None:
    cache, nodes = tree()
    upper = cache.split(cache.root, nodes["ab"], 1)
    assert upper.parent is cache.root, "the new node's parent is the one that was given"
    assert nodes["ab"].parent is upper, "the old node's parent is the new node now"
    for parent in (cache.root, upper):
        for key, child in parent.children.items():
            assert key == cache._key(child.tokens), f"{word_of(child)!r} is not under the key of its own first page"
    assert list(upper.children.values()) == [nodes["ab"]], (
        "the new node has one child, the old node, under the key of 'b'"
    )
    assert shape(cache) == {"a": [0], "ab": [1], "abcd": [10, 11], "abxy": [20, 21], "q": [30]}, f"{shape(cache)}"


# 4.3 insert


def insert(cache: RadixCache, word: str, slot: int) -> tuple[int, RadixHandle]:
    known, found = cache.insert_prefix(letters(word), torch.arange(slot, slot + len(word), dtype=torch.int32))
    return known, found  # type: ignore[return-value]


def test_what_was_inserted_is_found() -> None:
    cache = RadixCache(1)
    known, found = insert(cache, "abc", 50)
    assert known == 0, f"the tree was empty: 0 tokens were known, not {known}"
    assert found.slots().tolist() == [50, 51, 52], (
        f"the handle has the slots of the whole, not {found.slots().tolist()}"
    )
    assert shape(cache) == {"abc": [50, 51, 52]}, f"one leaf, 'abc': {shape(cache)}"
    cache.check_integrity()


def test_known_tokens_keep_their_slots() -> None:
    cache, _ = tree()
    known, found = insert(cache, "abcdef", 70)
    assert known == 4, f"'abcd' of 'abcdef' was there: 4 tokens, not {known}"
    slots = found.slots().tolist()
    assert slots == [0, 1, 10, 11, 74, 75], f"known tokens keep their slots, and e, f get 74 and 75: not {slots}"
    assert found.cached_len == 6, f"the handle is of the whole, 6 tokens, not {found.cached_len}"
    known, found = insert(cache, "abx", 80)
    assert known == 3, f"'abx' was all there: 3, not {known}"
    cache.check_integrity()


def test_half_a_page_is_not_kept() -> None:
    cache = RadixCache(2)
    known, found = insert(cache, "aabbc", 0)
    assert shape(cache) == {"aabb": [0, 1, 2, 3]}, f"pages of 2: 'c' is half a page, and is not kept: {shape(cache)}"
    assert (known, found.cached_len) == (0, 4), f"0 were known and 4 are kept, not {known} and {found.cached_len}"


def test_new_tokens_can_be_evicted() -> None:
    cache, _ = tree()
    insert(cache, "abcdef", 70)
    assert sizes(cache) == (9, 0), f"7 tokens were evictable and 2 are new: (9, 0), not {sizes(cache)}"


# 4.4 lock, unlock


def test_a_lock_protects_the_whole_path() -> None:
    cache, nodes = tree()
    cache.lock(handle(nodes["cd"]))
    counts = {name: node.ref_count for name, node in nodes.items()}
    assert counts == {"ab": 1, "cd": 1, "xy": 0, "q": 0}, (
        f"a lock on abcd counts on its whole path, ab and cd: {counts}"
    )
    assert sizes(cache) == (3, 4), f"of 7 evictable tokens 4 are protected now: (3, 4), not {sizes(cache)}"


def test_two_locks_need_two_unlocks() -> None:
    cache, nodes = tree()
    first, second = handle(nodes["cd"]), handle(nodes["xy"])
    seen = []
    for act, held in ((cache.lock, first), (cache.lock, second), (cache.unlock, first), (cache.unlock, second)):
        act(held)
        seen.append(sizes(cache))
    expected = [(3, 4), (1, 6), (3, 4), (7, 0)]
    assert seen == expected, (
        f"abcd and abxy locked, then unlocked; ab is shared, so its tokens count once: {expected}, not {seen}"
    )
    assert nodes["ab"].ref_count == 0, f"after both unlocks nobody holds ab, and its count is {nodes['ab'].ref_count}"


def test_unlock_without_a_lock_changes_nothing() -> None:
    cache, nodes = tree()
    cache.lock(handle(nodes["cd"]))
    refused("abcd is locked, and abxy was unlocked", cache.unlock, handle(nodes["xy"]))
    counts = {name: node.ref_count for name, node in nodes.items()}
    assert counts == {"ab": 1, "cd": 1, "xy": 0, "q": 0}, f"a refused unlock changes no count: {counts}"


def test_nothing_can_be_locked() -> None:
    cache, _ = tree()
    empty = RadixHandle(0, cache.root)
    cache.lock(empty)
    cache.unlock(empty)
    assert (sizes(cache), cache.root.ref_count) == ((7, 0), 0), "a match of 0 tokens locks nothing, and never the root"


# 4.5 evict


def test_the_oldest_leaf_goes_first() -> None:
    cache, _ = tree()
    slots = cache.evict(1)
    assert slots.dtype == torch.int32, f"slots are int32, not {slots.dtype}"
    gone = slots.tolist()
    assert gone == [10, 11], (
        f"the leaves are cd (used at 1), xy (2), q (3): the oldest, cd, goes whole: [10, 11], not {gone}"
    )
    assert shape(cache) == {"ab": [0, 1], "abxy": [20, 21], "q": [30]}, f"cd is gone and nothing else: {shape(cache)}"


def test_a_parent_goes_after_its_children() -> None:
    cache, nodes = tree()
    gone = cache.evict(7).tolist()
    assert sorted(gone) == [0, 1, 10, 11, 20, 21, 30], (
        f"all 7 can go: a parent is a leaf after its children went; {gone}"
    )
    assert nodes["cd"].parent is None, "a node that was evicted has no parent: so a stale handle is recognised"


def test_locked_leaves_stay() -> None:
    cache, nodes = tree()
    nodes["cd"].ref_count = nodes["ab"].ref_count = 1
    cache.evictable_size, cache.protected_size = 3, 4
    gone = cache.evict(3).tolist()
    assert sorted(gone) == [20, 21, 30], f"cd is locked, and ab with it: xy and q go, not {gone}"


def test_evictable_falls_by_what_was_dropped() -> None:
    cache, _ = tree()
    cache.evict(1)
    assert cache.evictable_size == 5, f"1 was asked for, 2 were really dropped: 7 - 2 = 5, not {cache.evictable_size}"
    nothing = cache.evict(0)
    assert nothing.tolist() == [], "nothing was asked for: nothing goes, an empty tensor"
    assert nothing.dtype == torch.int32, f"slots are int32, also when there are none: not {nothing.dtype}"


def test_too_much_is_refused_and_nothing_dropped() -> None:
    cache, _ = tree()
    before = shape(cache)
    refused("8 of 7 tokens were asked for", cache.evict, 8)
    assert shape(cache) == before, "8 of 7 tokens were asked for: refused, and nothing dropped"
