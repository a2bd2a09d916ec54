"""A batch over a paged pool, and what attention over it has to be, in float64: for tests of kernels' callers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.shape import Shape
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_pool import KVCachePool


class PagedScene:
    """Requests whose pages lie anywhere in a pool of one layer; what belongs to nobody is 100. The last row of the
    page table is the dummy's."""

    def __init__(self, lengths: list[tuple[int, int]], num_decode: int, shape: Shape, width: int = 0) -> None:
        """lengths: (cached_len, device_len) of each request, decode rows first. width: pages of a row at least."""
        size, self.shape = shape.page_size, shape
        counts = [-(-device_len // size) for _, device_len in lengths]
        pages = torch.randperm(sum(counts) + 2).int()
        self.pool = KVCachePool(1, len(pages), size, shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
        self.pool.k_cache(0)[: self.pool.dummy_slot] = 100.0
        self.pool.v_cache(0)[: self.pool.dummy_slot] = 100.0
        columns = (max([width, *counts]) + 1) * size
        self.table = torch.full((len(lengths) + 1, columns), self.pool.dummy_slot, dtype=torch.int32)
        reqs = []
        for row, ((cached, device_len), count) in enumerate(zip(lengths, counts, strict=True)):
            own, pages = pages[:count], pages[count:]
            self.table[row, : count * size] = (own[:, None] * size + torch.arange(size)).flatten()
            slots = self.table[row, :cached].to(shape.device)
            for cache in (self.pool.k_cache(0), self.pool.v_cache(0)):
                cache[slots] = torch.randn(cached, shape.kv_heads, shape.head_dim).to(cache)
            ids = torch.zeros(device_len, dtype=torch.int32)
            reqs.append(Req(row, ids, SamplingParams(max_tokens=8), row, cached_len=cached))
        self.table = self.table.to(shape.device)
        self.batch = Batch(reqs, num_decode)
        self.dummy = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), len(lengths))

    def error(self, attention: Any, metadata: object) -> float:
        """Of a forward, relative, over the whole batch."""
        s = self.shape
        q, k, v = (
            torch.randn(self.batch.num_tokens, n, s.head_dim).to(s.device, s.dtype)
            for n in (s.q_heads, s.kv_heads, s.kv_heads)
        )
        reqs = self.batch.padded_reqs
        out_loc = torch.cat([self.table[req.table_idx, req.cached_len : req.device_len] for req in reqs])
        fields: dict[str, Any] = {"input_ids": out_loc, "positions": out_loc, "logits_rows": None, "attention": None}
        context = Context(**fields, kv_cache=self.pool, out_loc=out_loc, attn_metadata=metadata)
        out = attention.forward(q, k, v, 0, context)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        expected = self._expected(q)
        return float((out.double() - expected).norm() / expected.norm())

    def _expected(self, q: Tensor) -> Tensor:
        outs, start = [], 0
        for req in self.batch.padded_reqs:
            slots = self.table[req.table_idx, : req.device_len].long()
            own = q[start : start + req.extend_len].double()
            k, v = self.pool.k_cache(0)[slots].double(), self.pool.v_cache(0)[slots].double()
            outs.append(causal(own, k, v, q.shape[2] ** -0.5))
            start += req.extend_len
        return torch.cat(outs)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The queries are the last of the keys' tokens. q: [new, q_heads, dim]; k, v: [length, kv_heads, dim]."""
    group, past = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(past + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
