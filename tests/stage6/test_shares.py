"""What each rank holds, how often ranks meet, and that together they compute what one would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.core.config import make_config
from minisgl.core.llm import Request
from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.config import ParallelConfig
from minisgl.stage6.engine import RankEngine, check_parallel
from minisgl.stage6.inbox import LocalInbox
from minisgl.stage6.llm import LLM
from minisgl.stage6.messages import AddRequests

LAYERS = 2
PROMPTS = [list(range(1, 20)), [7, 8, 9], list(range(100, 140))]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=9, ignore_eos=True),
]


class ListeningEngine(RankEngine):
    """Takes its communicator ready-made, and keeps the logits of each step and the all-reduces it took."""

    def __init__(self, comm: Communicator, *args: Any) -> None:
        self._given = comm
        self.steps: list[tuple[Tensor, int]] = []
        super().__init__(*args)

    def connect(self) -> Communicator:
        return self._given

    def run_model(self, batch: Any) -> Tensor:
        before = getattr(self.comm, "num_all_reduces", 0)
        logits = super().run_model(batch)
        count = getattr(self.comm, "num_all_reduces", 0) - before
        self.steps.append((self.model.lm_head.gather(logits).clone(), count))
        return logits


def make_engine(folder: Path, comm: Communicator, num_pages: int | None = 64) -> ListeningEngine:
    options = {"dtype": "float32", "num_pages": num_pages, "page_size": 4, "tp": comm.size, "max_running_requests": 4}
    config = make_config(ParallelConfig, options)
    return ListeningEngine(comm, config, folder, ModelConfig.from_folder(folder), 256, comm.rank)


def serve(folder: Path, comm: Communicator) -> tuple[list[Any], list[tuple[Tensor, int]]]:
    """All outputs of PROMPTS, and the engine's steps."""
    engine = make_engine(folder, comm)
    scheduler = Scheduler(engine.config, engine, frozenset({257}), Tracer(None))
    inbox = LocalInbox()
    inbox.put(AddRequests([Request(i, *pair) for i, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))]))
    outputs = []
    for step in LLM.serve(scheduler, inbox):
        outputs += step
        if inbox.idle:
            break
    scheduler.check_integrity()
    return outputs, engine.steps


@pytest.mark.parametrize("size", [2, 3, 6])
def test_ranks_compute_what_one_would(tiny_folder: Path, run_ranks: Any, size: int) -> None:
    """2 ranks: 2 + 1 KV groups. 6: each KV head twice, with 2 and 1 of its 3 q heads."""
    expected, expected_steps = serve(tiny_folder, NoCommunicator())
    ranks = run_ranks(size, lambda comm: serve(tiny_folder, comm))
    for outputs, steps in ranks:
        assert len(steps) == len(expected_steps)
        for (logits, _), (expected_logits, _) in zip(steps, expected_steps, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-3)
        assert outputs == expected
    for steps in zip(*(steps for _, steps in ranks), strict=True):
        assert all(torch.equal(logits, steps[0][0]) for logits, _ in steps), "ranks differ, and may draw differently"


def test_all_reduces_of_a_forward(tiny_folder: Path, run_ranks: Any) -> None:
    """Two in each layer (after attention, after the MLP), and one for the embedding."""
    for _, steps in run_ranks(2, lambda comm: serve(tiny_folder, comm)):
        assert {count for _, count in steps} == {2 * LAYERS + 1}


@pytest.mark.parametrize("size", [2, 3])
def test_shares_sum_to_the_whole(tiny_folder: Path, run_ranks: Any, size: int) -> None:
    def parts(comm: Communicator) -> tuple[dict[str, torch.Size], tuple[int, int]]:
        engine = make_engine(tiny_folder, comm)
        return {name: p.shape for name, p in engine.model.named_parameters()}, engine.memory()

    whole, (whole_weights, whole_kv) = parts(NoCommunicator())
    ranks = run_ranks(size, parts)
    replicated = 0
    for name, shape in whole.items():
        held = [shapes[name] for shapes, _ in ranks]
        if "norm" in name:
            assert held == [shape] * size
            replicated += 4 * shape.numel()
        else:
            assert sum(part.numel() for part in held) == shape.numel(), name
    assert sum(weights for _, (weights, _) in ranks) == whole_weights + (size - 1) * replicated
    assert sum(kv for _, (_, kv) in ranks) == whole_kv
    kv = [kv for _, (_, kv) in ranks]
    assert kv == ([whole_kv * 2 // 3, whole_kv // 3] if size == 2 else [whole_kv // 3] * 3)


def test_hazard_12_all_ranks_have_as_many_pages_as_the_one_with_least_room(
    tiny_folder: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 KV heads rank 0 has 2: its pages take twice the memory of rank 1's."""
    monkeypatch.setattr("minisgl.stage3.engine.pool_terms", lambda *_: (1.0, 100 * 1024, 0))
    pages = run_ranks(2, lambda comm: make_engine(tiny_folder, comm, num_pages=None).pool.num_pages)
    assert pages == [99, 99], "100 of 1 KiB on rank 0, less the dummy page"


def test_hazard_12_memory_is_counted_from_the_rank_that_has_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.stage3.engine.free_memory", lambda device: 7)
    comm = object.__new__(DistributedCommunicator)
    comm.extremes = lambda free: (5, 9)  # type: ignore[method-assign]
    engine = object.__new__(RankEngine)
    engine.comm, engine.device, engine._rendezvous = comm, torch.device("cpu"), Path("there")
    comm.size = 2
    assert engine.free_memory() == 2, "the ranks on a CPU take from the same 5 bytes"
    engine.device = torch.device("cuda")
    assert engine.free_memory() == 5
    comm.extremes = lambda free: (1 << 30, 9 << 30)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="more than 2 GiB apart"):
        engine.free_memory()


@pytest.mark.parametrize(("size", "words"), [(4, "3 KV heads"), (18, "9 attention heads")])
def test_impossible_cut_is_refused(tiny_folder: Path, size: int, words: str) -> None:
    """4 is no multiple of 3, and 18 is, but more than there are q heads."""
    config = make_config(ParallelConfig, {"tp": size, "device": "cpu"})
    with pytest.raises(ValueError, match=words):
        check_parallel(config, ModelConfig.from_folder(tiny_folder))
