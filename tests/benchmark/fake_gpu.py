"""A GPU for `record-trace` where there is none: events are stamps, and the profiler's kernels are torch's operators."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from minisgl.benchmark import device_trace, record_trace
from minisgl.kernel import device_lane
from minisgl.stage5 import scheduler

PRODUCTS = ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm")  # which of them is torch's affair


class StampedEvent:
    """The CPU has done what it was asked for as soon as it is asked."""

    def record(self, stream: object = None) -> None:
        self.ns = time.monotonic_ns()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: StampedEvent) -> float:
        return (later.ns - self.ns) / 1e6


class OperatorProfiler:
    """Each product looks like a kernel that was launched when it began, and ran in the second half of its time."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU])

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def export_chrome_trace(self, path: str) -> None:
        self._profile.export_chrome_trace(path)
        document = json.loads(Path(path).read_text())
        operators = [item for item in document["traceEvents"] if item["name"] in PRODUCTS]
        document["traceEvents"] = [made for item in operators for made in _as_gpu(item)]
        Path(path).write_text(json.dumps(document))


def _as_gpu(operator: dict[str, Any]) -> list[dict[str, Any]]:
    args = {"correlation": operator["args"]["External id"]}
    half = operator["dur"] / 2
    launch = {**operator, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": half, "args": args}
    name = "void some::mm_kernel<4, (anonymous namespace)::F>(int)"
    kernel = {**operator, "cat": "kernel", "name": name, "ts": operator["ts"] + half, "dur": half}
    return [launch, {**kernel, "args": {**args, "stream": 7}}]


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lane, "timing_event", StampedEvent)
    monkeypatch.setattr(device_lane, "idle_stream", lambda device: None)
    monkeypatch.setattr(scheduler, "device_lane", device_lane.CudaLane)
    monkeypatch.setattr(device_trace, "device_profiler", OperatorProfiler)
    monkeypatch.setattr(record_trace, "check_machine", lambda subject: None)
    monkeypatch.setattr(record_trace.sys, "argv", ["benchmark", "record-trace", "--out", "here", "steps", "--tp", "1"])
