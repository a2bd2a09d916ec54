"""Loops driven order by order, over an engine whose tokens depend on its pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fake_engine import EOS, FakeEngine

from minisgl.core.llm import Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.messages import Abort, AddRequests, Order
from minisgl.stage7.config import OverlapConfig

MAX_SEQ_LEN = 64


def make_scheduler(engine: FakeEngine, **options: Any) -> Scheduler:
    rows, page_size = engine.table.dummy_row, engine.table.page_size
    config = OverlapConfig(page_size=page_size, max_running_requests=rows, **options)
    return Scheduler(config, engine, frozenset({EOS}), Tracer(None))  # type: ignore[arg-type]


class ScriptedInbox:
    """ticks: the orders before each step. Afterwards the loop runs on until it has nothing to do."""

    def __init__(self, ticks: Iterable[list[Order]]) -> None:
        self._ticks = iter(ticks)

    def receive(self, blocking: bool) -> list[Order] | None:
        return next(self._ticks, None if blocking else [])


def add(uid: int, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> AddRequests:
    return AddRequests([Request(uid, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))])


def abort(uid: int) -> Abort:
    return Abort([uid])
