"""Stage 7's exercises, each claim in words: the loop, tokens that stay on the device, rows in flight, graphs.

They hold for the package's own code; `minisgl check 7` runs them on a learner's. The scheduler is real, the engine is
one whose tokens tell what lies in its pages (`fake_engine`), a graph is a function over fixed buffers, called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import EOS, FakeEngine
from fake_engine import plain_loop as plain_tokens
from torch import Tensor

from minisgl.core.batch import Batch, ForwardInput, ForwardOutput
from minisgl.core.context import Context
from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.messages import Abort, AddRequests, Order
from minisgl.stage7.graph_runner import GraphRunner, Replay
from minisgl.stage7.llm import LLM

PAGE, PAGES, ROWS, LONGEST = 4, 16, 4, 32
PROMPT = list(range(10, 20))


def make_scheduler(budget: int = 60) -> Scheduler:
    config = SchedulerConfig(page_size=PAGE, max_running_requests=ROWS, max_prefill_length=budget)
    return Scheduler(config, FakeEngine(PAGES, PAGE, ROWS, LONGEST), frozenset({EOS}), Tracer(None))  # type: ignore[arg-type]


# 7.1 the loop


class Ticket:
    def __init__(self, output: ForwardOutput) -> None:
        self.output = output

    def result(self) -> ForwardOutput:
        return self.output


class Watched:
    """A scheduler whose calls are noted: "schedule 1", "launch 1", "commit 1", and "receive", or "wait" when it may
    block. It is stream and inbox as well. turns: the orders of each; when they are used up and it may block, the loop
    is to end."""

    def __init__(self, turns: list[list[Order]]) -> None:
        self.scheduler, self.turns, self.log = make_scheduler(), turns, list[str]()
        self.launched: list[Batch] = []
        schedule, real_commit = self.scheduler.schedule, self.scheduler.commit

        def noted_schedule() -> ForwardInput | None:
            found = schedule()
            self.log.append(f"schedule {self.scheduler.step}" if found else "schedule nothing")
            return found

        def noted_commit(forward_input: ForwardInput, output: ForwardOutput) -> list[TokenOutput]:
            step = next((i for i, batch in enumerate(self.launched) if batch is forward_input.batch), -1) + 1
            self.log.append(f"commit {step}")
            return real_commit(forward_input, output)

        self.scheduler.schedule = noted_schedule  # type: ignore[method-assign]
        self.scheduler.commit = noted_commit  # type: ignore[method-assign]

    def submit(self, forward: Any, forward_input: ForwardInput) -> Ticket:
        self.launched.append(forward_input.batch)
        self.log.append(f"launch {len(self.launched)}")
        return Ticket(forward(forward_input))

    def close(self) -> None:
        return

    def receive(self, blocking: bool) -> list[Order] | None:
        assert self.log.count("receive") < 50, (
            "50 turns and no end: is every step that was launched committed once, the last one too? And None from "
            "receive ends the loop"
        )
        self.log.append("wait" if blocking else "receive")
        if blocking and self.scheduler.in_flight:
            raise AssertionError(
                "a step is in flight, and it would wait for orders that may not come for hours: it may block only when "
                "nothing is in flight and nothing is to do"
            )
        return self.turns.pop(0) if self.turns else None if blocking else []

    def turns_of(self) -> Iterator[list[TokenOutput]]:
        yield from LLM.overlap_loop(self.scheduler, self, self)

    def run(self) -> list[TokenOutput]:
        return [output for outputs in self.turns_of() for output in outputs]


def ask(uid: int, prompt: list[int], max_tokens: int, ignore_eos: bool = True) -> AddRequests:
    return AddRequests([Request(uid, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))])


def test_a_step_is_scheduled_before_the_one_before_it_is_known() -> None:
    watched = Watched([[ask(0, PROMPT, 4)]])
    watched.run()
    steps = [entry for entry in watched.log if entry[-1].isdecimal()]
    first = steps.index("commit 1") if "commit 1" in steps else len(steps)
    assert steps[:first] == ["schedule 1", "launch 1", "schedule 2", "launch 2"], (
        f"step 2 is scheduled before step 1 is committed, and launched too: the device has its next step when it has "
        f"done with this one. Before commit 1 came {steps[:first]}"
    )


def test_every_step_is_committed_once_and_in_order() -> None:
    watched = Watched([[ask(0, PROMPT, 4)]])
    outputs = watched.run()
    commits = [entry for entry in watched.log if entry.startswith("commit")]
    assert commits == [f"commit {step}" for step in (1, 2, 3, 4)], (
        f"4 steps were launched, and each is committed once, in order, the last one too: {commits}"
    )
    tokens = [output.token_id for output in outputs]
    assert len(tokens) == 4, f"the tokens of all 4 steps are yielded, and {len(tokens)} came: {tokens}"


def test_it_waits_for_orders_only_when_nothing_is_in_flight() -> None:
    """EOS ends the request when its next step is on its way: nobody runs, and a step is in flight."""
    prompt = next([seed, 3] for seed in range(1, 50) if 2 < len(plain_tokens([seed, 3], 12)[0]) < 12)
    watched = Watched([[ask(0, prompt, 12, ignore_eos=False)]])
    watched.run()
    assert watched.scheduler.stats()["rows_free"] == ROWS, "the step past the end was committed, so its row is free"
    assert watched.log[0] == "wait", "nothing is in flight and nothing is to do: it may block"
    assert "wait" not in watched.log[1:-2], (
        f"it may block only when nothing is in flight and nothing is to do: {watched.log}"
    )


def test_what_is_aborted_is_handed_on() -> None:
    watched = Watched([[ask(0, PROMPT, 9)], [], [Abort([0])]])
    outputs = watched.run()
    assert [output.finish_reason for output in outputs][-1:] == ["abort"], (
        f"carry_out gives the last output of what was aborted: it is handed on like any other, and came {outputs}"
    )


def test_every_turn_yields() -> None:
    watched = Watched([[ask(0, PROMPT, 2)]])
    yielded = sum(1 for _ in watched.turns_of())
    turns = len([entry for entry in watched.log if entry in ("receive", "wait")]) - 1  # the last one ends it
    assert yielded == turns, (
        f"{turns} turns, and {yielded} of them yielded: a turn without outputs yields an empty list too, since whoever "
        f"drives the loop gives its orders between two turns, or would wait for ever"
    )


def test_a_loop_that_is_stuck_says_so() -> None:
    watched = Watched([[ask(0, PROMPT, 2)]])
    watched.scheduler.schedule = lambda: None  # type: ignore[method-assign]
    why = "nothing was launched, nothing was in flight and a request waits: no later turn will do better"
    try:
        watched.run()
    except RuntimeError:
        return
    except AssertionError as error:
        raise AssertionError(f"{why}. A RuntimeError was expected, and the loop went on") from error
    raise AssertionError(f"{why}. A RuntimeError was expected, and the loop ended")


# 7.2 where a sampled token goes


def request(row: int, tokens: int, max_tokens: int = 20, uid: int = 0) -> Req:
    return Req(uid, torch.zeros(tokens, dtype=torch.int32), SamplingParams(max_tokens=max_tokens), row)


def write_tuple(*reqs: Req, padding: int = 0) -> list[tuple[int, int]]:
    scheduler, batch = make_scheduler(), Batch(list(reqs), len(reqs))
    batch.padded_reqs = batch.reqs + [scheduler.engine.dummy_req] * padding
    rows, positions = scheduler._write_tuple(batch)
    return list(zip(rows.tolist(), positions.tolist(), strict=True))


def test_a_token_goes_behind_the_last_of_its_row() -> None:
    found = write_tuple(request(row=2, tokens=6), request(row=0, tokens=9))
    assert found != [(2, 0), (6, 9)], "the pairs (2, 6) and (0, 9), turned: all rows first, then all positions"
    assert found == [(2, 6), (0, 9)], (
        f"tokens 0 to 5 of row 2 are there or computed now, so the new one goes behind the last, to position 6; "
        f"in row 0 to 9. Not {found}"
    )
    ahead = request(row=1, tokens=4)
    ahead.complete_one()
    found = write_tuple(ahead)
    assert found == [(1, 5)], (
        f"token 4 is in flight, so the host knows 4 tokens and the row has 5 (device_len): the new one goes behind the "
        f"last, to position 5. Not {found}"
    )


def test_a_chunk_has_no_token() -> None:
    chunk = ChunkedReq(0, torch.zeros(20, dtype=torch.int32), SamplingParams(max_tokens=5), 1, chunk_end=8)
    found = write_tuple(chunk, request(row=2, tokens=6))
    assert found == [(ROWS, 0), (2, 6)], (
        f"a chunk has no token: what is sampled of it goes to the dummy row, {ROWS}, and not over its prompt. {found}"
    )


def test_dummy_requests_have_no_token() -> None:
    found = write_tuple(request(row=0, tokens=6), request(row=1, tokens=7), padding=2)
    assert found == [(0, 6), (1, 7)], f"2 requests are sampled, and padding has no token: 2 places, not {found}"


def test_rows_and_positions_are_indices() -> None:
    rows, positions = make_scheduler()._write_tuple(Batch([request(0, 6), request(1, 7)], 2))
    for name, index in (("rows", rows), ("positions", positions)):
        assert isinstance(index, Tensor), f"{name} must be a tensor int64 [reqs], not a {type(index).__name__}"
        assert (index.dtype, index.shape) == (torch.int64, (2,)), f"{name} are int64 [2], not {index.dtype}"


# 7.3 when a row may be reused


def waiting_for_the_device(act: Callable[..., list[TokenOutput]], *args: Any) -> list[TokenOutput]:
    """The cache refuses pages that are freed too early: said in the words of the exercise."""
    try:
        return act(*args)
    except RuntimeError as error:
        raise AssertionError(
            f"a step in flight still writes to its row and pages, and they come back: {error}"
        ) from error


class Run:
    """Calls are made by hand, so that steps can be in flight."""

    def __init__(self, budget: int = 60) -> None:
        self.scheduler = make_scheduler(budget)
        self.freed: list[int] = []
        free = self.scheduler.tables.free

        def note(row: int) -> None:
            self.freed.append(row)
            free(row)

        self.scheduler.tables.free = note  # type: ignore[method-assign]

    def add(self, uid: int, prompt: list[int] = PROMPT, max_tokens: int = 12, **params: Any) -> None:
        self.scheduler.add(uid, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))

    def launch(self) -> tuple[ForwardInput, ForwardOutput]:
        forward_input = self.scheduler.schedule()
        assert forward_input is not None, "there is work, and nothing was scheduled"
        return forward_input, self.scheduler.forward(forward_input)

    def held(self) -> tuple[int, int]:
        """Rows, and pages that a request holds."""
        stats, locked = self.scheduler.stats(), self.scheduler.cache.cache.protected_size
        taken = PAGES - stats["pages_free"] - stats["pages_cached"]
        return ROWS - stats["rows_free"], taken + locked // PAGE

    def abort(self, uid: int, cached_tokens: int = 0) -> None:
        outputs = waiting_for_the_device(self.scheduler.abort, uid)
        assert outputs == [TokenOutput(uid, None, "abort", cached_tokens)], (
            f"an abort gives one terminal output, without a token: {outputs}"
        )


def test_nothing_comes_back_in_flight() -> None:
    run = Run()
    run.add(0)
    launched = run.launch()
    run.abort(0)
    rows, pages = run.held()
    assert (rows, pages) == (1, 3), (
        f"a step in flight still writes to its row and its 3 pages: given to another request, they would be written "
        f"over. {rows} rows and {pages} pages are held"
    )
    assert run.scheduler.schedule() is None, "it was aborted, so it no longer runs"
    outputs = run.scheduler.commit(*launched)
    assert outputs == [], f"it had its one terminal output: none comes of the step that was in flight, not {outputs}"
    assert run.held() == (0, 0), f"the step is done: now all comes back, and {run.held()} rows and pages are held"
    assert run.freed == [0], f"its row is freed once: {run.freed}"


def test_all_comes_back_when_nothing_is_in_flight() -> None:
    run = Run()
    run.add(0)
    run.scheduler.commit(*run.launch())
    run.abort(0)
    assert run.held() == (0, 0), (
        f"all comes back when nothing is in flight, at once: {run.held()} rows and pages are still held"
    )
    assert run.freed == [0], f"its row is freed once: {run.freed}"
    assert not run.scheduler.has_work, "it was aborted, so it no longer runs, and nothing is to do"


def test_an_abort_says_what_was_cached() -> None:
    run = Run()
    run.add(0, max_tokens=1)
    run.scheduler.commit(*run.launch())
    run.add(1)
    run.scheduler.commit(*run.launch())
    outputs = run.scheduler.abort(1)
    found = [output.cached_tokens for output in outputs]
    assert found == [8], f"8 tokens of its prompt were found in the cache (req.cached_tokens), and {found} is said"


def test_the_trace_hears_of_every_end() -> None:
    run, ended = Run(budget=4), list[tuple[str, int]]()
    run.scheduler.tracer.end = lambda name, uid, **facts: ended.append((name, uid))  # type: ignore[method-assign]
    run.add(0, PROMPT[:3])
    run.scheduler.commit(*run.launch())
    run.add(1)
    run.add(2)
    run.scheduler.commit(*run.launch())
    ended.clear()  # of what was queued
    for uid in (0, 1, 2):
        run.scheduler.abort(uid)
    assert ended == [("decode", 0), ("prefill", 1), ("queued", 2)], (
        f"the trace gets the end of what each was at: 0 decoded, 1 was a chunk (prefill), 2 still waited (its state): "
        f"and heard of {ended}"
    )


def test_two_steps_in_flight_are_both_waited_for() -> None:
    """The first token ends it, when the second step is on its way already."""
    run = Run()
    run.add(0, stop_token_ids=plain_tokens(PROMPT, 1)[0])
    first, second = run.launch(), run.launch()
    outputs = waiting_for_the_device(run.scheduler.commit, *first)
    assert [output.finish_reason for output in outputs] == ["stop"], f"its first token ends it: {outputs}"
    assert run.held()[0] == 1, "the second step is in flight and still writes to its row: it cannot be another's yet"
    run.scheduler.commit(*second)
    assert run.held() == (0, 0), f"all comes back when nothing is in flight: {run.held()} rows and pages are held"
    assert run.freed == [0], f"its row is freed once: {run.freed}"


def test_who_waits_is_taken_out_of_the_queue() -> None:
    run = Run()
    run.add(0)
    run.add(1)
    run.abort(0)
    waiting = list(run.scheduler.prefill.pending)
    assert waiting == [1], f"it was aborted, so it no longer waits: 1 does, and not {waiting}"
    assert run.freed == [], "it had no row yet, so none is freed"


def test_a_chunk_in_flight_can_be_aborted() -> None:
    run = Run(budget=4)
    run.add(0)
    launched = run.launch()
    run.abort(0)
    assert run.held()[0] == 1, "a chunk of it is in flight and still writes to its row: it cannot be another's yet"
    assert not run.scheduler.has_work, "it was aborted, so it no longer waits for its next chunk"
    run.scheduler.commit(*launched)
    assert run.held() == (0, 0), f"all comes back when nothing is in flight: {run.held()} rows and pages are held"


def test_who_has_ended_is_not_aborted() -> None:
    run = Run()
    run.add(0, max_tokens=1)
    run.scheduler.commit(*run.launch())
    outputs = run.scheduler.abort(0)
    assert outputs == [], f"it had its one terminal output, when it ended: [], not {outputs}"
    assert run.freed == [0], f"its row is freed once: {run.freed}"


def test_what_was_computed_stays_in_the_cache() -> None:
    run = Run()
    run.add(0, max_tokens=3)
    for _ in range(3):
        run.scheduler.commit(*run.launch())
    ids = torch.tensor(PROMPT + plain_tokens(PROMPT, 3)[0], dtype=torch.int32)
    found = run.scheduler.cache.match_req(ids).cached_len
    assert found == 12, f"10 tokens and 2 of the answer were computed, 3 pages: that stays in the cache, not {found}"


# 7.4 and 7.5 graphs


class RecordedRows:
    """A backend of one number: each request's length, in a buffer of its own."""

    def __init__(self) -> None:
        self.told = 0

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        self.lengths = torch.ones(max_size, dtype=torch.int64)

    def prepare_for_capture(self, batch: Batch) -> Tensor:
        return self.lengths[: batch.size]

    def prepare_for_replay(self, batch: Batch) -> None:
        self.told += 1
        self.lengths[: batch.padded_size] = batch.attn_metadata  # type: ignore[call-overload]


class Recorded:
    """What a GraphRunner asks of an engine. Its model's hidden state of a request is what it read of it: id, position,
    slot and length; `written` are the slots that the last step wrote to. sizes: the graphs."""

    def __init__(self, sizes: list[int]) -> None:
        self.dummy_req = request(row=ROWS, tokens=1, uid=-1)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.pool, self.table = SimpleNamespace(dummy_slot=99), SimpleNamespace(device=torch.zeros(1, 1))
        self.model_config, self.model = (
            SimpleNamespace(hidden_size=4),
            SimpleNamespace(model=self.read, lm_head=self.head),
        )
        self.attention, self.replayed, self.written = RecordedRows(), list[int](), list[int]()
        self.heads: list[int] = []
        self.runner = GraphRunner(self, self.attention, sizes, self.record)  # type: ignore[arg-type]

    def context(self, batch: Batch) -> Context:
        return Context(batch.input_ids, batch.positions, None, None, batch.attn_metadata, None, None, batch.out_loc)  # type: ignore[arg-type]

    def record(self, run: Replay) -> Replay:
        run()
        size = len(self.written)

        def replay() -> None:
            self.replayed.append(size)
            run()

        return replay

    def read(self, context: Context) -> Tensor:
        assert context.out_loc is not None
        self.written = context.out_loc.tolist()
        return torch.stack((context.input_ids, context.positions, context.out_loc, context.attn_metadata), 1).float()  # type: ignore[arg-type]

    def head(self, hidden: Tensor) -> Tensor:
        self.heads.append(len(hidden))
        return hidden * 10

    def step(self, size: int, padded: int, first: int) -> tuple[list[list[float]], list[list[float]]]:
        """A step of so many requests; first: of its numbers. Returns its logits, and what they should be."""
        batch = Batch([request(i, 3) for i in range(size)], size)
        batch.padded_reqs = batch.reqs + [self.dummy_req] * (padded - size)
        real, padding = torch.arange(size), torch.zeros(padded - size, dtype=torch.int64)
        batch.input_ids = torch.cat((first + real, padding)).int()
        batch.positions = torch.cat((first + 100 + real, padding))
        batch.out_loc = torch.cat((first + 200 + real, padding + 99)).int()
        batch.attn_metadata = torch.cat((first + 101 + real, padding + 1))
        logits = self.runner.replay(batch)
        wanted = torch.stack((batch.input_ids, batch.positions, batch.out_loc, batch.attn_metadata), 1) * 10
        return logits.tolist(), wanted[:size].tolist()


def batch_of(size: int, num_decode: int) -> Batch:
    return Batch([request(i, 3, uid=i) for i in range(size)], num_decode)


@pytest.mark.parametrize(("size", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_the_smallest_graph_that_holds_it(size: int, padded: int) -> None:
    batch = batch_of(size, size)
    Recorded([8, 4, 2, 1]).runner.pad(batch)
    why = "the smallest that holds it" if size < 9 else "none holds it, so it stays as it is"
    assert batch.padded_size == padded, (
        f"graphs of 8, 4, 2 and 1 requests, and a batch of {size}: {why}, {padded}, not {batch.padded_size}"
    )


@pytest.mark.parametrize("num_decode", [0, 2])
def test_only_decode_is_padded(num_decode: int) -> None:
    runner, batch = Recorded([8, 4]).runner, batch_of(3, num_decode)
    runner.pad(batch)
    assert batch.padded_size == 3, f"only decode steps are recorded: this one is {batch.phase}, and stays as it is"
    assert not runner.can_run(batch_of(4, num_decode)), (
        f"only decode steps are recorded: 4 requests, but {batch.phase}, and can_run says yes"
    )


def test_dummies_are_padding_and_no_requests() -> None:
    recorded, batch = Recorded([4]), batch_of(3, 3)
    before = list(batch.reqs)
    recorded.runner.pad(batch)
    assert batch.reqs == before, "dummies are no requests: batch.reqs, which are sampled and committed, stay 3"
    assert batch.padded_reqs[:3] == before, "the real ones come first in padded_reqs"
    assert batch.padded_reqs[3:] == [recorded.dummy_req], "and the engine's dummy request after them"


def test_a_graph_runs_what_has_its_size() -> None:
    runner = Recorded([8, 4]).runner
    for size, padded, runs in ((3, 4, True), (4, 4, True), (3, 3, False), (5, 5, False)):
        batch = batch_of(size, size)
        batch.padded_reqs = batch.reqs + batch.reqs[:1] * (padded - size)
        assert runner.can_run(batch) == runs, (
            f"graphs of 8 and 4: a batch of {size}, padded to {padded}, has {'' if runs else 'not '}its size"
        )


def test_a_graph_reads_its_own_buffers() -> None:
    recorded = Recorded([4, 2])
    for size, padded, first in ((2, 2, 10), (4, 4, 20), (1, 2, 30)):
        logits, wanted = recorded.step(size, padded, first)
        assert logits[:size] == wanted, (
            f"a graph reads the buffers that it was recorded with (ids, positions, slots), so this step's must be "
            f"copied into them. Id, position, slot, length, each times 10: wanted {wanted}, came {logits}"
        )
    assert recorded.replayed == [2, 4, 2], f"the graph of the padded size is replayed, once: {recorded.replayed}"


def test_nothing_of_an_earlier_step_is_left() -> None:
    recorded = Recorded([4])
    recorded.step(4, 4, first=10)
    recorded.step(2, 4, first=50)
    assert recorded.written[2:] == [99, 99], (
        f"2 requests and 2 dummies, whose K and V go to the dummy page's slot 99. The graph wrote to "
        f"{recorded.written}: 212 and 213 are of an earlier step, and may be another request's by now"
    )


def test_the_backend_is_told() -> None:
    recorded = Recorded([4])
    recorded.step(3, 4, first=10)
    assert recorded.attention.told == 1, (
        f"the backend keeps lengths and pages in buffers of its own: it is told once a step, not "
        f"{recorded.attention.told} times"
    )


def test_only_real_requests_have_logits() -> None:
    recorded = Recorded([4])
    logits, _ = recorded.step(3, 4, first=10)
    assert len(logits) == 3, f"3 real requests, so logits [3, vocab], and {len(logits)} rows came"
    assert recorded.heads == [3], f"the head is for the 3 real requests, and was called with {recorded.heads} rows"
