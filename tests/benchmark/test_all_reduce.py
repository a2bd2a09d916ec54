"""`benchmark all_reduce`: ranks are processes, and each way they add up is a line of the records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.benchmark import all_reduce_rank
from minisgl.benchmark.__main__ import main


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_two_ranks_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records"
    assert main(["all_reduce", "--device", "cpu", "--rows", "1,4", "--hidden", "64", "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["setting"] for entry in found] == [f"form=gloo rows={n} hidden=64 graph=no" for n in (1, 4)]
    assert all(entry["bench"] == "all_reduce" and entry["tp"] == 2 and entry["value"] > 0 for entry in found)
    assert "gloo" in capsys.readouterr().out


def test_windows_are_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["all_reduce", "--device", "cpu", "--windows"])
    assert ended.value.code == 2
    assert "--comm pynccl-window is for ranks on GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("windows", [False, True])
def test_windows_are_made_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, windows: bool) -> None:
    """NCCL may make NVLink multicast objects for them."""
    made: list[Any] = []
    calls = SimpleNamespace(all_reduce=lambda x: x, window=lambda num_bytes: made.append(num_bytes))
    monkeypatch.setattr(all_reduce_rank, "NcclCalls", lambda comm: calls)
    monkeypatch.setattr(all_reduce_rank, "why_not", lambda size: "no NVLink")
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), size=2, sum=lambda x: x)
    assert list(all_reduce_rank.ways(comm, windows)) == ["nccl", "pynccl", *["pynccl window"] * windows]
    assert bool(made) == windows
