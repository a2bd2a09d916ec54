"""What comes out of an LLM: tokens as they are made, and the answers put together from them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(NamedTuple):
    """How likely the model found a token, and which it found likeliest: natural logarithms."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), the likeliest first; as many as were asked for


class TokenOutput(NamedTuple):
    """One token of one request, as a scheduler reports it."""

    uid: int
    token_id: int | None  # None: the request ended without one (aborted)
    finish_reason: FinishReason | None  # None: more will come
    cached_tokens: int  # prompt tokens that were found in the prefix cache
    logprob: TokenLogprob | None = None  # of token_id, if the request asks for it
    # With the first token: of each prompt token. The first of them has none.
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. `text` may be empty: a character can take several tokens."""

    index: int  # of the prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    text: str  # without the end-of-sequence token
    token_ids: list[int]  # with it
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None = None  # of token_ids, if they were asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the prompt's; the first has none
