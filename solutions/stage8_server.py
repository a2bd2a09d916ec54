"""Stage 8, server: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.core.detokenizer import MAX_TOKENS, IncrementalDetokenizer, finished_len
from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import MalformedMessage, MessageDecoder
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply
from minisgl.stage8.stop_strings import StopStrings


class MyMessageDecoder(MessageDecoder):
    # 8.1 refuse malformed messages
    def decode(self, data: bytes) -> Any:
        """The message. Raises MalformedMessage, and nothing else, for bytes that are none."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes are not a message: {error}") from error

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        """Those that are messages, in order. The others are counted."""
        messages: list[Any] = []
        for data in received:
            try:
                messages.append(self.decode(data))
            except MalformedMessage:
                self.malformed += 1
        return messages


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    # 8.2 text from tokens as they come
    def add(self, token_id: int) -> str:
        """The text that this token makes certain: "" while its character is unfinished."""
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        end = finished_len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._ids) > MAX_TOKENS:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """The rest, whatever it is: an answer can end within a character. Ends the use of this object."""
        rest = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._sent = [], 0
        return rest


class MyStopStrings(StopStrings):
    # 8.3 hold back a possible stop string
    def end(self, piece: str) -> str | None:
        """What is left to give out before the string that this piece completes. None, and no change, if it does not."""
        text = self._held + piece
        found: list[tuple[int, int]] = []  # end, start
        for string in self._strings:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))  # one within `_held` did not count
            if start >= 0:
                found.append((start + len(string), start))
        return text[: min(found)[1]] if found else None

    def take(self, piece: str) -> str:
        """What may be given out now: all but the longest end that begins one of the strings."""
        text = self._held + piece
        size = next((size for size in range(min(len(text), self._longest - 1), 0, -1) if self._begins(text[-size:])), 0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]


class MyAsk(Ask):
    # 8.4 every reply to its own request
    def put(self, reply: Reply) -> bool:
        """Take in a reply to one of the open requests. Returns whether it was the last of that request."""
        terminal = reply.error is not None or reply.finish_reason is not None
        index = self._open.pop(reply.uid) if terminal else self._open[reply.uid]
        if reply.error is not None:
            refused = RequestRefused(reply.error, reply.param, reply.code)
            self._failure = RequestFailed(reply.error) if reply.is_bug else refused
        elif reply.finish_reason == "abort":
            self._failure = EngineGone("the server ended this request before it was finished")
        else:
            self._silent.discard(index)
            self._keep(index, reply)
        self._wake.set()
        return terminal

    # 8.5 abort what nobody waits for
    def close(self) -> None:
        """Abort what has not ended. May be called twice, and never waits: it is safe while being cancelled."""
        uids = list(self._open)
        self._open.clear()
        self._wake.set()
        for uid in uids:
            self._abort(uid)


class MyFrontend(Frontend):
    # 8.4 every reply to its own request
    def _route(self, replies: Sequence[Reply]) -> None:
        """Each to the Ask that has it open, which is forgotten after the last one; those that none has are counted.

        A reply that tells of a bug comes from the detokenizer alone: then the scheduler is told to stop.
        """
        for reply in replies:
            self._tracer.instant("Reply", "messages", reply.uid, tokens=len(reply.token_ids))
            ask = self._asks.get(reply.uid)
            if ask is None:
                self.late += 1
            elif ask.put(reply):
                del self._asks[reply.uid]
                if reply.is_bug:
                    self._send_abort(reply.uid)  # the scheduler does not know that the detokenizer failed

    # 8.5 abort what nobody waits for
    def abort(self, uid: int) -> None:
        """Nobody waits for this request any more. Unknown to the engine if it never was sent, or had ended."""
        if self._asks.pop(uid, None) is not None:
            self.metrics.end(uid, "abort")
            self._send_abort(uid)
