"""The scheduler's ends of the ring: what all ranks take in, and what rank 0 says. Knows nothing of batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from minisgl.core.outputs import TokenOutput
from minisgl.stage8.child import one_line
from minisgl.stage8.codec import MessageDecoder
from minisgl.stage8.messages import (
    TO_SCHEDULER,
    Abort,
    Answered,
    Begin,
    Flush,
    Generate,
    Heartbeat,
    Message,
    Rejected,
    Step,
    StopMatched,
)
from minisgl.stage8.sockets import Inbox, Outbox, Publisher, Subscriber

if TYPE_CHECKING:
    from minisgl.core.batch import Batch
    from minisgl.stage5.scheduler import Scheduler

log = logging.getLogger("minisgl")

HEARTBEAT_SECONDS = 1.0
MAX_ERROR_CHARS = 300


class RankInbox(Protocol):
    """All ranks get the same messages in the same turns of their loops; so they form the same batches."""

    def receive(self, wait: bool) -> list[Message]:
        """What has come. wait: there is nothing else to do until something does."""


class FirstRankInbox:
    """Takes in what the tokenizers send, and hands the very bytes on to the other ranks, if there are any."""

    def __init__(self, inbox: Inbox, publisher: Publisher | None) -> None:
        self.inbox, self._publisher = inbox, publisher

    def receive(self, wait: bool) -> list[Message]:
        """A wait may end with nothing, for a heartbeat. The other ranks do not hear of that: they wait on."""
        received = self.inbox.receive_raw(HEARTBEAT_SECONDS if wait else 0)
        if self._publisher and (received or not wait):
            self._publisher.send(received)
        return self.inbox.decoder.decode_all(received)


class OtherRankInbox:
    """Takes in what rank 0 hands on, one tick a call. It always waits for it: so the ranks stay in step."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._decoder = MessageDecoder(TO_SCHEDULER)

    def receive(self, wait: bool) -> list[Message]:
        return self._decoder.decode_all(self._subscriber.receive())


class Desk:
    """Messages in, calls of the scheduler; outputs back, messages. Every request taken in is answered to its end."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox | None, inbox: Inbox | None = None) -> None:
        """outbox, inbox: rank 0's. The other ranks do the same and say nothing."""
        self._scheduler, self._outbox, self._inbox = scheduler, outbox, inbox
        self._prompt_tokens: dict[int, int] = {}  # by uid: the requests that have not ended
        self._flushes: list[int] = []  # uids of those that wait for the batch in flight
        self._arrived: dict[int, float] = {}  # by uid, time.monotonic() seconds: those that were not scheduled yet
        self._queue_seconds: list[float] = []  # of those that were scheduled since the last heartbeat
        self._last_heartbeat = float("-inf")
        self._last_held: tuple[int, ...] = ()  # `_held`, as the last heartbeat told it

    def take(self, message: Message) -> None:
        if isinstance(message, Generate):
            self._add(message)
        elif isinstance(message, Abort | StopMatched):
            self.report(self._scheduler.abort(message.uid))
        elif isinstance(message, Flush):
            self._flush(message)
        elif isinstance(message, Answered | Rejected):
            self._send(message)

    def scheduled(self, batch: Batch) -> None:
        """It is about to run: who is in it for the first time waits no longer."""
        if self._arrived:
            now = time.monotonic()
            for req in batch.reqs[batch.num_decode :]:
                arrived = self._arrived.pop(req.uid, None)
                if arrived is not None:
                    self._queue_seconds.append(now - arrived)

    def report(self, outputs: Sequence[TokenOutput]) -> None:
        """What one step gave, in one message."""
        self._flush_if_idle()
        self.heartbeat()  # first, as in a flush: who has the last token of an answer shall not see it still run
        if not outputs:
            return
        uids, token_ids, reasons, cached, logprobs, of_prompts = (list(column) for column in zip(*outputs, strict=True))
        step = Step(uids, token_ids, reasons, cached, [self._prompt_tokens[uid] for uid in uids])
        step.logprobs.update((place, one) for place, one in enumerate(logprobs) if one is not None)
        step.prompt_logprobs.update((place, all_) for place, all_ in enumerate(of_prompts) if all_ is not None)
        self._send(step)
        for output in outputs:
            if output.finish_reason:
                del self._prompt_tokens[output.uid]
                self._arrived.pop(output.uid, None)

    def heartbeat(self) -> None:
        """Say that the loop is alive, if that was not said within the last second or requests came or went since."""
        if not self._outbox:
            return
        now, held = time.monotonic(), self._held()
        if held != self._last_held or now - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat, self._last_held = now, held
            queue_seconds, self._queue_seconds = self._queue_seconds, []
            self._send(Heartbeat(time.monotonic_ns(), self.stats(), queue_seconds))

    def stats(self) -> dict[str, int]:
        """In use is what requests hold; what the cache keeps for later ones can be had at any time."""
        scheduler, cache, tables = self._scheduler, self._scheduler.cache, self._scheduler.tables
        stats = {
            **scheduler.stats(),
            "pages_in_use": cache.num_pages - cache.available_pages,
            "rows_in_use": tables.num_rows - tables.num_free,
            "queried_tokens": cache.queried_tokens,
            "requests_running": len(scheduler.decode.running),
            "requests_waiting": len(scheduler.prefill.pending),
        }
        if self._inbox:
            stats["scheduler_wakeups"] = self._inbox.wakeups
            stats["malformed_messages"] = self._inbox.decoder.malformed
        return stats

    def _held(self) -> tuple[int, ...]:
        """What requests that come and go change. Of what they hold the rows are enough: pages go with them."""
        scheduler = self._scheduler
        return len(scheduler.decode.running), len(scheduler.prefill.pending), scheduler.tables.num_free

    def _add(self, message: Generate) -> None:
        """The tokenizer has checked it. Should it fail all the same, only this request may."""
        if message.uid in self._prompt_tokens:
            log.error("request %d came twice: the second is dropped", message.uid)
            return
        try:
            prompt_ids = message.prompt_ids
            self._scheduler.add(message.uid, prompt_ids, message.params)
            self._prompt_tokens[message.uid] = len(prompt_ids)
            if self._outbox:
                self._arrived[message.uid] = time.monotonic()
            begin = Begin.of(message)
            if begin:
                self._send(begin)
        except Exception as error:
            log.error("request %d cannot be queued", message.uid, exc_info=error)
            self._send(Rejected(message.uid, one_line(error, MAX_ERROR_CHARS), is_bug=True))

    def _flush(self, message: Flush) -> None:
        """A batch may be in flight without any request that goes on (overlap): then it is done after that batch."""
        if self._scheduler.has_work:
            self._send(Rejected(message.uid, "requests wait or run: flush the cache when none does"))
            return
        self._flushes.append(message.uid)
        self._flush_if_idle()

    def _flush_if_idle(self) -> None:
        if not self._flushes or self._scheduler.in_flight:
            return
        self._scheduler.flush_cache()
        self._last_heartbeat = float("-inf")
        self.heartbeat()  # first: who has the answer shall see what it says
        for uid in self._flushes:
            self._send(Answered(uid))
        self._flushes.clear()

    def _send(self, message: Message) -> None:
        if self._outbox:
            self._outbox.send(message)
