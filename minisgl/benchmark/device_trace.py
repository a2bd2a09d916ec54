"""What the device did and when, as events of a trace: whole steps by CUDA events, single kernels by torch's profiler.

Both are brought to the trace's clock, CLOCK_MONOTONIC. Knows nothing of workloads and files.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.trace import Tracer
from minisgl.stage5.scheduler import Scheduler

DEVICE, LAUNCHES, STREAM = "device", "launches", "stream "  # tracks; a stream's has its number
_ANCHORS = 50  # tries


class DeviceSteps:
    """From now until `stop`, each step of a scheduler is a span on the track "device", from when its stream comes to
    it to when the stream has done it. Two events a step: the step is not slowed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._forward = scheduler, scheduler.forward
        self._anchor, self._anchor_ns, self.error_ns = _anchor()
        self._steps: list[tuple[str, dict[str, int], torch.cuda.Event, torch.cuda.Event]] = []
        scheduler.forward = self._timed_forward  # type: ignore[method-assign]

    def stop(self) -> None:
        self._scheduler.forward = self._forward  # type: ignore[method-assign]
        for phase, args, start, end in self._steps:
            end.synchronize()
            start_ns, end_ns = (self._anchor_ns + round(self._anchor.elapsed_time(at) * 1e6) for at in (start, end))
            self._scheduler.tracer.complete(phase, start_ns, end_ns, DEVICE, **args)

    def _timed_forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Both events are on the stream that the step is launched on."""
        batch = forward_input.batch
        start, end = timing_event(), timing_event()
        start.record()
        output = self._forward(forward_input)
        end.record()
        args = {"step": self._scheduler.step, "tokens": len(batch.positions), "requests": batch.size}
        self._steps.append((batch.phase, args, start, end))
        return output


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _anchor() -> tuple[torch.cuda.Event, int, int]:
    """An event on the idle device, when it was (nanoseconds of CLOCK_MONOTONIC), and how far off that is at most."""
    tries = []
    for _ in range(_ANCHORS):
        event = timing_event()
        before = time.monotonic_ns()
        event.record()
        event.synchronize()
        after = time.monotonic_ns()
        tries.append((after - before, before, event))
    width, before, event = min(tries[1:], key=lambda one: one[0])  # the first waits for what the device is at
    return event, before + width // 2, width // 2


class Kernel(NamedTuple):
    """Times in nanoseconds. A graph's kernels all have its one launch."""

    name: str
    start: int
    end: int
    stream: int
    launch: int  # a number that a Launch has


class Launch(NamedTuple):
    """A call with which the host asks for kernels or copies."""

    name: str
    start: int
    end: int
    number: int


@contextmanager
def traced_kernels(tracer: Tracer) -> Iterator[None]:
    """What the process's GPU does meanwhile goes to the trace when it is over: kernels on a track for each stream,
    and the host's launches. The profiler makes each launch a little slower, and no kernel."""
    profiler = device_profiler()
    try:
        with profiler:
            yield
    finally:  # a loop in the caller's process ends by being closed
        _trace_profile(profiler, tracer)


def _trace_profile(profiler: profile, tracer: Tracer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        kernels, launches = read_profile(json.loads(path.read_text()), time.time_ns() - time.monotonic_ns())
    for launch in launches:
        tracer.complete(launch.name, launch.start, launch.end, LAUNCHES, launch=launch.number)
    for kernel in kernels:
        tracer.complete(kernel.name, kernel.start, kernel.end, f"{STREAM}{kernel.stream}", launch=kernel.launch)


def device_profiler() -> profile:
    return profile(activities=[ProfilerActivity.CUDA])


def read_profile(document: dict[str, Any], unix_ns: int) -> tuple[list[Kernel], list[Launch]]:
    """What was asked of the device and what it did, by start. document: as the profiler's `export_chrome_trace` writes
    it. unix_ns: what to take from Unix time to get to the trace's. Only launches that a kernel or copy came of."""
    base = document["baseTimeNanoseconds"] - unix_ns
    kernels: list[Kernel] = []
    calls: dict[int, Launch] = {}
    for item in document["traceEvents"]:
        kind, number = item.get("cat"), item.get("args", {}).get("correlation")
        if number is None or item["ph"] != "X":
            continue
        start = base + round(item["ts"] * 1000)
        end = start + round(item["dur"] * 1000)
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(Kernel(short_name(item["name"]), start, end, item["args"]["stream"], number))
        elif kind == "cuda_runtime" or (kind == "cuda_driver" and number not in calls):  # one may call the other
            calls[number] = Launch(item["name"], start, end, number)
    asked = {kernel.launch for kernel in kernels}
    return sorted(kernels, key=lambda k: k.start), sorted(
        (call for number, call in calls.items() if number in asked), key=lambda call: call.start
    )


def short_name(kernel: str) -> str:
    """A C++ kernel's name without namespaces, template and function arguments."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name)[0].strip().split("::")[-1][:60]
