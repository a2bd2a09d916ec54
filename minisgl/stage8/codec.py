"""Messages as bytes and back: msgpack, and never pickle. Knows nothing of sockets, nor of what a message is for.

Malformed bytes raise MalformedMessage, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.learn import exercise
from minisgl.stage8.messages import Message


class MalformedMessage(ValueError):
    """Bytes that are not a message of the expected kinds. Receivers count it and go on."""


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


class MessageDecoder:
    """Decodes the messages one process may receive: `MessageDecoder(TO_SCHEDULER)`."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self.malformed = 0  # dropped by `decode_all`

    @exercise("8.1")
    def decode(self, data: bytes) -> Any:
        """The message. Raises MalformedMessage, and nothing else, for bytes that are none."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes are not a message: {error}") from error

    @exercise("8.1")
    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        """Those that are messages, in order. The others are counted."""
        messages: list[Any] = []
        for data in received:
            try:
                messages.append(self.decode(data))
            except MalformedMessage:
                self.malformed += 1
        return messages
