"""A copy of the checkout without anybody's own work, for tests that write into it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def copy_checkout(folder: Path) -> Path:
    """Without anybody's own work."""
    unwanted = shutil.ignore_patterns("__pycache__", "mine.py", ".mine.json")
    for name in ("minisgl", "chapters", "solutions", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder
