"""5.2: asks the prompts first; one that is admitted whole is then in the batch twice."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage5.policies import Decode, Mixed, Prefill

kills = "tests/exercises/test_stage5.py::test_who_runs_is_asked_first_and_comes_first"
words = "asked first"


class MyMixed(Mixed):
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        prompts = prefill(token_budget)
        running = decode()
        return Batch(running + prompts, num_decode=len(running))
