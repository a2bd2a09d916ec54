"""Graphs with a recorder that only calls again what it recorded: buffers, padding and sizes, all but CUDA itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from recordable import MAX_SEQ_LEN, FixedShapeAttention, Recorder, make_engine
from tiny_model import make_tiny_model
from torch import Tensor

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.batch import Batch
from minisgl.core.config import make_config
from minisgl.core.context import Context
from minisgl.core.llm import Request
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import LocalInbox
from minisgl.stage6.messages import AddRequests
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphAttention, GraphEngine, GraphRunner, graph_sizes, sizes_to_record
from minisgl.stage7.llm import LLM

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> GraphEngine:
    return make_engine(folder, monkeypatch, "cpu")


def generate(engine: GraphEngine, count: int) -> dict[int, list[int]]:
    scheduler = Scheduler(engine.config, engine, frozenset({257}), Tracer(None))
    inbox = LocalInbox()
    inbox.put(AddRequests([Request(uid, [uid * 7 + i for i in range(3 + 5 * uid)], GREEDY) for uid in range(count)]))
    tokens: dict[int, list[int]] = {uid: [] for uid in range(count)}
    for outputs in LLM.plain_loop(scheduler, inbox):
        for output in outputs:
            assert output.token_id is not None
            tokens[output.uid].append(output.token_id)
        if inbox.idle:
            return tokens
    raise AssertionError


def test_padded_graphs_give_the_tokens_of_eager_steps(engine: GraphEngine) -> None:
    """Larger batches before smaller ones and again: what an earlier step left in the buffers must not matter."""
    assert engine.graphs is None
    counts = (5, 2, 3, 1, 6)
    expected = [generate(engine, count) for count in counts]
    recorder = Recorder()
    assert isinstance(engine.attention, FixedShapeAttention)
    engine.graphs = GraphRunner(engine, engine.attention, graph_sizes(8), recorder)
    assert [generate(engine, count) for count in counts] == expected
    assert recorder.recorded == 4
    assert recorder.replayed == len(counts) * 19, "every decode step"


def test_graph_inputs_never_move(engine: GraphEngine) -> None:
    seen: set[tuple[int, ...]] = set()
    forward = engine.model.model.forward

    def listen(context: Context) -> Tensor:
        assert context.out_loc is not None
        if context.logits_rows is None and len(context.input_ids) == 4:
            seen.add(tuple(x.data_ptr() for x in (context.input_ids, context.positions, context.out_loc)))
        return forward(context)

    engine.model.model.forward = listen
    assert isinstance(engine.attention, FixedShapeAttention)
    engine.graphs = GraphRunner(engine, engine.attention, graph_sizes(4), Recorder())
    generate(engine, 3)
    assert len(seen) == 1


def test_only_decode_batches_up_to_the_largest_size_are_padded(engine: GraphEngine) -> None:
    assert isinstance(engine.attention, FixedShapeAttention)
    engine.graphs = GraphRunner(engine, engine.attention, graph_sizes(8), Recorder())
    req = engine.dummy_req
    for size, num_decode, padded in [(3, 3, 4), (4, 4, 4), (5, 5, 8), (9, 9, 9), (3, 0, 3), (3, 2, 3)]:
        batch = Batch([req] * size, num_decode)
        engine.pad(batch)
        assert (batch.size, batch.padded_size) == (size, padded)
        assert engine.graphs.can_run(batch) == (num_decode == size <= 8)


def test_hazard_8_what_pads_a_batch_writes_to_the_dummy_page(engine: GraphEngine) -> None:
    """Whatever the rows of requests hold: a free one still has the slots of its last owner, which are another's now."""
    assert isinstance(engine.attention, FixedShapeAttention)
    engine.graphs = GraphRunner(engine, engine.attention, graph_sizes(8), Recorder())
    engine.table.device[:-1] = 7
    params = SamplingParams(max_tokens=8)
    reqs = [Req(row, torch.zeros(3, dtype=torch.int32), params, row, cached_len=2) for row in (0, 4, 2)]
    batch = Batch(reqs, num_decode=3)
    engine.pad(batch)
    rows, _ = engine.prepare(batch)
    assert batch.out_loc.tolist() == [7, 7, 7, engine.pool.dummy_slot]
    assert rows.tolist() == [0, 4, 2, engine.table.dummy_row]


def test_sizes() -> None:
    """The largest itself is one of them, or the fullest batches would be launched kernel by kernel."""
    assert graph_sizes(24) == [24, 16, 8, 4, 2, 1]
    assert graph_sizes(100) == [100, *range(96, 0, -8), 4, 2, 1]
    assert graph_sizes(7) == [7, 4, 2, 1]
    assert graph_sizes(1) == [1]


@pytest.mark.parametrize(("wanted", "largest"), [(8, 8), (100, 12), (12, 12), (None, 12)])
def test_no_size_is_larger_than_what_may_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | None, largest: int
) -> None:
    """12 requests."""
    engine = make_engine(folder, monkeypatch, "cpu", cuda_graph_max_bs=wanted)
    monkeypatch.setattr("minisgl.stage7.graph_runner.why_no_graphs", lambda engine: None)
    assert sizes_to_record(engine)[0] == graph_sizes(largest)


def test_the_log_says_the_sizes(engine: GraphEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(engine.attention, FixedShapeAttention)
    with caplog.at_level(logging.INFO, "minisgl"):
        GraphRunner(engine, engine.attention, graph_sizes(12), Recorder())
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "CUDA graphs: recording 5 batch sizes: 12 8 4 2 1"
    assert said[-1].startswith("CUDA graphs: 5 of 5 recorded, ")


def test_a_cpu_says_that_graphs_need_cuda(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(OverlapConfig, {"dtype": "float32", "device": "cpu", "num_pages": 4})
    with caplog.at_level(logging.INFO, "minisgl"):
        engine = GraphEngine(config, folder, ModelConfig.from_folder(folder), MAX_SEQ_LEN)
    assert engine.graphs is None
    assert [r.getMessage() for r in caplog.records if "graphs" in r.getMessage() and "start" not in r.getMessage()] == [
        "CUDA graphs need CUDA: on the cpu every step is launched kernel by kernel"
    ]


def test_a_backend_without_capture_methods_is_told_apart() -> None:
    assert isinstance(FixedShapeAttention(9, 3, 8, 4), GraphAttention)
    assert not isinstance(PagedTorchAttention(9, 3, 8, 4), GraphAttention)


@pytest.mark.gpu
def test_cuda_graphs_give_the_tokens_of_eager_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, monkeypatch, "cuda")
    assert engine.graphs is not None
    graphs, engine.graphs = engine.graphs, None
    expected = [generate(engine, count) for count in (5, 2, 3, 1, 6)]
    engine.graphs = graphs
    assert [generate(engine, count) for count in (5, 2, 3, 1, 6)] == expected
