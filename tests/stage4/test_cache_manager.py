"""The cache manager under a fake engine whose KV says which prefix it belongs to: wrong pages give wrong KV."""

from collections import deque

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage3.page_count import max_pages
from minisgl.stage3.page_pool import PageAllocator
from minisgl.stage3.page_table import PageTable
from minisgl.stage4.cache_manager import CacheManager

NO_EOS: frozenset[int] = frozenset()
ROWS, MAX_SEQ_LEN = 6, 80


class FakeEngine:
    """A manager with its table, and a memory that holds for each slot the tokens its KV was computed from."""

    def __init__(self, page_size: int, num_pages: int, cache: str = "radix") -> None:
        self.table = PageTable(ROWS, MAX_SEQ_LEN, page_size, num_pages * page_size, torch.device("cpu"))
        self.table.device = self.table.host.clone()  # two tensors, as on a GPU: the engine reads this one
        self.manager = CacheManager(self.table, num_pages, cache, Tracer(None))
        self.kv: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[int, list[int]] = {}  # uid -> tokens on the device, which may be one more than on the host

    def admit(self, uid: int, prompt: list[int], max_tokens: int = 8) -> Req:
        """Match, lock and take row `uid % ROWS`: what a scheduler does."""
        ids = torch.tensor(prompt, dtype=torch.int32)
        handle = self.manager.match_req(ids)
        self.manager.lock(handle)
        self.table.set_prefix(uid % ROWS, handle.slots())
        self.tokens[uid] = list(prompt)
        return Req(uid, ids, SamplingParams(max_tokens=max_tokens), uid % ROWS, handle.cached_len, handle)

    def launch(self, *reqs: Req, token: int = 0) -> None:
        """One forward of all of them: write the KV of the new tokens, read that of all before, sample `token`."""
        self.manager.allocate(reqs)
        for req in reqs:
            tokens = self.tokens[req.uid]
            slots = self.table.device[req.table_idx, : req.device_len].tolist()
            for position in range(req.cached_len, req.device_len):
                self.kv[slots[position]] = tuple(tokens[: position + 1])
            for position, slot in enumerate(slots):
                assert self.kv[slot] == tuple(tokens[: position + 1]), f"{req!r} reads KV that is not its own"
            if not isinstance(req, ChunkedReq):
                tokens.append(token)
            req.complete_one()
            req.in_flight += 1

    def commit(self, *reqs: Req) -> None:
        for req in reqs:
            req.in_flight -= 1
            if not isinstance(req, ChunkedReq):
                req.append_host(self.tokens[req.uid][len(req.input_ids)], NO_EOS)

    def step(self, *reqs: Req, token: int = 0) -> None:
        self.launch(*reqs, token=token)
        self.commit(*reqs)

    def run(self, uid: int, prompt: list[int], max_tokens: int) -> Req:
        """A whole request, alone, cached after its prefill and at its end."""
        req = self.admit(uid, prompt, max_tokens)
        for _ in range(max_tokens):
            self.step(req)
            self.manager.cache_req(req, finished=req.finish_reason is not None)
        return req


class ManagerMachine(RuleBasedStateMachine):
    """Requests come, are cut in chunks, run one step ahead of their tokens, end or are aborted in any order."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        room=st.integers(24, 100),
        cache=st.sampled_from(["radix", "radix", "naive"]),
    )
    def start(self, page_size: int, room: int, cache: str) -> None:
        self.size = page_size
        self.fake = FakeEngine(page_size, max(3, room // page_size), cache)
        self.manager = self.fake.manager
        self.live: dict[int, Req] = {}
        self.in_flight: deque[list[Req]] = deque()
        self.uid = 0
        self.queried = self.hits = 0

    def pages_to_come(self, req: Req) -> int:
        return max_pages(req.prompt_len, req.sampling_params, self.size) - -(-req.cached_len // self.size)

    @rule(
        words=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.sampled_from([0, 0, 1, 5]),
        max_tokens=st.integers(1, 10),
        chunk=st.sampled_from([0, 0, 1, 7, 16]),
    )
    def admit(self, words: list[int], tail: int, max_tokens: int, chunk: int) -> None:
        """Full reservation, as in stage 5. chunk: how much of the prompt comes in the first step; 0 for all."""
        rows = {req.table_idx for req in self.live.values()}
        while self.uid % ROWS in rows and len(rows) < ROWS:
            self.uid += 1
        prompt = [word for word in words for _ in range(8)][tail:]
        if (
            len(rows) == ROWS
            or max_pages(len(prompt), SamplingParams(max_tokens=max_tokens), self.size) > self.manager.num_pages
        ):
            return
        req = self.fake.admit(self.uid, prompt, max_tokens)
        assert req.cached_len <= len(prompt) - 1
        needed = sum(map(self.pages_to_come, [*self.live.values(), req]))
        if needed * self.size > self.manager.available_size:
            self.manager.unlock(req.cache_handle)
            return
        if chunk and req.extend_len > chunk:
            req = self.cut(req, chunk)
        self.live[self.uid] = req
        self.uid += 1

    def cut(self, before: Req, take: int) -> Req:
        """The next chunk, or the request itself if this one is the last."""
        end = before.cached_len + take
        args = (before.uid, before._ids[: before.prompt_len], before.sampling_params, before.table_idx)
        cached = (before.cached_len, before.cache_handle)
        return ChunkedReq(*args, *cached, chunk_end=end) if end < before.prompt_len else Req(*args, *cached)

    @precondition(lambda self: self.live and len(self.in_flight) < 2)
    @rule(data=st.data(), token=st.integers(0, 1), take=st.integers(1, 16))
    def launch(self, data: st.DataObject, token: int, take: int) -> None:
        for uid, req in self.live.items():
            if isinstance(req, ChunkedReq) and req.extend_len == 0:
                self.live[uid] = self.cut(req, take)
        able = [req for req in self.live.values() if not req.finish_reason and req.device_len < req.max_device_len]
        if not able:
            return
        waits = data.draw(st.sets(st.sampled_from(able), max_size=2)) if len(able) > 2 else ()
        reqs = [req for req in able if req not in waits]
        for req in reqs:
            if req.uid not in self.manager._row_end:
                self.queried += req.prompt_len
                self.hits += req.cached_len
        self.fake.launch(*reqs, token=token)
        self.in_flight.append(reqs)

    @precondition(lambda self: self.in_flight)
    @rule(cache=st.sampled_from([True, True, False]))
    def commit(self, cache: bool) -> None:
        """All of a batch in one go; requests that ended while it was in flight are released now."""
        with self.manager.freeing():
            for req in self.in_flight.popleft():
                now = self.live[req.uid]  # its next chunk may be launched already
                if req.finish_reason:
                    req.in_flight -= 1
                else:
                    self.fake.commit(req)
                    if cache and not now.finish_reason:
                        self.manager.cache_req(now, finished=False)
                self.release(now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        req = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        req.finish_reason = req.finish_reason or "abort"
        self.release(req)

    def release(self, req: Req) -> None:
        if req.finish_reason and not any(req.uid == other.uid for batch in self.in_flight for other in batch):
            self.manager.cache_req(req, finished=True)
            del self.live[req.uid]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.manager.check_integrity(list(self.live.values()))
        assert (self.manager.queried_tokens, self.manager.hit_tokens) == (self.queried, self.hits)
        needed = sum(map(self.pages_to_come, self.live.values()))
        assert needed * self.size <= self.manager.available_size, "a page that was promised is gone"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.in_flight:
            self.commit(cache=False)
        for req in list(self.live.values()):
            req.finish_reason = "abort"
            self.release(req)
        self.manager.check_integrity([])
        assert self.manager.available_size == self.manager.num_pages * self.size
        assert self.manager.cache.protected_size == 0


ManagerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
TestManager = ManagerMachine.TestCase


def free_pages(fake: FakeEngine) -> int:
    return fake.manager.allocator.num_free


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hazard_1_of_two_equal_prompts_side_by_side_the_second_reads_the_pages_of_the_first(page_size: int) -> None:
    fake = FakeEngine(page_size, num_pages=96 // page_size)
    prompt = list(range(32))
    first, second = fake.admit(0, prompt), fake.admit(1, prompt)
    fake.step(first, second)
    before = free_pages(fake)
    fake.manager.cache_req(first, finished=False)
    assert free_pages(fake) == before  # nothing to free: the tree took what the row holds
    fake.manager.cache_req(second, finished=False)
    assert free_pages(fake) == before + 32 // page_size
    assert torch.equal(fake.table.device[0, :32], fake.table.device[1, :32])
    other = fake.admit(2, [50] * 32)
    fake.step(other)  # it writes over the duplicates …
    fake.step(first, second)  # … which nobody reads any more
    fake.manager.check_integrity([first, second, other])


def test_hazard_2_a_finished_request_is_freed_once() -> None:
    fake = FakeEngine(4, num_pages=8)
    req = fake.admit(0, list(range(10)))
    fake.step(req)
    fake.manager.cache_req(req, finished=True)
    other = fake.admit(ROWS, [90] * 10)  # the same row
    fake.step(other)
    fake.manager.cache_req(req, finished=True)  # holds nothing by now
    fake.manager.check_integrity([other])


def test_hazard_2_a_request_in_flight_is_not_freed() -> None:
    fake = FakeEngine(4, num_pages=8)
    req = fake.admit(0, list(range(10)))
    fake.launch(req)
    with pytest.raises(RuntimeError, match="freed while 1 launched batches still use its pages"):
        fake.manager.cache_req(req, finished=True)
    fake.manager.check_integrity([req])


def test_hazard_2_pages_of_a_step_past_the_end_are_freed_and_not_cached() -> None:
    """Under overlap a request runs one step past its end: its row then holds more than the host knows."""
    fake = FakeEngine(4, num_pages=8)
    req = fake.admit(0, list(range(8)), max_tokens=2)
    fake.step(req)
    fake.launch(req, token=7)
    req.finish_reason = "stop"  # it was decided by the token before
    req.in_flight -= 1
    assert (req.committed_len, req.cached_len, free_pages(fake)) == (8, 9, 5)
    fake.manager.cache_req(req, finished=True)
    assert free_pages(fake) == 6
    assert fake.manager.cache.evictable_size == 8
    fake.manager.check_integrity([])


def test_hazard_3_the_tree_does_not_change_with_the_row() -> None:
    fake = FakeEngine(4, num_pages=8)
    fake.run(0, list(range(8)), max_tokens=1)
    slots = fake.manager.match_req(torch.arange(9, dtype=torch.int32)).slots()
    fake.table.set_prefix(0, torch.full((8,), 31, dtype=torch.int32))
    assert torch.equal(fake.manager.match_req(torch.arange(9, dtype=torch.int32)).slots(), slots)


def test_hazard_4_room_is_counted_in_pages() -> None:
    """17 tokens take two pages of 16; what a row does not fill is no room for others."""
    fake = FakeEngine(16, num_pages=3)
    req = fake.admit(0, list(range(17)))
    fake.step(req)
    assert fake.manager.available_size == 16
    other = fake.admit(1, [70] * 17)
    with pytest.raises(RuntimeError, match="16 tokens are to be evicted, and only 0 can be"):
        fake.manager.allocate([other])
    assert fake.manager.available_size == 16  # nothing was taken
    fake.manager.check_integrity([req, other])


def test_hazard_4_what_is_cached_and_unlocked_makes_room() -> None:
    fake = FakeEngine(4, num_pages=4)
    fake.run(0, list(range(16)), max_tokens=1)
    assert (free_pages(fake), fake.manager.available_size) == (0, 16)
    req = fake.admit(1, [*range(4), 77, 77])  # locks one page of the four
    assert fake.manager.available_size == 12
    fake.step(req)
    assert fake.manager.evicted_tokens == 12
    fake.manager.check_integrity([req])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_hazard_5_a_prompt_that_is_cached_whole_leaves_a_token_to_compute(page_size: int, length: int) -> None:
    fake = FakeEngine(page_size, num_pages=80 // page_size)
    prompt = list(range(length))
    fake.run(0, prompt, max_tokens=8)
    req = fake.admit(1, prompt)
    assert req.cached_len == (length - 1) // page_size * page_size
    fake.step(req)
    fake.manager.cache_req(req, finished=True)
    fake.manager.check_integrity([])


def test_a_request_aborted_between_chunks_leaves_its_whole_pages_to_others() -> None:
    fake = FakeEngine(4, num_pages=8)
    whole = fake.admit(0, list(range(20)))
    chunk = ChunkedReq(0, whole.input_ids, whole.sampling_params, 0, 0, whole.cache_handle, chunk_end=10)
    fake.step(chunk)
    fake.manager.cache_req(chunk, finished=True)
    fake.manager.check_integrity([])
    assert fake.admit(1, list(range(20))).cached_len == 8
    assert free_pages(fake) == 6


def test_a_request_aborted_before_its_first_step_gives_back_its_lock() -> None:
    fake = FakeEngine(4, num_pages=8)
    fake.run(0, list(range(8)), max_tokens=1)
    req = fake.admit(1, list(range(12)))
    assert fake.manager.cache.protected_size == 8
    fake.manager.cache_req(req, finished=True)
    fake.manager.check_integrity([])


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    """Its pages were given out, and its lengths did not advance: the KV is not there and must not be cached."""
    fake = FakeEngine(4, num_pages=8)
    req = fake.admit(0, list(range(20)))
    fake.manager.allocate([req])
    fake.manager.check_integrity([req])
    fake.manager.cache_req(req, finished=True)
    assert free_pages(fake) == 8
    fake.manager.check_integrity([])


def test_a_request_that_was_never_matched_is_cached_too() -> None:
    fake = FakeEngine(4, num_pages=8)
    prompt = torch.arange(9, dtype=torch.int32)
    fake.tokens[0] = prompt.tolist()
    req = Req(0, prompt, SamplingParams(max_tokens=2), table_idx=0)
    fake.step(req)
    fake.manager.cache_req(req, finished=True)
    fake.manager.check_integrity([])
    assert fake.manager.match_req(prompt).cached_len == 8


def test_freeing_many_requests_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine(4, num_pages=16)
    reqs = [fake.admit(uid, [uid] * 10) for uid in range(4)]
    fake.step(*reqs)
    calls: list[Tensor] = []
    free = PageAllocator.free
    monkeypatch.setattr(PageAllocator, "free", lambda self, pages: (calls.append(pages), free(self, pages)))
    with fake.manager.freeing():
        for req in reqs:
            fake.manager.cache_req(req, finished=True)
        assert not calls
    assert [len(pages) for pages in calls] == [4]
    fake.manager.check_integrity([])


def test_naive_computes_everything_again() -> None:
    fake = FakeEngine(4, num_pages=8, cache="naive")
    for uid in range(2):
        assert fake.run(uid, list(range(8)), max_tokens=3).cached_tokens == 0
        assert free_pages(fake) == 8
    assert (fake.manager.queried_tokens, fake.manager.hit_tokens) == (16, 0)


def _lose_a_page(fake: FakeEngine, req: Req) -> None:
    fake.manager.allocator.allocate(1)


def _free_a_page_in_use(fake: FakeEngine, req: Req) -> None:
    fake.manager.allocator.free(fake.table.pages(req.table_idx, 8, 9))


def _point_elsewhere(fake: FakeEngine, req: Req) -> None:
    fake.table.set_prefix(req.table_idx, torch.tensor([28], dtype=torch.int32))


def _forget_a_lock(fake: FakeEngine, req: Req) -> None:
    fake.manager.unlock(req.cache_handle)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lose_a_page, "pages are lost: 4 free"),
        (_free_a_page_in_use, "a page is in two places"),
        (_point_elsewhere, "does not begin with its prefix"),
        (_forget_a_lock, "0 tokens are locked, and the requests lock 8"),
    ],
)
def test_the_integrity_check_finds(damage, words) -> None:  # type: ignore[no-untyped-def]
    fake = FakeEngine(4, num_pages=8)
    req = fake.admit(0, list(range(9)))
    fake.step(req)
    fake.manager.cache_req(req, finished=False)
    fake.manager.check_integrity([req])
    damage(fake, req)
    with pytest.raises(AssertionError, match=words):
        fake.manager.check_integrity([req])
