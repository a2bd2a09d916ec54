"""The pool's layout and arithmetic, and the allocator against a set."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.stage3.page_pool import KVCachePool, PageAllocator


def pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class AllocatorMachine(RuleBasedStateMachine):
    """`held`, a plain list, is all that the allocator may have given out."""

    @initialize(num_pages=st.integers(1, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.held: list[int] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > self.allocator.num_pages - len(self.held):
            with pytest.raises(RuntimeError):
                self.allocator.allocate(count)
            return
        given = self.allocator.allocate(count)
        assert given.dtype == torch.int32
        assert len(given) == count
        assert not set(given.tolist()) & set(self.held)
        self.held += given.tolist()

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.allocator.free(pages(*chosen))
        self.held = [page for page in self.held if page not in chosen]

    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        """One that is free already, or the same one twice: refused whole, together with the good ones."""
        free = sorted(set(range(self.allocator.num_pages)) - set(self.held))
        bad = [data.draw(st.sampled_from(free))] if free else self.held[:1] * 2
        with pytest.raises(RuntimeError):
            self.allocator.free(pages(*self.held[1:], *bad))

    @invariant()
    def integrity(self) -> None:
        self.allocator.check_integrity()
        free = set(self.allocator.free_pages().tolist())
        assert free == set(range(self.allocator.num_pages)) - set(self.held)
        assert self.allocator.num_free == len(free)


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestAllocator = AllocatorMachine.TestCase


def test_what_is_refused_is_named() -> None:
    """Apart from the machine, which is a test of exercises: whoever writes those words them as they like."""
    allocator = PageAllocator(5)
    with pytest.raises(RuntimeError, match="6 pages wanted and 5 of 5 are free"):
        allocator.allocate(6)
    with pytest.raises(RuntimeError, match=r"pages freed twice: \[0\]"):
        allocator.free(pages(0))


def test_pages_are_given_lowest_first_and_the_last_freed_next() -> None:
    allocator = PageAllocator(5)
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    allocator.free(pages(1))
    assert allocator.allocate(2).tolist() == [1, 3]


def test_integrity_of_the_allocator_can_fail() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    allocator._is_free[0] = True
    with pytest.raises(AssertionError, match="disagree"):
        allocator.check_integrity()


def small_pool(page_size: int) -> KVCachePool:
    return KVCachePool(2, 3, page_size, 2, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_slot_holds_what_was_stored_there_and_nothing_else_changes(page_size: int) -> None:
    pool = small_pool(page_size)
    slots = torch.tensor([2 * page_size, 0, pool.dummy_slot], dtype=torch.int32)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    pool.store(1, k, v, slots)
    assert torch.equal(pool.k_cache(1)[slots], k)
    assert torch.equal(pool.v_cache(1)[slots], v)
    assert not pool.k_cache(0).any()  # another layer
    assert int(pool.k_cache(1).flatten(1).any(dim=1).sum()) == 3


def test_the_pool_has_one_page_more_than_is_given_out() -> None:
    """Hazard 8: writes that must go nowhere go to the dummy page, and it holds zeros, never NaN."""
    pool = small_pool(page_size=4)
    assert pool.dummy_slot == 12
    assert pool.k_cache(0).shape == (16, 2, 4)
    assert not pool.v_cache(0).any()


def test_the_budget_of_the_walkthrough() -> None:
    """Its chapter 5.2: 78 GiB free, a 16 GiB model, ratio 0.9, 32 layers of 8 heads of 128 in 16 bits. It rounds
    the 54.2 GiB that are left to 54, and so comes to 442 thousand."""
    each = KVCachePool.page_bytes(num_layers=32, page_size=1, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert each == 128 * 2**10
    assert KVCachePool.pages_in_budget(0.9, 78 * 2**30, 16 * 2**30, each) == 444_005
    assert (
        KVCachePool.pages_in_budget(0.9, 10 * 2**30, 16 * 2**30, each) < 1
    )  # the model alone does not fit: the caller refuses


def test_page_bytes_are_what_the_pool_takes() -> None:
    pool = KVCachePool(3, 7, 4, 2, 8, torch.bfloat16, torch.device("cpu"))
    taken = sum(cache(layer).nbytes for layer in range(3) for cache in (pool.k_cache, pool.v_cache))
    assert taken == 8 * KVCachePool.page_bytes(3, 4, 2, 8, torch.bfloat16)
