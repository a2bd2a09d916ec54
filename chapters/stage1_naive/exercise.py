"""Stage 1, naive: your code.

`minisgl start 1` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 1` says how you stand, `minisgl hint 1.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
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
    #   self.weight   [size], in the model's dtype
    #   self.eps      float: the formula's
    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) × weight over the last dimension, [..., size]. The sum of squares needs float32, whatever
        x is; the quotient is rounded to x's dtype before it meets the weight, as transformers does."""
        raise NotImplementedError("exercise 1.1")


class MyRotation(Rotation):
    # 1.2 RoPE: turn a head
    #   self.cos          [tokens, 1, head_dim]
    #   self.signed_sin   [tokens, 1, head_dim]: -sin for the first half of a head, sin for the second
    def apply(self, x: Tensor) -> Tensor:
        """Turn every head of x, [tokens, heads, head_dim].

        A pair (a, b) becomes (a cos - b sin, b cos + a sin): x × cos, plus x with its halves exchanged × (-sin, sin).
        """
        raise NotImplementedError("exercise 1.2")


class MyRecomputeAttention(RecomputeAttention):
    # 1.3 grouped-query attention
    #   Nothing but the arguments, which are all in the model's dtype and on its device.
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Grouped-query attention (arXiv 2305.13245), causal: softmax(q kᵀ / √head_dim) v.

        q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Query heads in a row share one KV head:
        head h reads KV head h // (q_heads / kv_heads). Token i sees tokens 0 … i. Returns q's shape.
        """
        raise NotImplementedError("exercise 1.3")


class MyTokenFilters(TokenFilters):
    # 1.4 top-k and top-p
    #   Nothing but the arguments. A score is a logit divided by the temperature, float32.
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        """The top_k-th highest score (arXiv 1805.04833); -inf for a row whose top_k is more than n.

        ranked: [rows, n], the n highest in descending order; top_k: int64 [rows]. Returns [rows, 1].
        """
        raise NotImplementedError("exercise 1.4")

    def top_p_threshold(self, ranked: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
        """The lowest score of the nucleus (arXiv 1904.09751), the fewest of the highest that hold top_p of the mass:
        a token stays if those above it hold less than top_p, so the first always does. top_p 1 keeps all.

        ranked: [rows, n] in descending order; log_total: [rows, 1], logsumexp of all scores that compete;
        top_p: [rows]. Returns [rows, 1].
        """
        raise NotImplementedError("exercise 1.4")


class MyLLM(LLM):
    # 1.5 the loop
    #   self._next_token(req) -> int      the forward over all that req holds, and the sampling
    #   self.tokenizer.eos_ids            frozenset[int]: what append_host asks for
    #   self.tracer.span("forward", "engine", req.uid, tokens=req.device_len)   `with` it around a step: for the figures
    #   request.uid, .sampling_params, .prompt_ids (list[int])
    #   Req(uid, input_ids, sampling_params, table_idx)   input_ids: a Tensor, int32, on the CPU
    #   req.append_host(token_id, eos_ids)   notes the token; sets and returns req.finish_reason, None while more will
    #       come
    #   TokenOutput(uid, token_id, finish_reason, cached_tokens)
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """One request after the other, one token after the other. Each token is yielded as soon as it is there, as a
        TokenOutput with the request's uid, its finish_reason so far, and no cached tokens.

        A Req is made of each request, in row 0. While it has no finish_reason, `_next_token` gives the token after all
        that it holds; `append_host` notes it, and says whether it is the last; `device_len` counts it.
        """
        raise NotImplementedError("exercise 1.5")
