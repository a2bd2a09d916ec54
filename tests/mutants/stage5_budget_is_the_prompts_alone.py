"""5.2: prompts get the whole budget, beside those that run."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage5.policies import Decode, Mixed, Prefill

kills = "tests/exercises/test_stage5.py::test_prompts_get_what_is_left_of_the_budget"
words = "left of the budget"


class MyMixed(Mixed):
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        running = decode()
        return Batch(running + prefill(token_budget), num_decode=len(running))
