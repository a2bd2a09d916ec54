"""What requests want changed in their logits: penalties, biases, ends that come too early. Knows nothing of drawing.

No counts are kept from step to step. When a token is chosen, the token pool on the device holds all those before it,
also the last, which the host may not know yet; so they are counted anew for the rows that ask. Nothing has to be undone
when a request is retracted, and overlap changes nothing.
Semantics and order are vLLM's; the repetition penalty is that of CTRL (Keskar et al., 2019, arXiv 1909.05858).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minisgl.core.req import ChunkedReq, Req
from minisgl.kernel.device import to_device

_ROWS_AT_ONCE = 64  # of counts: 39 MB in float32 for a vocabulary of 152,000


@dataclass(frozen=True, eq=False)
class LogitAdjustments:
    """Of rows some of which ask for any."""

    bias: LogitBias | None  # None: no row asks
    penalties: list[Penalties]  # in groups of rows: counts are as large as logits, and should not fill the memory

    def apply(self, logits: Tensor) -> Tensor:
        """logits: [rows, vocab], any float dtype, not changed. Returns them adjusted, float32."""
        adjusted = logits.to(torch.float32, copy=True)  # [rows, vocab]
        if self.bias is not None:
            adjusted[self.bias.rows, self.bias.token_ids] += self.bias.values
        for group in self.penalties:
            adjusted.index_copy_(0, group.rows, group.apply(adjusted[group.rows]))
        return adjusted


@dataclass(frozen=True, eq=False)
class LogitBias:
    """One entry for each token whose logit changes by a number known in advance: no pair of row and token twice."""

    rows: Tensor  # int64 [n]
    token_ids: Tensor  # int64 [n]
    values: Tensor  # float32 [n]; -inf: may not be chosen


@dataclass(frozen=True, eq=False)
class Penalties:
    """On tokens that were there before. One entry for each row that has any."""

    rows: Tensor  # int64 [n]
    tokens: Tensor  # int32 [pool rows, width]: a view, read when it is applied; past a row's length anything
    pool_rows: Tensor  # int64 [n]: where in `tokens` each is
    starts: Tensor  # int64 [n]: where the answer begins
    ends: Tensor  # int64 [n]: tokens before the one to be chosen
    presence: Tensor  # float32 [n]
    frequency: Tensor  # float32 [n]
    repetition: Tensor  # float32 [n]
    of_output: bool  # known to the host: some row has one of the first two
    of_all: bool  # some row has the third

    def apply(self, logits: Tensor) -> Tensor:
        """logits: float32 [n, vocab]. Returns the same shape."""
        ids = self.tokens[self.pool_rows].long()  # [n, width]
        place = torch.arange(ids.shape[1], device=ids.device)  # [width]
        known = place < self.ends[:, None]  # [n, width]
        ids = ids.masked_fill(~known, 0)  # `where` would make the host wait: it copies its number to the device
        if self.of_all:
            seen = _counts(ids, known, logits) > 0  # [n, vocab]
            factor = self.repetition[:, None]
            logits = logits.where(~seen, torch.where(logits > 0, logits / factor, logits * factor))
        if self.of_output:
            counts = _counts(ids, known & (place >= self.starts[:, None]), logits)  # [n, vocab]
            logits = logits - self.frequency[:, None] * counts - self.presence[:, None] * (counts > 0)
        return logits


def _counts(ids: Tensor, which: Tensor, like: Tensor) -> Tensor:
    """How often each token is among those of `ids` that count, both [n, width]: float32 [n, vocab], exact."""
    return torch.zeros_like(like).scatter_add_(1, ids, which.float())


def asks(req: Req) -> bool:
    """Whether the step that will compute it, before its lengths advance, is to change its logits."""
    if req.is_plain or isinstance(req, ChunkedReq):
        return False
    params = req.sampling_params
    return params.penalizes or bool(params.logit_bias) or req.device_len - req.prompt_len < params.min_tokens


def adjustments(
    reqs: Sequence[Req], eos_ids: frozenset[int], token_pool: Tensor | None, device: torch.device
) -> LogitAdjustments | None:
    """For the step that will compute reqs, before their lengths advance. None when no row asks for anything.

    token_pool: int32 [rows, max_seq_len], on the device. None: the host knows all tokens.
    """
    asking = [(row, req) for row, req in enumerate(reqs) if asks(req)]
    bias = _bias(asking, eos_ids, device)
    penalized = [(row, req) for row, req in asking if req.sampling_params.penalizes]
    groups = [penalized[i : i + _ROWS_AT_ONCE] for i in range(0, len(penalized), _ROWS_AT_ONCE)]
    penalties = [_penalties(group, token_pool, device) for group in groups]
    return LogitAdjustments(bias, penalties) if bias or penalties else None


def _bias(asking: list[tuple[int, Req]], eos_ids: frozenset[int], device: torch.device) -> LogitBias | None:
    """Arrays, since a request may have 1,024 entries in every step: as lists 16 of 300 took 2.7 ms, so 0.2."""
    rows = [(row, by_token) for row, req in asking if (by_token := _biases(req, eos_ids))]
    if not rows:
        return None
    sizes = [len(by_token) for _, by_token in rows]
    row_of = np.repeat([row for row, _ in rows], sizes)
    token_ids = np.concatenate([np.fromiter(by_token, np.int64, len(by_token)) for _, by_token in rows])
    values = [np.fromiter(by_token.values(), np.float32, len(by_token)) for _, by_token in rows]
    places = to_device(torch.from_numpy(np.stack([row_of, token_ids])), device)  # [2, n]
    return LogitBias(places[0], places[1], to_device(torch.from_numpy(np.concatenate(values)), device))


def _biases(req: Req, eos_ids: frozenset[int]) -> Mapping[int, float]:
    """By token id: what this step adds to its logit."""
    params = req.sampling_params
    bias = params.logit_bias or {}
    if req.device_len - req.prompt_len >= params.min_tokens:
        return bias
    return {**bias, **dict.fromkeys(params.ends(eos_ids), -torch.inf)}


def _penalties(asking: list[tuple[int, Req]], token_pool: Tensor | None, device: torch.device) -> Penalties:
    reqs, params = [req for _, req in asking], [req.sampling_params for _, req in asking]
    if token_pool is None:
        tokens = to_device(pad_sequence([req.input_ids for req in reqs], batch_first=True), device)
        pool_rows = list(range(len(reqs)))
    else:
        tokens = token_pool[:, : max(req.device_len for req in reqs)]
        pool_rows = [req.table_idx for req in reqs]
    numbers = [[row for row, _ in asking], pool_rows, [r.prompt_len for r in reqs], [r.device_len for r in reqs]]
    rows, of_pool, starts, ends = to_device(torch.tensor(numbers), device)
    factors = [[p.presence_penalty, p.frequency_penalty, p.repetition_penalty] for p in params]
    presence, frequency, repetition = to_device(torch.tensor(factors).T.contiguous(), device)
    of_output = any(p.presence_penalty or p.frequency_penalty for p in params)
    of_all = any(p.repetition_penalty != 1 for p in params)
    return Penalties(rows, tokens, of_pool, starts, ends, presence, frequency, repetition, of_output, of_all)
