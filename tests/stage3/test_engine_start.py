"""The engine's start: six steps with their times in the log, and a failure that names its step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from minisgl.stage3.engine import EngineStartError
from minisgl.stage3.llm import LLM

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
