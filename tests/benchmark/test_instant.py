"""The whole server with an engine that answers at once: it serves, and each process's share is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.benchmark.__main__ import main


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="CPU time of other processes is read from /proc")
def test_the_command_counts_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "instant.jsonl"
    assert main(["instant", "--streams", "2", "--tokens", "64", "--requests", "2", "--out", str(out)]) == 0
    found = {line["metric"]: line["value"] for line in map(json.loads, out.read_text().splitlines())}
    assert list(found) == ["requests", "throughput", "api_cpu", "scheduler_cpu", "text_cpu", "client_cpu"]
    assert found["requests"] > 0
    assert found["throughput"] > 0
    assert "scheduler, µs/token" in capsys.readouterr().out


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["instant", "--tokens", "0"])
    assert end.value.code == 2
    assert "--tokens" in capsys.readouterr().err
