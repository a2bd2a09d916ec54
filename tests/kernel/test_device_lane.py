"""The device's times in a trace are its events', on the trace's clock. With events and clocks that are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl.core.batch import Batch
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer, read_events
from minisgl.kernel import device_lane
from minisgl.kernel.device_lane import CudaLane, NoLane

MS = 10**6
DRIFT = 1.0001  # the GPU's clock gains 100 µs a second


class Machine:
    """A host's clock, and a GPU that is done with what it was asked for after `delay` of its stream."""

    def __init__(self) -> None:
        self.now, self.delay = 50_000 * MS, 0
        self.waited = 0

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=0)

        def record(stream: object = None) -> None:
            event.at = self.now + (0 if stream == "idle" else self.delay)
            self.now += 1000  # a call takes a microsecond

        def synchronize() -> None:
            self.waited += event.at > self.now
            self.now = max(self.now, event.at) + 1000

        event.record, event.synchronize = record, synchronize
        event.elapsed_time = lambda later: (later.at - event.at) * DRIFT / MS
        return event


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(device_lane, "timing_event", made.event)
    monkeypatch.setattr(device_lane, "idle_stream", lambda device: "idle")
    monkeypatch.setattr(device_lane, "time", SimpleNamespace(monotonic_ns=lambda: made.now))
    return made


def batch(requests: int = 3, decode: int = 3) -> Batch:
    params = SamplingParams(max_tokens=4)
    made = Batch([Req(uid, torch.zeros(4, dtype=torch.int32), params, uid) for uid in range(requests)], decode)
    made.positions = torch.zeros(requests + 5, dtype=torch.int64)
    return made


def lane(folder: Path) -> tuple[CudaLane, Tracer]:
    tracer = Tracer(folder / "trace.json")
    return CudaLane(tracer, torch.device("cpu")), tracer


def test_a_step_is_when_its_stream_was_at_it(tmp_path: Path, machine: Machine) -> None:
    """Two steps are launched before the first is written, as with overlap; the stream is 7 ms behind the host."""
    device, tracer = lane(tmp_path)
    machine.delay = 7 * MS
    starts = []
    for number in (1, 2):
        starts.append(machine.now + machine.delay)
        with device.step(number, batch(decode=3 if number == 2 else 0)):
            machine.delay += 5 * MS  # what the step asks of the device
    assert machine.waited == 0, "to launch a step waits for nothing"
    device.write()
    device.write()
    tracer.close()
    found = read_events(tmp_path / "trace.json")
    assert [(event.name, event.track) for event in found] == [("prefill", "device"), ("decode", "device")]
    assert [event.args["step"] for event in found] == [1, 2]
    assert (found[0].args["tokens"], found[0].args["requests"]) == (8, 3)
    for event, start in zip(found, starts, strict=True):
        assert event.ts == pytest.approx(start, abs=5000)
        assert event.duration == pytest.approx(5 * MS, abs=5000)
        assert event.args["error_ns"] <= 2000


def test_clocks_that_drift_apart_are_set_again(tmp_path: Path, machine: Machine) -> None:
    """After a minute the GPU's clock would be 6 ms off."""
    device, tracer = lane(tmp_path)
    machine.now += 60_000 * MS
    start = machine.now
    with device.step(1, batch()):
        machine.delay = MS
    device.write()
    tracer.close()
    (event,) = read_events(tmp_path / "trace.json")
    assert event.ts == pytest.approx(start, abs=100_000)


def test_without_a_trace_or_a_gpu_there_is_none(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace.json")
    for found in (
        device_lane.device_lane(tracer, torch.device("cpu")),
        device_lane.device_lane(Tracer(None), torch.device("cuda")),
    ):
        assert isinstance(found, NoLane)
        with found.step(1, batch()):
            pass
        found.write()
    tracer.close()
    assert read_events(tmp_path / "trace.json") == []
