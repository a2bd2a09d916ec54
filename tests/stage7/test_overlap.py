"""Overlap: real, safe, and worth the larger of two times instead of their sum."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from fake_engine import EOS, FakeEngine, plain_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_loop import MAX_SEQ_LEN, ScriptedInbox, abort, add, make_scheduler

from minisgl.core.batch import Batch, ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7.llm import LLM
from minisgl.stage7.streams import ThreadStream


def run(scheduler: Scheduler, ticks: list[Any], overlap: bool = True) -> list[TokenOutput]:
    """All outputs of a loop over ticks. It ends idle."""
    inbox = ScriptedInbox(ticks)
    if not overlap:
        return [output for outputs in LLM.plain_loop(scheduler, inbox) for output in outputs]
    with closing(ThreadStream(1)) as stream:
        return [output for outputs in LLM.overlap_loop(scheduler, inbox, stream) for output in outputs]


class BlockedEngine(FakeEngine):
    """The device's first step ends only when the host has prepared the second, or gives up."""

    def __init__(self, *shape: int, patience: float) -> None:
        super().__init__(*shape)
        self.patience, self.second_prepared, self.overlapped = patience, threading.Event(), False

    def prepare(self, batch: Batch) -> Any:
        if self.batches:
            self.second_prepared.set()
        return super().prepare(batch)

    def forward_batch(self, batch: Batch, args: Any) -> ForwardOutput:
        if self.computed_tokens == 0:
            self.overlapped = self.second_prepared.wait(self.patience)
        return super().forward_batch(batch, args)


@pytest.mark.parametrize(("overlap", "patience"), [(True, 60.0), (False, 0.05)])
def test_next_step_is_scheduled_before_the_device_is_done(overlap: bool, patience: float) -> None:
    engine = BlockedEngine(16, 4, 2, MAX_SEQ_LEN, patience=patience)
    run(make_scheduler(engine), [[add(0, [1, 2, 3], 4, ignore_eos=True)]], overlap)
    assert engine.overlapped == overlap


class Clock:
    now = 0


class ClockEngine(FakeEngine):
    """The host needs `host` ticks to prepare a step, the device `device` ticks to compute it."""

    def __init__(self, clock: Clock, host: int, device: int) -> None:
        super().__init__(16, 4, 2, MAX_SEQ_LEN)
        self.clock, self.host_ticks, self.device_ticks = clock, host, device

    def prepare(self, batch: Batch) -> Any:
        self.clock.now += self.host_ticks
        return super().prepare(batch)

    def forward_batch(self, batch: Batch, args: Any) -> ForwardOutput:
        self.clock.now += self.device_ticks
        return super().forward_batch(batch, args)


class VirtualStream:
    """Runs a step at once, and says that it took place when the device was free."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free = clock, 0

    def submit(self, forward: Any, forward_input: ForwardInput) -> VirtualTicket:
        launched = self.clock.now
        self.clock.now = max(launched, self.free)
        output = forward(forward_input)
        self.free, self.clock.now = self.clock.now, launched
        return VirtualTicket(self.clock, self.free, output)

    def close(self) -> None:
        return


class VirtualTicket:
    def __init__(self, clock: Clock, end: int, output: ForwardOutput) -> None:
        self.clock, self.end, self.output = clock, end, output

    def result(self) -> ForwardOutput:
        self.clock.now = max(self.clock.now, self.end)
        return self.output


@pytest.mark.parametrize(("prepare", "commit", "device"), [(2, 1, 10), (7, 3, 3), (3, 2, 5)])
def test_step_takes_the_larger_of_host_and_device_not_their_sum(prepare: int, commit: int, device: int) -> None:
    """Between the first step's end and the last's, so that filling and draining the pipeline do not count."""

    def ticks_a_step(overlap: bool) -> float:
        clock = Clock()
        scheduler = make_scheduler(ClockEngine(clock, prepare, device))
        real_commit = scheduler.commit

        def timed_commit(*args: Any) -> list[TokenOutput]:
            clock.now += commit
            return real_commit(*args)

        scheduler.commit = timed_commit  # type: ignore[method-assign]
        inbox = ScriptedInbox([[add(0, [1, 2, 3], 40, ignore_eos=True)]])
        stream: Any = VirtualStream(clock)
        loop = LLM.overlap_loop(scheduler, inbox, stream) if overlap else LLM.plain_loop(scheduler, inbox)
        times = [clock.now for outputs in loop if outputs]
        assert len(times) == 40
        return (times[-3] - times[2]) / (len(times) - 5)

    assert ticks_a_step(overlap=False) == prepare + commit + device
    assert ticks_a_step(overlap=True) == max(prepare + commit, device)


class GuardedEngine(FakeEngine):
    """Knows which slots and rows launched steps may still write."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.in_flight: list[tuple[set[int], set[int]]] = []  # of each step: pages, rows
        self.computed: dict[int, int] = {}

    def prepare(self, batch: Batch) -> Any:
        prepared = super().prepare(batch)
        pages = (batch.out_loc // self.table.page_size).tolist()
        self.in_flight.append((set(pages), {req.table_idx for req in batch.reqs}))
        for req in batch.reqs:
            self.computed[req.uid] = self.computed.get(req.uid, 0) + req.extend_len
        return prepared


def guard(scheduler: Scheduler, engine: GuardedEngine) -> None:
    """Fail when what a launched step may write is given away."""
    free_pages, free_row, commit = scheduler.cache.allocator.free, scheduler.tables.free, scheduler.commit

    def check_pages(pages: Any) -> None:
        assert not any(set(pages.tolist()) & written for written, _ in engine.in_flight), "page freed in flight"
        free_pages(pages)

    def check_row(row: int) -> None:
        assert not any(row in rows for _, rows in engine.in_flight), "row freed in flight"
        free_row(row)

    def done(forward_input: ForwardInput, output: ForwardOutput) -> list[TokenOutput]:
        engine.in_flight.pop(0)
        return commit(forward_input, output)

    scheduler.cache.allocator.free = check_pages  # type: ignore[method-assign]
    scheduler.tables.free = check_row  # type: ignore[method-assign]
    scheduler.commit = done  # type: ignore[method-assign]


SHARED = list(range(10, 30))
arrivals = st.tuples(
    st.just("add"), st.integers(0, 20), st.lists(st.integers(1, 49), min_size=1, max_size=8), st.integers(1, 10)
)
aborts = st.tuples(st.just("abort"), st.integers(0, 9))


@settings(max_examples=60)
@given(
    events=st.lists(st.lists(st.one_of(arrivals, aborts), max_size=3), min_size=1, max_size=25),
    page_size=st.sampled_from([1, 4, 16]),
    rows=st.integers(1, 4),
    budget=st.integers(3, 30),
)
def test_any_arrivals_and_aborts(events: list[Any], page_size: int, rows: int, budget: int) -> None:
    """On a real thread: the plain loop's tokens, one terminal output each, nothing given away that is in flight, at
    most one step too far, and at the end all is free."""
    asked: dict[int, tuple[list[int], int]] = {}
    ticks = []
    for events_of_tick in events:
        ticks.append([])
        for kind, *args in events_of_tick:
            if kind == "add":
                asked[len(asked)] = (SHARED[: args[0]] + args[1], args[2])
                ticks[-1].append(add(len(asked) - 1, *asked[len(asked) - 1]))
            elif args[0] < len(asked):
                ticks[-1].append(abort(args[0]))
    engine = GuardedEngine(-(-MAX_SEQ_LEN // page_size), page_size, rows, MAX_SEQ_LEN)
    scheduler = make_scheduler(engine, max_prefill_length=budget)
    guard(scheduler, engine)
    outputs = run(scheduler, ticks)

    for uid, (prompt, max_tokens) in asked.items():
        mine = [output for output in outputs if output.uid == uid]
        assert [output.finish_reason is not None for output in mine] == [False] * (len(mine) - 1) + [True]
        tokens = [output.token_id for output in mine if output.token_id is not None]
        expected, reason = plain_loop(prompt, max_tokens)
        assert tokens == expected[: len(tokens)]
        if mine[-1].finish_reason != "abort":
            assert (tokens, mine[-1].finish_reason) == (expected, reason)
        needed = len(prompt) - mine[-1].cached_tokens + max(0, len(tokens) - 1)
        if uid in engine.computed and tokens:
            assert engine.computed[uid] <= needed + 1 + (mine[-1].finish_reason == "abort")
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats["pages_free"] + stats["pages_cached"] == scheduler.cache.num_pages
    assert scheduler.cache.cache.protected_size == 0
    assert stats["rows_free"] == rows


def test_usage_never_counts_the_step_too_far() -> None:
    """A request that ends by EOS has been scheduled once more by then: computed, not reported."""
    prompt = next([seed, 3] for seed in range(1, 50) if EOS in plain_loop([seed, 3], 20)[0][2:])
    expected, _ = plain_loop(prompt, 20)
    engine = GuardedEngine(16, 4, 2, MAX_SEQ_LEN)
    outputs = run(make_scheduler(engine), [[add(0, prompt, 20)]])
    assert [output.token_id for output in outputs] == expected
    assert engine.computed[0] == len(prompt) + len(expected) - 1 + 1


def test_a_step_that_raises_ends_the_loop_with_its_error() -> None:
    class BrokenEngine(FakeEngine):
        def forward_batch(self, batch: Batch, args: Any) -> ForwardOutput:
            raise ZeroDivisionError("on the device's thread")

    with pytest.raises(ZeroDivisionError, match="device's thread"):
        run(make_scheduler(BrokenEngine(16, 4, 2, MAX_SEQ_LEN)), [[add(0, [1], 4)]])
    assert not any(thread.name.startswith("engine-stream") for thread in threading.enumerate())


def test_the_worker_computes_with_the_threads_it_was_given() -> None:
    with closing(ThreadStream(2)) as stream:
        seen = stream.submit(lambda _: torch.get_num_threads(), None).result()  # type: ignore[arg-type, return-value]
    assert seen == 2
    torch.set_num_threads(1)
