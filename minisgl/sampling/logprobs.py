"""How likely the model found tokens, by its logits as they are: measured on the device, read on the host.

Knows nothing of how tokens are chosen. What is measured crosses to the host as int32, in one copy with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core.outputs import TokenLogprob
from minisgl.core.req import ChunkedReq, Req
from minisgl.kernel.device import device_tensor, to_device

_ROWS_AT_ONCE = 128  # of logits: 78 MB in float32 for a vocabulary of 152,000


@dataclass(frozen=True, eq=False)
class LogprobArgs:
    """The rows of a batch whose tokens are to be reported, and the prompts among them."""

    tops: dict[int, int]  # known to the host: row of the batch -> likeliest tokens that it wants
    rows: Tensor  # int64 [n], the same rows in the same order
    prompts: PromptTokens | None
    max_top: int  # the most that any row or prompt wants

    def measure(self, logits: Tensor, token_ids: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """logits: [rows, local_vocab] of the batch, as the model gave them; token_ids: int32 [rows], what was sampled;
        gather: all columns of some rows. Returns int32 [n, 1 + 2 * max_top], see `measure`."""
        groups = self.rows.split(_ROWS_AT_ONCE)
        return torch.cat([measure(gather(logits[rows]), token_ids[rows], self.max_top) for rows in groups])


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Those tokens of a batch that say how likely the next token of their own prompt is."""

    counts: dict[int, tuple[int, int]]  # row of the batch -> how many of them are its, likeliest tokens that it wants
    indices: Tensor  # int64 [m], of the batch's tokens
    next_ids: Tensor  # int32 [m]
    max_top: int

    def measure(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """hidden: [m, hidden size]; head: to logits, few rows at a time: a long prompt's would fill the memory.
        Returns int32 [m, 1 + 2 * max_top]."""
        parts = zip(hidden.split(_ROWS_AT_ONCE), self.next_ids.split(_ROWS_AT_ONCE), strict=True)
        return torch.cat([measure(head(some), ids, self.max_top) for some, ids in parts])


def measure(logits: Tensor, token_ids: Tensor, top: int) -> Tensor:
    """logits: [n, vocab], any float dtype; token_ids: int32 [n]. Returns int32 [n, 1 + 2 * top]: the logprob of the
    token, those of the likeliest (all float32, their bits), and the ids of the likeliest."""
    scores = logits.float()
    best, best_ids = scores.topk(top, dim=1)  # [n, top]
    chosen = scores.gather(1, token_ids.long()[:, None])  # [n, 1]
    logprobs = torch.cat((chosen, best), dim=1) - scores.logsumexp(dim=1, keepdim=True)  # [n, 1 + top]
    return torch.cat((logprobs.view(torch.int32), best_ids.int()), dim=1)


class LogprobsOnHost:
    """What was measured of a batch, once its copy is done."""

    def __init__(self, args: LogprobArgs, measured: Tensor) -> None:
        """measured: int32 [n + m, 1 + 2 * max_top], on the host: first the sampled tokens, then the prompts'."""
        self._args, self._measured = args, measured

    def read(self) -> tuple[dict[int, TokenLogprob], dict[int, list[TokenLogprob]]]:
        """By row of the batch: of the sampled tokens, and of the prompt tokens, in order."""
        columns = 1 + self._args.max_top
        numbers = self._measured.numpy()
        logprobs = numbers[:, :columns].view(np.float32).tolist()
        entries = zip(logprobs, numbers[:, columns:].tolist(), strict=True)
        sampled = {row: _entry(*next(entries), top) for row, top in self._args.tops.items()}
        counts = self._args.prompts.counts if self._args.prompts else {}
        return sampled, {row: [_entry(*next(entries), top) for _ in range(n)] for row, (n, top) in counts.items()}


def _entry(logprobs: list[float], token_ids: list[int], top: int) -> TokenLogprob:
    return TokenLogprob(logprobs[0], list(zip(token_ids[:top], logprobs[1:], strict=False)))


def logprob_args(reqs: Sequence[Req], vocab_size: int, device: torch.device) -> LogprobArgs | None:
    """For the step that will compute reqs, before their lengths advance. None when no row asks for any."""
    asking = {
        row: min(n, vocab_size) for row, req in enumerate(reqs) if (n := req.sampling_params.logprobs) is not None
    }
    if not asking:
        return None
    max_top = max(asking.values())
    tops = {row: top for row, top in asking.items() if not isinstance(reqs[row], ChunkedReq)}
    rows = device_tensor(list(tops), torch.int64, device)
    return LogprobArgs(tops, rows, _prompt_tokens(reqs, asking, max_top, device), max_top)


def _prompt_tokens(
    reqs: Sequence[Req], asking: dict[int, int], max_top: int, device: torch.device
) -> PromptTokens | None:
    """The batch's tokens are its requests', one request after the other."""
    starts = np.cumsum([0, *(req.extend_len for req in reqs)]).tolist()
    counts, indices, next_ids = {}, [], []
    for row, top in asking.items():
        req = reqs[row]
        ids = req.input_ids[req.cached_len + 1 : min(req.device_len + 1, req.prompt_len)]
        if req.prompt_logprobs is not None and len(ids):
            counts[row] = len(ids), top
            next_ids.append(ids)
            indices.append(torch.arange(starts[row], starts[row] + len(ids)))
    if not counts:
        return None
    return PromptTokens(counts, to_device(torch.cat(indices), device), to_device(torch.cat(next_ids), device), max_top)
