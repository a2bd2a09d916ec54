"""The API's sockets, for an event loop. Knows addresses, and nothing of what is sent.

Nothing here may wait but `each`: the loop that would stand still is everybody's. So sending never blocks, not even
when the reader has died, as the blocking sockets of the other processes would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import zmq

from minisgl.stage8.ask import EngineGone
from minisgl.stage8.codec import encode
from minisgl.stage8.launch import Processes
from minisgl.stage8.messages import Message
from minisgl.stage8.sockets import has_message

MAX_AT_ONCE = 16  # messages, until the loop's other tasks have a turn


class TokenizerOutbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: Message) -> None:
        """Raises EngineGone when no tokenizer is connected: the queue itself has no limit."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineGone("the tokenizer process does not take requests") from None


class RepliesInbox:
    """What the detokenizer sends. The loop watches ZMQ's descriptor itself: a message through `zmq.asyncio` costs 35 µs
    more, for a future, a poll and two turns of the loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    async def each(self, take: Callable[[bytes], None]) -> None:
        """Calls `take` with every message, in order, for ever. Raises what that raises."""
        loop, descriptor = asyncio.get_running_loop(), self._socket.fileno()
        failed: asyncio.Future[None] = loop.create_future()

        def watch() -> None:
            if not failed.done():
                loop.add_reader(descriptor, ready)
                ready()  # the descriptor tells only of the first message, and not of those from before

        def ready() -> None:
            try:
                for _ in range(MAX_AT_ONCE):
                    if failed.done() or not has_message(self._socket):
                        return
                    take(self._socket.recv(zmq.NOBLOCK))
            except Exception as error:
                failed.set_exception(error)
            else:
                loop.remove_reader(descriptor)
                loop.call_soon(watch)

        try:
            watch()
            await failed
        finally:
            loop.remove_reader(descriptor)


class Ring:
    """Binds the API's ends, before the processes start."""

    def __init__(self, processes: Processes) -> None:
        self._context = zmq.Context()
        addresses = processes.to_tokenizer_addresses
        self.tokenizers = [TokenizerOutbox(self._bound(zmq.PUSH, address)) for address in addresses]
        self.replies = RepliesInbox(self._bound(zmq.PULL, processes.from_detokenizer_address))

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # what can be queued is bounded by the requests that may be open
        socket.bind(address)
        return socket
