"""What graphs will take is counted: the pool is smaller by that much, and the log says both numbers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from recordable import MAX_SEQ_LEN, Recorder, make_engine
from tiny_model import make_tiny_model

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.benchmark.models import CONFIGS
from minisgl.models.config import ModelConfig
from minisgl.stage3.page_pool import KVCachePool
from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.communicators_symm import SymmetricCommunicator
from minisgl.stage7.graph_memory import GraphMemory, graph_memory, layer_numbers
from minisgl.stage7.graph_runner import graph_sizes
from minisgl.stage7.step_graphs import SIZES

ROOM = 1 << 30  # bytes
LLAMA = ModelConfig.from_dict(CONFIGS["llama-3.1-8b"])
EXPERTS = ModelConfig.from_dict(CONFIGS["qwen3-30b-a3b"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU whose steps can be recorded, and whose pool is sized as that of a GPU with ROOM bytes."""
    monkeypatch.setattr("minisgl.stage7.graph_runner.why_no_graphs", lambda engine: None)
    monkeypatch.setattr("minisgl.stage7.graph_runner.CudaGraphMaker", lambda device: Recorder())
    monkeypatch.setattr("minisgl.stage3.engine.pool_terms", lambda device, ratio, free, held: (ratio, ROOM, held))
    return monkeypatch


def test_one_layer_of_known_shapes() -> None:
    """Llama-3.1-8B: 32 query heads and 8 KV heads of 128, an MLP of 14,336. Qwen3-30B-A3B: 8 of 128 experts of 768."""
    assert layer_numbers(LLAMA, 0, 1) == 3 * 4096 + (3 * 4096 + 2 * 1024) + 3 * 14336
    assert layer_numbers(LLAMA, 1, 2) == 3 * 4096 + (3 * 2048 + 2 * 512) + 3 * 7168, "half of all but the residual"
    assert layer_numbers(EXPERTS, 0, 1) == 3 * 2048 + (3 * 4096 + 2 * 512) + 128 + 8 * (768 + 2048)


def test_the_largest_step_of_each_kind_counts_and_every_graph() -> None:
    one = graph_memory(LLAMA, (0, 1), 2, 0, [256], [])
    more = graph_memory(LLAMA, (0, 1), 2, 0, [256, 128, 64], [])
    both = graph_memory(LLAMA, (0, 1), 2, 0, [256, 128, 64], [2048, 64])
    assert more.activations == one.activations == 256 * layer_numbers(LLAMA, 0, 1) * 2
    assert both.activations == 9 * one.activations
    assert (more.graphs, both.graphs) == (3 * one.graphs, 5 * one.graphs)
    assert one.once == both.once > 0


# Model, ranks, largest decode step, NCCL, GiB that graphs took on H200s on 2026-11-30 (Qwen3-0.6B in two runs).
RUNS = [
    ("llama-3.1-8b", 1, 64, False, 0.52),
    ("llama-3.1-8b", 1, 256, False, 0.52),
    ("llama-3.1-8b", 2, 64, False, 0.42),
    ("llama-3.1-8b", 2, 256, False, 0.45),
    ("llama-3.1-8b", 2, 64, True, 0.54),
    ("qwen3-0.6b", 1, 256, False, 0.30),
    ("qwen3-0.6b", 1, 256, False, 0.32),
    ("qwen3-30b-a3b", 1, 256, False, 0.50),
]


@pytest.mark.parametrize(("name", "ranks", "largest", "nccl", "used"), RUNS)
def test_recorded_runs_are_counted_on_the_safe_side(
    name: str, ranks: int, largest: int, nccl: bool, used: float
) -> None:
    model = ModelConfig.from_dict(CONFIGS[name])
    pages_a_row = model.max_position // 16
    sizes = graph_sizes(largest), list(SIZES)
    counted = graph_memory(model, (0, ranks), 2, pages_a_row, *sizes, nccl).total / 2**30
    assert used + 0.005 <= counted <= used + 0.15, "two decimals were told"


def test_a_row_has_a_place_for_each_of_its_pages() -> None:
    """int32, in the buffers of decode steps and again, beside 64 prompts, in those of steps with prompts."""
    bare, wide = (graph_memory(LLAMA, (0, 1), 2, pages, [256], [2048]) for pages in (0, 1000))
    assert wide.buffers - bare.buffers == (256 + 256 + 64) * 1000 * 4
    assert wide.total - bare.total == wide.buffers - bare.buffers


def test_only_what_will_be_recorded_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_memory(LLAMA, (0, 1), 2, 100, [], [2048]) == GraphMemory()
    engine = make_engine(folder, monkeypatch, "cpu")
    assert engine.reserved_bytes() == 0, "a CPU"
    engine.device = torch.device("cuda")
    assert engine.reserved_bytes() > 0
    engine.config = dataclasses.replace(engine.config, cuda_graph_max_bs=0)
    assert engine.reserved_bytes() == 0, "off"
    engine.config = dataclasses.replace(engine.config, cuda_graph_max_bs=4)
    engine.attention = PagedTorchAttention(9, 3, 8, 4)
    assert engine.reserved_bytes() == 0, "a backend that cannot be recorded"


def test_what_nccl_takes_for_being_recorded_counts_if_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, monkeypatch, "cpu")
    engine.device = torch.device("cuda")
    without = engine.reserved_bytes()
    for kind, more in ((DistributedCommunicator, True), (SymmetricCommunicator, False)):
        engine.comm = object.__new__(kind)
        engine.comm.rank, engine.comm.size, engine.comm.device = 0, 1, engine.device
        assert (engine.reserved_bytes() > without + (64 << 20)) is more, kind


def test_the_pool_is_smaller_by_what_graphs_will_take(folder: Path, on_a_gpu: pytest.MonkeyPatch) -> None:
    options = {"num_pages": None, "max_running_requests": 50_000}  # more rows than the memory can fill
    on_a_gpu.setattr("minisgl.stage7.graph_runner.GraphEngine.prepare_to_run", lambda engine: None)
    engine = make_engine(folder, on_a_gpu, "cpu", **options)
    expected = graph_memory(engine.model_config, (0, 1), 4, MAX_SEQ_LEN // 4, [8, 4, 2, 1], [])
    assert engine.reserved_bytes() == expected.total > 100 << 20
    on_a_gpu.setattr("minisgl.stage7.graph_runner.GraphEngine.reserved_bytes", lambda engine: 0)
    without = make_engine(folder, on_a_gpu, "cpu", **options)
    each = KVCachePool.page_bytes(2, 4, 3, 8, engine.dtype)
    assert 0 <= without.pool.num_pages - engine.pool.num_pages - expected.total // each <= 1


@pytest.mark.parametrize(("used", "warnings"), [(2.0, 1), (0.01, 0)])
def test_the_log_says_what_was_counted_and_what_was_used(
    folder: Path, on_a_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, used: float, warnings: int
) -> None:
    left = iter((9.0, 9.0 - used))
    on_a_gpu.setattr("minisgl.stage7.graph_runner.free_memory", lambda device: int(next(left) * 2**30))
    with caplog.at_level(logging.INFO, "minisgl"):
        engine = make_engine(folder, on_a_gpu, "cpu")
    told = [record for record in caplog.records if record.getMessage().startswith("CUDA graphs")]
    said = f"CUDA graphs: {used:.2f} GiB ({engine.reserved_bytes() / 2**30:.2f} counted: "
    assert sum(record.getMessage().startswith(said) for record in told) == 1
    assert sum(record.levelno == logging.WARNING for record in told) == warnings
