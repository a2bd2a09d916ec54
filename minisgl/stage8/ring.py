"""The API's sockets, for an event loop. Knows addresses, and nothing of what is sent.

Nothing here may wait but `recv`: the loop that would stand still is everybody's. So sending never blocks, not even
when the reader has died, as the blocking sockets of the other processes would.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from minisgl.stage8.ask import EngineGone
from minisgl.stage8.launch import Processes
from minisgl.stage8.messages import Message, encode


class TokenizerOutbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: Message) -> None:
        """Raises EngineGone when no tokenizer is connected: the queue itself has no limit."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineGone("the tokenizer process does not take requests") from None


class Ring:
    """Binds the API's ends. Made within the running loop, before the processes start. `replies` has `recv`."""

    def __init__(self, processes: Processes) -> None:
        self._context = zmq.asyncio.Context()
        self.tokenizers = [
            TokenizerOutbox(self._bound(zmq.PUSH, address, socket_class=zmq.Socket))
            for address in processes.to_tokenizer_addresses
        ]
        self.replies: zmq.asyncio.Socket = self._bound(zmq.PULL, processes.from_detokenizer_address)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def _bound(self, kind: int, address: str, **options: Any) -> Any:
        socket: Any = self._context.socket(kind, **options)
        socket.set_hwm(0)  # what can be queued is bounded by the requests that may be open
        socket.bind(address)
        return socket
