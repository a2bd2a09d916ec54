"""Ctrl-C while a command still imports: one line and status 130, as later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [*(f"minisgl.stage{number}" for number in range(1, 8)), "minisgl.benchmark", "minisgl.viz"]
SLOW = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"  # in the place of what takes seconds


@pytest.mark.parametrize("command", COMMANDS)
def test_interrupted_while_it_imports(command: str, tmp_path: Path) -> None:
    for name in ("torch", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-m", command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")
