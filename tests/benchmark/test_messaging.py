"""The command that counts what a streamed token costs runs, and shows a row for each number of requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from minisgl.benchmark.__main__ import main


def test_the_command_counts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert main(["messaging", "--model", str(folder), "--repeats", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "4", "16", "64"]
    assert all(float(value) > 0 for row in rows for value in row[1:])
