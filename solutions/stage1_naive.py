"""Stage 1, naive: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.sampling.filters import TokenFilters
from minisgl.stage1.llm import LLM


class MyRMSNorm(RMSNorm):
    # 1.1 RMSNorm
    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) × weight over the last dimension, [..., size]. The sum of squares needs float32, whatever
        x is; the quotient is rounded to x's dtype before it meets the weight, as transformers does."""
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight  # [..., size]


class MyRotation(Rotation):
    # 1.2 RoPE: turn a head
    def apply(self, x: Tensor) -> Tensor:
        """Turn every head of x, [tokens, heads, head_dim].

        A pair (a, b) becomes (a cos - b sin, b cos + a sin): x × cos, plus x with its halves exchanged × (-sin, sin).
        """
        exchanged = x.roll(x.shape[-1] // 2, dims=-1)  # [tokens, heads, head_dim]
        return torch.addcmul(x * self.cos, exchanged, self.signed_sin)


class MyRecomputeAttention(RecomputeAttention):
    # 1.3 grouped-query attention
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Grouped-query attention (arXiv 2305.13245), causal: softmax(q kᵀ / √head_dim) v.

        q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Query heads in a row share one KV head:
        head h reads KV head h // (q_heads / kv_heads). Token i sees tokens 0 … i. Returns q's shape.
        """
        tokens, q_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q = q.view(tokens, kv_heads, q_heads // kv_heads, head_dim).permute(1, 2, 0, 3)  # [kv, group, tokens, dim]
        k = k.permute(1, 2, 0)[:, None]  # [kv, 1, dim, tokens]
        v = v.transpose(0, 1)[:, None]  # [kv, 1, tokens, dim]
        scores = (q @ k).float() * head_dim**-0.5  # [kv, group, tokens, tokens]
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1).to(v.dtype)
        return (weights @ v).permute(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)


class MyTokenFilters(TokenFilters):
    # 1.4 top-k and top-p
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        """The top_k-th highest score (arXiv 1805.04833); -inf for a row whose top_k is more than n.

        ranked: [rows, n], the n highest in descending order; top_k: int64 [rows]. Returns [rows, 1].
        """
        n = ranked.shape[1]
        kth = ranked.gather(1, top_k.clamp(max=n)[:, None] - 1)  # [rows, 1]
        return kth.masked_fill(top_k[:, None] > n, -torch.inf)

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


class MyLLM(LLM):
    # 1.5 the loop
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """One request after the other, one token after the other. Each token is yielded as soon as it is there, as a
        TokenOutput with the request's uid, its finish_reason so far, and no cached tokens.

        A Req is made of each request, in row 0. While it has no finish_reason, `_next_token` gives the token after all
        that it holds; `append_host` notes it, and says whether it is the last; `device_len` counts it.
        """
        for request in requests:
            ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
            req = Req(request.uid, ids, request.sampling_params, table_idx=0)
            while req.finish_reason is None:
                with self.tracer.span("forward", "engine", req.uid, tokens=req.device_len):
                    token_id = self._next_token(req)
                req.append_host(token_id, self.tokenizer.eos_ids)
                req.device_len += 1  # cached_len stays 0: nothing is kept, so all of it is computed again
                yield TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0)
