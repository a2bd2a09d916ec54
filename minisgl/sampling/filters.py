"""Which tokens may be drawn: top-k, top-p and min-p. Knows nothing of drawing one.

Each filter is a threshold a row: the lowest score that stays. Tokens that tie with it stay too, so an answer does not
depend on the order in which a sort leaves equals. A score is logit / temperature, float32.
Semantics and order (top-k, then top-p of what is left, then min-p) are those of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.learn import exercise
from minisgl.sampling.args import BatchSamplingArgs

_FIRST_TRIES = (256, 4096)  # a nucleus is mostly small, and a full sort takes a CPU 20 times as long as the first try
_MASS_ERROR = 1e-4  # more than float32 sums of a vocabulary can be wrong by


class TokenFilters:
    def apply(self, scores: Tensor, args: BatchSamplingArgs) -> Tensor:
        """scores: float32 [rows, vocab]. Returns them with -inf where a token may not be drawn; in place."""
        floor = torch.full_like(scores[:, :1], -torch.inf)  # [rows, 1]
        if args.top_k is not None or args.top_p is not None:
            ranked = self._rank(scores, args)
            if args.top_k is not None:
                floor = self.top_k_threshold(ranked, args.top_k)
            if args.top_p is not None:
                log_total = scores.masked_fill(scores < floor, -torch.inf).logsumexp(dim=1, keepdim=True)  # [rows, 1]
                floor = torch.maximum(floor, self.top_p_threshold(ranked, log_total, args.top_p))
        if args.min_p is not None:
            floor = torch.maximum(floor, self.min_p_threshold(scores, args.min_p))
        return scores.masked_fill_(scores < floor, -torch.inf)

    @exercise("1.4")
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        """The top_k-th highest score (arXiv 1805.04833); -inf for a row whose top_k is more than n.

        ranked: [rows, n], the n highest in descending order; top_k: int64 [rows]. Returns [rows, 1].
        """
        n = ranked.shape[1]
        kth = ranked.gather(1, top_k.clamp(max=n)[:, None] - 1)  # [rows, 1]
        return kth.masked_fill(top_k[:, None] > n, -torch.inf)

    @exercise("1.4")
    def top_p_threshold(self, ranked: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
        """The lowest score of the nucleus (arXiv 1904.09751), the fewest of the highest that hold top_p of the mass:
        a token stays if those above it hold less than top_p, so the first always does. top_p 1 keeps all.

        ranked: [rows, n] in descending order; log_total: [rows, 1], logsumexp of all scores that compete;
        top_p: [rows]. Returns [rows, 1].
        """
        probs = (ranked - log_total).exp()  # [rows, n]
        above = probs.cumsum(dim=1) - probs  # [rows, n]
        outside = above >= top_p[:, None]
        lowest = ranked.masked_fill(outside, torch.inf).amin(dim=1, keepdim=True)  # [rows, 1]
        return lowest.masked_fill(top_p[:, None] >= 1, -torch.inf)

    def min_p_threshold(self, scores: Tensor, min_p: Tensor) -> Tensor:
        """The score of min_p times the highest probability (arXiv 2407.01082).

        scores: [rows, vocab]; min_p: [rows]. Returns [rows, 1].
        """
        return scores.amax(dim=1, keepdim=True) + min_p.log()[:, None]

    def _rank(self, scores: Tensor, args: BatchSamplingArgs) -> Tensor:
        """Each row's highest scores, descending, at least as many as top-k and top-p can leave: [rows, n]."""
        if args.top_p is None or not args.open_nucleus:
            return scores.topk(args.max_top_k, dim=1).values
        if scores.device.type == "cpu":  # on a GPU a sort is cheaper than to wait for the answer to "enough?"
            log_total = scores.logsumexp(dim=1, keepdim=True)  # [rows, 1]
            for n in (n for n in _FIRST_TRIES if args.max_top_k <= n < scores.shape[1]):
                ranked = scores.topk(n, dim=1).values
                mass = (ranked - log_total).exp().sum(dim=1)  # [rows]
                if bool(((mass > args.top_p + _MASS_ERROR) | (args.top_p == 1)).all()):
                    return ranked
        return scores.sort(dim=1, descending=True).values
