"""The time of each step of an LLM with a scheduler, taken where its outputs come back. Knows no workload.

A step's time is that between the outputs before it and its own: from launch to launch, with overlap or without, and
for any number of ranks. Costs two calls a step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from minisgl.core.outputs import TokenOutput
from minisgl.stage7.llm import LLM


class Step(NamedTuple):
    seconds: float
    phase: str  # "prefill" if some request got its first token, else "decode"
    requests: int


class StepClock:
    """Measures from the moment it is made. A chunk that ends no prompt counts to the prefill step after it."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Step] = []
        self._llm = llm
        self._outputs = llm.ranks.outputs
        self._seen: set[int] = set()
        self._last = time.perf_counter()
        llm.ranks.outputs = self._timed_outputs  # type: ignore[method-assign]

    def stop(self) -> None:
        self._llm.ranks.outputs = self._outputs  # type: ignore[method-assign]

    def seconds(self, phase: str) -> float:
        return sum(step.seconds for step in self.steps if step.phase == phase)

    def _timed_outputs(self) -> list[TokenOutput]:
        outputs = self._outputs()
        if outputs:
            now = time.perf_counter()
            is_prefill = outputs[-1].uid not in self._seen  # rows that decode stand first
            if is_prefill:
                self._seen.update(output.uid for output in outputs)
            self.steps.append(Step(now - self._last, "prefill" if is_prefill else "decode", len(outputs)))
            self._last = now
        return outputs
