"""One token for each row of logits. Knows nothing of models, batches or what becomes of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.device import device_tensor
from minisgl.kernel.triton_runs import triton_runs
from minisgl.sampling.args import BatchSamplingArgs, RowsApart
from minisgl.sampling.filters import TokenFilters
from minisgl.sampling.logprobs import logprob_args
from minisgl.sampling.noise import gumbel_noise
from minisgl.sampling.penalties import adjustments, asks

_OURS = __name__, TokenFilters.__module__
_MIN_TEMPERATURE = 1e-6  # colder than this there is nothing left to draw, and float32 would overflow
_NEUTRAL = SamplingParams(temperature=1.0, seed=0)  # of a row that is greedy in a batch that draws


class _Drawn(NamedTuple):
    """Rows that were drawn, and the arguments for it."""

    params: list[SamplingParams]
    greedy: list[bool]
    lengths: list[int]
    args: BatchSamplingArgs

    def next(self, params: list[SamplingParams], greedy: list[bool], lengths: list[int]) -> BatchSamplingArgs | None:
        """The arguments for these rows if they are the same ones, a token further: without a copy to the device."""
        grown = lengths == [length + 1 for length in self.lengths]
        if not grown or params != self.params or greedy != self.greedy or self.args.positions is None:
            return None
        return replace(self.args, positions=self.args.positions + 1)


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device, fused: bool = False) -> None:
        """fused: rows are filtered and drawn by kernels if there are any for the device; the tokens are the same."""
        self.vocab_size, self.device = vocab_size, device
        exercises = Sampler.argmax, Sampler.draw, TokenFilters.top_k_threshold, TokenFilters.top_p_threshold
        ours = all(method.__module__ in _OURS for method in exercises)  # not a learner's
        self.fused = fused and ours and triton_runs(device)
        self.filters = TokenFilters()
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._drawn: _Drawn | None = None  # the last

    def prepare(
        self, reqs: Sequence[Req], eos_ids: frozenset[int] = frozenset(), token_pool: Tensor | None = None
    ) -> BatchSamplingArgs:
        """For the step that will compute reqs: call it before their lengths advance (`complete_one`). A chunk's row
        is greedy, its token is thrown away. Raises ValueError if a row that draws has no seed.

        eos_ids: what min_tokens keeps away; some configurations name tokens that the model does not have. token_pool:
        see `adjustments`.
        """
        greedy = [req.sampling_params.is_greedy or isinstance(req, ChunkedReq) for req in reqs]
        plain = all(req.is_plain for req in reqs)
        if plain and all(greedy):
            return BatchSamplingArgs()
        rows = [row for row, req in enumerate(reqs) if asks(req) or (not greedy[row] and _filters(req))]
        apart = None
        if rows:
            own = [reqs[row] for row in rows]
            ends = frozenset(token_id for token_id in eos_ids if token_id < self.vocab_size)
            adjust = adjustments(own, ends, token_pool, self.device)
            args = self._draws(own, [greedy[row] for row in rows])
            apart = RowsApart(self._tensor(rows, torch.int64), adjust, args)
            for row in rows:
                greedy[row] = True
        logprobs = None if plain else logprob_args(reqs, self.vocab_size, self.device)
        return replace(self._draws(reqs, greedy), apart=apart, logprobs=logprobs)

    def _draws(self, reqs: Sequence[Req], greedy: list[bool]) -> BatchSamplingArgs:
        if all(greedy):
            return BatchSamplingArgs()
        params = [_NEUTRAL if g else req.sampling_params for g, req in zip(greedy, reqs, strict=True)]
        lengths = [req.device_len for req in reqs]
        args = self._drawn.next(params, greedy, lengths) if self._drawn else None
        if args is None:
            args = self._on_device(reqs, params, greedy)
        self._drawn = _Drawn(params, greedy, lengths, args)
        return args

    def _on_device(self, reqs: Sequence[Req], params: list[SamplingParams], greedy: list[bool]) -> BatchSamplingArgs:
        seeds = [p.seed for p in params if p.seed is not None]
        if len(seeds) < len(params):
            unseeded = [req.uid for req, p in zip(reqs, params, strict=True) if p.seed is None]
            raise ValueError(f"requests {unseeded[:8]} draw tokens and have no seed: give them one at arrival")
        vocab = self.vocab_size
        top_k = [vocab if p.top_k == -1 else min(p.top_k, vocab) for p in params]
        return BatchSamplingArgs(
            temperatures=self._tensor([max(p.temperature, _MIN_TEMPERATURE) for p in params], torch.float32),
            greedy=self._tensor(greedy, torch.bool) if any(greedy) else None,
            seeds=self._tensor(seeds, torch.int64),
            positions=self._tensor([req.device_len for req in reqs], torch.int64),
            top_k=self._tensor(top_k, torch.int64) if min(top_k) < vocab else None,
            top_p=self._tensor([p.top_p for p in params], torch.float32) if any(p.top_p < 1 for p in params) else None,
            min_p=self._tensor([p.min_p for p in params], torch.float32) if any(p.min_p > 0 for p in params) else None,
            max_top_k=max((k for k in top_k if k < vocab), default=0),
            open_nucleus=any(p.top_p < 1 and k == vocab for k, p in zip(top_k, params, strict=True)),
        )

    def sample(self, logits: Tensor, args: BatchSamplingArgs) -> Tensor:
        """logits: [rows, vocab], any float dtype, not changed. Returns int32 [rows]."""
        apart = args.apart
        if apart is None:
            return self.choose(logits, args)
        all_are = len(apart.rows) == len(logits)
        rows = self.whole(logits if all_are else logits[apart.rows])  # [n, vocab]
        tokens = self._choose(rows if apart.adjust is None else apart.adjust.apply(rows), apart.args)  # [n]
        return tokens if all_are else self.choose(logits, args).index_copy_(0, apart.rows, tokens)

    def choose(self, logits: Tensor, args: BatchSamplingArgs) -> Tensor:
        """As `sample`, where no row is apart."""
        return self._choose(logits, args)

    def whole(self, logits: Tensor) -> Tensor:
        """All columns of what `sample` was given some rows of."""
        return logits

    def _choose(self, logits: Tensor, args: BatchSamplingArgs) -> Tensor:
        if self.fused:
            return self._sample_fused(logits, args)
        if args.temperatures is None:
            return self.argmax(logits)
        scores = logits.float() / args.temperatures[:, None]  # [rows, vocab]
        drawn = self.draw(self.filters.apply(scores, args), args)
        return drawn if args.greedy is None else torch.where(args.greedy, self.argmax(logits), drawn)

    def _sample_fused(self, logits: Tensor, args: BatchSamplingArgs) -> Tensor:
        from minisgl.kernel.triton_filters import lowest_logits
        from minisgl.kernel.triton_sample import sample_rows

        filtered = any(values is not None for values in (args.top_k, args.top_p, args.min_p))
        return sample_rows(logits, args, lowest_logits(logits, args) if filtered else None)

    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the highest: int32 [rows]. By `max`: on a CPU `argmax` takes 4 times as long in bfloat16."""
        return logits.max(dim=1).indices.int()

    def draw(self, scores: Tensor, args: BatchSamplingArgs) -> Tensor:
        """Token i with probability softmax(scores)[i], as the argmax of scores + Gumbel noise: no softmax, no sum, and
        a small change of the scores rarely changes the token. scores: float32 [rows, vocab]. Returns int32 [rows]."""
        if args.seeds is None or args.positions is None:
            raise ValueError("a row can be drawn only with seeds and positions: make the arguments with prepare()")
        return self.argmax(scores + gumbel_noise(args.seeds, args.positions, self.token_ids))

    def _tensor(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return device_tensor(values, dtype, self.device)


def _filters(req: Req) -> bool:
    params = req.sampling_params
    return params.top_k != -1 or params.top_p < 1 or params.min_p > 0
