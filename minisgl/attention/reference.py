"""Attention of one query at a time, in float32: slow, and plainly right. The oracle of every backend's tests."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries are the last n of m tokens. q: [n, q_heads, head_dim]; k, v: [m, kv_heads, head_dim].
    Returns float32 in q's shape."""
    n, q_heads, head_dim = q.shape
    m, kv_heads, _ = k.shape
    q, k, v = q.float(), k.float(), v.float()
    out = torch.empty_like(q)
    for i in range(n):
        seen = m - n + i + 1
        for head in range(q_heads):
            kv_head = head * kv_heads // q_heads
            scores = k[:seen, kv_head] @ q[i, head] / head_dim**0.5  # [seen]
            out[i, head] = scores.softmax(dim=0) @ v[:seen, kv_head]
    return out


def reference_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: list[int], lengths: list[tuple[int, int]]
) -> Tensor:
    """A batch, request by request. lengths: (cached_len, device_len) of each; the caches hold the new tokens already.

    q: [tokens, q_heads, head_dim]; k_cache, v_cache: [slots, kv_heads, head_dim]; page_table: int32 [rows, width].
    """
    outs, start = [], 0
    for row, (cached_len, device_len) in zip(rows, lengths, strict=True):
        slots = page_table[row, :device_len].long()
        end = start + device_len - cached_len
        outs.append(reference_attention(q[start:end], k_cache[slots], v_cache[slots]))
        start = end
    return torch.cat(outs)
