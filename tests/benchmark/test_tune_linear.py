"""The command that measures which configurations of cuBLASLt gain, without a GPU: what it asks for and writes down."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.benchmark import tune_linear, tune_moe
from minisgl.benchmark.__main__ import main
from minisgl.kernel import cublaslt
from minisgl.kernel.cublaslt import Configuration
from minisgl.kernel.cublaslt_choices import choices

NUMBERS = "66 35 221 5 6"
ANY = Configuration(66, 35, 221, 5, 6)
LLAMA = ["tune-linear", "--model", "llama-3.1-8b", "--dtype", "bfloat16"]
TUNE_MOE = ["tune-moe", "--model", "qwen3-30b-a3b", "--dtype", "bfloat16"]


def test_without_a_gpu_there_is_nothing_to_tune(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["tune-linear"])
    assert "runs on an NVIDIA GPU in bfloat16" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as tune-linear sees, where _measure is exchanged too."""
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr("minisgl.benchmark.target.resolve_device", lambda name: torch.device("cuda"))


def test_what_gains_is_written(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[int, tuple[float, float, Configuration]] = {
        128: (100e-6, 97e-6, ANY),
        144: (100e-6, 99e-6, ANY),
        160: (90e-6, 80e-6, ANY._replace(tile=7)),
    }
    monkeypatch.setattr(tune_linear, "_measure", lambda rows, *rest: measured.get(rows))
    path = tmp_path / "choices.json"
    assert main([*LLAMA, "--choices", str(path)]) == 0
    assert choices("A GPU", 28672, 4096, path) == {128: ANY, 160: ANY._replace(tile=7)}
    shapes = ["28672x4096", "4096x14336", "6144x4096", "4096x4096"]
    assert list(json.loads(path.read_text())["A GPU"]["products"]) == shapes


def test_a_model_of_small_weights_has_nothing_to_tune(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "choices.json"
    with pytest.raises(SystemExit, match="2"):
        main(["tune-linear", "--model", "qwen3-0.6b", "--dtype", "bfloat16", "--choices", str(path)])
    assert "qwen3-0.6b has no weight of 16777216 elements or more" in capsys.readouterr().err
    assert not path.exists(), "nor is anything written"


def test_two_ranks_have_products_of_their_own(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tune_linear, "_measure", lambda rows, outputs, inputs, subject: asked.append((outputs, inputs)))
    assert main([*LLAMA, "--tp", "2", "--choices", str(tmp_path / "choices.json")]) == 0
    assert set(asked) == {(14336, 4096), (4096, 7168)}, "the others are small"


@pytest.mark.parametrize(("ranks", "rows", "measured"), [(1, 128, False), (1, 104, True), (2, 128, True)])
@torch.inference_mode()
def test_what_one_rank_makes_in_halves_is_left_out(
    ranks: int, rows: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(call: Any, device: torch.device, on_host: bool) -> float:
        return 2.0 if call().shape == (rows, 64) else 1.0

    monkeypatch.setattr(tune_linear, "is_better_halved", lambda layer: True)
    monkeypatch.setattr(tune_linear, "fast_product", lambda layer, tuned: layer.product)
    monkeypatch.setattr(tune_linear, "CACHE_BYTES", 0)
    monkeypatch.setattr(tune_linear, "Product", lambda *sizes: sizes)
    monkeypatch.setattr(tune_linear, "_accepted", lambda product: [(ANY, lambda x, weight: weight)])
    monkeypatch.setattr(tune_linear, "_quickest", lambda calls, device: list(calls))
    monkeypatch.setattr(tune_linear, "seconds", seconds)
    subject: Any = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(tp=ranks))
    assert tune_linear._measure(rows, 64, 32, subject) == ((2.0, 1.0, ANY) if measured else None)


@pytest.mark.parametrize(("command", "flag"), [(LLAMA, "--choices"), (TUNE_MOE, "--tiles")])
@pytest.mark.parametrize("content", [None, "not JSON", "[]"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    gpu: None,
    tmp_path: Path,
    command: list[str],
    flag: str,
    content: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / ("there" if content else "not/there")
    if content:
        path.write_text(content)
    monkeypatch.setattr(tune_moe, "triton_runs", lambda device: True)
    for module, measures in ((tune_linear, "_measure"), (tune_moe, "_make_weights")):
        monkeypatch.setattr(module, measures, lambda *sizes: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="2"):
        main([*command, flag, str(path)])
    assert f"{flag} {path}: " in capsys.readouterr().err
    assert not content or path.read_text() == content


def test_what_is_measured_again_takes_the_place_of_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "choices.json"
    table.write_text(json.dumps({"A GPU": {"version": 130100, "products": {"64x32": {"16": NUMBERS}}}}))
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    other = {"version": 130100, "products": {}}
    tune_linear._write(table, "Another", {})
    tune_linear._write(table, "A GPU", {"64x32": {32: NUMBERS}, "8x8": {16: NUMBERS}})
    products = {"64x32": {"32": NUMBERS}, "8x8": {"16": NUMBERS}}
    assert json.loads(table.read_text()) == {"A GPU": {"version": 130100, "products": products}, "Another": other}
    monkeypatch.setattr(cublaslt, "version", lambda: 130200)
    tune_linear._write(table, "A GPU", {})
    assert json.loads(table.read_text())["A GPU"] == {"version": 130200, "products": {}}, "of another version"
