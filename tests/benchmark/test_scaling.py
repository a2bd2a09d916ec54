"""Recorded numbers are compared when only the ranks differ, and the last of each counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.benchmark.__main__ import main


def entry(tp: int, value: float, metric: str = "output_throughput", **other: str) -> str:
    unit = "tokens/s" if metric == "output_throughput" else "ms"
    bench = "offline" if metric == "output_throughput" else "decode_step"
    found = {"bench": bench, "model": "m", "tp": tp, "setting": "a=1", "metric": metric, "unit": unit, "value": value}
    return json.dumps({**found, "machine": f"{tp} x GPU", **other})


def test_what_more_ranks_bought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offline = [
        entry(1, 900.0),
        entry(1, 1000.0),
        entry(4, 3000.0),
        entry(2, 5.0, setting="a=2"),
        entry(2, 5.0, machine="2 x another"),
        entry(2, 5.0, model="n"),
        entry(2, 5.0, metric="run"),
    ]
    (tmp_path / "offline").write_text("\n".join(offline))
    (tmp_path / "step").write_text(
        "\n".join([entry(2, 2.0, "step_p50"), entry(4, 1.6, "step_p50"), entry(1, 9, "p90")])
    )
    assert main(["scaling", "--model", "m", "--records", str(tmp_path / "offline"), str(tmp_path / "step")]) == 0
    header, _, first, second = capsys.readouterr().out.splitlines()
    assert header.split("  ")[-1].strip() == "with"
    assert [word for word in header.split() if word.isdigit()] == ["1", "2", "4"]
    assert first.split() == ["offline", "tokens/s", "1,000", "(1.00", "x)", "3,000", "(3.00", "x)", "a=1,", "GPU"]
    assert second.split() == ["decode", "step", "ms", "2.000", "(1.00", "x)", "1.600", "(1.25", "x)", "a=1,", "GPU"]
    assert first.index("1,000") < second.index("2.000") < first.index("3,000") < second.index("1.600") + 8


@pytest.mark.parametrize(("lines", "words"), [(None, "cannot be read"), ([entry(1, 2.0)], "nothing of 'm'")])
def test_nothing_to_compare_is_said(
    lines: list[str] | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        (tmp_path / "r").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as ended:
        main(["scaling", "--model", "m", "--records", str(tmp_path / "r")])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
