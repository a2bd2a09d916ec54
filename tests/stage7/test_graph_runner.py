"""Graphs with a recorder that only calls again what it recorded: buffers, padding and sizes, all but CUDA itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.batch import Batch
from minisgl.core.config import make_config
from minisgl.core.context import Context
from minisgl.core.llm import Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import LocalInbox
from minisgl.stage6.messages import AddRequests
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphAttention, GraphEngine, GraphRunner, Replay, graph_sizes
from minisgl.stage7.llm import LLM

MAX_SEQ_LEN = 64
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


class FixedDecode(NamedTuple):
    slots: Tensor  # int64 [rows, width]
    seen: Tensor  # bool [rows, 1, 1, width]


class FixedShapeAttention(PagedTorchAttention):
    """Decode reads whole rows of the table and masks: only values depend on a length, no shape does."""

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> Any:
        if batch.phase != "decode":
            return super().prepare_metadata(batch, page_table)
        device = page_table.device
        rows = torch.tensor([req.table_idx for req in batch.padded_reqs], device=device)
        lengths = torch.tensor([req.device_len for req in batch.padded_reqs], device=device)
        seen = torch.arange(page_table.shape[1], device=device) < lengths[:, None]
        return FixedDecode(page_table[rows].long(), seen[:, None, None])

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        slots = torch.zeros(max_size, page_table.shape[1], dtype=torch.int64, device=page_table.device)
        self.buffers = FixedDecode(slots, torch.ones_like(slots, dtype=torch.bool)[:, None, None])

    def prepare_for_capture(self, batch: Batch) -> FixedDecode:
        return FixedDecode(*(buffer[: batch.size] for buffer in self.buffers))

    def prepare_for_replay(self, batch: Batch) -> None:
        for buffer, live in zip(self.buffers, batch.attn_metadata, strict=True):  # type: ignore[call-overload]
            buffer[: batch.padded_size] = live

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        metadata, cache = ctx.attn_metadata, ctx.kv_cache
        if not isinstance(metadata, FixedDecode):
            return super().forward(q, k, v, layer_id, ctx)
        assert cache is not None
        assert ctx.out_loc is not None
        cache.store(layer_id, k, v, ctx.out_loc)
        keys, values = (x[metadata.slots].transpose(1, 2) for x in (cache.k_cache(layer_id), cache.v_cache(layer_id)))
        out = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=metadata.seen, enable_gqa=True)
        return out[:, :, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> GraphEngine:
    def create(name: str, *shape: Any) -> FixedShapeAttention:
        return FixedShapeAttention(*shape[:4])

    monkeypatch.setattr("minisgl.stage3.engine.create_attention", create)
    options = {"dtype": "float32", "device": device, "num_pages": 64, "page_size": 4, "max_running_requests": 12}
    config = make_config(OverlapConfig, {**options, "cuda_graph_max_bs": 8})
    return GraphEngine(config, folder, ModelConfig.from_folder(folder), MAX_SEQ_LEN)


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> GraphEngine:
    return make_engine(folder, monkeypatch, "cpu")


class Recorder:
    """The fake: a graph is a function over fixed buffers, called again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Replay) -> Replay:
        with torch.inference_mode():
            run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


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


def test_sizes() -> None:
    assert graph_sizes(24) == [24, 16, 8, 4, 2, 1]
    assert graph_sizes(7) == [4, 2, 1]
    assert graph_sizes(1) == [1]


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
