"""Attention of one sequence whose K and V lie one after the other in a cache. Knows nothing of pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.learn import exercise


class ContiguousAttention:
    """Stage 2's: only the new tokens are computed, and they attend to all that is cached."""

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> object:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        if ctx.kv_cache is None or ctx.out_loc is None:
            raise ValueError("ContiguousAttention needs a context with kv_cache and out_loc")
        ctx.kv_cache.store(layer_id, k, v, ctx.out_loc)
        length = int(ctx.positions[-1]) + 1
        return self.attend(q, ctx.kv_cache.k_cache(layer_id)[:length], ctx.kv_cache.v_cache(layer_id)[:length])

    @exercise("2.2")
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

    @exercise("2.2")
    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """bool [n, m], true where query i, which is token m - n + i, may look at key j: j <= m - n + i."""
        return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)
