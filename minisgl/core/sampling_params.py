"""How one request wants its tokens chosen, and when it ends. Knows nothing about logits or batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Immutable, so that one object can be shared by many requests.

    temperature 0 is argmax, whatever the other fields say. top_k -1 means the whole vocabulary. A seeded
    answer depends only on the seed and the position of each token; without a seed one is drawn at arrival.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 1024
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, 2**31 - 1, also="-1 for the whole vocabulary")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r:.80}")

    @property
    def is_greedy(self) -> bool:
        """Only one token can be chosen. top_p cannot undo that (the walk-through's 4.8.4 lets it)."""
        return self.temperature == 0 or self.top_k == 1


def _number(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}], not {value!r:.80}")


def _integer(name: str, value: int, low: int, high: int, also: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        also = f", or {also}" if also else ""
        raise ValueError(f"{name} must be an integer from {low} to {high}{also}, not {value!r:.80}")
