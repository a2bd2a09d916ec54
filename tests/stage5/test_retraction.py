"""Admission by an estimate, and what happens when it was too low: nobody notices but the clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import plain_loop
from scheduler_life import SHARED, Rank, drain, fix_estimate, make
from tiny_model import make_tiny_model

from minisgl.core.outputs import Completion, TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer, read_events
from minisgl.stage5.admission import EstimatedOutput, FullReservation
from minisgl.stage5.pending import PendingReq
from minisgl.stage7.llm import LLM


def crowded(overlap: bool, num_pages: int = 16, estimate: int = 1, **options: Any) -> Rank:
    """A pool of 64 tokens for requests that are all let in, and grow."""
    rank = Rank(overlap, num_pages, **{"page_size": 4, "rows": 4, "budget": 60, "cache": "naive", **options})
    fix_estimate(rank.scheduler, estimate)
    return rank


def run(rank: Rank) -> dict[int, list[int | None]]:
    tokens: dict[int, list[int | None]] = {}
    while not rank.idle:
        for output in rank.tick()[1]:
            tokens.setdefault(output.uid, []).append(output.token_id)
        rank.scheduler.check_integrity()
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["prefill-first", "mixed", "cache-aware"])
@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_hazard_4_a_full_pool_retracts_and_nobody_sees_it(policy: str, cache: str, overlap: bool) -> None:
    """Four requests that may need 64 tokens each, in a pool of 64: all are admitted. The streams go on where they
    stopped; the first to come is never sent back; pages and rows are whole."""
    rank = crowded(overlap, schedule_policy=policy, cache=cache)
    back: list[int] = []
    put_back = rank.scheduler.prefill.put_back

    def note(pending: Any) -> None:
        if pending.chunk is None:
            back.append(pending.uid)
        put_back(pending)

    rank.scheduler.prefill.put_back = note  # type: ignore[method-assign]
    for uid in range(4):
        rank.scheduler.add(uid, SHARED[uid : uid + 8], SamplingParams(max_tokens=56, ignore_eos=True))
    rank.tick()
    assert len(rank.scheduler.decode.running) == 4
    tokens = run(rank)
    for uid in range(4):
        expected = endless(SHARED[uid : uid + 8], 56)
        assert tokens[uid] == expected[len(expected) - len(tokens[uid]) :]
        assert len(tokens[uid]) >= 55  # the first tick's is not among them without overlap
    assert back
    assert 0 not in back
    assert rank.scheduler.stats()["retractions"] == len(back)
    assert rank.scheduler.stats()["rows_free"] == 4


def endless(prompt: list[int], count: int) -> list[int]:
    """The plain loop's tokens, EOS or not."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(plain_loop(ids, 1)[0][0])
    return ids[len(prompt) :]


def two_that_collide(overlap: bool, second: int = 40, **options: Any) -> Rank:
    """Both are admitted, and grow together until 16 pages of 4 are used up: at 32 tokens each."""
    rank = crowded(overlap, **options)
    rank.scheduler.add(0, SHARED[:8], SamplingParams(max_tokens=50, ignore_eos=True))
    rank.scheduler.add(1, SHARED[8:16], SamplingParams(max_tokens=second, ignore_eos=True))
    return rank


def until_retracted(rank: Rank) -> list[int | None]:
    """The tokens of request 1 until it is retracted, with those of the tick that did it."""
    tokens: list[int | None] = []
    while rank.scheduler.retractions == 0:
        tokens += [output.token_id for output in rank.tick()[1] if output.uid == 1]
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_the_token_in_flight_is_kept(overlap: bool) -> None:
    """32 tokens of each are in the pool and 25 of the answer are known or, with overlap, one is on its way: it comes
    with the batch that carries it, before the request goes back; its pages come back once, and at once."""
    rank = two_that_collide(overlap)
    tokens = until_retracted(rank)
    pending = rank.scheduler.prefill.pending[1]
    assert tokens == endless(SHARED[8:16], 25)
    assert pending.input_ids.tolist() == SHARED[8:16] + tokens
    assert (pending.prompt_len, pending.max_len) == (8, 48)
    assert rank.scheduler.stats()["rows_free"] == 3
    assert rank.scheduler.cache.allocator.num_free in (7, 8)  # of 16, and the other has 8 or 9
    rank.scheduler.check_integrity()
    assert tokens + run(rank)[1] == endless(SHARED[8:16], 40)


def test_nobody_is_sent_back_for_pages_that_come_by_themselves() -> None:
    """At 20 tokens each of three requests has 5 of 16 pages. Request 1's last token is on its way, so request 2 waits
    one step for a page of its."""
    rank = crowded(overlap=True)
    for uid in range(3):
        max_tokens = 13 if uid == 1 else 24
        rank.scheduler.add(uid, SHARED[8 * uid : 8 * uid + 8], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    tokens = run(rank)
    assert [len(tokens[uid]) for uid in range(3)] == [24, 13, 24]
    assert rank.scheduler.retractions == 0
    assert ["0:20-21"] in rank.engine.batches


def test_eos_in_flight_ends_a_retracted_request() -> None:
    prompts = ([a, b] for a in range(1, 50) for b in range(1, 50))
    prompt = next(prompt for prompt in prompts if len(plain_loop(prompt, 32)[0]) == 31)
    rank = crowded(overlap=True)
    rank.scheduler.add(0, SHARED[:2], SamplingParams(max_tokens=60, ignore_eos=True))
    rank.scheduler.add(1, prompt, SamplingParams(max_tokens=60))
    tokens = until_retracted(rank)
    assert tokens == plain_loop(prompt, 60)[0]
    assert not rank.scheduler.prefill.pending
    run(rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_usage_tells_of_the_first_admission(overlap: bool) -> None:
    """What it finds of itself in the cache when it comes back was not cached for its caller."""
    rank = two_that_collide(overlap, cache="radix")
    until_retracted(rank)
    rank.scheduler.abort(0)
    cached = set()
    while not rank.idle:
        cached |= {output.cached_tokens for output in rank.tick()[1]}
    assert cached == {0}
    assert rank.scheduler.stats()["hit_tokens"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_while_it_waits_to_come_back(overlap: bool) -> None:
    rank = two_that_collide(overlap)
    until_retracted(rank)
    assert rank.scheduler.abort(1) == [TokenOutput(1, None, "abort", 0)]
    assert rank.scheduler.abort(1) == []
    assert 1 not in run(rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_half_done_prompt_is_retracted_too(overlap: bool) -> None:
    """Request 2 is cut in many chunks, and what it was promised for them is nobody else's. Request 0 grows past what
    it was expected to; since nobody else is there, 2 must make room, and begins again."""
    rank = crowded(overlap, budget=3)
    rank.scheduler.add(0, SHARED[:8], SamplingParams(max_tokens=50, ignore_eos=True))
    tokens: list[int | None] = []
    while len(tokens) < 10:
        tokens += [output.token_id for output in rank.tick()[1]]
    rank.scheduler.add(2, SHARED[:30] + SHARED[:10], SamplingParams(max_tokens=5, ignore_eos=True))
    while rank.scheduler.retractions == 0:
        half_done = rank.scheduler.prefill.half_done
        tokens += [output.token_id for output in rank.tick()[1]]
    assert half_done is not None
    assert half_done.retracted
    assert rank.scheduler.prefill.half_done is None
    rest = run(rank)
    assert tokens + rest[0] == endless(SHARED[:8], 50)
    assert rest[2] == endless(SHARED[:30] + SHARED[:10], 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_half_done_prompt_stays_first_when_a_stream_is_retracted(overlap: bool) -> None:
    """Request 5 runs, and 2, which has the older claim, is cut in many chunks: it keeps what it was promised."""
    rank = crowded(overlap, budget=3)
    rank.scheduler.add(5, SHARED[:8], SamplingParams(max_tokens=50, ignore_eos=True))
    tokens: list[int | None] = []
    while len(tokens) < 10:
        tokens += [output.token_id for output in rank.tick()[1]]
    rank.scheduler.add(2, SHARED[:30] + SHARED[:10], SamplingParams(max_tokens=5, ignore_eos=True))
    while rank.scheduler.retractions == 0:
        tokens += [output.token_id for output in rank.tick()[1]]
    waiting = list(rank.scheduler.prefill.pending)
    assert waiting == [2, 5], (
        f"5 came last, by its number, and goes; 2 is half-done and stays: [2, 5] wait, not {waiting}"
    )
    assert rank.scheduler.prefill.half_done is not None
    rest = run(rank)
    assert tokens + rest[5] == endless(SHARED[:8], 50)
    assert rest[2] == endless(SHARED[:30] + SHARED[:10], 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_while_it_is_computed_again(overlap: bool) -> None:
    """A half-done recomputation, with tokens of its answer in its chunks, is released like any other."""
    rank = two_that_collide(overlap, budget=2)
    tokens = until_retracted(rank)
    rank.scheduler.admission.pages = lambda *lengths: 0  # let it in though there is no room  # type: ignore[method-assign]
    rest = run(rank)
    assert rank.scheduler.retractions > 1
    assert tokens + rest[1] == endless(SHARED[8:16], 40)


def test_who_came_last_goes_first_and_comes_back_before_those_that_wait() -> None:
    rank = crowded(overlap=False, rows=3)
    for uid in range(4):
        rank.scheduler.add(uid, [uid + 1] * 8, SamplingParams(max_tokens=40, ignore_eos=True))
    while rank.scheduler.retractions < 2:
        rank.tick()
    assert list(rank.scheduler.prefill.pending) == [1, 2, 3]


def test_one_operation_frees_all_that_end_in_a_step() -> None:
    scheduler, _ = make(64, page_size=4, rows=8, budget=100, cache="naive")
    for uid in range(8):
        scheduler.add(uid, [uid + 1] * 5, SamplingParams(max_tokens=4, ignore_eos=True))
    calls: list[int] = []
    free = scheduler.cache.allocator.free
    scheduler.cache.allocator.free = lambda pages: (calls.append(len(pages)), free(pages))[1]  # type: ignore[method-assign]
    drain(scheduler)
    assert calls == [16]


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler, _ = make(4, page_size=4, rows=2, budget=60, admission="estimate")
    with pytest.raises(ValueError, match="10 prompt tokens and max_tokens 9 need 5 pages, and the pool has 4"):
        scheduler.add(0, [1] * 10, SamplingParams(max_tokens=9))
    assert not scheduler.has_work
    scheduler.add(1, [1] * 10, SamplingParams(max_tokens=7, ignore_eos=True))
    assert len(drain(scheduler)[1]) == 7


def test_reservation_never_retracts() -> None:
    rank = two_that_collide(False, admission="reserve")
    rank.tick()
    assert list(rank.scheduler.decode.running) == [0], "the second could not be served to its end beside it"
    run(rank)
    assert rank.scheduler.retractions == 0


def test_estimates() -> None:
    """Until an answer has ended all is reserved; then the average, and for an answer that is longer a little more."""
    full, estimated = FullReservation(16), EstimatedOutput(16)
    assert full.final_len(100, 100, 1000) == estimated.final_len(100, 100, 1000) == 999
    estimated.note_finished(50)
    assert estimated.final_len(100, 100, 1000) == 150
    assert estimated.final_len(100, 140, 1000) == 140 + estimated.MARGIN
    assert estimated.final_len(100, 100, 130) == 129
    for _ in range(1000):
        estimated.note_finished(80)
    assert math.isclose(estimated.mean_output, 80)
    assert full.pages(16, 100, 100, 1000) == 63 - 1
    assert estimated.pages(16, 100, 100, 1000) == math.ceil(180 / 16) - 1


def test_the_trace_shows_it(tmp_path: Path) -> None:
    rank = two_that_collide(False)
    rank.scheduler.tracer = rank.scheduler.cache.tracer = Tracer(tmp_path / "trace.json")
    rank.scheduler.tracer.begin("queued", 0)
    rank.scheduler.tracer.begin("queued", 1)
    run(rank)
    rank.scheduler.tracer.close()
    events = [e for e in read_events(tmp_path / "trace.json") if e.track == "requests" and e.uid == 1]
    states = ["queued", "prefill", "decode", "retracted", "prefill", "decode"]
    assert [(e.phase, e.name) for e in events] == [(phase, state) for state in states for phase in "be"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


PROMPTS = ["The quick brown fox", "Wie geht es dir?", "def add(a, b):", "1 2 3 4 5"]
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, seed=6, max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, ignore_eos=True),
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "page_size": 4, "device": "cpu", "max_seq_len": 256, "threads": 1}


def answers(folder: Path, num_pages: int, **options: Any) -> tuple[list[Completion], int]:
    """Of a model that expects short answers, and how often it retracted somebody."""
    with LLM(str(folder), num_pages=num_pages, **OPTIONS, **options) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
        return llm.generate(PROMPTS, PARAMS), llm.stats()["retractions"]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Completion]:
    completions, retractions = answers(folder, num_pages=200, cache="naive")
    assert retractions == 0
    return completions


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["prefill-first", "mixed"])
def test_a_model_gives_the_same_tokens_greedy_and_seeded(
    folder: Path, expected: list[Completion], policy: str, overlap: bool
) -> None:
    options = {"schedule_policy": policy, "disable_overlap": not overlap, "cache": "naive"}
    found, retractions = answers(folder, num_pages=30, max_prefill_length=16, **options)
    assert retractions > 1
    assert found == expected


@pytest.mark.slow
def test_the_built_in_model_gives_the_same_tokens(model_folder: Path) -> None:
    """Two answers of 24 tokens in a pool that has room for one and a half."""
    prompts = ["What is 2+2?", "The three primary colours are"]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 0.8)]
    found = []
    for num_pages in (64, 24):
        with LLM(str(model_folder), num_pages=num_pages, page_size=2, cache="naive", dtype="float32", threads=1) as llm:
            llm.generate("a", SamplingParams(max_tokens=1))
            found.append((llm.generate(prompts, params), llm.stats()["retractions"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == 0 < found[1][1]


def test_a_prompt_that_was_reported_may_come_from_the_cache() -> None:
    asked = SamplingParams(logprobs=0, prompt_logprobs=True)
    prompt, answered = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    assert PendingReq(0, prompt, 5, asked).reports_prompt
    assert not PendingReq(0, answered, 5, asked).reports_prompt
    assert not PendingReq(0, prompt, 5, SamplingParams(logprobs=0)).reports_prompt
