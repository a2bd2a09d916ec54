"""Attention with no cache: one sequence, all of its tokens, every time. Written out, to be read first."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.learn import exercise


class RecomputeAttention:
    """Stage 1's. Stores nothing."""

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        return self.attend(q, k, v)

    @exercise("1.3")
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
