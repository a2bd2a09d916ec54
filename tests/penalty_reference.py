"""What penalties, biases and min_tokens do to one row of logits, token by token in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.sampling_params import SamplingParams


def penalized(
    logits: Tensor, params: SamplingParams, ids: list[int], prompt_len: int, eos_ids: frozenset[int]
) -> Tensor:
    """logits: [vocab], of the token after ids, prompt and answer. Returns float64 [vocab]."""
    out, answer = logits.double().tolist(), ids[prompt_len:]
    for token_id, bias in (params.logit_bias or {}).items():
        out[token_id] += bias
    if len(answer) < params.min_tokens:
        for token_id in (set() if params.ignore_eos else eos_ids) | set(params.stop_token_ids):
            out[token_id] = -float("inf")
    for token_id in range(len(out)):
        if token_id in ids:
            factor = params.repetition_penalty
            out[token_id] *= 1 / factor if out[token_id] > 0 else factor
        count = answer.count(token_id)
        out[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return torch.tensor(out, dtype=torch.float64)
