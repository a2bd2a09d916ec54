"""When fast kernels take the place of layers' methods. What they compute is tested in tests/kernel and tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.models.fuse import fuse, layers_are_ours
from minisgl.sampling import sampler
from minisgl.sampling.sampler import Sampler


def of_another_module(self: Any, x: Tensor) -> Tensor:
    return x


def test_on_a_cpu_every_layer_keeps_its_own_code() -> None:
    model: Any = None  # it is not even looked at
    assert not fuse(model, model, torch.device("cpu"))


@pytest.mark.parametrize(("owner", "name"), [(RMSNorm, "forward"), (Rotation, "apply")])
def test_a_method_that_was_exchanged_is_not_bypassed(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers_are_ours()
    monkeypatch.setattr(owner, name, of_another_module)
    assert not layers_are_ours()


def test_nor_is_one_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "triton_runs", lambda device: True)
    device = torch.device("cpu")
    assert Sampler(10, device, fused=True).fused
    assert not Sampler(10, device).fused
    monkeypatch.setattr(Sampler, "draw", of_another_module)
    assert not Sampler(10, device, fused=True).fused
