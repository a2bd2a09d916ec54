"""8.1: counts the calls in which something was malformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.stage8.codec import MalformedMessage, MessageDecoder

kills = "tests/exercises/test_stage8.py::test_those_that_are_none_are_counted"
words = "self.malformed is 3"


class MyMessageDecoder(MessageDecoder):
    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes are not a message: {error}") from error

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        messages: list[Any] = []
        bad = False
        for data in received:
            try:
                messages.append(self.decode(data))
            except MalformedMessage:
                bad = True
        self.malformed += bad
        return messages
