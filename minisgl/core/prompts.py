"""What may be asked of a model: prompts and their sampling parameters, checked before anything runs. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.errors import ContextLengthExceeded
from minisgl.core.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None

PROMPTS = "prompts must be a str, a list of them, or a list of lists of token ids ([[1, 2, 3]] is one prompt)"
PARAMS = "sampling_params must be a SamplingParams, or a list with one for each prompt"


def pairs(prompts: Prompts, sampling_params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt, and what is its own, everybody's, or the default. Raises ValueError for what has another type."""
    many: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
    _check_list(many, (str, Sequence), PROMPTS)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: Sequence[SamplingParams] = [sampling_params or SamplingParams()] * len(many)
    else:
        params = sampling_params
        _check_list(params, (SamplingParams,), PARAMS)
    if len(params) != len(many):
        raise ValueError(f"{len(params)} sampling_params for {len(many)} prompts: give one, or one for each")
    return list(zip(many, params, strict=True))


def _check_list(values: object, kinds: tuple[type, ...], allowed: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{allowed}, not {type(values).__name__}")
    for value in values:
        if not isinstance(value, kinds) or isinstance(value, bytes):
            raise ValueError(f"{allowed}, not a {type(values).__name__} with {type(value).__name__} in it")


def _raise_for_bad_id(ids: Sequence[int], vocab_size: int) -> None:
    """The first that is none. Nothing when all are: a subclass of int is one, too."""
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id!r:.80} is not an integer from 0 to {vocab_size - 1}")


def check_prompt(ids: Sequence[int], params: SamplingParams, vocab_size: int, max_seq_len: int) -> None:
    """Raises ValueError when the request could not be served: empty, ids out of range, or too long
    (ContextLengthExceeded)."""
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    # Types and ends first: token by token it takes half as long again, and nothing runs meanwhile. Of what is too long
    # anyway, which may be millions, none is looked at.
    if len(ids) <= max_seq_len and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size):
        _raise_for_bad_id(ids, vocab_size)
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        if token_ids and max(token_ids) >= vocab_size:
            raise ValueError(f"{name} has token id {max(token_ids)}, over this model's last, {vocab_size - 1}")
    total = len(ids) + params.max_tokens
    if total > max_seq_len:
        remedy = "shorten the prompt" if len(ids) >= max_seq_len else "shorten the prompt or lower max_tokens"
        raise ContextLengthExceeded(
            f"{len(ids)} prompt tokens and max_tokens {params.max_tokens} make {total}, over the limit of "
            f"{max_seq_len} (the model's own, or a lower --max-seq-len): {remedy}"
        )
