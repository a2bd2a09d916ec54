"""Stage 8, right and written otherwise than the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.core.detokenizer import MAX_TOKENS, IncrementalDetokenizer, finished_len
from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import MalformedMessage, MessageDecoder
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply
from minisgl.stage8.stop_strings import StopStrings


class MyMessageDecoder(MessageDecoder):
    def decode(self, data: bytes) -> Any:
        try:
            message = self._decoder.decode(data)
        except Exception as error:
            raise MalformedMessage(str(error)) from None
        return message

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        return [message for data in received if (message := self._message_or_none(data)) is not None]

    def _message_or_none(self, data: bytes) -> Any:
        try:
            return self.decode(data)
        except MalformedMessage:
            self.malformed += 1
            return None


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    def add(self, token_id: int) -> str:
        piece = ""
        if token_id < self._tokenizer.vocab_size and token_id not in self._tokenizer.special_ids:
            self._ids = [*self._ids, token_id]
            text = self._tokenizer.decode(self._ids)
            certain = text[: finished_len(text)]
            if len(certain) > self._sent:
                piece = certain[self._sent :]
                self._sent += len(piece)
            if len(self._ids) > MAX_TOKENS:
                self._shorten(text)
        return piece

    def finish(self) -> str:
        whole, before = self._tokenizer.decode(self._ids), self._sent
        self._ids.clear()
        self._sent = 0
        return whole[before:]


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        """One character at a time, as the rule is worded."""
        text = self._held
        for character in piece:
            text += character
            ended = [len(string) for string in self._strings if text.endswith(string)]
            if ended:
                return text[: len(text) - max(ended)]
        return None

    def take(self, piece: str) -> str:
        text = self._held + piece
        start = max(0, len(text) - self._longest + 1)
        while start < len(text) and not self._begins(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start]


class MyAsk(Ask):
    def put(self, reply: Reply) -> bool:
        index = self._open[reply.uid]
        if reply.is_terminal:
            del self._open[reply.uid]
        if reply.error is not None and reply.is_bug:
            self._failure = RequestFailed(reply.error)
        elif reply.error is not None:
            self._failure = RequestRefused(reply.error, reply.param, reply.code)
        elif reply.finish_reason == "abort":
            self._failure = EngineGone("ended by the server")
        else:
            self._keep(index, reply)
            self._silent -= {index}
        self._wake.set()
        return reply.is_terminal

    def close(self) -> None:
        self._wake.set()
        while self._open:
            uid = next(iter(self._open))
            del self._open[uid]
            self._abort(uid)


class MyFrontend(Frontend):
    def _route(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._tracer.instant("Reply", "messages", reply.uid, tokens=len(reply.token_ids))
            if reply.uid not in self._asks:
                self.late += 1
                continue
            if self._asks[reply.uid].put(reply):
                self._asks.pop(reply.uid)
            if reply.is_bug:
                self._send_abort(reply.uid)

    def abort(self, uid: int) -> None:
        if uid not in self._asks:
            return
        del self._asks[uid]
        self._send_abort(uid)
        self.metrics.end(uid, "abort")
