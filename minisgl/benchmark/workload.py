"""The requests every stage is measured with. Knows nothing of how they are run."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ORDINARY_ID = 100  # of the built-in model's vocabulary: those below are special tokens and single bytes
LAST_ORDINARY_ID = 40000


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens, answers of a fixed length: nothing depends on what the model says."""

    prompt_len: int = 128
    output_len: int = 128
    requests: int = 16
    shared_len: int = 1000  # of the conversation whose second turn is timed
    turn_len: int = 48  # the user's second message
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        return [self._tokens(index, self.prompt_len) for index in range(self.requests)]

    def turns(self, repeat: int) -> tuple[list[int], list[int]]:
        """A conversation's first prompt, and the second, which begins with it. Another one for each repeat."""
        first = self._tokens(1000 + repeat, self.shared_len)
        return first, first + self._tokens(2000 + repeat, self.turn_len)

    def _tokens(self, index: int, length: int) -> list[int]:
        generator = random.Random(f"{self.seed} {index}")
        return [generator.randint(FIRST_ORDINARY_ID, LAST_ORDINARY_ID) for _ in range(length)]
