"""Lock step: the same orders before the same step on every rank, whenever they arrive."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minisgl.stage6.inbox import LocalInbox, LockStepInbox, Mailbox
from minisgl.stage6.messages import Abort, Stop, encode


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
