"""How one request wants its tokens chosen, and when it ends. Knows nothing about logits or batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # OpenAI's limits, here and below
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True)
class SamplingParams:
    """Immutable, so that one object can be shared by many requests.

    temperature 0 is argmax, whatever the other fields say. top_k -1 means the whole vocabulary. A seeded
    answer depends only on the seed and the position of each token; without a seed one is drawn at arrival.

    Penalties are vLLM's: presence and frequency count the answer's tokens, repetition those of the prompt too. Their
    order: logit_bias, min_tokens, penalties, temperature, filters. logprobs are the model's own, before any of these.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 1024
    ignore_eos: bool = False
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # end the answer as an end-of-sequence token does, ignore_eos or not
    min_tokens: int = 0  # so many must come before a token may end the answer
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None  # by token id
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the one chosen; None: nothing
    prompt_logprobs: bool = False  # the same for the prompt's tokens: its KV is computed, not taken from the cache

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
        self._check_ids()
        self._check_penalties()
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs needs logprobs, which says how many tokens to report")

    def _check_ids(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS}, not {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_penalties(self) -> None:
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.logit_bias is None:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, not {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Only one token can be chosen. top_p cannot undo that (the walk-through's 4.8.4 lets it)."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        """What was said before changes what may be said."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_plain(self) -> bool:
        """Tokens are chosen by the logits as the model gave them, and nothing but the tokens is reported."""
        asks = self.penalizes or self.logit_bias or self.min_tokens or self.logprobs is not None
        return not asks

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer. eos_ids: the model's."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_ids.union(self.stop_token_ids)


def _number(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}], not {value!r:.80}")


def _integer(name: str, value: int, low: int, high: int, also: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        also = f", or {also}" if also else ""
        raise ValueError(f"{name} must be an integer from {low} to {high}{also}, not {value!r:.80}")
