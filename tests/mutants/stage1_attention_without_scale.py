"""1.3: does not divide the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention

kills = "tests/exercises/test_stage1.py::test_scores_are_divided_by_the_root_of_head_dim"
words = "root of head_dim"


class MyRecomputeAttention(RecomputeAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q = q.view(tokens, kv_heads, q_heads // kv_heads, head_dim).permute(1, 2, 0, 3)  # [kv, group, tokens, dim]
        k = k.permute(1, 2, 0)[:, None]  # [kv, 1, dim, tokens]
        v = v.transpose(0, 1)[:, None]  # [kv, 1, tokens, dim]
        scores = (q @ k).float()  # [kv, group, tokens, tokens]
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1).to(v.dtype)
        return (weights @ v).permute(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)
