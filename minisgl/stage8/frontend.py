"""The API's end of the ring: sends requests off and routes what comes back. Knows nothing of HTTP or of processes.

All of it runs on one event loop. Whoever asks gets an `Ask`, and closing that is always enough: what is unfinished is
aborted, once, and its uid forgotten. A uid is never used again, so a late reply can meet no other request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from minisgl.core.trace import Tracer
from minisgl.learn import exercise
from minisgl.stage8.ask import Ask, EngineGone, RequestRefused
from minisgl.stage8.codec import MalformedMessage, MessageDecoder
from minisgl.stage8.messages import TO_API, Abort, Decode, Encode, Flush, Heartbeat, Message, Replies, Reply, Tokenize
from minisgl.stage8.metrics import Metrics

Question = Tokenize | Encode | Decode | Flush


class QueueFull(RuntimeError):
    """As many requests are open as may be: try again later."""


class Outbox(Protocol):
    def send(self, message: Message) -> None:
        """Hands the message over in order, without waiting. Raises EngineGone when nobody takes it."""


class Inbox(Protocol):
    async def each(self, take: Callable[[bytes], None]) -> None:
        """Calls `take` with every message as it comes, for ever. Raises what that raises."""


class Frontend:
    """tokenizers: one outbox for each tokenizer process. replies: where the detokenizer's messages arrive.
    max_open: requests that may be open, waiting ones and running ones together."""

    def __init__(self, tokenizers: Sequence[Outbox], replies: Inbox, max_open: int, tracer: Tracer) -> None:
        self._tokenizers = tokenizers
        self._replies = replies
        self._tracer = tracer
        self._decoder = MessageDecoder(TO_API)
        self._uids = itertools.count()
        self._asks: dict[int, Ask] = {}
        self._heartbeat_at = time.monotonic()
        self.heard = asyncio.Event()  # once a heartbeat has come, all the way from the scheduler
        self._failure: str | None = None
        self.max_open = max_open
        self.stats: dict[str, int] = {}  # the scheduler's, as of its last heartbeat
        self.metrics = Metrics()
        self.late = 0  # replies to requests that nobody waits for
        self.malformed = 0  # messages that were none

    @property
    def num_open(self) -> int:
        return len(self._asks)

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the scheduler last said that it is alive."""
        return time.monotonic() - self._heartbeat_at

    def new_uid(self) -> int:
        return next(self._uids)

    def ask(self, requests: Sequence[Question]) -> Ask:
        """Send requests off, each with a uid of its own from `new_uid`.

        Raises QueueFull, EngineGone, or RequestRefused for more requests at once than may ever be open.
        """
        if self._failure is not None:
            raise EngineGone(self._failure)
        if len(requests) > self.max_open:
            raise RequestRefused(f"{len(requests)} answers in one call: at most {self.max_open} may be open at once")
        if self.num_open + len(requests) > self.max_open:
            raise QueueFull(f"{self.num_open} of at most {self.max_open} requests are open: try again later")
        ask, now = Ask([request.uid for request in requests], self.abort), time.monotonic()
        try:
            for request in requests:
                self._send(request)
                self._asks[request.uid] = ask
                if isinstance(request, Tokenize):
                    self.metrics.begin(request.uid, now)
        except Exception:
            ask.close()
            raise
        return ask

    async def once(self, question: Encode | Decode | Flush) -> Reply:
        """Ask what has one reply, and wait for that. Raises as `ask` and iterating do."""
        with self.ask([question]) as ask:
            [(_, reply)] = await anext(ask)
            return reply

    @exercise("8.5")
    def abort(self, uid: int) -> None:
        """Nobody waits for this request any more. Unknown to the engine if it never was sent, or had ended."""
        if self._asks.pop(uid, None) is not None:
            self.metrics.end(uid, "abort")
            self._send_abort(uid)

    async def listen(self) -> None:
        """Route replies for ever. Run it as a task of the loop that asks."""
        await self._replies.each(self._receive)

    def fail_all(self, error: str) -> None:
        """The engine is gone: every open request, and every later one, fails with this error."""
        self._failure = error
        self.metrics.end_all("error")
        asks = set(self._asks.values())
        self._asks.clear()
        for ask in asks:
            ask.fail(EngineGone(error))

    def _receive(self, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except MalformedMessage:
            self.malformed += 1
        else:
            self._take(message)

    def _take(self, message: Replies | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            self._heartbeat_at = time.monotonic()
            self.heard.set()
            self.stats = message.stats
            self.metrics.queued(message.queue_seconds)
            return
        self.metrics.take(message.replies, time.monotonic())
        self._route(message.replies)

    @exercise("8.4")
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

    def _send_abort(self, uid: int) -> None:
        with suppress(EngineGone):
            self._send(Abort(uid))

    def _send(self, message: Question | Abort) -> None:
        self._tracer.instant(type(message).__name__, "messages", message.uid)
        self._tokenizers[message.uid % len(self._tokenizers)].send(message)
