"""Who is next and what a step is made of: bounded stalls, half-done prompts, cached prefixes first, nobody starves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_engine import FakeEngine, plain_loop
from scheduler_life import SHARED, Rank, drain, make

from minisgl.core.req import ChunkedReq
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage5.policies import CacheAware
from minisgl.stage5.scheduler import Scheduler

LONG_PROMPT = [(7 * i) % 49 + 1 for i in range(44)]
MIXED = ("mixed", "cache-aware")


def members(engine: FakeEngine) -> list[list[int]]:
    """The uids of each step."""
    return [[int(part.split(":")[0]) for part in batch] for batch in engine.batches]


def most_work_between_outputs(policy: str, overlap: bool, budget: int = 8) -> int:
    """Tokens computed between two outputs of a request that runs while four prompts of 44 tokens arrive: the most."""
    rank = Rank(overlap, 64, page_size=4, rows=8, budget=budget, schedule_policy=policy)
    rank.scheduler.add(0, [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    counts: list[int] = []
    while not rank.idle:
        before = rank.engine.computed_tokens
        _, outputs = rank.tick()
        if any(output.uid == 0 for output in outputs):
            counts.append(
                before if overlap else rank.engine.computed_tokens
            )  # overlap: what was launched since is later
            if len(counts) == 5:
                for uid in range(1, 5):
                    rank.scheduler.add(uid, [uid, *LONG_PROMPT[1:]], SamplingParams(max_tokens=2))
    assert len(counts) == 50
    return max(after - before for before, after in pairwise(counts))


@pytest.mark.parametrize("overlap", [False, True])
def test_hazard_16_a_long_prompt_stalls_running_streams_for_one_budget_at_most(overlap: bool) -> None:
    for policy in MIXED:
        assert most_work_between_outputs(policy, overlap) <= 8
    assert most_work_between_outputs("prefill-first", overlap) > 4 * 44, "else this test would show nothing"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunks", [3, 4, 11])
@pytest.mark.parametrize("policy", ["prefill-first", *MIXED])
def test_hazard_17_a_prompt_of_many_chunks(policy: str, chunks: int, overlap: bool) -> None:
    """No token before the last chunk, then the plain loop's; aborted after any chunk, it leaves nothing behind."""
    budget = -(-44 // chunks)
    for abort_after in range(chunks + 1):
        rank = Rank(overlap, 16, page_size=4, rows=2, budget=budget, schedule_policy=policy)
        rank.scheduler.add(0, LONG_PROMPT, SamplingParams(max_tokens=5))
        tokens: list[int | None] = []
        for tick in range(chunks + 20):
            if tick == abort_after != 0:
                assert [output.finish_reason for output in rank.scheduler.abort(0)] == ["abort"]
            outputs = rank.tick()[1]
            assert not outputs or tick >= chunks - 1, "a token came too soon"
            tokens += [output.token_id for output in outputs]
            rank.scheduler.check_integrity()
        assert rank.idle
        assert tokens == (plain_loop(LONG_PROMPT, 5)[0] if abort_after == 0 else tokens[:1])
        assert rank.scheduler.stats()["rows_free"] == 2


@pytest.mark.parametrize("policy", MIXED)
def test_hazard_18_arrivals_do_not_starve_decode(policy: str) -> None:
    """A prompt arrives in every step, each as long as the budget. The stream gets a token in every step."""
    rank = Rank(False, 64, page_size=4, rows=8, budget=12, schedule_policy=policy)
    rank.scheduler.add(0, [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    for tick in range(40):
        rank.scheduler.add(1 + tick, [tick + 1] * 12, SamplingParams(max_tokens=1))
        assert 0 in [output.uid for output in rank.tick()[1]]


@pytest.mark.parametrize("policy", ["prefill-first", *MIXED])
def test_hazard_18_decode_does_not_starve_admission(policy: str) -> None:
    """More requests run than the budget has tokens. Who waits gets in as soon as enough of them have ended."""
    rank = Rank(False, 64, page_size=4, rows=9, budget=4, schedule_policy=policy)
    for uid in range(8):
        rank.scheduler.add(uid, [uid + 1], SamplingParams(max_tokens=10, ignore_eos=True))
    rank.scheduler.add(8, LONG_PROMPT[:9], SamplingParams(max_tokens=10, ignore_eos=True))
    uids = [output.uid for _ in range(60) for output in rank.tick()[1]]
    assert uids.count(8) == 10
    assert rank.idle


@pytest.mark.parametrize("policy", ["prefill-first", *MIXED])
def test_one_half_done_prompt_and_it_resumes_first(policy: str) -> None:
    rank = Rank(False, 64, page_size=4, rows=8, budget=5, schedule_policy=policy)
    rank.scheduler.add(0, SHARED[:16], SamplingParams(max_tokens=1))
    while not rank.idle:
        rank.tick()
    rank.scheduler.add(1, [1, *LONG_PROMPT[:20]], SamplingParams(max_tokens=1))
    rank.tick()
    for uid in (2, 3):  # whose prefix is cached, and who would go first
        rank.scheduler.add(uid, SHARED[: 16 + uid], SamplingParams(max_tokens=1))
    while not rank.idle:
        batch, _ = rank.tick()
        assert batch is not None
        assert sum(isinstance(req, ChunkedReq) for req in batch.batch.reqs) <= 1
    first = [uids[0] for uids in members(rank.engine)]
    assert sorted(first) == first


def cached_first(scheduler: Scheduler, engine: FakeEngine) -> list[int]:
    """The order in which four requests are prefilled, of which the last begins with what is cached."""
    scheduler.add(0, SHARED[:16], SamplingParams(max_tokens=1))
    drain(scheduler)
    for uid in (1, 2, 3):
        scheduler.add(uid, [uid] * 16, SamplingParams(max_tokens=1))
    scheduler.add(4, SHARED[:20], SamplingParams(max_tokens=1))
    drain(scheduler)
    return [uid for uids in members(engine)[1:] for uid in uids]


@pytest.mark.parametrize(("policy", "order"), [("mixed", [1, 2, 3, 4]), ("cache-aware", [4, 1, 2, 3])])
def test_longest_cached_prefix_first(policy: str, order: list[int]) -> None:
    assert cached_first(*make(64, page_size=4, rows=1, budget=16, schedule_policy=policy)) == order


def test_cache_aware_order_starves_nobody() -> None:
    """One request without a cached prefix among an endless stream of requests with one."""
    rank = Rank(False, 64, page_size=4, rows=1, budget=32, schedule_policy="cache-aware")
    rank.scheduler.add(0, SHARED[:16], SamplingParams(max_tokens=1))
    rank.tick()
    rank.scheduler.add(1, [49] * 16, SamplingParams(max_tokens=1))
    for tick in range(2 * CacheAware.MAX_OVERTAKEN):
        for uid in (2 + 2 * tick, 3 + 2 * tick):
            rank.scheduler.add(uid, [*SHARED[:16], 1 + uid % 40], SamplingParams(max_tokens=1))
        rank.tick()
    order = [uid for uids in members(rank.engine)[1:] for uid in uids]
    assert order.index(1) == CacheAware.MAX_OVERTAKEN
