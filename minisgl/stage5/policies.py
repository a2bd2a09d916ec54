"""Who of those that wait is next, and what a step is made of. Knows nothing of pages: admission has the last word.

A policy decides by nothing but the requests and the order in which they came: no clock, no hash. So every rank decides
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.req import Req
from minisgl.learn import exercise
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.pending import PendingReq

Prefill = Callable[[int], list[Req]]  # the next tokens of those that wait, as many as this
Decode = Callable[[], list[Req]]  # everyone who runs


class SchedulePolicy(Protocol):
    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        """The order to admit in. The queue comes with a half-done prompt first, then those that were retracted, then
        first come first; those must stay in front. departed: requests that have left the queue so far."""

    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        """What runs next. Empty: nothing can run."""


class PrefillFirst:
    """First come, first served, and whoever waits joins as soon as there is room: until then nobody decodes. (The
    walk-through's.) Running requests stand still for as long as prompts keep coming."""

    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        return waiting

    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        prompts = prefill(token_budget)
        if prompts:
            return Batch(prompts)
        running = decode()
        return Batch(running, num_decode=len(running))


class Mixed(PrefillFirst):
    """Everyone who runs gets a token in every step, and prompts what is left of the budget: so between two tokens of a
    request lies at most one budget of work. From Sarathi-Serve (Agrawal et al. 2024)."""

    @exercise("5.2")
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        """Decode rows first, a token each, then prompts, as many of their tokens as the budget has left."""
        running = decode()
        return Batch(running + prefill(token_budget - len(running)), num_decode=len(running))


class CacheAware(Mixed):
    """The longest cached prefix first, so that it is used before it is evicted. From SGLang (Zheng et al. 2024).

    Among the first WINDOW that wait. Who was overtaken by MAX_OVERTAKEN others is next, so nobody starves.
    """

    WINDOW = 64
    MAX_OVERTAKEN = 64

    def __init__(self, cached_len: Callable[[Tensor], int]) -> None:
        """cached_len: tokens of a prompt (int32, on the host) that are in the prefix cache."""
        self.cached_len = cached_len

    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        window = list(islice(waiting, self.WINDOW))
        return sorted(window, key=lambda pending: self._rank(pending, departed))  # stable: equals as they came

    def _rank(self, pending: PendingReq, departed: int) -> int:
        """Less is sooner. In the order of arrival, as many would have left before a request as came before it: any
        more have overtaken it."""
        if pending.is_resumed or departed - pending.number >= self.MAX_OVERTAKEN:
            return -(2**31)
        return -self.cached_len(pending.input_ids)


CreatePolicy = Callable[[SchedulerConfig, Callable[[Tensor], int]], SchedulePolicy]


def create_policy(config: SchedulerConfig, cached_len: Callable[[Tensor], int]) -> SchedulePolicy:
    if config.schedule_policy == "cache-aware":
        return CacheAware(cached_len)
    return Mixed() if config.schedule_policy == "mixed" else PrefillFirst()
