"""Ranks as threads, and a model whose heads do not divide by 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import on_ranks
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 heads and 3 KV heads, as the built-in model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(size, work): what `work(communicator)` returned on each of `size` ranks."""
    return on_ranks
