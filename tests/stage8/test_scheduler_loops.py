"""The loops of the scheduler process, run here on a real scheduler: no sockets, and a script in place of clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from minisgl.core.outputs import FinishReason
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.streams import engine_stream
from minisgl.stage8 import scheduler_io
from minisgl.stage8.llm import overlap_loop, plain_loop
from minisgl.stage8.messages import (
    Abort,
    Answered,
    Begin,
    Flush,
    Generate,
    Heartbeat,
    Message,
    Rejected,
    Step,
    StopMatched,
)
from minisgl.stage8.scheduler_io import Desk
from minisgl.stage8.server_config import ServerConfig

LONG, SHORT = SamplingParams(max_tokens=50, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)


class EndOfScript(Exception):
    pass


class Script:
    """An inbox that has some messages for each turn of the loop, and ends the loop when it would wait for more."""

    def __init__(self, turns: list[list[Message]]) -> None:
        self._turns = iter(turns)

    def receive(self, wait: bool) -> list[Message]:
        messages = next(self._turns, None)
        if messages is None and wait:
            raise EndOfScript
        return messages or []


class Sent:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


@pytest.fixture
def scheduler(tiny_folder: Path) -> Iterator[Scheduler]:
    config = ServerConfig(dtype="float32", device="cpu", num_pages=32, page_size=4, max_running_requests=8, threads=1)
    engine = GraphEngine(config, tiny_folder, ModelConfig.from_folder(tiny_folder), 200)
    scheduler = Scheduler(config, engine, frozenset([257]), Tracer(None))
    yield scheduler
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["rows_free"] == 8


def run(scheduler: Scheduler, overlap: bool, turns: list[list[Message]]) -> list[Message]:
    sent = Sent()
    desk = Desk(scheduler, sent)  # type: ignore[arg-type]
    with contextlib.suppress(EndOfScript), closing(engine_stream(scheduler.engine.device, 1)) as stream:
        if overlap:
            overlap_loop(scheduler, Script(turns), desk, stream)
        plain_loop(scheduler, Script(turns), desk)
    return sent.messages


def answers(messages: list[Message]) -> dict[int, tuple[list[int], list[FinishReason]]]:
    """By uid: the tokens, and every finish reason that was told."""
    found: dict[int, tuple[list[int], list[FinishReason]]] = {}
    for message in messages:
        if isinstance(message, Step):
            for uid, token_id, reason in zip(message.uids, message.token_ids, message.finish_reasons, strict=True):
                ids, reasons = found.setdefault(uid, ([], []))
                ids += [] if token_id is None else [token_id]
                reasons += [reason] if reason else []
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_come_and_go_between_any_two_steps(scheduler: Scheduler, overlap: bool) -> None:
    alone = answers(run(scheduler, False, [[Generate.of(1, [5, 6, 7], SHORT)]]))[1]
    turns: list[list[Message]] = [
        [Generate.of(1, [5, 6, 7], SHORT), Generate.of(2, [9] * 10, LONG), Rejected(7, "refused")],
        [Generate.of(3, [4, 4], SHORT), Generate.of(4, [8], LONG), Abort(4)],
        [],
        [Abort(2), Abort(2), Abort(99)],
        [Generate.of(5, [9] * 10, SHORT)],
    ]
    sent = run(scheduler, overlap, turns)
    found = answers(sent)
    assert {uid: reasons for uid, (_, reasons) in found.items()} == {
        1: ["length"],
        2: ["abort"],
        3: ["length"],
        4: ["abort"],
        5: ["length"],
    }
    assert found[1] == alone
    assert [len(found[uid][0]) for uid in (1, 3, 4, 5)] == [5, 5, 0, 5]
    assert found[5][0][: len(found[2][0])] == found[2][0][:5]  # the same prompt
    assert [message for message in sent if isinstance(message, Rejected)] == [Rejected(7, "refused")]
    assert sum(isinstance(message, Heartbeat) for message in sent) >= 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_many_requests_is_one_message(scheduler: Scheduler, overlap: bool) -> None:
    sent = run(scheduler, overlap, [[Generate.of(uid, [uid, 5], SHORT) for uid in range(6)]])
    steps = [message for message in sent if isinstance(message, Step)]
    assert [step.uids for step in steps] == [list(range(6))] * 5
    assert steps[0].prompt_tokens == [2] * 6


@pytest.mark.parametrize("overlap", [False, True])
def test_counters_come_before_the_last_token_and_once_all_is_free(
    scheduler: Scheduler, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says: it stands still. With overlap pages and row are held for one step longer."""
    monkeypatch.setattr(scheduler_io, "HEARTBEAT_SECONDS", float("inf"))
    sent = run(scheduler, overlap, [[Generate.of(1, [5, 6, 7], SHORT)]])
    (last,) = [place for place, one in enumerate(sent) if isinstance(one, Step) and one.finish_reasons == ["length"]]
    before, at_the_end = sent[last - 1], [one for one in sent if isinstance(one, Heartbeat)][-1]
    assert isinstance(before, Heartbeat)
    assert before.stats["requests_running"] == 0
    assert at_the_end.stats["rows_in_use"] == at_the_end.stats["pages_in_use"] == 0
    assert [one.stats["requests_running"] for one in sent if isinstance(one, Heartbeat)][:2] == [0, 1]
    assert sum(isinstance(one, Heartbeat) for one in sent) < len(sent) / 2 + 2, "not with every step"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_cache_is_emptied_only_when_nothing_runs(scheduler: Scheduler, overlap: bool) -> None:
    """Asked in every turn. With overlap the batch of a request that was aborted is still in flight: it waits for it."""
    start = Generate.of(0, list(range(1, 30)), LONG)
    turns: list[list[Message]] = [[start], *([Flush(uid)] for uid in range(1, 15))]
    turns[8].insert(0, Abort(0))
    sent = run(scheduler, overlap, turns)
    outcomes = [message for message in sent if isinstance(message, Answered | Rejected)]
    refused = sum(isinstance(message, Rejected) for message in outcomes)
    assert [message.uid for message in outcomes] == list(range(1, 15))
    assert refused == 7
    assert all(isinstance(message, Answered) for message in outcomes[refused:])
    for before, message in pairwise(sent):
        if isinstance(message, Answered):
            assert isinstance(before, Heartbeat), "who has the answer sees what it says"
            assert before.stats["pages_cached"] == 0
            assert before.stats["pages_free"] == before.stats["pages_total"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_matched_stop_string_ends_the_work(scheduler: Scheduler, overlap: bool) -> None:
    """As an abort does, and what the text needs is told before its first token."""
    generate = Generate.of(1, [5, 6, 7], LONG, ["x"], "before", "abc")
    sent = run(scheduler, overlap, [[generate], [], [], [StopMatched(1), StopMatched(9)], [StopMatched(1)]])
    [(ids, reasons)] = answers(sent).values()
    assert reasons == ["abort"]
    assert 0 < len(ids) <= 4
    begin = Begin(1, ["x"], 0, "before", generate.prompt, "abc")
    assert next(m for m in sent if isinstance(m, Begin | Step)) == begin
