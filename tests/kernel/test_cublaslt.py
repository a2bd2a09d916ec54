"""Products by a named configuration of cuBLASLt, and the table of those that gain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cublaslt_stand_in import StandIn

from minisgl.benchmark import tune_linear
from minisgl.kernel import cublaslt, cublaslt_choices
from minisgl.kernel.cublaslt import Configuration, Product
from minisgl.kernel.cublaslt_choices import STEP, TABLE, choices, plans_for

needs_a_gpu = pytest.mark.skipif(not cublaslt.version() or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NUMBERS = "66 35 221 5 6"
ANY = Configuration(66, 35, 221, 5, 6)


class NamedProduct(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    device: torch.device


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"A GPU": {"version": 130100, "products": {"64x32": {"16": NUMBERS}}}}))
    return path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    offers = [{0: 66, 6: 35, 1: tile, 8: 5, 5: 2} for tile in (2, 1)]
    library = StandIn(offers)
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: c_void_p(12345))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return library


def test_a_plan_is_the_product_by_the_kernel_that_was_named(stand_in: StandIn) -> None:
    product, named = Product(5, 24, 16, torch.device("cpu")), Configuration(66, 35, 1, 5, 3)
    plans = [product.plan(configuration) for configuration in (named, named._replace(option=2))]
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    for plan in plans:
        assert plan is not None
        torch.testing.assert_close(plan(x, weight), (x.float() @ weight.float().T).bfloat16())
    assert stand_in.ran == [[66, 1, 0, 0, 0, 3, 35, 0, 5], [66, 1, 0, 0, 0, 2, 35, 0, 5]]
    assert stand_in.streams == [7, 7], "the one that a graph is recorded on"


def test_no_plan_is_one_that_needs_memory_or_is_not_there(stand_in: StandIn) -> None:
    product = Product(5, 24, 16, torch.device("cpu"))
    assert product.plan(ANY._replace(tile=5)) is None
    assert product.plan(ANY._replace(tile=3)) is None


def test_what_is_offered_and_may_be_asked_for(stand_in: StandIn) -> None:
    product = Product(5, 24, 16, torch.device("cpu"))
    expected = [Configuration(66, 35, 2, 5, 2), Configuration(66, 35, 1, 5, 2)]
    assert product.offered() == expected
    assert product.offered(most=1) == expected[:1]
    assert product.tiles(ANY) == [1, 2, 5]
    assert product.options(ANY) == range(4)
    accepted = [configuration for configuration, _ in tune_linear._accepted(product)]
    assert {(c.tile, c.cluster, c.option) for c in accepted} == {(1, c, o) for c in (2, 3, 4, 5) for o in range(4)}


def test_an_error_of_the_library_is_named(stand_in: StandIn) -> None:
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulAlgoInit .* gave status 7"):
        Product(5, 24, 16, torch.device("cpu")).plan(ANY._replace(algorithm=67))


@pytest.mark.parametrize(
    "other",
    [
        {"device": torch.device("cpu")},
        {"dtype": torch.float16},
        {"is_contiguous": lambda: False},
        {"data_ptr": lambda: 264},
    ],
)
def test_which_weights_have_plans(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt_choices, "_plans", lambda *sizes: dict.fromkeys([16], sizes))
    of = {"device": torch.device("cuda", 1), "dtype": torch.bfloat16, "shape": torch.Size([64, 32])}
    of |= {"is_contiguous": lambda: True, "data_ptr": lambda: 256}
    assert plans_for(SimpleNamespace(**of)) == {16: (64, 32, torch.device("cuda", 1))}
    assert plans_for(SimpleNamespace(**of | other)) == {}


def test_eight_rows_fewer_take_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sizes(NamedProduct):
        def plan(self, configuration: Configuration) -> Any:
            return (*self, configuration) if self.rows != 24 else None

    monkeypatch.setattr(cublaslt_choices, "Product", Sizes)
    monkeypatch.setattr(cublaslt_choices, "choices", lambda name, *shape: {16: ANY, 32: ANY._replace(tile=9)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    device = torch.device("cuda", 9)
    expected = {8: (8, 64, 32, device, ANY), 16: (16, 64, 32, device, ANY)}
    assert cublaslt_choices._plans(64, 32, device) == {**expected, 32: (32, 64, 32, device, ANY._replace(tile=9))}


def test_a_choice_is_by_gpu_and_sizes(table: Path) -> None:
    assert choices("A GPU", 64, 32, table) == {16: ANY}
    assert choices("A GPU", 32, 64, table) == {}
    assert choices("Another", 64, 32, table) == {}


def test_another_version_may_mean_another_kernel(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "version", lambda: 130200)
    assert choices("A GPU", 64, 32, table) == {}


def test_a_weight_that_is_not_on_a_gpu_has_none() -> None:
    assert plans_for(torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")) == {}


def shipped() -> Iterator[tuple[str, int, int, int]]:
    """GPU, outputs, inputs, rows."""
    for name, of_gpu in json.loads(TABLE.read_text()).items():
        for shape, entries in of_gpu["products"].items():
            for rows in entries:
                outputs, inputs = map(int, shape.split("x"))
                yield name, outputs, inputs, int(rows)


def test_the_table_is_for_rows_that_graphs_have() -> None:
    assert all(rows in tune_linear.ROWS for *_, rows in shipped())
    assert STEP == 16, "two sizes of graphs"


@pytest.mark.gpu
@needs_a_gpu
@torch.inference_mode()
def test_every_choice_of_this_gpu() -> None:
    """Against torch in float64, with rows that it was measured for and with eight fewer."""
    device = torch.device("cuda")
    for shape in {(outputs, inputs) for name, outputs, inputs, _ in shipped() if name == torch.cuda.get_device_name()}:
        weight = torch.randn(shape, dtype=torch.bfloat16, device=device) / shape[1] ** 0.5
        plans, wide = plans_for(weight), weight[:4096].double()
        assert set(plans) >= set(choices(torch.cuda.get_device_name(), *shape))
        for rows, plan in plans.items():
            x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=device)
            found = plan(x, weight)
            expected = x.double() @ wide.T
            assert float((found[:, :4096] - expected).norm() / expected.norm()) < 4e-3
            torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), atol=0.05, rtol=0.02)


@pytest.mark.gpu
@needs_a_gpu
@torch.inference_mode()
def test_what_the_library_offers_and_what_it_has_not() -> None:
    product = Product(48, 512, 256, torch.device("cuda"))
    x, weight = (torch.randn(n, 256, dtype=torch.bfloat16, device="cuda") for n in (48, 512))
    offered = product.offered()
    assert offered
    for configuration in offered:
        plan = product.plan(configuration)
        assert plan is not None
        torch.testing.assert_close(plan(x, weight), x @ weight.T, atol=0.3, rtol=0.02)
    first = offered[0]
    assert first.tile in product.tiles(first)
    assert first.option in product.options(first)
    assert product.plan(first._replace(tile=100_000)) is None


@pytest.mark.gpu
@needs_a_gpu
@torch.inference_mode()
def test_a_plan_is_recorded_in_a_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    product = Product(48, 512, 256, device)
    plan = product.plan(product.offered()[0])
    assert plan is not None
    x, weight = (torch.randn(n, 256, dtype=torch.bfloat16, device=device) for n in (48, 512))
    plan(x, weight)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = plan(x, weight)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(found, x @ weight.T, atol=0.3, rtol=0.02)
