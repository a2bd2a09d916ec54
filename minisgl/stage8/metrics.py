"""What is counted and timed. Knows nothing of how it is asked for, nor of what runs requests.

A streamed token costs two look-ups and a few additions, of plain numbers: see prometheus.py for the rest.
A request is one choice: a call with n answers counts n times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from minisgl.stage8.messages import Reply

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 90.0)
REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """bounds: a value counts in the first bucket whose bound it does not exceed, or in one more after the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Progress:
    """Of one request. Times in seconds of time.monotonic()."""

    __slots__ = ("began", "last_text", "prompt_counted")

    def __init__(self, began: float) -> None:
        self.began = began
        self.last_text: float | None = None  # when a piece of text last came
        self.prompt_counted = False


class Metrics:
    """Times are those of the API's process, when it sent a request off and when replies arrived there. Definitions:
    API contract, section 5."""

    def __init__(self) -> None:
        self._open: dict[int, Progress] = {}  # by uid
        self.prompt_tokens = self.generation_tokens = 0
        self.ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # error: ours; a refused one never was a request
        self.time_to_first_token = Histogram(FIRST_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.e2e_request_latency = Histogram(REQUEST_SECONDS)  # of those that came to their end
        self.request_queue_time = Histogram(REQUEST_SECONDS)  # in the scheduler, until first scheduled

    def begin(self, uid: int, now: float) -> None:
        self._open[uid] = Progress(now)

    def take(self, replies: Iterable[Reply], now: float) -> None:
        """What has arrived at once. Replies to requests that did not begin, or have ended, count for nothing."""
        for reply in replies:
            progress = self._open.get(reply.uid)
            if progress is None:
                continue
            self.generation_tokens += len(reply.token_ids)
            if reply.text:
                self._text(progress, now)
            if not progress.prompt_counted:
                progress.prompt_counted = True
                self.prompt_tokens += reply.prompt_tokens
            if reply.error is not None:
                self.end(reply.uid, "error" if reply.is_bug else None)
            elif reply.finish_reason is not None:
                self.end(reply.uid, reply.finish_reason)
                if reply.finish_reason != "abort":
                    self.e2e_request_latency.observe(now - progress.began)

    def end(self, uid: int, reason: str | None) -> None:
        """reason: a key of `ended`, or None for a request that was refused. What has ended does not end again."""
        if self._open.pop(uid, None) is not None and reason is not None:
            self.ended[reason] += 1

    def end_all(self, reason: str) -> None:
        for uid in list(self._open):
            self.end(uid, reason)

    def queued(self, seconds: Iterable[float]) -> None:
        """How long those have waited that were scheduled since the last call."""
        for value in seconds:
            self.request_queue_time.observe(value)

    def _text(self, progress: Progress, now: float) -> None:
        if progress.last_text is None:
            self.time_to_first_token.observe(now - progress.began)
        else:
            self.inter_token_latency.observe(now - progress.last_text)
        progress.last_text = now
