"""A learner's methods on the package's classes: now, later, in every process, counted, and off again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.learn.install import VARIABLE, Method, install, read_calls
from minisgl.stage3.page_pool import KVCachePool, PageAllocator

MINE = """
from minisgl.stage3.page_pool import KVCachePool, PageAllocator

class MyPageAllocator(PageAllocator):
    def allocate(self, count):
        return self.twice(count)

    def twice(self, count):
        return 2 * count

class MyKVCachePool(KVCachePool):
    @staticmethod
    def page_bytes(*shape):
        return 7
"""
POOL = "minisgl.stage3.page_pool"


@pytest.fixture
def methods(tmp_path: Path) -> list[Method]:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    places = {"PageAllocator.allocate": "3.1", "PageAllocator.twice": "", "KVCachePool.page_bytes": "3.6"}
    return [Method(number, f"{POOL}:{place}", str(file)) for place, number in places.items()]


def test_methods_come_and_go_and_are_counted(methods: list[Method]) -> None:
    allocator = PageAllocator(4)
    installer = install(methods)
    try:
        assert allocator.allocate(3) == 6  # type: ignore[comparison-overlap]
        assert KVCachePool.page_bytes(1, 1, 1, 1, torch.float32) == 7
        assert KVCachePool(1, 1, 1, 1, 1, torch.float32, torch.device("cpu")).page_bytes(1, 1, 1, 1, torch.float32) == 7
        assert installer.calls() == {"3.1": 1, "3.6": 2}
    finally:
        installer.remove()
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    assert not hasattr(allocator, "twice")
    assert KVCachePool.page_bytes(1, 1, 1, 1, torch.float32) == 8


def test_a_process_that_is_killed_has_counted(methods: list[Method], tmp_path: Path) -> None:
    """By the environment alone, before the class exists, and without a goodbye."""
    code = f"""
import minisgl, os, sys
assert "torch" not in sys.modules and "{POOL}" not in sys.modules
from {POOL} import PageAllocator
assert [PageAllocator(4).allocate(n) for n in (1, 2)] == [2, 4]
os._exit(0)
"""
    calls = tmp_path / "calls"
    calls.mkdir()
    environment = {**os.environ, VARIABLE: json.dumps({"methods": methods, "calls": str(calls)})}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert read_calls(calls, ["3.1", "3.6"]) == {"3.1": 4, "3.6": 0}


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = "import minisgl, minisgl.core.cli, sys; print([m for m in sys.modules if m.startswith('minisgl.learn')])"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
