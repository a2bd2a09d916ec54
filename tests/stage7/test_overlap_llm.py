"""Stage 7 as its user sees it: both loops give the same answers, in one process and in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from scripted_loop import MAX_SEQ_LEN, add, make_scheduler
from test_overlap import run
from tiny_model import make_tiny_model

from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer, read_events
from minisgl.stage3.engine import EngineStartError
from minisgl.stage7.llm import LLM

PROMPTS = ["The quick brown fox", "Wie geht es dir?", "def add(a, b):", "你好"]
PARAMS = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=25),
    SamplingParams(temperature=1.0, top_k=20, max_tokens=11),
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "page_size": 4, "device": "cpu", "max_seq_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[Completion]]:
    with LLM(str(folder), disable_overlap=True, **OPTIONS) as llm:
        yield llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("chunk", [8192, 5])
def test_overlap_gives_the_plain_loops_answers(folder: Path, expected: list[Completion], chunk: int) -> None:
    with LLM(str(folder), max_prefill_length=chunk, **OPTIONS) as llm:
        assert llm.generate(PROMPTS, PARAMS) == expected
        chunks = llm.stream(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(9):
            next(chunks)
        chunks.close()
        stats = llm.stats()
        assert stats["pages_free"] + stats["pages_cached"] == 64
        assert stats["rows_free"] == llm.config.max_running_requests


@pytest.mark.parametrize("disable_overlap", [True, False])
def test_a_loop_that_an_error_ended_says_so(
    folder: Path, disable_overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), disable_overlap=disable_overlap, **OPTIONS) as llm:
        monkeypatch.setattr(llm.ranks.scheduler.engine, "run_model", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, PARAMS)
        with pytest.raises(RuntimeError, match="the loop of this LLM was ended by an error: make a new one"):
            llm.generate(PROMPTS, PARAMS)


def test_a_start_that_failed_leaves_the_callers_threads_as_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the engine's first step takes all but one of them from the caller."""
    monkeypatch.setattr("minisgl.stage3.engine.load_model", lambda *args: 1 / 0)
    torch.set_num_threads(2)
    try:
        with pytest.raises(EngineStartError):
            LLM(str(folder), **OPTIONS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.timeout(120)
def test_overlap_in_two_ranks(folder: Path, expected: list[Completion]) -> None:
    with LLM(str(folder), tp=2, **OPTIONS) as llm:
        assert llm.generate(PROMPTS, PARAMS) == expected
        chunks = llm.stream(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        next(chunks)
        chunks.close()
        stats = llm.stats()
        assert stats["pages_free"] + stats["pages_cached"] == 64


def test_the_trace_has_both_lanes_and_an_arrow_for_each_step(tmp_path: Path) -> None:
    scheduler = make_scheduler(FakeEngine(16, 4, 2, MAX_SEQ_LEN))
    scheduler.tracer = Tracer(tmp_path / "trace.json")
    run(scheduler, [[add(0, [1, 2, 3], 6, ignore_eos=True)]])
    scheduler.tracer.close()
    events = [event for event in read_events(tmp_path / "trace.json") if event.track in ("scheduler", "engine")]
    spans = {(event.track, event.name) for event in events if event.phase == "X"}
    assert spans >= {("scheduler", "schedule"), ("scheduler", "launch"), ("scheduler", "commit"), ("engine", "forward")}
    arrows = [sorted(event.flow_id for event in events if event.phase == phase) for phase in "sf"]
    assert arrows == [[1, 2, 3, 4, 5, 6]] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_has_a_span_for_its_commit(tmp_path: Path, overlap: bool) -> None:
    """After its own forward, and with overlap after the next one's schedule."""
    scheduler = make_scheduler(FakeEngine(16, 4, 2, MAX_SEQ_LEN))
    scheduler.tracer = Tracer(tmp_path / "trace.json")
    run(scheduler, [[add(0, [1, 2, 3], 6, ignore_eos=True)]], overlap)
    scheduler.tracer.close()
    spans = [event for event in read_events(tmp_path / "trace.json") if event.phase == "X"]
    calls = [event.name for event in sorted(spans, key=lambda event: event.ts) if event.track == "scheduler"]
    assert calls.count("commit") == 6
    order = [name for name in calls if name in ("schedule", "commit")]
    if overlap:
        assert order == ["schedule", *["schedule", "commit"] * 5, "commit"]
    else:
        assert order == ["schedule", "commit"] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("tp", [1, 2])
def test_overlap_on_gpus(folder: Path, expected: list[Completion], tp: int) -> None:
    """Streams and events instead of a thread; NCCL instead of gloo. (A GPU's sums differ: only greedy is compared.)"""
    if tp > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    with LLM(str(folder), tp=tp, **{**OPTIONS, "device": "cuda"}) as llm:
        for _ in range(3):
            answers = llm.generate(PROMPTS, PARAMS)  # from the second time on with cached prefixes
            assert [c.token_ids for c in answers[:2]] == [c.token_ids for c in expected[:2]]
        chunks = llm.stream(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        next(chunks)
        chunks.close()
        stats = llm.stats()
        assert stats["pages_free"] + stats["pages_cached"] == 64


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_built_in_model_overlapped_and_cut(model_folder: Path) -> None:
    """Overlap in two ranks against one plain rank, on 9 heads and 3 KV heads."""
    prompts = ["What is 2+2?", "The three primary colours are"]
    params = SamplingParams(max_tokens=12)
    options = {"dtype": "float32", "device": "cpu", "num_pages": 32}
    with LLM(str(model_folder), disable_overlap=True, threads=1, **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM(str(model_folder), tp=2, **options) as llm:
        assert llm.generate(prompts, params) == expected
