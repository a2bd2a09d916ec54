"""Steps with prompts as graphs, all but CUDA itself: which are padded, and with what. tests/gpu runs the real ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_engine import serve
from tiny_model import make_tiny_model
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.batch import Batch
from minisgl.core.config import make_config
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7 import step_graphs
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.step_graphs import record_each, record_steps


class RecordableAttention(PagedTorchAttention):
    """Its lengths are fixed once recorded, so only a batch like the recorded one would come out right."""

    def can_record_steps(self) -> bool:
        return True

    def init_capture_steps(self, max_decode: int, max_prompts: int, max_tokens: int, page_table: Tensor) -> None:
        pass

    def prepare_for_capture(self, batch: Batch) -> Any:
        return None

    def prepare_for_replay(self, batch: Batch) -> None:
        self.replayed = [req.extend_len for req in batch.padded_reqs]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> GraphEngine:
    kind = getattr(request, "param", RecordableAttention)
    monkeypatch.setattr("minisgl.stage3.engine.create_attention", lambda name, *shape: kind(*shape[:4]))
    options = {"dtype": "float32", "device": "cpu", "num_pages": 64, "page_size": 4, "max_running_requests": 20}
    folder = make_tiny_model(tmp_path)
    return GraphEngine(make_config(OverlapConfig, options), folder, ModelConfig.from_folder(folder), 200)


def req(engine: GraphEngine, row: int, tokens: int, cached: int = 0) -> Req:
    return Req(row, torch.zeros(cached + tokens, dtype=torch.int32), SamplingParams(max_tokens=1), row, cached)


@pytest.mark.parametrize("engine", [PagedTorchAttention], indirect=True)
def test_a_backend_that_cannot_record_prompts_has_no_such_graphs(engine: GraphEngine) -> None:
    assert record_steps(engine, 2048, 4, lambda run: run) is None


def test_sizes_are_those_that_fit(engine: GraphEngine) -> None:
    assert record_steps(engine, 63, 4, lambda run: run) is None
    recorded: list[Any] = []
    record_steps(engine, 2048, 4, lambda run: recorded.append(run) or run)
    assert len(recorded) == 3, "64, 128 and 192 of at most 200 positions"


def test_padding_is_one_more_request_on_the_dummy_page(engine: GraphEngine) -> None:
    graphs = record_steps(engine, 128, 4, lambda run: lambda: None)
    assert graphs is not None
    engine.table.device[:-1] = 7  # what the rows of requests hold
    cases = (((30, 20), 0, 64), ((64,), 0, 64), ((65,), 0, 128), ((3,) * 15, 0, 64), ((1, 1, 1, 1, 50), 4, 64))
    for tokens, num_decode, padded in cases:
        batch = Batch([req(engine, row, n, cached=4) for row, n in enumerate(tokens)], num_decode)
        graphs.pad(batch)
        assert batch.num_tokens == padded
        assert batch.padded_size == len(tokens) + (sum(tokens) < padded)
        engine.prepare(batch)
        assert (batch.out_loc[sum(tokens) :] == engine.pool.dummy_slot).all()
        for each in batch.reqs:
            each.complete_one()  # a batch is launched after its requests' lengths have advanced
        assert graphs.can_run(batch)


@pytest.mark.parametrize(("tokens", "num_decode"), [((200,), 0), ((1,) * 3, 0), ((1, 1), 2), ((1,) * 5 + (50,), 5)])
def test_too_long_too_many_or_no_prompts(
    engine: GraphEngine, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], num_decode: int
) -> None:
    monkeypatch.setattr("minisgl.stage7.step_graphs.MOST_PROMPTS", 3)
    graphs = record_steps(engine, 128, 4, lambda run: run)
    assert graphs is not None
    batch = Batch([req(engine, row, n) for row, n in enumerate(tokens)], num_decode)
    graphs.pad(batch)
    assert batch.padded_size == len(tokens)
    engine.prepare(batch)
    assert not graphs.can_run(batch)


def test_a_prompt_whose_logprobs_are_wanted_runs_in_no_graph(engine: GraphEngine) -> None:
    """It was padded for one before that is known; what is measured is of its own tokens."""
    asked = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=True)
    found = []
    for largest in (128, 0):
        engine.step_graphs = record_steps(engine, largest, 4, lambda run: lambda: pytest.fail("replayed"))
        scheduler = Scheduler(engine.config, engine, frozenset(), Tracer(None))
        found += serve(scheduler, [list(range(30)), list(range(40, 50))], [asked] * 2)
    for padded, plain in zip(found[:2], found[2:], strict=True):
        for a, b in zip(padded, plain, strict=True):
            assert (a.token_id, a.logprob.top[0][0]) == (b.token_id, b.logprob.top[0][0])
        for c, d in zip(padded[0].prompt_logprobs[1:], plain[0].prompt_logprobs[1:], strict=True):
            assert c.logprob == pytest.approx(d.logprob, abs=1e-4)


def test_what_a_longer_batch_left_points_at_no_token_of_a_shorter(engine: GraphEngine) -> None:
    seen: list[Tensor] = []
    graphs = record_steps(engine, 128, 4, lambda run: lambda: seen.append(graphs._logits_rows.clone()))  # type: ignore[union-attr]
    assert graphs is not None
    for tokens in ((40, 50, 10), (7,)):
        batch = Batch([req(engine, row, n) for row, n in enumerate(tokens)])
        graphs.pad(batch)
        engine.prepare(batch)
        batch.input_ids = torch.zeros(batch.num_tokens, dtype=torch.int32)
        with torch.inference_mode():
            assert len(graphs.replay(batch)) == len(tokens)
    assert seen[0][:4].tolist() == [39, 89, 99, 127]
    assert seen[1][:2].tolist() == [6, 63]
    assert int(seen[1].max()) == 63


def test_the_log_says_which_sizes_and_how_far_it_is(
    engine: GraphEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In seconds: a start that records for a minute is not taken for one that hangs."""
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(step_graphs.time, "perf_counter", lambda: float(next(now)))
    with caplog.at_level(logging.INFO, "minisgl"):
        record_each([4, 2, 1], lambda size: lambda: None)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"CUDA graphs: {n} of 3 recorded, {3.0 * n:.1f} s" for n in (1, 2, 3)]
    caplog.clear()
    with caplog.at_level(logging.INFO, "minisgl"):
        record_steps(engine, 130, 8, lambda run: run)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "CUDA graphs: recording steps with prompts of 128 64 tokens"
    assert said[-1].startswith("CUDA graphs: 2 of 2 recorded, ")
