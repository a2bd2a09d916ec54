"""Every kernel of a GPU as an event of a trace, by torch's profiler. Knows nothing of workloads.

Its times are brought to the trace's clock, CLOCK_MONOTONIC.
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

from torch.profiler import ProfilerActivity, profile

from minisgl.core.trace import Tracer

LAUNCHES, STREAM = "launches", "stream "  # tracks; a stream's has its number


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
