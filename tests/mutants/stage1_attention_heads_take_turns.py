"""1.3: query heads take turns with the KV heads."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention

kills = "tests/exercises/test_stage1.py::test_heads_of_a_group_share_a_kv_head"
words = "takes turns"


class MyRecomputeAttention(RecomputeAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q = q.view(tokens, q_heads // kv_heads, kv_heads, head_dim).permute(2, 1, 0, 3)  # [kv, group, tokens, dim]
        k = k.permute(1, 2, 0)[:, None]  # [kv, 1, dim, tokens]
        v = v.transpose(0, 1)[:, None]  # [kv, 1, tokens, dim]
        scores = (q @ k).float() * head_dim**-0.5  # [kv, group, tokens, tokens]
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1).to(v.dtype)
        return (weights @ v).permute(2, 1, 0, 3).reshape(tokens, q_heads, head_dim)
