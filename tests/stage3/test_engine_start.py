"""The engine's start: six steps with their times in the log, and a failure that names its step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model

from minisgl.core.protocols import NoCommunicator
from minisgl.models.config import ModelConfig
from minisgl.models.load import load_model, weight_bytes
from minisgl.stage3.engine import EngineStartError
from minisgl.stage3.llm import LLM
from minisgl.stage3.page_pool import KVCachePool

STEPS = ["device", "communication", "weights", "KV cache pool", "page table", "graphs"]
OWNERS = {  # what a step calls that can fail for a reason that is no setting's
    "weights": "minisgl.stage3.engine.load_model",
    "KV cache pool": "minisgl.stage3.engine.create_attention",
    "page table": "minisgl.stage3.engine.PageTable",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_six_steps_are_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "minisgl"):
        LLM(str(folder), dtype="float32").close()
    found = [re.fullmatch(r"engine start: (.+) \d+\.\d\d s", message) for message in caplog.messages]
    assert [match[1] for match in found if match] == STEPS


@pytest.mark.parametrize("step", list(OWNERS))
def test_a_failure_names_its_step(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(OWNERS[step], fail)
    with pytest.raises(EngineStartError, match=f"the engine failed to start at step '{step}': no room"):
        LLM(str(folder), dtype="float32")


@pytest.mark.parametrize(("option", "value"), [("attn", "fa"), ("attn", "triton,fi"), ("moe_backend", "triton")])
def test_what_cannot_run_here_is_refused_before_weights_are_read(
    folder: Path, option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("minisgl.stage3.engine.load_model", read)
    flag = option.replace("_", "-")
    with pytest.raises(ValueError, match=f"--{flag} {value}: .* needs? a (CUDA )?GPU.* takes what runs here"):
        LLM(str(folder), device="cpu", **{option: value})


def test_what_weights_take_is_known_before_they_are_read(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, config, 64, torch.device("cpu"), dtype)
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert weight_bytes(config, NoCommunicator(), dtype) == held


def test_more_pages_than_fit_beside_the_weights_are_refused_before_those_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("the weights are read")

    config = ModelConfig.from_folder(folder)
    page = KVCachePool.page_bytes(config.num_layers, 16, config.num_kv_heads, config.head_dim, torch.float32)
    free = weight_bytes(config, NoCommunicator(), torch.float32) + 6 * page  # one of them is the dummy page
    monkeypatch.setattr("minisgl.stage3.engine.free_memory", lambda device: free)
    monkeypatch.setattr("minisgl.stage3.engine.load_model", read)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 16}
    with pytest.raises(ValueError, match="--num-pages 6 needs .* GiB are free: give at most 5, or leave it out"):
        LLM(str(folder), num_pages=6, **options)
    for good in ({"num_pages": 5}, {}):
        with pytest.raises(EngineStartError, match="the weights are read"):
            LLM(str(folder), **good, **options)
