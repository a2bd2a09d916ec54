"""The ring's sockets and the scheduler's end of it, as threads of one process: any order of start, nothing lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage8.messages import (
    TO_API,
    TO_DETOKENIZER,
    TO_SCHEDULER,
    TO_TOKENIZER,
    Abort,
    Generate,
    Heartbeat,
    Message,
    Rejected,
    Replies,
    Reply,
    Step,
    Tokenize,
)
from minisgl.stage8.ring import MAX_AT_ONCE, RepliesInbox
from minisgl.stage8.scheduler_io import Desk, FirstRankInbox, OtherRankInbox
from minisgl.stage8.sockets import Addresses, Inbox, Sockets

PARAMS = SamplingParams(max_tokens=2)
SECONDS = 20.0  # long enough for any machine; nothing here takes a tenth of it unless it is broken


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:  # pytest's own folders are too long for sockets
        yield Addresses(Path(folder))


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets(Tracer(None))
    yield sockets
    sockets.close()


def receive(inbox: Inbox, count: int) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + SECONDS
    while len(messages) < count and time.monotonic() < deadline:
        messages += inbox.receive(timeout=1)
    return messages


class Ring:
    """The processes as functions that start them: each opens its sockets and passes messages on in a thread."""

    def __init__(self, addresses: Addresses, sockets: Sockets) -> None:
        self.addresses, self.sockets = addresses, sockets
        self.threads: list[threading.Thread] = []

    def start(self, kinds: Any, bind: str | None, source: list[str], target: str, turn: Callable[[Any], Any]) -> None:
        inbox = self.sockets.inbox(kinds, bind=bind, connect=source)
        outbox = self.sockets.outbox(connect=[target])

        def run() -> None:
            for message in receive(inbox, 3):
                outbox.send(turn(message))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def tokenizer(self) -> None:
        source, target = [self.addresses.tokenizer(0)], self.addresses.scheduler
        self.start(TO_TOKENIZER, None, source, target, lambda m: Generate.of(m.uid, m.token_ids, m.params))

    def scheduler(self) -> None:
        bind, target = self.addresses.scheduler, self.addresses.detokenizer
        self.start(TO_SCHEDULER, bind, [], target, lambda m: Step([m.uid], m.prompt_ids[:1], ["stop"], [0], [1]))

    def detokenizer(self) -> None:
        bind, target = self.addresses.detokenizer, self.addresses.api
        reply = lambda m: Replies([Reply(m.uids[0], "x", m.token_ids, "stop", 1, 0)])  # noqa: E731
        self.start(TO_DETOKENIZER, bind, [], target, reply)


@pytest.mark.parametrize("order", list(itertools.permutations(["tokenizer", "scheduler", "detokenizer"])), ids="-".join)
def test_processes_may_start_in_any_order(order: tuple[str, ...], addresses: Addresses, sockets: Sockets) -> None:
    to_tokenizer = sockets.outbox(bind=addresses.tokenizer(0))
    from_detokenizer = sockets.inbox(TO_API, bind=addresses.api)
    ring = Ring(addresses, sockets)
    for name in order:
        getattr(ring, name)()
        time.sleep(0.02)  # so that whoever comes first finds nobody
    to_tokenizer.wait_for_reader()
    for uid in range(3):
        to_tokenizer.send(Tokenize(uid, PARAMS, token_ids=[uid + 10]))
    replies = [reply for message in receive(from_detokenizer, 3) for reply in message.replies]
    assert [(reply.uid, reply.token_ids) for reply in replies] == [(0, [10]), (1, [11]), (2, [12])]
    for thread in ring.threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_everything_is_taken_at_once_and_what_is_malformed_is_counted(addresses: Addresses, sockets: Sockets) -> None:
    inbox = sockets.inbox(TO_SCHEDULER, bind=addresses.scheduler)
    outbox = sockets.outbox(connect=[addresses.scheduler])
    for uid in range(5000):  # more than ZMQ's usual limits
        outbox.send(Abort(uid))
    outbox.send(Heartbeat(1, {}))  # not for a scheduler
    outbox.send(Rejected(7, "end"))
    messages = receive(inbox, 5001)
    assert messages == [*(Abort(uid) for uid in range(5000)), Rejected(7, "end")]
    assert inbox.decoder.malformed == 1
    assert inbox.receive(timeout=0) == []


def test_an_idle_inbox_sleeps_and_wakes_for_messages_and_deaths(addresses: Addresses, sockets: Sockets) -> None:
    inbox = sockets.inbox(TO_SCHEDULER, bind=addresses.scheduler)
    outbox = sockets.outbox(connect=[addresses.scheduler])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(inbox.receive)
        time.sleep(0.1)
        assert not waiting.done()
        outbox.send(Abort(1))
        assert waiting.result(SECONDS) == [Abort(1)]
        assert inbox.wakeups == 1
        read_end, write_end = os.pipe()
        waiting = pool.submit(inbox.receive, None, [read_end])
        time.sleep(0.05)
        assert not waiting.done()
        os.close(write_end)
        assert waiting.result(SECONDS) == []
        os.close(read_end)
    assert inbox.wakeups == 2


@pytest.fixture
def loop_hop(addresses: Addresses) -> Iterator[tuple[zmq.Socket, RepliesInbox]]:
    """Into an event loop: the sender's socket, and what the loop reads."""
    with zmq.Context() as context:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        receiver.bind(addresses.api)
        sender.connect(addresses.api)
        yield sender, RepliesInbox(receiver)
        context.destroy(linger=0)


def test_a_loop_gets_every_message_in_order_and_its_other_tasks_their_turns(
    loop_hop: tuple[zmq.Socket, RepliesInbox],
) -> None:
    sender, inbox = loop_hop
    taken: list[int] = []

    async def test() -> None:
        for number in range(1000):  # before anybody reads
            sender.send(b"%d" % number)
        time.sleep(0.2)  # until they have arrived: the loop would not come to its other tasks by itself
        reading = asyncio.create_task(inbox.each(lambda data: taken.append(int(data))))
        before = [0]
        while len(taken) < 1000:
            await asyncio.sleep(0)
            before.append(len(taken))
        assert max(after - earlier for earlier, after in itertools.pairwise(before)) <= MAX_AT_ONCE
        for number in range(1000, 1300):  # one at a time, and three
            sender.send(b"%d" % number)
            while number % 3 == 0 and len(taken) <= number:
                await asyncio.sleep(0.001)
        while len(taken) < 1300:
            await asyncio.sleep(0.001)
        reading.cancel()

    asyncio.run(asyncio.wait_for(test(), SECONDS))
    assert taken == list(range(1300))


@pytest.mark.parametrize("end", ["an error of who takes them", "a cancel"])
def test_a_loop_that_has_stopped_reading_takes_no_more(end: str, loop_hop: tuple[zmq.Socket, RepliesInbox]) -> None:
    sender, inbox = loop_hop
    taken: list[bytes] = []

    def take(data: bytes) -> None:
        taken.append(data)
        if data == b"bad":
            raise KeyError("a bug")

    async def test() -> None:
        reading = asyncio.create_task(inbox.each(take))
        for data in (b"good", b"bad", b"never") if end != "a cancel" else (b"good",):
            sender.send(data)
        while not taken:
            await asyncio.sleep(0.001)
        if end == "a cancel":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            with pytest.raises(KeyError, match="a bug"):
                await reading
        sender.send(b"never")
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(test(), SECONDS))
    assert taken == ([b"good"] if end == "a cancel" else [b"good", b"bad"])


def test_a_message_nobody_can_read_is_an_error_and_no_wait(addresses: Addresses, sockets: Sockets) -> None:
    outbox = sockets.outbox(bind=addresses.tokenizer(0))
    with pytest.raises(BrokenPipeError, match="no process reads"):
        outbox.send(Abort(1))


def test_a_path_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TMPDIR"):
        Addresses(tmp_path / ("x" * 100))


@pytest.mark.parametrize("late", [False, True])
def test_hazard_31_no_rank_misses_what_was_published(late: bool, addresses: Addresses, sockets: Sockets) -> None:
    """Whether the ranks subscribe before rank 0 binds or after: all get every tick, with the very same messages."""
    others = [] if late else [sockets.subscriber(addresses.ranks) for _ in range(2)]
    publisher = sockets.publisher(addresses.ranks)
    with ThreadPoolExecutor() as pool:
        proof = pool.submit(publisher.wait_for, 2)
        if late:
            time.sleep(0.1)
            assert not proof.done()
            others = [sockets.subscriber(addresses.ranks) for _ in range(2)]
        proof.result(SECONDS)
    inbox = sockets.inbox(TO_SCHEDULER, bind=addresses.scheduler)
    outbox = sockets.outbox(connect=[addresses.scheduler])
    first = FirstRankInbox(inbox, publisher)
    ranks = [OtherRankInbox(other) for other in others]

    assert first.receive(wait=False) == []  # a busy turn without messages is a tick all the same
    outbox.send(Generate.of(1, [5], PARAMS))
    outbox.send(Abort(1))
    turns = [first.receive(wait=True)]
    while sum(map(len, turns)) < 2:
        turns.append(first.receive(wait=False))
    for rank in ranks:
        assert rank.receive(wait=False) == []
        assert [rank.receive(wait=False) for _ in turns] == turns


def test_the_folder_of_the_sockets_is_private(addresses: Addresses, sockets: Sockets) -> None:
    sockets.inbox(TO_API, bind=addresses.api)
    assert stat.S_IMODE(addresses.directory.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((addresses.directory / "api").stat().st_mode)


class FakeScheduler:
    """Takes every request but those of one token 0, and knows what runs."""

    def __init__(self) -> None:
        self.decode = SimpleNamespace(running={})
        self.prefill = SimpleNamespace(pending=[])
        self.cache = SimpleNamespace(num_pages=5, available_pages=3, queried_tokens=7)
        self.tables = SimpleNamespace(num_rows=4, num_free=3)

    def add(self, uid: int, prompt_ids: list[int], params: SamplingParams) -> None:
        if prompt_ids == [0]:
            raise KeyError("something unforeseen")
        self.decode.running[uid] = prompt_ids

    def abort(self, uid: int) -> list[TokenOutput]:
        return [TokenOutput(uid, None, "abort", 0)] if self.decode.running.pop(uid, None) else []

    def stats(self) -> dict[str, int]:
        return {"pages_free": 3}


class Sent:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def take(self) -> list[Message]:
        """All but heartbeats, which are then gone too."""
        messages, self.messages = self.messages, []
        return [message for message in messages if not isinstance(message, Heartbeat)]

    def take_heartbeats(self) -> list[Heartbeat]:
        """Those alone. All else is then gone too."""
        messages, self.messages = self.messages, []
        return [message for message in messages if isinstance(message, Heartbeat)]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def desk(sent: Sent) -> Desk:
    return Desk(FakeScheduler(), sent)  # type: ignore[arg-type]


def test_a_step_is_one_message(desk: Desk, sent: Sent) -> None:
    desk.take(Generate.of(1, [5, 6], PARAMS))
    desk.take(Generate.of(2, [7], PARAMS))
    desk.report([TokenOutput(1, 11, None, 0), TokenOutput(2, 12, "stop", 1)])
    assert sent.take() == [Step([1, 2], [11, 12], [None, "stop"], [0, 1], [2, 1])]
    desk.report([])
    assert sent.take() == []


def test_every_request_gets_one_last_message(desk: Desk, sent: Sent) -> None:
    desk.take(Generate.of(1, [5], PARAMS))
    desk.take(Abort(1))
    assert sent.take() == [Step([1], [None], ["abort"], [0], [1])]
    desk.take(Abort(1))  # a second one, and one of a request that never was
    desk.take(Abort(99))
    assert sent.take() == []
    refused = Rejected(3, "no")
    desk.take(refused)
    assert sent.take() == [refused]


def test_a_request_that_fails_on_arrival_is_refused_alone(desk: Desk, sent: Sent) -> None:
    desk.take(Generate.of(1, [0], PARAMS))
    desk.take(Generate.of(2, [5], PARAMS))
    (refused,) = sent.take()
    assert isinstance(refused, Rejected)
    assert refused.uid == 1
    assert refused.is_bug, "the tokenizer had found it good"
    desk.report([TokenOutput(2, 9, "length", 0)])
    assert sent.take() == [Step([2], [9], ["length"], [0], [1])]


def test_a_uid_that_comes_twice_does_not_disturb_the_first(desk: Desk, sent: Sent) -> None:
    desk.take(Generate.of(1, [5], PARAMS))
    desk.take(Generate.of(1, [5, 6, 7], PARAMS))
    desk.report([TokenOutput(1, 9, "length", 0)])
    assert sent.take() == [Step([1], [9], ["length"], [0], [1])]


def test_heartbeats_come_at_once_and_then_no_more_than_one_a_second(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    desk.take(Generate.of(1, [5], PARAMS))
    for _ in range(3):
        desk.heartbeat()
    (beat,) = sent.take_heartbeats()
    assert beat.stats == {
        "pages_free": 3,
        "pages_in_use": 2,
        "rows_in_use": 1,
        "queried_tokens": 7,
        "requests_running": 1,
        "requests_waiting": 0,
    }
    now = 101.0
    desk.heartbeat()
    assert len(sent.take_heartbeats()) == 1


def test_a_heartbeat_comes_at_once_when_requests_have_come_or_gone(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    desk.heartbeat()
    desk.heartbeat()
    desk.take(Generate.of(1, [5], PARAMS))
    desk.heartbeat()
    desk.heartbeat()
    desk.take(Abort(1))
    beats = sent.messages[0], sent.messages[1], sent.messages[2]
    assert [beat.stats["requests_running"] for beat in beats if isinstance(beat, Heartbeat)] == [0, 1, 0]
    assert isinstance(sent.messages[3], Step), "whoever has the last of an answer does not see it run"
    assert len(sent.messages) == 4


def test_a_heartbeat_tells_how_long_requests_waited_until_they_first_ran(
    desk: Desk, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for uid in (1, 2, 3, 4):
        desk.take(Generate.of(uid, [5], PARAMS))
    now = 100.25
    desk.scheduled(batch_of([9], [1]))  # 9 decodes: it does not wait
    desk.take(Abort(3))
    now = 100.5
    desk.scheduled(batch_of([], [1, 2]))  # 1 with its next chunk
    desk.report([])
    desk.take(Abort(2))
    assert [seconds for beat in sent.take_heartbeats() for seconds in beat.queue_seconds] == [0.25, 0.5]
    now = 102.0
    desk.scheduled(batch_of([], [3, 4]))
    desk.heartbeat()
    (beat,) = sent.take_heartbeats()
    assert beat.queue_seconds == [2.0], "an aborted one was never scheduled, and nobody waits twice"


def batch_of(decode: list[int], prompts: list[int]) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace(uid=uid) for uid in decode + prompts], num_decode=len(decode))


def test_ranks_but_the_first_say_nothing() -> None:
    desk = Desk(FakeScheduler(), None)  # type: ignore[arg-type]
    desk.take(Generate.of(1, [5], PARAMS))
    desk.report([TokenOutput(1, 11, "stop", 0)])
    desk.heartbeat()
