"""A checkout of one's own, in which a learner may write, and the commands in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout_copy import Run, copy_checkout
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def run(checkout: Path) -> Run:
    """`python -m …` in the checkout, and of its package."""

    def run(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=240)
        if status is not None:
            assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
