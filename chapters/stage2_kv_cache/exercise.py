"""Stage 2, kv cache: your code.

`minisgl start 2` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 2` says how you stand, `minisgl hint 2.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.models.config import ModelConfig
from minisgl.stage2.contiguous_cache import ContiguousCache
from minisgl.stage2.llm import LLM


class MyContiguousCache(ContiguousCache):
    # 2.1 append to the cache
    #   self.k_cache(layer_id), self.v_cache(layer_id)   [slots, kv_heads, head_dim], views: what is written to them is
    #       kept
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Append. k and v: [tokens, kv_heads, head_dim]; out_loc: int32 [tokens], the positions of the tokens."""
        raise NotImplementedError("exercise 2.1")

    # 2.4 bytes per token
    #   config.num_layers, config.num_kv_heads, config.head_dim   int
    #   dtype.itemsize   bytes of one number
    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """What each token of context costs to keep: a K and a V, head_dim numbers of this dtype each, for every KV
        head of every layer."""
        raise NotImplementedError("exercise 2.4")


class MyContiguousAttention(ContiguousAttention):
    # 2.2 attend to what is cached
    #   self.causal_mask(n, m, device)   yours too
    #   scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False)   is PyTorch's: it
    #       wants [batch, heads, tokens, head_dim]; true in a mask means: may look; is_causal takes query 0 for token 0
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Grouped-query, causal: the queries are the last n of the m tokens of one sequence. Returns q's shape.

        q: [n, q_heads, head_dim]; k, v: [m, kv_heads, head_dim], m >= n.
        """
        raise NotImplementedError("exercise 2.2")

    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """bool [n, m], true where query i, which is token m - n + i, may look at key j: j <= m - n + i."""
        raise NotImplementedError("exercise 2.2")


class MyLLM(LLM):
    # 2.3 positions of a step
    #   self.device, self.attention, self.cache   the last two go into the Context as attention and kv_cache
    #   req.input_ids   int32 [n], all tokens, on the CPU
    #   req.cached_len, req.device_len, and req.extend_len, their difference
    #   Context(input_ids=, positions=, logits_rows=, attention=, kv_cache=, out_loc=)   tensors on self.device: int32
    #       [tokens], int64 [tokens], int64 [rows], and out_loc, the slots to write to, int32 [tokens]
    def _context(self, req: Req) -> Context:
        """Only what is not cached: the tokens from cached_len to device_len, whose positions start at cached_len and
        not at 0. Slot n of the cache is for token n. Of the logits only the last token's row is wanted."""
        raise NotImplementedError("exercise 2.3")
