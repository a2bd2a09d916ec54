"""The radix tree against a dict from every cached prefix to its page; what its docstrings promise, one by one."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from minisgl.stage4.radix_cache import RadixCache, RadixHandle, RadixNode, common_length, path_to_root

Prefix = tuple[int, ...]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def slots_of(pages: list[int], page_size: int) -> Tensor:
    return int32(*(page * page_size + i for page in pages for i in range(page_size)))


def ends_with(node: RadixNode) -> Prefix:
    """The whole prefix that a node ends."""
    return tuple(token for part in list(path_to_root(node))[::-1] for token in part.tokens.tolist())


class RadixMachine(RuleBasedStateMachine):
    """Three mirrors of the tree, page by page: `page` of each prefix, when it was `used`, and the `locks`."""

    @initialize(page_size=st.sampled_from([1, 4, 16]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.cache = RadixCache(page_size)
        self.page: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: list[tuple[RadixHandle, Prefix]] = []
        self.time = 0
        self.next_page = 0

    # A word is a page of one token repeated, so that pages often agree; `tail` makes lengths of every kind.
    words = st.lists(st.integers(0, 1), max_size=6)
    tail = st.integers(0, 15)

    def tokens(self, words: list[int], tail: int) -> Prefix:
        return tuple(word for word in words for _ in range(self.size)) + (2,) * (tail % self.size)

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def touch(self, tokens: Prefix) -> Prefix:
        """The longest cached prefix; it counts as used now."""
        self.time += 1
        known = [prefix for prefix in self.prefixes(tokens) if prefix in self.page]
        self.used.update((prefix, self.time) for prefix in known)
        return known[-1] if known else ()

    def locked(self, prefix: Prefix) -> int:
        return sum(lock[: len(prefix)] == prefix for _, lock in self.locks)

    def check_handle(self, handle: RadixHandle, tokens: Prefix) -> None:
        assert handle.cached_len == len(tokens)
        pages = [self.page[prefix] for prefix in self.prefixes(tokens)]
        assert torch.equal(handle.slots(), slots_of(pages, self.size))

    @rule(words=words, tail=tail)
    def insert(self, words: list[int], tail: int) -> None:
        tokens = self.tokens(words, tail)
        pages = [self.next_page + i for i in range(len(words))]
        self.next_page += len(words)
        known, handle = self.cache.insert_prefix(int32(*tokens), slots_of([*pages, 10**6], self.size)[: len(tokens)])
        assert known == len(self.touch(tokens))
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            self.page.setdefault(prefix, page)
            self.used[prefix] = self.time
        self.check_handle(handle, self.tokens(words, 0))

    @rule(words=words, tail=tail, lock=st.booleans())
    def match(self, words: list[int], tail: int, lock: bool) -> None:
        tokens = self.tokens(words, tail)
        handle = self.cache.match_prefix(int32(*tokens))
        prefix = self.touch(tokens)
        self.check_handle(handle, prefix)
        if lock:
            self.cache.lock(handle)
            self.locks.append((handle, prefix))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        handle, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(handle)

    @rule(pages=st.integers(0, 4))
    def evict(self, pages: int) -> None:
        wanted = pages * self.size
        free_to_go = {prefix for prefix in self.page if not self.locked(prefix)}
        if pages > len(free_to_go):
            with pytest.raises(RuntimeError):
                self.cache.evict(wanted)
            return
        slots = self.cache.evict(wanted)
        assert len(slots) >= wanted
        assert torch.equal(slots, slots_of((slots[:: self.size] // self.size).tolist(), self.size))
        by_page = {page: prefix for prefix, page in self.page.items()}
        gone = [by_page[page] for page in (slots[:: self.size] // self.size).tolist()]
        assert set(gone) <= free_to_go
        times = [self.used[prefix] for prefix in gone]
        assert all(a <= b for a, b in pairwise(times)), "not the least recently used first"
        for prefix in gone:
            del self.page[prefix], self.used[prefix]
        parents = {prefix[: -self.size] for prefix in self.page}
        leaves = [prefix for prefix in self.page if prefix not in parents and not self.locked(prefix)]
        assert not gone or all(self.used[prefix] >= times[-1] for prefix in leaves), "an older leaf was kept"

    @invariant()
    def same_as_the_mirrors(self) -> None:
        self.cache.check_integrity()
        found: dict[Prefix, int] = {}
        for node in self.cache.nodes():
            whole = ends_with(node)
            for i, prefix in enumerate(self.prefixes(whole)[-(node.length // self.size) :]):
                found[prefix] = int(node.slots[i * self.size]) // self.size
                assert node.timestamp == self.used[prefix]
                assert node.ref_count == self.locked(prefix)
        assert found == self.page
        protected = sum(self.locked(prefix) > 0 for prefix in self.page)
        assert self.cache.protected_size == protected * self.size
        assert self.cache.evictable_size == (len(self.page) - protected) * self.size
        for handle, prefix in self.locks:
            self.check_handle(handle, prefix)


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestRadix = RadixMachine.TestCase


def filled(*words: str, page_size: int = 1) -> RadixCache:
    """A tree of strings, one token a letter. The slots of the n-th word begin at 100 * n."""
    cache = RadixCache(page_size)
    for i, word in enumerate(words):
        cache.insert_prefix(letters(word), torch.arange(100 * i, 100 * i + len(word), dtype=torch.int32))
    return cache


def letters(word: str) -> Tensor:
    return int32(*map(ord, word))


def shape(cache: RadixCache) -> dict[str, list[int]]:
    """Word that a node ends -> its own slots."""
    return {"".join(map(chr, ends_with(node))): node.slots.tolist() for node in cache.nodes()}


def test_a_walk_through_the_tree() -> None:
    cache = filled("abcd", "abxy", "ab")
    assert shape(cache) == {"ab": [0, 1], "abcd": [2, 3], "abxy": [102, 103]}
    handle = cache.match_prefix(letters("abxq"))
    assert handle.slots().tolist() == [0, 1, 102]
    assert shape(cache) == {"ab": [0, 1], "abcd": [2, 3], "abx": [102], "abxy": [103]}


def test_only_whole_pages_are_matched_and_kept() -> None:
    cache = filled("aaaabbbbcc", page_size=4)
    assert shape(cache) == {"aaaabbbb": list(range(8))}
    assert cache.match_prefix(letters("aaaabbbbcccc")).cached_len == 8
    assert cache.match_prefix(letters("aaaabbbx")).cached_len == 4
    assert cache.match_prefix(letters("aaa")).cached_len == 0


def test_hazard_3_the_tree_keeps_copies() -> None:
    cache = RadixCache(2)
    tokens, slots = letters("abcd"), int32(4, 5, 6, 7)
    _, handle = cache.insert_prefix(tokens, slots)
    tokens.fill_(0)
    slots.fill_(0)
    assert shape(cache) == {"abcd": [4, 5, 6, 7]}
    handle.slots().fill_(0)
    assert cache.match_prefix(letters("abcd")).slots().tolist() == [4, 5, 6, 7]


def test_hazard_3_a_lock_covers_the_node_and_all_above_it() -> None:
    cache = filled("abcd", "abxy")
    handle = cache.match_prefix(letters("abcd"))
    cache.lock(handle)
    assert sorted(cache.evict(2).tolist()) == [102, 103]
    with pytest.raises(RuntimeError, match="1 tokens are to be evicted, and only 0 can be"):
        cache.evict(1)
    assert handle.slots().tolist() == [0, 1, 2, 3]
    cache.unlock(handle)
    assert sorted(cache.evict(4).tolist()) == [0, 1, 2, 3]


def test_hazard_26_a_lock_moves_tokens_from_evictable_to_protected() -> None:
    cache = filled("abcd", "abxy")
    handle = cache.match_prefix(letters("abcd"))
    assert (cache.evictable_size, cache.protected_size) == (6, 0)
    cache.lock(handle)
    assert (cache.evictable_size, cache.protected_size) == (2, 4)
    cache.lock(handle)  # a second request with the same prefix: the tokens count once
    assert (cache.evictable_size, cache.protected_size) == (2, 4)
    cache.unlock(handle)
    assert (cache.evictable_size, cache.protected_size) == (2, 4)
    cache.unlock(handle)
    assert (cache.evictable_size, cache.protected_size) == (6, 0)


def test_hazard_26_a_split_keeps_locks_and_the_part_that_was_hit_is_used_now() -> None:
    cache = filled("abcd", "xyz")
    handle = cache.match_prefix(letters("abcd"))
    cache.lock(handle)
    cache.insert_prefix(letters("xyz"), int32(0, 0, 0))  # "abcd" is the older one now
    cache.match_prefix(letters("ab"))  # splits it, once
    assert [node.ref_count for node in path_to_root(handle.node)] == [1, 1]
    cache.unlock(handle)
    cache.check_integrity()
    assert cache.evict(1).tolist() == [2, 3]  # "cd" was not touched by the hit on "ab" …
    assert cache.evict(1).tolist() == [100, 101, 102]  # … and "ab" was
    assert cache.evict(1).tolist() == [0, 1]


def test_hazard_26_evict_counts_what_it_drops_and_never_runs_dry() -> None:
    cache = filled("abcd", "abxy", "q")
    assert cache.evict(0).tolist() == []
    assert len(cache.evict(3)) == 4  # whole leaves: "cd", "xy"
    assert cache.evictable_size == 3
    with pytest.raises(RuntimeError):
        cache.evict(4)
    assert shape(cache) == {"ab": [0, 1], "q": [200]}  # nothing was dropped
    assert len(cache.evict(3)) == 3
    assert shape(cache) == {}


def test_the_least_recently_used_goes_first_and_parents_after_their_children() -> None:
    cache = filled("abcd", "abxy", "q")
    cache.match_prefix(letters("abcd"))
    assert [cache.evict(1).tolist() for _ in range(4)] == [[102, 103], [200], [2, 3], [0, 1]]


def test_a_handle_survives_the_split_of_its_node() -> None:
    cache = filled("abcdef")
    handle = cache.match_prefix(letters("abcdef"))
    cache.lock(handle)
    cache.match_prefix(letters("abxx"))
    cache.match_prefix(letters("abcdxx"))
    assert handle.slots().tolist() == list(range(6))
    cache.unlock(handle)
    cache.check_integrity()
    assert cache.protected_size == 0


def test_a_prefix_that_was_evicted_cannot_be_locked() -> None:
    cache = filled("abcd")
    handle = cache.match_prefix(letters("abcd"))
    cache.evict(4)
    with pytest.raises(RuntimeError, match="evicted before it was locked"):
        cache.lock(handle)
    cache.check_integrity()


def test_unlock_without_lock_is_refused() -> None:
    cache = filled("abcd")
    with pytest.raises(RuntimeError):
        cache.unlock(cache.match_prefix(letters("abcd")))
    cache.check_integrity()


def test_what_is_refused_is_named() -> None:
    """Apart from tests of exercises: whoever writes those words their errors as they like."""
    cache = filled("abcd")
    with pytest.raises(RuntimeError, match="prefix of 4 tokens is unlocked more often than it was locked"):
        cache.unlock(cache.match_prefix(letters("abcd")))
    with pytest.raises(RuntimeError, match="5 tokens are to be evicted, and only 4 can be"):
        cache.evict(5)


def test_hazard_10_the_same_calls_evict_the_same_pages_on_every_rank() -> None:
    def run() -> list[int]:
        cache = filled("abcd", "abxy", "q", "qrs", "abcz", "m")
        cache.match_prefix(letters("qr"))
        return [slot for _ in range(6) for slot in cache.evict(1).tolist()]

    assert run() == run()


@pytest.mark.parametrize(("a", "b", "common"), [("", "a", 0), ("ab", "abc", 2), ("abc", "axc", 1), ("x", "a", 0)])
def test_common_length(a: str, b: str, common: int) -> None:
    assert common_length(letters(a), letters(b)) == common


def _lose_a_lock(cache: RadixCache) -> None:
    next(cache.nodes()).ref_count += 1


def _wrong_key(cache: RadixCache) -> None:
    cache.root.children[(9, 9)] = cache.root.children.pop(next(iter(cache.root.children)))


def _half_a_page(cache: RadixCache) -> None:
    node = next(cache.nodes())
    node.tokens, node.slots = node.tokens[:3], node.slots[:3]


def _same_slot_twice(cache: RadixCache) -> None:
    for node in cache.nodes():
        node.slots = torch.arange(node.length, dtype=torch.int32)


def _not_a_page(cache: RadixCache) -> None:
    next(cache.nodes()).slots += 1


def _wrong_size(cache: RadixCache) -> None:
    cache.evictable_size += 2


def _from_the_future(cache: RadixCache) -> None:
    next(node for node in cache.nodes() if not node.children).timestamp += 100


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lose_a_lock, "sizes differ"),
        (_wrong_key, "under a wrong key"),
        (_half_a_page, "has 3 tokens, pages have 2"),
        (_same_slot_twice, "share a slot"),
        (_not_a_page, "not those of whole pages"),
        (_wrong_size, "sizes differ"),
        (_from_the_future, "used after its parent"),
    ],
)
def test_the_integrity_check_finds(damage, words) -> None:  # type: ignore[no-untyped-def]
    cache = filled("aabb", "ccddee", "ccdd", page_size=2)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(AssertionError, match=words):
        cache.check_integrity()
