"""The collector leaves alone what was there before, and finds it again afterwards."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from tiny_model import make_tiny_model

from minisgl.core.garbage import spared
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage7.llm import LLM


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_becomes_garbage_meanwhile_is_found_when_it_is_over() -> None:
    old = Node()
    gone = weakref.ref(old)
    with spared():
        del old
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        assert gone() is not None  # the collector did not walk through it
    gc.collect()
    assert gone() is None


def test_a_run_is_spared_and_nothing_stays_so(tmp_path: Path) -> None:
    gc.unfreeze()  # what other tests may have left
    folder = make_tiny_model(tmp_path / "tiny")
    with LLM(str(folder), num_pages=32, max_seq_len=64, max_running_requests=4) as llm:
        frozen = [gc.get_freeze_count() for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=4))]
    assert min(frozen) > 10_000, "torch alone is more objects than that"
    assert gc.get_freeze_count() == 0
