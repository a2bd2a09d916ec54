"""More threads than cores are refused, by what this process may use and not by what the machine has."""

from __future__ import annotations

import os

import pytest

from minisgl.core import threads
from minisgl.core.config import Config

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    assert Config(threads=3).threads == 3
    assert Config().threads is None
    with pytest.raises(ValueError, match="--threads 4 is more than the cores .* give at most 3"):
        Config(threads=4)


@needs_affinity
def test_the_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert threads.usable_cores() == 1
        with pytest.raises(ValueError, match="give at most 1"):
            Config(threads=2)
    finally:
        os.sched_setaffinity(0, before)
    assert threads.usable_cores() == len(before)
