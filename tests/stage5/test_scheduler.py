"""What the scheduler does, one behaviour at a time: chunks, prefixes, pages. Tokens are always the plain loop's."""

from __future__ import annotations

import pytest
from fake_engine import EOS, FakeEngine, plain_loop
from scheduler_life import SHARED, drain, make

from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.scheduler import Scheduler


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


@pytest.mark.parametrize("lost", [True, False])
def test_the_integrity_check_finds_rows_that_are_lost_or_given_twice(lost: bool) -> None:
    scheduler, _ = make(num_pages=4, page_size=16, rows=4, budget=100)
    scheduler.add(0, [1] * 20, SamplingParams(max_tokens=20))
    scheduler.schedule()
    scheduler.check_integrity()
    if lost:
        scheduler.tables.allocate()
    else:
        scheduler.tables.free(0)
    with pytest.raises(AssertionError, match=rf"1 rows held and {2 if lost else 4} free, of 4"):
        scheduler.check_integrity()


def test_steps_to_drain_against_a_static_batch() -> None:
    """What stage 5 buys: a row is filled again as soon as it is free. 8 requests, 2 rows, answers of 2 and 12."""
    scheduler, engine = make(num_pages=64, page_size=4, rows=2, budget=100, cache="naive")
    lengths = [12 if uid % 2 else 2 for uid in range(8)]
    for uid, length in enumerate(lengths):
        scheduler.add(uid, [uid + 1] * 5, SamplingParams(max_tokens=length, ignore_eos=True))
    assert [len(tokens) for _, tokens in sorted(drain(scheduler).items())] == lengths
    static = sum(2 + max(pair) - 1 for pair in zip(lengths[::2], lengths[1::2], strict=True))  # stages 3 and 4
    assert (len(engine.batches), static) == (30, 52)


def test_the_budget_depends_on_the_device_and_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(num_pages=100, page_size=4, num_rows=4, max_seq_len=512)
    config = SchedulerConfig(page_size=4, max_running_requests=4)
    with caplog.at_level("INFO", "minisgl"):
        scheduler = Scheduler(config, engine, frozenset({EOS}), Tracer(None))  # type: ignore[arg-type]
    assert caplog.messages == ["scheduler: mixed, at most 256 tokens a step"]
    scheduler.add(0, [7] * 300, SamplingParams(max_tokens=3))
    forward_input = scheduler.schedule()
    assert forward_input is not None
    assert len(forward_input.batch.positions) == 256
