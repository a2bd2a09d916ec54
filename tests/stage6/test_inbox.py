"""Lock step: the same orders before the same step on every rank, whenever they arrive."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from minisgl.core.llm import Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import LocalInbox, LockStepInbox, Mailbox, carry_out
from minisgl.stage6.messages import Abort, AddRequests, Stop, encode


class PlainMailbox(Mailbox):
    """Filled by the test instead of a thread."""

    def __init__(self, messages: list[bytes]) -> None:
        super().__init__(Connection(socket.socketpair()[0].detach()), Path("/nonexistent"))
        for message in messages:
            self.put(message)

    def put(self, message: bytes) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def _read(self) -> None:
        return


def orders(*uids: int) -> list[bytes]:
    return [encode(Abort([uid])) for uid in uids]


def test_rank_0_decides_how_many_are_taken(run_ranks: Any) -> None:
    """Rank 1 has more of the messages than rank 0, rank 2 has none of them yet."""
    there = [orders(1, 2), orders(1, 2, 3), []]
    asked = threading.Event()

    def work(comm: Any) -> list[Any]:
        mailbox = PlainMailbox(there[comm.rank])

        def broadcast(value: int) -> int:
            count = comm.broadcast(value)
            asked.set()
            return count

        inbox = LockStepInbox(mailbox, broadcast, lambda: None)
        if comm.rank == 2:
            threading.Thread(target=lambda: (asked.wait(60), [mailbox.put(m) for m in orders(1, 2, 3)])).start()
        return [order.uids for order in inbox.receive(blocking=False) or []]

    assert run_ranks(3, work) == [[[1], [2]]] * 3


def test_waiting_rank_says_once_that_it_is_idle() -> None:
    """Idle is said only before a wait: not while there is work, nor when an order is there already."""
    idle: list[int] = []
    mailbox = PlainMailbox([])

    def on_idle() -> None:
        idle.append(1)
        mailbox.put(orders(5)[0])

    inbox = LockStepInbox(mailbox, lambda count: count, on_idle)
    assert inbox.receive(blocking=False) == []
    assert inbox.receive(blocking=True) == [Abort([5])]
    assert idle == [1]
    mailbox.put(orders(6)[0])
    assert inbox.receive(blocking=True) == [Abort([6])]
    assert idle == [1]


def test_stop_ends_the_loop() -> None:
    inbox = LockStepInbox(PlainMailbox([*orders(1), encode(Stop())]), lambda count: count, lambda: None)
    assert inbox.receive(blocking=False) is None


def test_local_inbox_never_waits() -> None:
    inbox = LocalInbox()
    inbox.put(Abort([1]))
    assert inbox.receive(blocking=True) == [Abort([1])]
    assert not inbox.idle
    assert inbox.receive(blocking=True) == []
    assert inbox.idle


def test_a_batch_of_aborts_is_one_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running, half-done and waiting requests, in two orders: their pages come back in one operation."""
    engine = FakeEngine(num_pages=32, page_size=4, num_rows=4, max_seq_len=64)
    config = SchedulerConfig(page_size=4, max_running_requests=4, max_prefill_length=26, cache="naive")
    scheduler = Scheduler(config, engine, frozenset(), Tracer(None))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=9)
    carry_out(scheduler, [AddRequests([Request(uid, [uid + 1] * 10, params) for uid in range(5)])])
    forward_input = scheduler.schedule()
    assert forward_input is not None
    scheduler.commit(forward_input, scheduler.forward(forward_input))
    assert len(scheduler.decode.running) == 2
    assert scheduler.prefill.half_done is not None
    freed: list[int] = []
    free = scheduler.cache.allocator.free
    monkeypatch.setattr(scheduler.cache.allocator, "free", lambda pages: (freed.append(len(pages)), free(pages)))
    outputs = carry_out(scheduler, [Abort([0, 1, 2]), Abort([3, 4, 4])])
    assert [(output.uid, output.finish_reason) for output in outputs] == [(uid, "abort") for uid in range(5)]
    assert freed == [3 + 3 + 2]
    assert not scheduler.has_work
    scheduler.check_integrity()
    assert scheduler.stats()["pages_free"] == 32
