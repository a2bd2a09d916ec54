"""What a config alone rules out is said before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from tiny_model import make_tiny_model

from minisgl.stage8 import launch, serve


def test_more_ranks_than_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: launch.Processes) -> NoReturn:
        raise AssertionError("a process would have started")

    monkeypatch.setattr(launch.Processes, "start", start)
    folder = str(make_tiny_model(tmp_path / "tiny"))
    for more in ([], ["--prompt", "a"]):
        with pytest.raises(SystemExit) as ended:
            serve.main(["--model", folder, "--port", "0", "--tp", "99", *more])
        assert ended.value.code == 2
        assert "--tp 99 is more than this model's" in capsys.readouterr().err
