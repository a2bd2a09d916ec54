"""A run's trace has each step as the GPU saw it: after its launch began, before its commit was over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import read_events
from minisgl.stage7.llm import LLM

pytestmark = pytest.mark.gpu

SLACK = 100_000  # nanoseconds between two clocks


@pytest.mark.parametrize("disable_overlap", [True, False])
def test_each_step_is_on_the_device_after_its_launch(tmp_path: Path, disable_overlap: bool) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=512, num_attention_heads=4, num_key_value_heads=2)
    trace = str(tmp_path / "trace.json")
    options = {"num_pages": 200, "max_seq_len": 512, "max_running_requests": 16, "cuda_graph_max_bs": 8}
    with LLM(str(model), device="cuda", trace=trace, disable_overlap=disable_overlap, **options) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=30, ignore_eos=True))
    events = read_events(trace)
    forwards = {event.args["step"]: event for event in events if event.name == "forward"}
    device = {event.args["step"]: event for event in events if event.track == "device"}
    assert device.keys() == forwards.keys()
    assert len(device) >= 30
    ends = []
    for step, event in sorted(device.items()):
        assert event.ts >= forwards[step].ts - SLACK
        assert event.duration is not None
        assert 0 < event.duration < 10**9
        if ends:
            assert event.ts >= ends[-1] - 1000, "steps of one stream do not overlap"
        ends.append(event.ts + event.duration)
    last = max(event.ts + (event.duration or 0) for event in events if event.track == "scheduler")
    assert ends[-1] <= last + SLACK + 10**7
