"""Graphs in pieces with a recorder that calls each operation again, on the tensors that it was recorded with: what a
CUDA graph does, all but CUDA. tests/gpu runs the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_engine import serve
from tiny_model import make_tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.core.batch import Batch
from minisgl.core.config import make_config
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage3.engine import Engine
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.piecewise_graphs import PiecewiseGraphs

PROMPTS = [[(7 * i + 11 * n) % 250 for i in range(n)] for n in (5, 70, 33, 1, 90)]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 3, 12, 20, 4)]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out

    def again(self) -> None:
        for func, args, kwargs, out in self.done:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class OperationRecorder:
    def __init__(self) -> None:
        self.rehearsed = self.pieces = 0
        self.recording: Operations | None = None

    def rehearse(self, run: Callable[[], None]) -> None:
        self.rehearsed += 1
        run()

    def begin(self) -> None:
        assert self.recording is None
        self.recording = Operations()
        self.recording.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.recording is not None
        self.recording.__exit__(None, None, None)
        done, self.recording = self.recording, None
        self.pieces += 1
        return done.again


@pytest.fixture
def engine(tmp_path: Path) -> GraphEngine:
    options = {"dtype": "float32", "device": "cpu", "num_pages": 64, "page_size": 4, "max_running_requests": 20}
    folder = make_tiny_model(tmp_path)
    return GraphEngine(make_config(OverlapConfig, options), folder, ModelConfig.from_folder(folder), 200)


def batch_of(engine: GraphEngine, tokens: tuple[int, ...], num_decode: int = 0) -> Batch:
    reqs = [
        Req(
            row, torch.arange(n, dtype=torch.int32), SamplingParams(max_tokens=1), row, n - 1 if row < num_decode else 0
        )
        for row, n in enumerate(tokens)
    ]
    batch = Batch(reqs, num_decode)
    pages = iter(range(64))
    for req in reqs:
        slots = [4 * page + i for page in (next(pages) for _ in range(-(-req.device_len // 4))) for i in range(4)]
        engine.table.device[req.table_idx, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    engine.prepare(batch)
    batch.input_ids = torch.cat([req.input_ids[req.cached_len :] for req in reqs])
    return batch


def test_one_graph_more_than_layers_and_the_sizes_that_are_wanted(engine: GraphEngine) -> None:
    recorder = OperationRecorder()
    graphs = PiecewiseGraphs(engine, 200, recorder)
    assert recorder.rehearsed == 3, "64, 128 and 192 tokens"
    assert recorder.pieces == 3 * (engine.model_config.num_layers + 1)
    assert [graphs.can_run(batch_of(engine, (n,))) for n in (1, 192, 193)] == [True, True, False]
    assert not graphs.can_run(batch_of(engine, (3, 4), num_decode=2)), "decode steps have graphs of their own"
    assert not PiecewiseGraphs(engine, 63, recorder).can_run(batch_of(engine, (1,)))


@pytest.mark.parametrize(("tokens", "num_decode"), [((30, 20), 0), ((64,), 0), ((9, 7, 70), 2), ((1,) * 15, 0)])
@torch.inference_mode()
def test_logits_are_those_of_a_step_without_graphs(
    engine: GraphEngine, tokens: tuple[int, ...], num_decode: int
) -> None:
    graphs = PiecewiseGraphs(engine, 128, OperationRecorder())
    for some in ((100,), tokens):  # what a longer step has left changes nothing
        batch = batch_of(engine, some, num_decode if some is tokens else 0)
        expected = Engine.run_model(engine, batch)
        torch.testing.assert_close(graphs.replay(batch), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_padding_stores_on_the_dummy_page(engine: GraphEngine) -> None:
    graphs = PiecewiseGraphs(engine, 128, OperationRecorder())
    graphs.replay(batch_of(engine, (120,)))
    batch = batch_of(engine, (30,))
    before = engine.pool.k_cache(0).clone()
    graphs.replay(batch)
    changed = (engine.pool.k_cache(0) != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= set(batch.out_loc.tolist()) | {engine.pool.dummy_slot}


@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_tokens_are_those_without_graphs(engine: GraphEngine, policy: str) -> None:
    found = []
    config = make_config(OverlapConfig, {"page_size": 4, "schedule_policy": policy, "max_prefill_length": 50})
    for largest in (128, 0):
        engine.pieces = PiecewiseGraphs(engine, largest, recorder := OperationRecorder())
        served = serve(Scheduler(config, engine, frozenset(), Tracer(None)), PROMPTS, PARAMS)
        found.append([[output.token_id for output in each] for each in served])
        assert recorder.pieces == (6 if largest else 0)
    assert found[0] == found[1]


def test_a_prompt_whose_logprobs_are_wanted_runs_in_no_graph(engine: GraphEngine) -> None:
    """It needs the hidden states of all its tokens."""
    asked = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2, prompt_logprobs=True)
    engine.pieces = PiecewiseGraphs(engine, 128, OperationRecorder())
    engine.pieces.replay = lambda batch: pytest.fail("replayed")  # type: ignore[method-assign]
    (outputs,) = serve(Scheduler(engine.config, engine, frozenset(), Tracer(None)), [list(range(30))], [asked])
    assert outputs[0].logprob is not None


def test_a_failure_ends_the_recording(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = OperationRecorder()
    rehearse = recorder.rehearse

    def then_fail(run: Callable[[], None]) -> None:
        rehearse(run)
        monkeypatch.setattr(engine.model.model.norm, "forward", lambda *args: 1 / 0)

    monkeypatch.setattr(recorder, "rehearse", then_fail)
    with pytest.raises(ZeroDivisionError):
        PiecewiseGraphs(engine, 64, recorder)
    assert recorder.recording is None
