"""Stage 5's exercises, each claim in words: admission, chunk budget, decode set, commit, retraction.

They hold for the package's own code; `minisgl check 5` runs them on a learner's. The parts are real, the engine is one
whose tokens tell what lies in its pages (`fake_engine`). Pages have 4 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine import EOS, FakeEngine, next_token, plain_loop
from torch import Tensor

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage3.page_table import PageTable
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage5.admission import EstimatedOutput, FullReservation
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.decode import DecodeManager
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import Mixed
from minisgl.stage5.prefill import PrefillAdder
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.table import TableManager

PAGE, POOL, LONGEST = 4, 8, 64


def ids(count: int, first: int = 1) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32)


def pending(prompt: int, max_tokens: int, uid: int = 0) -> PendingReq:
    return PendingReq(uid, ids(prompt), prompt, SamplingParams(max_tokens=max_tokens))


def request(uid: int, tokens: int, max_tokens: int = 20) -> Req:
    """One that decodes: of its tokens all but the last are computed. The row is no order."""
    req = Req(uid, ids(tokens), SamplingParams(max_tokens=max_tokens), table_idx=20 - uid)
    req.cached_len = tokens - 1
    return req


# 5.1 find room


def adder(promised: int = 0, cached: int = 0, budget: int = 100) -> PrefillAdder:
    """Over a pool of 8 pages, of which the first tokens of every prompt here may be cached."""
    table = PageTable(4, LONGEST, PAGE, POOL * PAGE, torch.device("cpu"))
    cache = CacheManager(table, POOL, "radix", Tracer(None))
    if cached:
        before = Req(99, ids(cached), SamplingParams(max_tokens=1), 3)
        cache.allocate([before])
        before.complete_one()
        before.append_host(0, frozenset())
        cache.cache_req(before, finished=True)
    return PrefillAdder(cache, TableManager(4, LONGEST, torch.device("cpu")), FullReservation(PAGE), budget, promised)


def find_room(found: PrefillAdder, prompt: int, max_tokens: int) -> Any:
    waiting = pending(prompt, max_tokens)
    return found._find_room(waiting, waiting.input_ids)


@pytest.mark.parametrize("max_tokens", [3, 23])
def test_it_enters_when_its_pages_are_there(max_tokens: int) -> None:
    handle = find_room(adder(), 10, max_tokens)
    pages = (10 + max_tokens - 1 + 3) // 4
    assert handle is not None, f"it is promised {pages} pages, of 8 that are free: exactly enough, or more"
    assert handle.cached_len == 0, f"nothing is cached: 0 tokens, not {handle.cached_len}"


def test_it_waits_when_a_page_is_missing() -> None:
    handle = find_room(adder(), 10, 24)
    assert handle is None, "it may need 33 tokens, 9 pages, of 8 that are free: it must wait (None)"


def test_what_was_promised_to_others_is_not_there() -> None:
    assert find_room(adder(promised=5), 10, 3) is not None, "8 pages, 5 promised to others, 3 wanted: exactly enough"
    handle = find_room(adder(promised=6), 10, 3)
    assert handle is None, "8 pages are free, and 6 of them are promised to others: 3 more are not there"


def test_what_is_cached_needs_no_pages() -> None:
    found = adder(promised=4, cached=8)
    handle = find_room(found, 10, 7)
    assert handle is not None, "of 16 tokens 8 are cached and locked: 2 pages are wanted, 4 promised, 6 there: enough"
    assert handle.cached_len == 8, f"8 of its tokens are cached, not {handle.cached_len}"
    assert found.cache.cache.protected_size == 8, (
        f"what it found must be locked, or it is evicted: 8 tokens, not {found.cache.cache.protected_size}"
    )


def test_its_own_prefix_is_no_room_for_it() -> None:
    handle = find_room(adder(promised=4, cached=8), 10, 15)
    assert handle is None, (
        "8 pages are available before the lock and 6 after it. It wants 4 beside its prefix, and 4 are promised: its "
        "own prefix is no room for it"
    )


def test_who_waits_holds_nothing() -> None:
    found = adder(promised=8, cached=8)
    assert find_room(found, 10, 3) is None, "8 pages are promised, of 6: it must wait"
    locked = found.cache.cache.protected_size
    assert locked == 0, f"who waits holds nothing, so that others can have it; {locked} tokens are still locked"


def test_what_is_looked_for_is_what_was_given() -> None:
    found = adder(cached=8)
    handle = found._find_room(pending(10, 3), ids(0))
    assert handle is not None, "3 pages are wanted of 8: enough"
    assert handle.cached_len == 0, f"ids is empty: nothing is looked for, and {handle.cached_len} tokens were found"


def expecting(tokens: int, promised: int = 0) -> PrefillAdder:
    """Answers of late had so many tokens; a request counts for 16 more than it has, at the least."""
    found = adder(promised)
    estimate = EstimatedOutput(PAGE)
    estimate.note_finished(tokens)
    found.admission = estimate
    return found


def test_one_that_was_retracted_is_promised_for_all_it_has() -> None:
    back = PendingReq(0, ids(14), 10, SamplingParams(max_tokens=40))
    assert expecting(1, promised=1)._find_room(back, back.input_ids) is None, (
        "a prompt of 10 and 4 tokens of an answer, and it is back after a retraction: it has 14 tokens, and 16 more "
        "are 30, 8 pages. 1 of 8 is promised to others: it must wait"
    )
    assert expecting(20)._find_room(back, back.input_ids) is not None, (
        "a prompt of 10 with an answer of 20 tokens, the mean of late, is 30: 8 pages, and 8 are there. (The 4 that it "
        "has made are of that answer, and no part of the prompt)"
    )
    prompt = pending(14, 40)
    assert expecting(1, promised=1)._find_room(prompt, ids(0)) is None, (
        "it has 14 tokens, although none of them is looked for in the cache: 16 more are 30, 8 pages, of which 1 is "
        "promised to others. It must wait"
    )


# 5.2 the budget


class Asked:
    """The two functions that `compose` gets: notes what is asked for, and when."""

    def __init__(self, running: int) -> None:
        self.running = [request(uid, 6) for uid in range(running)]
        self.prompt = request(9, 6)
        self.calls: list[str] = []
        self.budgets: list[int] = []

    def decode(self) -> list[Req]:
        self.calls.append("decode")
        return self.running

    def prefill(self, token_budget: int) -> list[Req]:
        self.calls.append("prefill")
        self.budgets.append(token_budget)
        return [self.prompt] if token_budget > 0 else []


def test_who_runs_is_asked_first_and_comes_first() -> None:
    asked = Asked(running=3)
    batch = Mixed().compose(10, asked.prefill, asked.decode)
    assert asked.calls == ["decode", "prefill"], (
        f"those that run are asked first, since an admitted prompt joins them at once: {asked.calls}"
    )
    uids = [req.uid for req in batch.reqs]
    assert uids == [0, 1, 2, 9], f"decode rows first, then prompts: uids 0, 1, 2, 9, not {uids}"
    assert batch.num_decode == 3, f"3 of the batch decode, not {batch.num_decode}"


@pytest.mark.parametrize(("running", "left"), [(0, 10), (3, 7), (10, 0), (12, -2)])
def test_prompts_get_what_is_left_of_the_budget(running: int, left: int) -> None:
    asked = Asked(running)
    batch = Mixed().compose(10, asked.prefill, asked.decode)
    if left > 0:
        assert asked.budgets == [left], f"{left} of 10 tokens are left of the budget beside {running}: {asked.budgets}"
    assert all(budget <= left or budget == 0 for budget in asked.budgets), (
        f"nothing of 10 tokens is left of the budget beside {running}, and prompts were asked for {asked.budgets}"
    )
    assert batch.size == running + (left > 0), "everyone who runs is in the batch, and the prompt if there is budget"


def cut(found: PrefillAdder, prompt: int, cached_len: int = 0, max_tokens: int = 5) -> Req:
    waiting = pending(prompt, max_tokens, uid=7)
    return found._cut(waiting, 2, cached_len, found.cache.match_req(ids(0)))


@pytest.mark.parametrize("prompt", [1, 19, 20])
def test_a_prompt_that_fits_is_a_request(prompt: int) -> None:
    req = cut(adder(budget=20), prompt)
    assert type(req) is Req, f"{prompt} tokens fit a budget of 20: a Req, not a {type(req).__name__}"
    assert (req.uid, req.table_idx, req.prompt_len) == (7, 2, prompt), f"uid 7, row 2, prompt of {prompt}: {req!r}"
    assert (req.cached_len, req.device_len) == (0, prompt), f"all of it is computed: {req!r}"


def test_a_prompt_that_does_not_fit_is_a_chunk() -> None:
    req = cut(adder(budget=20), 21)
    assert isinstance(req, ChunkedReq), (
        "20 of 21 tokens are not the whole prompt: as a Req a token would be sampled too soon"
    )
    assert (req.cached_len, req.device_len) == (0, 20), f"the first 20 tokens are computed: {req!r}"
    assert len(req.input_ids) == 21, f"a chunk knows all tokens of its prompt, 21, not {len(req.input_ids)}"


def test_the_last_chunk_is_a_request() -> None:
    middle, last = cut(adder(budget=8), 21, cached_len=8), cut(adder(budget=8), 21, cached_len=16)
    assert isinstance(middle, ChunkedReq), "tokens 8 to 15 of 21: a chunk"
    assert (middle.cached_len, middle.device_len) == (8, 16), f"8 tokens from cached_len on: 8 to 16; {middle!r}"
    assert type(last) is Req, "tokens 16 to 20 of 21 are the last: a Req, whose next token is wanted, and it is a " + (
        type(last).__name__
    )
    assert (last.cached_len, last.device_len) == (16, 21), f"the rest, 16 to 21: {last!r}"


def test_the_budget_is_used_up() -> None:
    found = adder(budget=20)
    cut(found, 13, cached_len=8)
    assert found.token_budget == 15, f"5 of 20 tokens are used up (8 were cached): 15 left, not {found.token_budget}"
    cut(found, 30)
    assert found.token_budget == 0, f"a chunk uses up all that is left: 0, not {found.token_budget}"


def test_what_was_sampled_before_a_retraction_is_no_prompt() -> None:
    """A prompt of 10 tokens comes back with 4 of its answer, of 12."""
    back = PendingReq(7, ids(14), 10, SamplingParams(max_tokens=12))
    whole = adder(budget=20)._cut(back, 2, 0, adder().cache.match_req(ids(0)))
    assert (whole.prompt_len, whole.output_len) == (10, 4), (
        f"10 tokens are the prompt and 4 the answer so far (max_tokens counts from there), and prompt_len is "
        f"{whole.prompt_len}: hand pending.prompt_len on"
    )
    part = adder(budget=10)._cut(back, 2, 0, adder().cache.match_req(ids(0)))
    assert isinstance(part, ChunkedReq), (
        "10 of the 14 tokens it has are not all: a chunk, although the prompt ends there. As a Req a token would be "
        "sampled too soon"
    )
    assert part.prompt_len == 10, f"a chunk hands pending.prompt_len on too: 10, not {part.prompt_len}"


def test_a_chunk_is_promised_all_that_follows() -> None:
    found = adder(promised=2, budget=8)
    cut(found, 20, max_tokens=5)
    assert found.promised_pages == 2 + 6, (
        f"20 tokens and an answer of 5 hold 24 in the end: 6 pages are promised beside the 2 of others, so 8, not "
        f"{found.promised_pages}"
    )


# 5.3 who decodes


def deciding(*reqs: Req) -> DecodeManager:
    manager = DecodeManager(FullReservation(PAGE))
    manager.add(list(reqs))
    return manager


def uids(reqs: list[Req]) -> list[int]:
    return [req.uid for req in reqs]


def test_who_runs_is_in_the_order_of_uids() -> None:
    found = uids(deciding(request(5, 7), request(1, 7), request(3, 7)).runnable())
    assert found == [1, 3, 5], f"in the order of uids, the same in every process: [1, 3, 5], not {found}"


def test_who_leaves_does_not_run() -> None:
    ended, retracted, last, runs = (request(uid, 7) for uid in range(4))
    ended.finish_reason, retracted.retracted, last.device_len = "stop", True, last.max_device_len
    found = uids(deciding(ended, retracted, last, runs).runnable())
    assert found == [3], f"0 has ended, 1 was retracted, 2 has its last token on its way: leaving. [3], not {found}"


@pytest.mark.parametrize("tokens", [6, 9])
def test_with_pages_for_all_all_run(tokens: int) -> None:
    found = uids(deciding(*(request(uid, tokens) for uid in (2, 0, 1))).schedule(3))
    assert found == [0, 1, 2], f"3 pages, and nobody takes more than one: all run, by uid, not {found}"


def test_the_first_to_come_get_the_pages() -> None:
    manager = deciding(*(request(uid, 9) for uid in (3, 2, 1, 0)))  # 8 tokens fill two pages: each needs a third
    found = uids(manager.schedule(2))
    assert found == [0, 1], f"4 need a page each and there are 2: the first to come get the pages, [0, 1], not {found}"
    assert len(manager.running) == 4, "who must wait is still one of those that run"


def test_who_needs_no_page_runs_all_the_same() -> None:
    reqs = [request(uid, 6 if uid in (1, 3) else 9) for uid in range(4)]
    found = uids(deciding(*reqs).schedule(1))
    assert found == [0, 1, 3], (
        f"1 page: 0 gets it, 2 must wait; 1 and 3 have room in their last page, and who needs no page runs: [0, 1, 3], "
        f"not {found}"
    )


# 5.4 commit


class Run:
    """A scheduler on an engine without weights. Calls are made by hand, so that steps can be in flight."""

    def __init__(self, budget: int = 60, **options: Any) -> None:
        config = SchedulerConfig(page_size=PAGE, max_running_requests=4, max_prefill_length=budget, **options)
        engine = FakeEngine(2 * POOL, PAGE, 4, LONGEST)
        self.scheduler = Scheduler(config, engine, frozenset({EOS}), Tracer(None))  # type: ignore[arg-type]

    def add(self, uid: int, prompt: list[int], max_tokens: int = 20, **params: Any) -> None:
        self.scheduler.add(uid, prompt, SamplingParams(max_tokens=max_tokens, **params))

    def launch(self) -> tuple[ForwardInput, ForwardOutput]:
        forward_input = self.scheduler.schedule()
        assert forward_input is not None, "there is work, and nothing was scheduled"
        return forward_input, self.scheduler.forward(forward_input)

    def step(self) -> list[TokenOutput]:
        return self.scheduler.commit(*self.launch())

    def req(self, uid: int) -> Req:
        running = self.scheduler.decode.running
        assert uid in running, f"request {uid} is not among those that run"
        return running[uid]

    def all_is_free(self) -> bool:
        stats, locked = self.scheduler.stats(), self.scheduler.cache.cache.protected_size
        return stats["pages_free"] + stats["pages_cached"] == 2 * POOL and locked == 0 and stats["rows_free"] == 4


PROMPT = list(range(10, 20))


def test_a_token_is_noted_and_handed_on() -> None:
    run = Run()
    run.add(3, PROMPT, ignore_eos=True)
    expected = next_token(PROMPT)
    outputs = run.step()
    assert outputs == [TokenOutput(3, expected, None, 0)], f"token {expected} of request 3 is handed on: {outputs}"
    req = run.req(3)
    assert req.input_ids.tolist() == [*PROMPT, expected], "the token is noted: append_host puts it behind the prompt"
    assert req.in_flight == 0, f"no step of it is in flight any more, and in_flight is {req.in_flight}"


def test_nothing_comes_of_a_chunk() -> None:
    run = Run(budget=4)
    run.add(0, PROMPT)
    tokens = [[output.token_id for output in run.step()] for _ in range(3)]
    assert tokens == [[], [], [next_token(PROMPT)]], (
        f"10 tokens in chunks of 4: nothing comes of a chunk, and the third step has the first token: {tokens}"
    )


def test_the_last_token_gives_all_back() -> None:
    run = Run()
    run.add(0, PROMPT, max_tokens=2, ignore_eos=True)
    reasons = [[output.finish_reason for output in run.step()] for _ in range(2)]
    assert reasons == [[None], ["length"]], f"max_tokens is 2: the second output says why it is the last, not {reasons}"
    assert not run.scheduler.has_work, "it has ended, and no longer runs: the decode manager must not keep it"
    assert run.all_is_free(), f"its row and pages must be given back: {run.scheduler.stats()}"


def test_an_answer_that_ended_is_learnt_from() -> None:
    run = Run()
    lengths: list[int] = []
    run.scheduler.admission.note_finished = lengths.append  # type: ignore[method-assign]
    run.add(0, PROMPT, max_tokens=3, ignore_eos=True)
    for _ in range(3):
        run.step()
    assert lengths == [3], f"an answer of 3 tokens ended, and is to be learnt from, once: [3], not {lengths}"


def test_a_prompt_is_cached_once_after_its_first_token() -> None:
    run = Run()
    calls: list[bool] = []
    cache_req = run.scheduler.cache.cache_req

    def note(req: Req, finished: bool) -> None:
        calls.append(finished)
        cache_req(req, finished)

    run.scheduler.cache.cache_req = note  # type: ignore[method-assign]
    run.add(0, PROMPT, ignore_eos=True)
    run.step()
    found = run.scheduler.cache.match_req(torch.tensor(PROMPT, dtype=torch.int32)).cached_len
    assert found == 8, f"after the first token the prompt is there for whoever comes next: 8 tokens, not {found}"
    for _ in range(3):
        run.step()
    assert calls == [False], (
        f"a prompt is cached once, with finished=False, and not at every token: cache_req was called with {calls}"
    )


def test_an_eos_is_the_last() -> None:
    prompt = next([seed, 3] for seed in range(1, 50) if 1 < len(plain_loop([seed, 3], 6)[0]) < 6)
    run = Run()
    run.add(0, prompt)
    while run.scheduler.has_work:
        outputs = run.step()
    assert [output.finish_reason for output in outputs] == ["stop"], (
        f"EOS ends an answer: append_host says so when it is given self.eos_ids, and came {outputs}"
    )


def test_an_output_says_what_was_cached() -> None:
    run = Run()
    run.add(0, PROMPT, max_tokens=1, ignore_eos=True)
    run.step()
    run.add(1, PROMPT, ignore_eos=True)
    (output,) = run.step()
    assert output.cached_tokens == 8, (
        f"8 tokens of the second prompt were found in the cache: its output says so, cached_tokens is 8 and not "
        f"{output.cached_tokens}"
    )


def test_a_chunk_that_was_aborted_is_released() -> None:
    run = Run(budget=4)
    run.add(0, PROMPT)
    launched = run.launch()
    run.scheduler.abort(0)
    assert run.scheduler.commit(*launched) == [], "it was aborted: nothing more is handed on"
    assert run.all_is_free(), (
        f"a chunk was aborted while in flight: it has ended, and that is asked before what it is; its row and pages "
        f"must be given back: {run.scheduler.stats()}"
    )


def test_a_token_past_the_end_is_dropped() -> None:
    """With overlap the next step is launched before this one's token is known, which may be the last."""
    run = Run()
    first_token = next_token(PROMPT)
    run.add(0, PROMPT, stop_token_ids=[first_token])
    first, second = run.launch(), run.launch()
    outputs = run.scheduler.commit(*first)
    assert [output.finish_reason for output in outputs] == ["stop"], f"token {first_token} ends it: {outputs}"
    assert not run.all_is_free(), "a step of it is in flight and writes to its pages: they cannot be given back yet"
    outputs = run.scheduler.commit(*second)
    assert outputs == [], f"a token past the end is nobody's: nothing is handed on, not {outputs}"
    assert run.all_is_free(), f"now its row and pages must be given back: {run.scheduler.stats()}"


def test_a_retracted_request_keeps_its_token_and_goes_back() -> None:
    run = Run()
    run.add(0, PROMPT, ignore_eos=True)
    run.step()
    launched, req = run.launch(), run.req(0)
    run.scheduler._retract(req)
    outputs = run.scheduler.commit(*launched)
    assert len(outputs) == 1, f"the token that was in flight is kept and handed on: {outputs}"
    waiting = run.scheduler.prefill.pending
    assert list(waiting) == [0], "it was retracted: with its token it goes back to the queue"
    assert waiting[0].input_ids.tolist() == PROMPT + plain_loop(PROMPT, 2)[0], "it goes back with all the tokens it has"
    assert run.all_is_free(), f"it goes back without row and pages: {run.scheduler.stats()}"


def test_an_end_is_an_end_for_one_that_was_retracted() -> None:
    run = Run()
    run.add(0, PROMPT, max_tokens=2, ignore_eos=True)
    run.step()
    launched, req = run.launch(), run.req(0)
    run.scheduler._retract(req)
    why = "its last token was in flight: it has ended, and must not go back as well"
    try:
        outputs = run.scheduler.commit(*launched)
    except RuntimeError as error:
        raise AssertionError(f"{why} ({error})") from error
    assert [output.finish_reason for output in outputs] == ["length"], f"its last token was in flight: {outputs}"
    assert not run.scheduler.has_work, why
    assert run.all_is_free(), f"row and pages are given back: {run.scheduler.stats()}"


def test_a_retracted_chunk_goes_back() -> None:
    run = Run(budget=4)
    run.add(0, PROMPT)
    launched = run.launch()
    chunk = run.scheduler.prefill.half_done
    assert chunk is not None
    run.scheduler._retract(chunk)
    assert run.scheduler.commit(*launched) == [], "nothing is sampled of a chunk"
    assert run.all_is_free(), "a chunk that was retracted goes back to the queue: row and pages are given back"
    assert run.scheduler.prefill.half_done is None, "a chunk that was retracted goes back, and begins anew"


# 5.5 make room


def crowd(requests: int, tokens: int, free: int, **options: Any) -> Run:
    """So many requests that run, each with so many tokens of which the last is still to be computed, and so many free
    pages: the others of the pool are taken away."""
    run = Run(cache="naive", **options)
    for uid in range(requests):
        run.add(uid, list(range(10 * uid + 1, 10 * uid + tokens)), max_tokens=8, ignore_eos=True)
    run.step()
    assert len(run.scheduler.decode.running) == requests
    leave(run, free)
    return run


def leave(run: Run, free: int) -> None:
    allocator = run.scheduler.cache.allocator
    allocator.allocate(allocator.num_free - free)


def running(run: Run) -> list[int]:
    return sorted(run.scheduler.decode.running)


@pytest.mark.parametrize(("tokens", "free"), [(9, 3), (8, 0)])
def test_nobody_goes_while_there_is_room(tokens: int, free: int) -> None:
    run = crowd(3, tokens, free)
    run.scheduler._make_room()
    why = "each of 3 needs a page, and 3 are there" if free else "each of 3 has room in its last page"
    assert running(run) == [0, 1, 2], f"{why}: nobody goes while there is room, and {running(run)} run"


def test_who_came_last_goes() -> None:
    run = crowd(3, tokens=9, free=1)
    run.scheduler.decode.running = dict(reversed(run.scheduler.decode.running.items()))
    run.scheduler._make_room()
    assert running(run) == [0, 1], (
        f"3 need a page each and 1 is there: who came last goes, and 0 and 1 run, not {running(run)}"
    )
    assert list(run.scheduler.prefill.pending) == [2], "it waits at the head of the queue"
    assert run.scheduler.retractions == 1, f"one was retracted, and {run.scheduler.retractions} were counted"


def test_as_many_go_as_it_takes() -> None:
    run = crowd(4, tokens=5, free=0)
    run.scheduler._make_room()
    assert running(run) == [0, 1], (
        f"each of 4 has one full page and needs another, and none is free. 3 goes: 1 page for three. 2 goes: 2 pages "
        f"for two. As many go as it takes, and 0 and 1 run, not {running(run)}"
    )


def test_one_that_is_alone_stays() -> None:
    run = crowd(1, tokens=9, free=0)
    run.scheduler._make_room()
    assert running(run) == [0], "one that is alone stays: the first to come always gets on"


def half_done_beside_one(free: int) -> Run:
    """Request 0 needs no page, 1 is a prompt of 20 tokens with 2 pages, and needs 3 more."""
    run = crowd(1, tokens=6, free=6, budget=8)
    run.scheduler.admission.pages = lambda *lengths: 0  # type: ignore[method-assign]  # it is let in all the same
    run.add(1, list(range(20, 40)))
    run.step()
    assert run.scheduler.prefill.half_done is not None
    leave(run, free)
    return run


def test_a_half_done_prompt_stays_while_its_pages_are_there() -> None:
    run = half_done_beside_one(free=3)
    run.scheduler._make_room()
    assert run.scheduler.prefill.half_done is not None, (
        "a half-done prompt needs 3 more pages, and 3 are there: nobody goes while there is room"
    )


def test_a_half_done_prompt_can_go_too() -> None:
    run = half_done_beside_one(free=0)
    run.scheduler._make_room()
    assert run.scheduler.prefill.half_done is None, (
        "a half-done prompt has 2 pages and needs 3 more, none is there, and it came last: it goes"
    )
    assert running(run) == [0], f"0 needs no page, and runs: {running(run)}"


@pytest.mark.parametrize("how", ["it has its last token in flight", "it was aborted in flight"])
def test_pages_that_are_coming_back_are_waited_for(how: str) -> None:
    """A step in flight, as with overlap: request 1 leaves with it."""
    run = Run(cache="naive")
    last = 2 if "last" in how else 12
    for uid in range(3):
        run.add(uid, list(range(10 * uid + 1, 10 * uid + 8)), max_tokens=last if uid == 1 else 12, ignore_eos=True)
    run.step()
    launched = run.launch()
    if "aborted" in how:
        run.scheduler.abort(1)
    leave(run, 1)
    run.scheduler._make_room()
    assert run.scheduler.retractions == 0, (
        f"0 and 2 need a page each and 1 is there. But request 1: {how}, and its 2 pages are coming back by themselves "
        f"with that batch (self.in_flight): nobody is retracted"
    )
    run.scheduler.commit(*launched)
    run.scheduler._make_room()
    assert running(run) == [0, 2], f"1 has ended, and there is room for 0 and 2: {running(run)}"
