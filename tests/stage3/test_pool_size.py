"""How many pages there are: as many as asked for, or one line that says how many there could be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from minisgl.stage3.llm import LLM


def test_more_pages_than_memory(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "tiny"))
    with pytest.raises(ValueError, match=r"--num-pages 999999999 needs .* GiB, and .* are free: give at most \d+"):
        LLM(folder, num_pages=999_999_999)
