"""Stage 8 once more, by somebody who had read the chapter and its hints."""

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
    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"{error}") from error

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        out = []
        for data in received:
            try:
                out.append(self.decode(data))
            except MalformedMessage:
                self.malformed += 1
        return out


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    def add(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        n = finished_len(text)
        piece = text[self._sent : n]
        self._sent += len(piece)
        if len(self._ids) > MAX_TOKENS:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids)[self._sent :]


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        text = self._held + piece
        best = None
        for s in self._strings:
            at = text.find(s, max(0, len(self._held) - (len(s) - 1)))
            if at >= 0 and (best is None or (at + len(s), at) < best):
                best = (at + len(s), at)
        return None if best is None else text[: best[1]]

    def take(self, piece: str) -> str:
        text = self._held + piece
        for i in range(len(text)):
            if self._begins(text[i:]):
                self._held = text[i:]
                return text[:i]
        self._held = ""
        return text


class MyAsk(Ask):
    def put(self, reply: Reply) -> bool:
        last = reply.error is not None or reply.finish_reason is not None
        index = self._open[reply.uid]
        if last:
            del self._open[reply.uid]
        if reply.is_bug:
            self._failure = RequestFailed(reply.error)
        elif reply.error is not None:
            self._failure = RequestRefused(reply.error, reply.param, reply.code)
        elif reply.finish_reason == "abort":
            self._failure = EngineGone("aborted")
        else:
            self._silent.discard(index)
            self._keep(index, reply)
        self._wake.set()
        return last

    def close(self) -> None:
        uids = list(self._open)
        self._open.clear()
        self._wake.set()
        for uid in uids:
            self._abort(uid)


class MyFrontend(Frontend):
    def _route(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._tracer.instant("Reply", "messages", reply.uid, tokens=len(reply.token_ids))
            ask = self._asks.get(reply.uid)
            if ask is None:
                self.late += 1
                continue
            if ask.put(reply):
                del self._asks[reply.uid]
            if reply.is_bug:
                self._send_abort(reply.uid)

    def abort(self, uid: int) -> None:
        if uid in self._asks:
            del self._asks[uid]
            self.metrics.end(uid, "abort")
            self._send_abort(uid)
