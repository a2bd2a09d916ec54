"""How orders reach the loop: at once in the caller's process, or to all ranks in the same tick. Knows no requests."""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from minisgl.core.outputs import TokenOutput
from minisgl.learn import exercise
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.messages import Abort, AddRequests, Order, Stop


class Inbox(Protocol):
    def receive(self, blocking: bool) -> list[Order] | None:
        """The orders that have come, possibly none. blocking: there is nothing else to do. None: end the loop."""


def carry_out(scheduler: Scheduler, orders: list[Order]) -> list[TokenOutput]:
    """Returns the last outputs of what was aborted, whose pages come back in one operation."""
    outputs: list[TokenOutput] = []
    if not orders:
        return outputs
    with scheduler.cache.freeing():
        for order in orders:
            if isinstance(order, AddRequests):
                for request in order.requests:
                    scheduler.add(request.uid, request.prompt_ids, request.sampling_params)
            elif isinstance(order, Abort):
                outputs += [output for uid in order.uids for output in scheduler.abort(uid)]
    return outputs


class LocalInbox:
    """The caller gives orders between two steps of a loop that it drives itself: nothing is ever waited for."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self.idle = True  # the loop would have waited

    def put(self, order: Order) -> None:
        self._orders.append(order)

    def receive(self, blocking: bool) -> list[Order]:
        orders, self._orders = self._orders, []
        self.idle = blocking and not orders
        return orders


class Mailbox:
    """All that the parent sends, read by a thread of its own. When the parent is gone this process ends at once,
    even while a collective waits for another rank: nobody is left to tell."""

    def __init__(self, connection: Connection, private_folder: Path) -> None:
        """private_folder: removed when the parent has died without doing so."""
        self._connection, self._folder = connection, private_folder
        self._messages: deque[bytes] = deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def __len__(self) -> int:
        return len(self._messages)

    def wait(self) -> None:
        """Until there is a message."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._messages)

    def take(self, count: int) -> list[bytes]:
        """The next `count` messages, also those that have still to come."""
        with self._arrived:
            self._arrived.wait_for(lambda: len(self._messages) >= count)
            return [self._messages.popleft() for _ in range(count)]

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)
            with self._arrived:
                self._messages.append(message)
                self._arrived.notify()


class LockStepInbox:
    """Every rank gets all messages from the parent, but not at the same moment. Before each step rank 0 says how many
    it has, and all take just as many: the ranks' schedulers then see the same and decide the same.

    The walk-through's 4.7.7 has the same count, and loses messages in its PUB/SUB.
    """

    def __init__(self, mailbox: Mailbox, broadcast: Callable[[int], int], on_idle: Callable[[], None]) -> None:
        """broadcast: a Communicator's. on_idle: called before waiting for messages with nothing to do."""
        self._mailbox, self._broadcast, self._on_idle = mailbox, broadcast, on_idle
        self._decode = msgspec.msgpack.Decoder(Order).decode

    @exercise("6.6")
    def receive(self, blocking: bool) -> list[Order] | None:
        """As many messages as rank 0 has, the same on all ranks. blocking: wait for the first, before they agree on a
        number. None: one of them is Stop."""
        if blocking:
            if not self._mailbox:
                self._on_idle()
            self._mailbox.wait()  # each rank at its own mailbox: no collective may wait for hours
        count = self._broadcast(len(self._mailbox))
        orders = [self._decode(message) for message in self._mailbox.take(count)]
        return None if any(isinstance(order, Stop) for order in orders) else orders
