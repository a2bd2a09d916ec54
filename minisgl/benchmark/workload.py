"""The requests that are measured. Knows nothing of how they are run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ORDINARY_ID = 100  # of the built-in model's vocabulary: those below are special tokens and single bytes
LAST_ORDINARY_ID = 40000


@dataclass(frozen=True)
class Workload:
    """What every stage is measured with: prompts of random tokens, answers of a fixed length."""

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


@dataclass(frozen=True)
class OfflineWorkload:
    """Many requests of very different lengths, all there from the start: nano-vllm's bench.py, token for token.

    256 of them with the lengths as they are have 142,827 prompt and 133,966 output tokens.
    """

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(cls, requests: int, lengths: tuple[int, int], vocab_size: int) -> OfflineWorkload:
        """lengths: the least and the most, of prompts and of answers. A vocabulary above 10,000 changes nothing."""
        generator = random.Random(0)
        last_id = min(10000, vocab_size - 1)
        prompts = [[generator.randint(0, last_id) for _ in range(generator.randint(*lengths))] for _ in range(requests)]
        return cls(prompts, [generator.randint(*lengths) for _ in prompts])

    def other_tokens(self) -> list[list[int]]:
        """Prompts of the same lengths that share no prefix with these: to warm up and leave nothing to be found."""
        highest = max(map(max, self.prompts))
        return [[highest - token_id for token_id in prompt] for prompt in self.prompts]


def random_prompts(count: int, length: int, vocab_size: int, seed: str) -> list[list[int]]:
    """Prompts of one length. Two seeds give prompts that share no prefix, but for chance."""
    generator = random.Random(seed)
    return [generator.choices(range(min(10000, vocab_size)), k=length) for _ in range(count)]


def texts(count: int, words: int, seed: str) -> list[str]:
    """Texts of random words with no prefix in common, for servers that tokenize."""
    generator = random.Random(seed)
    return [" ".join(_word(generator) for _ in range(words)) for _ in range(count)]


def _word(generator: random.Random) -> str:
    letters: Sequence[str] = "abcdefghijklmnopqrstuvwxyz"
    return "".join(generator.choices(letters, k=generator.randint(3, 7)))
