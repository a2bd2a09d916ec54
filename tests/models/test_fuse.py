"""When fast kernels take the place of layers' methods. What they compute is tested in tests/kernel and tests/gpu."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.layers.linear import LinearReplicated
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.models import fuse_linear
from minisgl.models.fuse import fuse, layers_are_ours
from minisgl.models.fuse_linear import fast_product, halves, is_better_halved
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 24, 64, 112, 113])
@torch.inference_mode()
def test_a_product_is_the_same_however_many_rows_choose_its_kernel(rows: int) -> None:
    layer = LinearReplicated(4096, 4096, bias=False).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=1 / 64)
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    found = fast_product(layer)(x, None)
    expected = x.double() @ layer.weight.double().T
    assert float((found - expected).norm() / expected.norm()) < 4e-3


@torch.inference_mode()
def test_a_planned_kernel_is_for_its_rows_and_what_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one_row = SimpleNamespace(gemv=lambda x, weight: "gemv")
    monkeypatch.setitem(sys.modules, "minisgl.kernel.triton_linear", one_row)
    monkeypatch.setattr(fuse_linear, "LARGE_WEIGHT", 64 * 32)
    monkeypatch.setattr(fuse_linear, "plans_for", lambda weight: {1: None, 16: lambda x, weight: "planned"})
    layer, bias = LinearReplicated(32, 64, bias=False), torch.ones(64)
    torch.nn.init.normal_(layer.weight)
    product, x = fast_product(layer), torch.randn(17, 32)

    assert product(x[:16], None) == "planned"
    assert product(x[:1], None) == "gemv"
    torch.testing.assert_close(product(x, None), layer(x))
    torch.testing.assert_close(product(x[:16], bias), layer(x[:16]) + 1)
    for unreadable in (torch.randn(32, 16).T, torch.randn(16 * 32 + 1)[1:].view(16, 32)):
        torch.testing.assert_close(product(unreadable, None), layer(unreadable))
    torch.testing.assert_close(fast_product(layer, tuned=False)(x[:16], None), layer(x[:16]))
    smaller = LinearReplicated(31, 64, bias=False)
    torch.nn.init.normal_(smaller.weight)
    torch.testing.assert_close(fast_product(smaller)(x[:16, :31].contiguous(), None), smaller(x[:16, :31]))


def test_which_products_are_made_in_halves() -> None:
    def better(outputs: int, inputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> bool:
        with torch.device("meta"):
            return is_better_halved(LinearReplicated(inputs, outputs, bias).to(dtype))

    assert better(4096, 4096)
    assert better(4096, 14336)
    assert not better(1024, 3072), "too small to gain"
    assert not better(28672, 4096), "enough tiles as it is"
    assert not better(4096, 14344), "the second half would not begin at 16 bytes"
    assert not better(4096, 4096, bias=True)
    assert not better(4096, 4096, dtype=torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "in_halves"), [(1, False), (112, False), (113, True), (256, True), (257, False)])
def test_for_which_rows(rows: int, in_halves: bool) -> None:
    layer = LinearReplicated(64, 32, bias=False)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(rows, 64)
    found = halves(layer)(x, None)
    assert found.dim() == (3 if in_halves else 2)
    torch.testing.assert_close(found.sum(0) if in_halves else found, layer(x))
