"""8.1: knows the decoder's own error only: lists that are nested deep end the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.stage8.codec import MalformedMessage, MessageDecoder

kills = "tests/exercises/test_stage8.py::test_what_is_no_message_is_malformed"
words = "nothing else is to be raised"


class MyMessageDecoder(MessageDecoder):
    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"{len(data)} bytes are not a message: {error}") from error

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        messages: list[Any] = []
        for data in received:
            try:
                messages.append(self.decode(data))
            except MalformedMessage:
                self.malformed += 1
        return messages
