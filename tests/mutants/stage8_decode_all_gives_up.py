"""8.1: one malformed message costs all that came with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.stage8.codec import MalformedMessage, MessageDecoder

kills = "tests/exercises/test_stage8.py::test_those_that_are_messages_are_served"
words = "3 of 5 are messages"


class MyMessageDecoder(MessageDecoder):
    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes are not a message: {error}") from error

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        messages: list[Any] = []
        try:
            for data in received:
                messages.append(self.decode(data))
        except MalformedMessage:
            self.malformed += 1
        return messages
