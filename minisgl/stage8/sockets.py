"""ZMQ sockets for our messages: one way, in order, none lost. Knows nothing of what they say.

Addresses are files in a private directory, so several servers run on one host and nobody else can speak to them.
One process binds each; whoever connects may come earlier, and what it sends waits.
Queues have no limit of their own (ZMQ's high-water mark): at a limit a PUSH would block the scheduler behind a slow
reader, and a PUB would drop messages, after which ranks would disagree. What can be queued is bounded by the requests
that the API admits. What is unsent at the end is dropped (LINGER 0): whoever would read it is ending too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from minisgl.core.trace import Tracer
from minisgl.stage8.codec import MessageDecoder, encode
from minisgl.stage8.messages import Message, uids_of

MS_TO_CONNECT = 5000
_READABLE = int(zmq.POLLIN)  # the enum takes 3 µs to compare


@dataclass(frozen=True)
class Addresses:
    """Where the processes of one server meet. Who binds: the API the first and the last, else the reader, and rank 0
    that of the ranks."""

    directory: Path

    def __post_init__(self) -> None:
        longest = len(self.tokenizer(999).removeprefix("ipc://"))
        if longest > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(f"{self.directory} is too long a path for sockets: set TMPDIR to a shorter one")

    def tokenizer(self, index: int) -> str:
        return f"ipc://{self.directory}/tokenizer{index}"

    @property
    def scheduler(self) -> str:
        return f"ipc://{self.directory}/scheduler"

    @property
    def ranks(self) -> str:
        return f"ipc://{self.directory}/ranks"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.directory}/detokenizer"

    @property
    def api(self) -> str:
        return f"ipc://{self.directory}/api"


class Sockets:
    """All sockets of one process: they are closed together. What they send is recorded."""

    def __init__(self, tracer: Tracer) -> None:
        self._context = zmq.Context()
        self._tracer = tracer

    def inbox(self, kinds: Any, bind: str | None = None, connect: Sequence[str] = ()) -> Inbox:
        """Receives messages of these kinds (a union of messages.py) from whoever sends there."""
        return Inbox(self._open(zmq.PULL, bind, connect), MessageDecoder(kinds))

    def outbox(self, bind: str | None = None, connect: Sequence[str] = ()) -> Outbox:
        return Outbox(self._open(zmq.PUSH, bind, connect), self._tracer)

    def publisher(self, bind: str) -> Publisher:
        return Publisher(self._open(zmq.XPUB, bind, (), {zmq.XPUB_VERBOSE: 1}))

    def subscriber(self, connect: str) -> Subscriber:
        return Subscriber(self._open(zmq.SUB, None, [connect], {zmq.SUBSCRIBE: b""}))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _open(
        self, kind: int, bind: str | None, connect: Sequence[str], options: dict[int, Any] | None = None
    ) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds: whoever connects first shall not be late
        for option, value in (options or {}).items():
            socket.setsockopt(option, value)
        if bind:
            socket.bind(bind)
        for address in connect:
            socket.connect(address)
        return socket


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `recv` would not wait. Cheaper than to try it and be refused."""
    events: Any = socket.get(zmq.EVENTS)
    return bool(events & _READABLE)


class Inbox:
    """wakeups: how often a wait ended: an idle process must not wake up for nothing."""

    def __init__(self, socket: zmq.Socket[bytes], decoder: MessageDecoder) -> None:
        self._socket, self.decoder = socket, decoder
        self.wakeups = 0

    def receive(self, timeout: float | None = None, also: Sequence[int] = ()) -> list[Any]:
        """`receive_raw`, decoded. Also empty when nothing of what came was a message."""
        return self.decoder.decode_all(self.receive_raw(timeout, also))

    def receive_raw(self, timeout: float | None = None, also: Sequence[int] = ()) -> list[bytes]:
        """Everything that has arrived, in order. Waits for the first, but no longer than timeout seconds (None: for
        ever, 0: not at all), nor when one of the file descriptors `also` can be read."""
        received: list[bytes] = []
        if timeout is None and not also:
            received.append(self._socket.recv())  # half the system calls of a poll before it
            self.wakeups += 1
        elif timeout != 0:
            self._wait(timeout, also)
        while has_message(self._socket):
            received.append(self._socket.recv(zmq.NOBLOCK))
        return received

    def _wait(self, timeout: float | None, also: Sequence[int]) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in also:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(None if timeout is None else round(timeout * 1000))
        self.wakeups += 1


class Outbox:
    def __init__(self, socket: zmq.Socket[bytes], tracer: Tracer) -> None:
        self._socket, self._tracer = socket, tracer

    def wait_for_reader(self) -> None:
        """Until somebody has connected to the address that this process binds; not much longer than that ever takes."""
        self._socket.poll(MS_TO_CONNECT, zmq.POLLOUT)

    def send(self, message: Message) -> None:
        """Never waits. Raises BrokenPipeError when nobody has connected to an address that this process binds."""
        if self._tracer.enabled:  # first: no reader's events shall be older
            for uid in uids_of(message):
                self._tracer.instant(type(message).__name__, "messages", uid)
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise BrokenPipeError("no process reads what is sent here") from None


class Publisher:
    """Rank 0's end of what all ranks must hear. One `send` is one tick: the bytes of all messages, and their number."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def wait_for(self, subscribers: int) -> None:
        """Until so many have subscribed: what is published before that is lost to them. An XPUB socket, unlike a
        PUB, is told of each subscription, and what it publishes from then on arrives."""
        for _ in range(subscribers):
            self._socket.recv()

    def send(self, received: Sequence[bytes]) -> None:
        self._socket.send_multipart([str(len(received)).encode(), *received])


class Subscriber:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self) -> list[bytes]:
        """The messages of the next tick. Raises RuntimeError when some of them are missing."""
        count, *received = self._socket.recv_multipart()
        if int(count) != len(received):
            raise RuntimeError(f"{len(received)} messages came of a tick that had {int(count)}")
        return received
