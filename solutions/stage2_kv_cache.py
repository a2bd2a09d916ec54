"""Stage 2, kv cache: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

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
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Append. k and v: [tokens, kv_heads, head_dim]; out_loc: int32 [tokens], the positions of the tokens."""
        self.k_cache(layer_id)[out_loc] = k
        self.v_cache(layer_id)[out_loc] = v

    # 2.4 bytes per token
    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """What each token of context costs to keep: a K and a V, head_dim numbers of this dtype each, for every KV
        head of every layer."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class MyContiguousAttention(ContiguousAttention):
    # 2.2 attend to what is cached
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Grouped-query, causal: the queries are the last n of the m tokens of one sequence. Returns q's shape.

        q: [n, q_heads, head_dim]; k, v: [m, kv_heads, head_dim], m >= n.
        """
        n, q_heads, head_dim = q.shape
        m, kv_heads, _ = k.shape
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, kv, m, dim]
        if n == 1:
            # The last token sees everything, so its heads can stand where tokens do: K is read once for each group.
            q = q.view(1, kv_heads, q_heads // kv_heads, head_dim)  # [1, kv, group, dim]
            return scaled_dot_product_attention(q, k, v).reshape(1, q_heads, head_dim)
        mask = None if n == m else self.causal_mask(n, m, q.device)
        q = q.transpose(0, 1)[None]  # [1, q_heads, n, dim]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out[0].transpose(0, 1)

    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """bool [n, m], true where query i, which is token m - n + i, may look at key j: j <= m - n + i."""
        return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


class MyLLM(LLM):
    # 2.3 positions of a step
    def _context(self, req: Req) -> Context:
        """Only what is not cached: the tokens from cached_len to device_len, whose positions start at cached_len and
        not at 0. Slot n of the cache is for token n. Of the logits only the last token's row is wanted."""
        positions = torch.arange(req.cached_len, req.device_len, device=self.device)  # [tokens]
        return Context(
            input_ids=req.input_ids[req.cached_len : req.device_len].to(self.device),
            positions=positions,
            logits_rows=torch.tensor([req.extend_len - 1], device=self.device),  # [1]
            attention=self.attention,
            kv_cache=self.cache,
            out_loc=positions.int(),
        )
