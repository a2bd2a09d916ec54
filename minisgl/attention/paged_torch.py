"""Attention over a paged pool in plain torch: the reference of every paged kernel, and what a CPU runs.

Decode rows are gathered and computed in one call for all of them; extend rows one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.attention.views import page_counts, pages_view
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req
from minisgl.kernel.device import device_tensor


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Several requests of one new token each. `longest` is a whole number of pages."""

    pages: Tensor  # int32 [rows * longest / page_size]
    hidden: Tensor  # bool [rows, 1, longest]: not this row's tokens
    tails: Tensor  # int64 [n]: of the gathered slots, those behind a row's last token but in its last page


@dataclass(frozen=True, eq=False)
class Sequence:
    """One request, attended alone: the tokens [start, end) of the batch are the last of its `length`."""

    start: int
    end: int
    length: int
    pages: Tensor | slice | None  # a slice: consecutive, read in place. None: nothing but the new tokens


@dataclass(frozen=True, eq=False)
class PagedMetadata:
    num_decode: int
    decode: DecodeRows | None
    sequences: list[Sequence]


class PagedTorchAttention(ContiguousAttention):
    """Stage 3's and later. One instance an engine: its workspace is written by one forward at a time."""

    def __init__(self, num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        """Heads of this rank."""
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.page_size = page_size
        self._workspace: Tensor | None = None

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> PagedMetadata:
        reqs = batch.padded_reqs
        num_decode = len(reqs) if batch.phase == "decode" else batch.num_decode
        alone, start = [], 0
        for i, req in enumerate(reqs):
            if i >= num_decode or num_decode == 1:
                pages = self._pages_of(req, page_table) if req.cached_len else None
                alone.append(Sequence(start, start + req.extend_len, req.device_len, pages))
            start += req.extend_len
        decode = self._decode_rows(reqs[:num_decode], page_table) if num_decode > 1 else None
        return PagedMetadata(num_decode if decode else 0, decode, alone)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        metadata, cache = ctx.attn_metadata, ctx.kv_cache
        if not isinstance(metadata, PagedMetadata) or cache is None or ctx.out_loc is None:
            raise ValueError("PagedTorchAttention needs a context with its own attn_metadata, kv_cache and out_loc")
        cache.store(layer_id, k, v, ctx.out_loc)
        outs = []
        if metadata.decode is not None:
            outs.append(self._forward_decode(q[: metadata.num_decode], layer_id, cache, metadata.decode))
        for s in metadata.sequences:
            keys, values = k[s.start : s.end], v[s.start : s.end]
            if s.pages is not None:
                keys = self.gather(cache.k_cache(layer_id), s.pages)[: s.length]
                values = self.gather(cache.v_cache(layer_id), s.pages)[: s.length]
            outs.append(self.attend(q[s.start : s.end], keys, values))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def gather(self, cache: Tensor, pages: Tensor | slice, out: Tensor | None = None) -> Tensor:
        """The contents of some pages, in their order, as one sequence: [pages * page_size, kv_heads, head_dim].

        cache: [slots, kv_heads, head_dim], page p in the slots [p * page_size, (p + 1) * page_size). By whole pages,
        a few large copies instead of many small ones; consecutive pages, a slice, are not copied at all.
        out: where to copy to, [pages, page_size * kv_heads * head_dim].
        """
        by_page = cache.view(-1, self.page_size * self.num_kv_heads * self.head_dim)
        chosen = by_page[pages] if isinstance(pages, slice) else torch.index_select(by_page, 0, pages, out=out)
        return chosen.view(-1, self.num_kv_heads, self.head_dim)

    def attend_decode(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """One query for each row, all rows at once. Returns q's shape.

        q: [rows, q_heads, head_dim]; k, v: [rows, longest, kv_heads, head_dim]; hidden: bool [rows, 1, longest].
        A query head is widened to all KV heads, zero outside its own: K and V are then one matrix a row, as they lie
        in memory. More products, fewer bytes moved: faster on a CPU than one small product for every head.
        """
        rows, kv_heads = len(q), self.num_kv_heads
        own = torch.eye(kv_heads, dtype=q.dtype, device=q.device)[:, None, :, None]  # [kv, 1, kv, 1]
        wide = q.view(rows, kv_heads, -1, 1, self.head_dim) * own  # [rows, kv, group, kv, dim]
        scores = torch.bmm(
            wide.view(rows, self.num_q_heads, -1), k.flatten(2).transpose(1, 2)
        )  # [rows, heads, longest]
        scores = (scores.float() * self.head_dim**-0.5).masked_fill_(hidden, -torch.inf)
        out = torch.bmm(scores.softmax(dim=-1).to(v.dtype), v.flatten(2))  # [rows, heads, kv * dim]
        out = out.view(rows, kv_heads, -1, kv_heads, self.head_dim).diagonal(dim1=1, dim2=3)  # [rows, group, dim, kv]
        return out.permute(0, 3, 1, 2).reshape(q.shape)

    def _forward_decode(self, q: Tensor, layer_id: int, cache: KVCache, decode: DecodeRows) -> Tensor:
        shape = (len(q), -1, self.num_kv_heads, self.head_dim)
        k_space, v_space = self._space_for(cache.k_cache(layer_id), len(decode.pages))
        k = self.gather(cache.k_cache(layer_id), decode.pages, k_space)
        v = self.gather(cache.v_cache(layer_id), decode.pages, v_space)
        # A page's former owner may have left NaN in it, and weight 0 * NaN is NaN.
        v.index_fill_(0, decode.tails, 0)
        return self.attend_decode(q, k.view(shape), v.view(shape), decode.hidden)

    def _decode_rows(self, reqs: list[Req], page_table: Tensor) -> DecodeRows:
        lengths, device = [req.device_len for req in reqs], page_table.device
        pages = pages_view(page_table, [req.table_idx for req in reqs], lengths, self.page_size)
        longest = pages.shape[1] * self.page_size
        seen = device_tensor(lengths, torch.int64, device)
        hidden = torch.arange(longest, device=device) >= seen[:, None]
        counts = page_counts(lengths, self.page_size)
        tails = [
            row * longest + column
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
            for column in range(length, count * self.page_size)
        ]
        return DecodeRows(pages.flatten(), hidden[:, None], device_tensor(tails, torch.int64, device))

    def _pages_of(self, req: Req, page_table: Tensor) -> Tensor | slice:
        pages = pages_view(page_table, [req.table_idx], [req.device_len], self.page_size)[0]
        if pages.device.type == "cpu" and bool((pages.diff() == 1).all()):  # a GPU would have to be waited for
            return slice(int(pages[0]), int(pages[0]) + len(pages))
        return pages

    def _space_for(self, cache: Tensor, pages: int) -> Tensor:
        """[2, pages, page_size * kv_heads * head_dim] to gather into, kept: fresh memory costs a fault every 4 KB."""
        if self._workspace is None or self._workspace.shape[1] < pages:
            width = self.page_size * self.num_kv_heads * self.head_dim
            self._workspace = cache.new_empty(2, pages + pages // 4, width)
        return self._workspace[:, :pages]
