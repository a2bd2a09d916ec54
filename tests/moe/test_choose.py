"""--moe-backend: what runs the experts. What the kernels give is tested in tests/kernel and tests/gpu."""

from __future__ import annotations

import logging

import pytest
import torch
from test_moe import make_layer

from minisgl.core.config import make_config
from minisgl.layers.activation import SiluAndMul
from minisgl.moe import choose
from minisgl.moe.choose import check_moe_backend, choose_experts
from minisgl.moe.layer import waits_for_host
from minisgl.stage3.config import EngineConfig

CPU = torch.device("cpu")


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "triton_runs", lambda device: True)


def test_where_kernels_do_not_run_the_loop_does(caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(True)
    with caplog.at_level(logging.INFO, "minisgl"):
        choose_experts(layer, "auto", CPU)
    assert waits_for_host(layer)
    assert "forward" not in vars(layer)
    assert "one after another in torch (the kernels need a GPU" in caplog.text
    with pytest.raises(ValueError, match="--moe-backend triton: the kernels need a GPU .* auto takes what runs here"):
        choose_experts(layer, "triton", CPU)


@pytest.mark.parametrize(("name", "kernels"), [("auto", True), ("triton", True), ("torch", False)])
@pytest.mark.usefixtures("kernels_run")
def test_where_they_run_they_are_taken_unless_the_loop_is_asked_for(name: str, kernels: bool) -> None:
    layer = make_layer(True)
    choose_experts(layer, name, CPU)
    assert ("forward" in vars(layer)) == kernels
    assert waits_for_host(layer) != kernels


@pytest.mark.usefixtures("kernels_run")
def test_a_gate_of_someone_else_is_not_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiluAndMul, "forward", lambda self, x: x)
    layer = make_layer(True)
    choose_experts(layer, "auto", CPU)
    assert "forward" not in vars(layer)


def test_a_model_without_experts_has_nothing_to_choose() -> None:
    choose_experts(torch.nn.Linear(2, 2), "triton", CPU)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="--moe-backend must be one of auto, triton, torch, not 'vllm'"):
        make_config(EngineConfig, {"moe_backend": "vllm"})


def test_kernels_that_cannot_run_are_refused_before_there_is_a_model() -> None:
    for name in ("auto", "torch"):
        check_moe_backend(name, CPU)
    with pytest.raises(ValueError, match="--moe-backend triton: the kernels need a GPU"):
        check_moe_backend("triton", CPU)
