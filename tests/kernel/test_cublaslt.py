"""Products by a named configuration of cuBLASLt, the table of those that gain, and the command that writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl.benchmark import tune_linear
from minisgl.benchmark.__main__ import main
from minisgl.kernel import cublaslt
from minisgl.kernel.cublaslt import Configuration, Product
from minisgl.kernel.cublaslt_choices import STEP, TABLE, choices, plans_for

needs_a_gpu = pytest.mark.skipif(not cublaslt.version() or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NUMBERS = "66 35 221 5 6"
ANY = Configuration(66, 35, 221, 5, 6)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"A GPU": {"version": 130100, "products": {"64x32": {"16": NUMBERS}}}}))
    return path


def test_a_choice_is_by_gpu_and_sizes(table: Path) -> None:
    assert choices("A GPU", 64, 32, table) == {16: ANY}
    assert choices("A GPU", 32, 64, table) == {}
    assert choices("Another", 64, 32, table) == {}


def test_another_version_may_mean_another_kernel(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "version", lambda: 130200)
    assert choices("A GPU", 64, 32, table) == {}


def test_a_weight_that_is_not_on_a_gpu_has_none() -> None:
    assert plans_for(torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")) == {}


def test_what_is_measured_again_takes_the_place_of_what_was(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"version": 130100, "products": {}}
    tune_linear._write(table, "Another", {})
    tune_linear._write(table, "A GPU", {"64x32": {32: NUMBERS}, "8x8": {16: NUMBERS}})
    products = {"64x32": {"32": NUMBERS}, "8x8": {"16": NUMBERS}}
    assert json.loads(table.read_text()) == {"A GPU": {"version": 130100, "products": products}, "Another": other}
    monkeypatch.setattr(cublaslt, "version", lambda: 130200)
    tune_linear._write(table, "A GPU", {})
    assert json.loads(table.read_text())["A GPU"] == {"version": 130200, "products": {}}, "of another version"


def test_without_a_gpu_there_is_nothing_to_tune(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["tune-linear"])
    assert "runs on an NVIDIA GPU in bfloat16" in capsys.readouterr().err


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
