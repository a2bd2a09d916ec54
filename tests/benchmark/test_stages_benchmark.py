"""`benchmark stages` around its measurements, which take minutes and are made up here: its table and its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.benchmark import stages
from minisgl.benchmark.__main__ import main

OFFLINE = {"one_stream_tok_s": 40.0, "batch_tok_s": 400.0}


def test_each_stage_by_what_it_is_for_and_the_server_by_its_share_of_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def child(module: str, arguments: list[str]) -> dict[str, float]:
        asked.append(" ".join([module, *arguments[4:]]))
        return OFFLINE

    async def serve_and_load(dtype: str, threads: int) -> dict[str, float]:
        return {"batch_tok_s": 300.0}

    monkeypatch.setattr(stages, "child", child)
    monkeypatch.setattr(stages, "serve_and_load", serve_and_load)
    out = tmp_path / "stages.jsonl"
    main(["stages", "--threads", "1", "--out", str(out)])
    assert [one for one in asked if "--tp" not in one] == [
        *(f"measure --stage {stage}" for stage in range(1, 8)),
        "transformers_baseline",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["one_stream_tok_s", "batch_tok_s", "share_of_offline_pct"]
    assert next(line for line in lines if line.startswith("stage 8")).split()[-2:] == ["300", "75"]
    assert lines[-1].split() == ["transformers", "40", "400"]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    [share] = [entry for entry in found if entry["metric"] == "share_of_offline_pct"]
    assert (share["value"], share["unit"]) == (75.0, "%")
    assert "of=stage_8,_HTTP" in share["setting"]


def test_there_is_no_share_of_what_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve_and_load(dtype: str, threads: int) -> dict[str, float]:
        return {"batch_tok_s": 300.0}

    monkeypatch.setattr(stages, "child", lambda module, arguments: OFFLINE)
    monkeypatch.setattr(stages, "serve_and_load", serve_and_load)
    main(["stages", "--threads", "1", "--stages", "8", "--out", str(tmp_path / "stages.jsonl")])
    assert "share" not in capsys.readouterr().out
