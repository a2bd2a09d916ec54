"""When the device was at each step, for traces: on a GPU the host's own times are of launches. Knows no scheduler.

Two CUDA events go around a step, on the stream that it is launched on, and are read when it is done. Their clock is the
GPU's: an event on an idle stream, which the host sees pass, says what time it is there when it is so and so much here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from minisgl.core.batch import Batch
from minisgl.core.trace import Tracer

TRACK = "device"
_TRIES = 20  # of which the shortest counts
_GOOD_FOR = 10**9  # nanoseconds: two clocks may be apart by some 20 µs more after each second


class DeviceLane(Protocol):
    def step(self, number: int, batch: Batch) -> AbstractContextManager[None]:
        """What its body asks of the device is one span. batch: prepared."""

    def write(self) -> None:
        """To the trace, the oldest step that is not there yet. It must be done, or nearly: this waits for it."""


class NoLane:
    """Without a trace, and where the host's times are the device's."""

    def step(self, number: int, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self) -> None:
        return


class _Anchor(NamedTuple):
    """An event, when it was (nanoseconds of CLOCK_MONOTONIC), and how far off that is at most."""

    event: torch.cuda.Event
    time_ns: int
    error_ns: int


class CudaLane:
    def __init__(self, tracer: Tracer, device: torch.device) -> None:
        self._tracer = tracer
        self._idle_stream = idle_stream(device)
        self._anchor = self._new_anchor()
        self._steps: deque[tuple[str, dict[str, int], _Anchor, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def step(self, number: int, batch: Batch) -> Generator[None, None, None]:
        if time.monotonic_ns() - self._anchor.time_ns > _GOOD_FOR:
            self._anchor = self._new_anchor()
        args = {"step": number, "tokens": len(batch.positions), "requests": batch.size}
        start, end = timing_event(), timing_event()
        start.record()
        yield
        end.record()
        self._steps.append((batch.phase, args, self._anchor, start, end))

    def write(self) -> None:
        phase, args, anchor, start, end = self._steps.popleft()
        end.synchronize()
        start_ns, end_ns = (anchor.time_ns + round(anchor.event.elapsed_time(at) * 1e6) for at in (start, end))
        self._tracer.complete(phase, start_ns, end_ns, TRACK, **args, error_ns=anchor.error_ns)

    def _new_anchor(self) -> _Anchor:
        tries = []
        for _ in range(_TRIES):
            event = timing_event()
            before = time.monotonic_ns()
            event.record(self._idle_stream)
            event.synchronize()
            after = time.monotonic_ns()
            tries.append(_Anchor(event, (before + after) // 2, (after - before) // 2))
        return min(tries, key=lambda anchor: anchor.error_ns)


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def idle_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def device_lane(tracer: Tracer, device: torch.device) -> DeviceLane:
    return CudaLane(tracer, device) if tracer.enabled and device.type == "cuda" else NoLane()
