"""The scheduler under arrivals, aborts, chunks, small pools, and both orders of its calls: the plain loop's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, plain_loop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage3.page_count import max_pages
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.scheduler import Scheduler

MAX_SEQ_LEN = 64
SHARED = list(range(10, 40))  # prompts begin with a part of it


def make(num_pages: int, page_size: int, rows: int, budget: int, cache: str) -> tuple[Scheduler, FakeEngine]:
    engine = FakeEngine(num_pages, page_size, rows, MAX_SEQ_LEN)
    config = SchedulerConfig(page_size=page_size, max_running_requests=rows, max_prefill_length=budget, cache=cache)
    return Scheduler(config, engine, frozenset({EOS}), Tracer(None)), engine  # type: ignore[arg-type]


def drain(scheduler: Scheduler) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while scheduler.has_work:
        forward_input = scheduler.schedule()
        assert forward_input is not None, "work, and nothing to run"
        for output in scheduler.commit(forward_input, scheduler.forward(forward_input)):
            assert output.token_id is not None
            tokens.setdefault(output.uid, []).append(output.token_id)
        scheduler.check_integrity()
    return tokens


class Life(RuleBasedStateMachine):
    """One tick is one schedule; with `overlap`, a batch is committed only after the next one was scheduled."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        extra=st.integers(0, 40),
        rows=st.integers(1, 5),
        budget=st.integers(1, 40),
        cache=st.sampled_from(["radix", "naive"]),
        overlap=st.booleans(),
    )
    def start(self, page_size: int, extra: int, rows: int, budget: int, cache: str, overlap: bool) -> None:
        self.num_pages = -(-MAX_SEQ_LEN // page_size) + extra // page_size
        self.scheduler, self.engine = make(self.num_pages, page_size, rows, budget, cache)
        self.page_size, self.budget, self.overlap = page_size, budget, overlap
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.last: tuple[ForwardInput, ForwardOutput] | None = None

    @rule(shared=st.integers(0, len(SHARED)), tail=st.lists(st.integers(1, 49), max_size=12), length=st.integers(1, 12))
    def arrive(self, shared: int, tail: list[int], length: int) -> None:
        prompt = SHARED[:shared] + tail or [7]
        uid, params = len(self.asked), SamplingParams(max_tokens=length)
        assert max_pages(len(prompt), params, self.page_size) <= self.num_pages
        self.asked[uid] = (prompt, length)
        self.scheduler.add(uid, prompt, params)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        uid = data.draw(st.integers(0, len(self.asked) - 1))
        outputs = self.scheduler.abort(uid)
        assert len(outputs) == (uid not in self.ended), "one terminal message each"
        self.take(outputs)

    @rule()
    def tick(self) -> None:
        forward_input = self.scheduler.schedule()
        now = None
        if forward_input is not None:
            computed = len(forward_input.batch.positions)
            assert 0 < computed <= max(self.budget, forward_input.batch.num_decode)
            now = (forward_input, self.scheduler.forward(forward_input))
        done, self.last = (self.last, now) if self.overlap else (now, None)
        if done is not None:
            self.take(self.scheduler.commit(*done))

    @rule()
    def finish_all(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work and self.last is None:
                break
            self.tick()
        assert not self.scheduler.has_work, "starved"
        assert self.ended.keys() == self.asked.keys()
        stats = self.scheduler.stats()
        assert stats["pages_free"] + stats["pages_cached"] == self.num_pages
        assert self.scheduler.cache.cache.protected_size == 0
        assert stats["rows_free"] == self.scheduler.tables.num_rows

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            assert output.uid not in self.ended, "a message after the terminal one"
            if output.token_id is not None:
                self.got.setdefault(output.uid, []).append(output.token_id)
            if output.finish_reason:
                self.ended[output.uid] = output.finish_reason

    @invariant()
    def tokens_are_the_plain_loops(self) -> None:
        for uid, tokens in getattr(self, "got", {}).items():
            expected, reason = plain_loop(*self.asked[uid])
            assert tokens == expected[: len(tokens)]
            if self.ended.get(uid) not in (None, "abort"):
                assert (tokens, self.ended[uid]) == (expected, reason)

    @invariant()
    def pages_add_up(self) -> None:
        if getattr(self, "scheduler", None) and self.last is None:
            self.scheduler.check_integrity()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 33])
@pytest.mark.parametrize("budget", [1, 8, 16])
def test_prompts_around_page_and_chunk_borders(length: int, budget: int) -> None:
    """Hazards 5 and 17: multiples of the page and of the chunk budget, and prompts of three chunks and more."""
    scheduler, _ = make(num_pages=32, page_size=8, rows=4, budget=budget, cache="radix")
    prompt = SHARED[:length] + [41] * (length - 30)
    for uid in (0, 1):  # the second time all of it is cached, and one token at least is computed
        scheduler.add(uid, prompt, SamplingParams(max_tokens=5))
        assert drain(scheduler)[uid] == plain_loop(prompt, 5)[0]
    assert scheduler.cache.hit_tokens == (length - 1) // 8 * 8


def test_budget_bounds_the_tokens_of_a_step() -> None:
    scheduler, engine = make(num_pages=64, page_size=4, rows=8, budget=10, cache="naive")
    for uid in range(4):
        scheduler.add(uid, [uid + 1] * 23, SamplingParams(max_tokens=3))
    drain(scheduler)
    spans = [[part.split(":")[1].split("-") for part in batch] for batch in engine.batches]
    assert max(sum(int(end) - int(start) for start, end in batch) for batch in spans) == 10


def test_same_new_prefix_side_by_side() -> None:
    """Hazard 1: both are prefilled in one batch; the second finds its pages are duplicates."""
    scheduler, _ = make(num_pages=64, page_size=4, rows=4, budget=100, cache="radix")
    for uid in (0, 1, 2):
        scheduler.add(uid, SHARED[:17], SamplingParams(max_tokens=9))
    tokens = drain(scheduler)
    assert tokens[0] == tokens[1] == tokens[2] == plain_loop(SHARED[:17], 9)[0]


def test_waits_for_pages_and_never_for_ever() -> None:
    """Hazard 4: two requests that fit alone but not together, in a pool of just the pages of one."""
    scheduler, _ = make(num_pages=4, page_size=16, rows=4, budget=100, cache="radix")
    for uid in (0, 1):
        scheduler.add(uid, [uid + 1] * 40, SamplingParams(max_tokens=20))
    tokens = drain(scheduler)
    assert tokens == {uid: plain_loop([uid + 1] * 40, 20)[0] for uid in (0, 1)}


def test_steps_to_drain_against_a_static_batch() -> None:
    """What stage 5 buys: a row is filled again as soon as it is free. 8 requests, 2 rows, answers of 2 and 12."""
    scheduler, engine = make(num_pages=64, page_size=4, rows=2, budget=100, cache="naive")
    lengths = [12 if uid % 2 else 2 for uid in range(8)]
    for uid, length in enumerate(lengths):
        scheduler.add(uid, [uid + 1] * 5, SamplingParams(max_tokens=length, ignore_eos=True))
    assert [len(tokens) for _, tokens in sorted(drain(scheduler).items())] == lengths
    static = sum(2 + max(pair) - 1 for pair in zip(lengths[::2], lengths[1::2], strict=True))  # stages 3 and 4
    assert (len(engine.batches), static) == (32, 52)
