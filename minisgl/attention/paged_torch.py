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
from minisgl.kernel.device import device_tensor, to_device
from minisgl.learn import exercise

_CALL_COST = 2048  # slots that can be read in the time one more call takes (30 layers of SmolLM2, Zen 4)


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Requests of one new token each, of about the same length. `longest` is a whole number of pages."""

    rows: Tensor  # int64 [rows]: which of the batch's decode rows
    pages: Tensor  # int32 [rows * longest / page_size]
    hidden: Tensor  # bool [rows, 1, longest]: not this row's tokens
    hidden_slots: Tensor  # int64 [n]: the same as indices into what is gathered


@dataclass(frozen=True, eq=False)
class Sequence:
    """One request, attended alone: the tokens [start, end) of the batch are the last of its `length`."""

    start: int
    end: int
    length: int
    pages: Tensor | None  # int32 [pages]; None: nothing but the new tokens


@dataclass(frozen=True, eq=False)
class PagedMetadata:
    num_decode: int
    decode: list[DecodeRows]  # one, unless lengths differ much
    sequences: list[Sequence]


def group_by_length(lengths: list[int], page_size: int) -> list[list[int]]:
    """Rows to compute in one call each, every row once. A call pads its rows to the longest; it may pad up to as many
    slots as its rows have, or up to what another call would cost. One group has its rows in order."""
    counts = page_counts(lengths, page_size)
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(counts)), key=counts.__getitem__):
        own = sum(counts[member] for member in groups[-1])
        padded = counts[row] * len(groups[-1]) - own
        if padded * page_size > max(_CALL_COST, own * page_size):
            groups.append([])
        groups[-1].append(row)
    return [sorted(group) for group in groups]


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
                row, length = [req.table_idx], [req.device_len]
                pages = pages_view(page_table, row, length, self.page_size)[0] if req.cached_len else None
                alone.append(Sequence(start, start + req.extend_len, req.device_len, pages))
            start += req.extend_len
        if num_decode < 2:
            return PagedMetadata(0, [], alone)
        groups = group_by_length([req.device_len for req in reqs[:num_decode]], self.page_size)
        return PagedMetadata(num_decode, [self._decode_rows(reqs, rows, page_table) for rows in groups], alone)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        metadata, cache = ctx.attn_metadata, ctx.kv_cache
        if not isinstance(metadata, PagedMetadata) or cache is None or ctx.out_loc is None:
            raise ValueError("PagedTorchAttention needs a context with its own attn_metadata, kv_cache and out_loc")
        cache.store(layer_id, k, v, ctx.out_loc)
        outs = []
        if metadata.decode:
            outs.append(self._forward_decode(q[: metadata.num_decode], layer_id, cache, metadata.decode))
        for s in metadata.sequences:
            keys, values = k[s.start : s.end], v[s.start : s.end]
            if s.pages is not None:
                keys, values = (cached[: s.length] for cached in self._gather_both(layer_id, cache, s.pages))
            outs.append(self.attend(q[s.start : s.end], keys, values))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @exercise("3.5")
    def gather(self, cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
        """The contents of some pages, in their order, as one sequence: [pages * page_size, kv_heads, head_dim].

        cache: [slots, kv_heads, head_dim], page p in the slots [p * page_size, (p + 1) * page_size). By whole pages: a
        few large copies instead of many small ones. pages: int32 [pages]. out: where to copy to, [pages, page_size *
        kv_heads * head_dim].
        """
        by_page = cache.view(-1, self.page_size * self.num_kv_heads * self.head_dim)
        return torch.index_select(by_page, 0, pages, out=out).view(-1, self.num_kv_heads, self.head_dim)

    def attend_decode(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """One query for each row, all rows at once. Returns q's shape.

        q: [rows, q_heads, head_dim]; k, v: [rows, longest, kv_heads, head_dim]; hidden: bool [rows, 1, longest].
        A query head is widened to all KV heads, zero outside its own: K and V are then one matrix a row, as they lie
        in memory. More products, fewer bytes moved: faster on a CPU than one small product for every head.
        """
        rows, kv, dim = len(q), self.num_kv_heads, self.head_dim
        group = self.num_q_heads // kv
        wide = q.new_zeros(rows, kv, group, kv, dim)
        wide.diagonal(dim1=1, dim2=3).copy_(q.view(rows, kv, group, dim).permute(0, 2, 3, 1))  # [rows, group, dim, kv]
        keys = k.flatten(2).transpose(1, 2)  # [rows, kv * dim, longest]
        scores = torch.bmm(wide.view(rows, kv * group, kv * dim), keys)  # [rows, heads, longest]
        weights = scores.float().mul_(dim**-0.5).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
        out = torch.bmm(weights.to(v.dtype), v.flatten(2))  # [rows, heads, kv * dim]
        out = out.view(wide.shape).diagonal(dim1=1, dim2=3)  # [rows, group, dim, kv]
        return out.permute(0, 3, 1, 2).reshape(q.shape)

    def _forward_decode(self, q: Tensor, layer_id: int, cache: KVCache, groups: list[DecodeRows]) -> Tensor:
        if len(groups) == 1:
            return self._forward_group(q, layer_id, cache, groups[0])
        out = torch.empty_like(q)
        for group in groups:
            out[group.rows] = self._forward_group(q[group.rows], layer_id, cache, group)
        return out

    def _forward_group(self, q: Tensor, layer_id: int, cache: KVCache, group: DecodeRows) -> Tensor:
        shape = (len(q), -1, self.num_kv_heads, self.head_dim)
        k, v = self._gather_both(layer_id, cache, group.pages)
        # A page's former owner may have left NaN in it, and weight 0 * NaN is NaN.
        v.index_fill_(0, group.hidden_slots, 0)
        return self.attend_decode(q, k.view(shape), v.view(shape), group.hidden)

    def _decode_rows(self, reqs: list[Req], rows: list[int], page_table: Tensor) -> DecodeRows:
        lengths, device = [reqs[row].device_len for row in rows], page_table.device
        pages = pages_view(page_table, [reqs[row].table_idx for row in rows], lengths, self.page_size)
        hidden = torch.arange(pages.shape[1] * self.page_size) >= torch.tensor(lengths)[:, None]  # on the host
        hidden_slots = hidden.flatten().nonzero().flatten()
        return DecodeRows(
            device_tensor(rows, torch.int64, device),
            pages.flatten(),
            to_device(hidden[:, None], device),
            to_device(hidden_slots, device),
        )

    def _gather_both(self, layer_id: int, cache: KVCache, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some pages, valid until the next call."""
        k_cache, v_cache = cache.k_cache(layer_id), cache.v_cache(layer_id)
        k_space, v_space = self._space_for(k_cache, len(pages))
        return self.gather(k_cache, pages, k_space), self.gather(v_cache, pages, v_space)

    def _space_for(self, cache: Tensor, pages: int) -> Tensor:
        """[2, pages, page_size * kv_heads * head_dim] to gather into, kept: fresh memory costs a fault every 4 KB."""
        if self._workspace is None or self._workspace.shape[1] < pages:
            width = self.page_size * self.num_kv_heads * self.head_dim
            self._workspace = cache.new_empty(2, pages + pages // 4, width)
        return self._workspace[:, :pages]
