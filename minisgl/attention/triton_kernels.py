"""Attention over a paged cache in Triton: one query a row (decode), and many (extend). Knows no batches.

Both keep a running softmax over blocks of keys (FlashAttention, Dao et al., 2022). Decode also cuts each row's keys
into parts that different processors take (Flash-Decoding, Dao et al., 2023), and adds the parts up at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early

_PROGRAMS = 1024  # eight for each of a large GPU's processors
_MOST_SPLITS = 32
TILE = 64  # queries of a row that one program of `extend` takes

# Keys of a block in float32. What does not fit in registers lies in memory, and the GPU keeps that much for all threads
# it could run until the process ends: with 64 keys 10.6 KB of each, 2.7 GiB of an H200.
_EXACT_KEYS = 16


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    order: Tensor,
    page_size: int,
    splits: int,
    out: Tensor | None = None,
) -> Tensor:
    """q: [rows, q_heads, head_dim]; k_cache, v_cache: [slots, kv_heads, head_dim]; pages: int32 [rows, most pages];
    lengths: int32 [rows], tokens of each row in the cache; of a row with none the result is 0. order: int32 [rows],
    all rows, the longest first so that none of those is left over at the end. splits: from `decode_splits`. Returns
    q's shape, in out if it is given."""
    rows, q_heads, dim = q.shape
    kv_heads, pdl = k_cache.shape[1], launches_early(q.device)
    group = q_heads // kv_heads
    out = torch.empty((rows, q_heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    partial = out if splits == 1 else q.new_empty((rows, q_heads, splits, dim), dtype=torch.float32)
    logsumexp = torch.empty((rows, q_heads, splits), dtype=torch.float32, device=q.device)
    block_dim, block_heads = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(group))
    keys, warps, stages = (32, 2, 4) if rows * kv_heads >= 2 * _PROGRAMS else (64, 4, 2)
    if q.dtype == torch.float32:
        keys, warps, stages = _EXACT_KEYS, 4, 2
    _decode_part[(kv_heads, splits, rows)](
        q, k_cache, v_cache, pages, lengths, order, partial, logsumexp, dim**-0.5 * 1.4426950408889634,
        q.stride(0), q.stride(1), k_cache.stride(0), pages.stride(0), kv_heads, dim,
        page_size, group, block_heads, block_dim, keys, splits, pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(rows, q_heads)](
            partial, logsumexp, out, dim, splits, triton.next_power_of_2(splits), block_dim, pdl, launch_pdl=pdl
        )
    return out


def decode_splits(rows: int, kv_heads: int) -> int:
    """So that few rows still fill the GPU. It depends on no length: a recorded graph keeps it."""
    return min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows * kv_heads)))


def extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    starts: Tensor,
    tiles: Tensor,
    page_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """The queries of row i are its last tokens, q[starts[i] : starts[i + 1]]. q: [tokens, q_heads, head_dim];
    starts: int32 [rows + 1]; tiles: int32 [tiles, 2], a row and the first of TILE of its queries (or past them all);
    the rest as in `decode`. Returns the shape of q, in out if it is given: what is no row's stays as it is."""
    _, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    keys = _EXACT_KEYS if q.dtype == torch.float32 else 64
    _extend[(len(tiles), q_heads)](
        q, k_cache, v_cache, pages, lengths, starts, tiles, out, dim**-0.5 * 1.4426950408889634,
        q.stride(0), q.stride(1), k_cache.stride(0), pages.stride(0), q_heads, dim,
        page_size, q_heads // kv_heads, TILE, max(16, triton.next_power_of_2(dim)), keys, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _decode_part(
    q, k_cache, v_cache, pages, lengths, order, partial, logsumexp, scale,
    q_row, q_head, slot_size, pages_row, kv_heads, dim,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head of one row, over one part of the row's keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.load(order + tl.program_id(2)).to(tl.int64)
    length = tl.load(lengths + row)
    each = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    start, end = split * each, tl.minimum(split * each + each, length)
    member, column = tl.arange(0, HEADS), tl.arange(0, DIM)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (column < dim)[None, :]
    queries = tl.load(q + row * q_row + head[:, None] * q_head + column[None, :], mask=inside, other=0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, DIM], tl.float32)
    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        if PAGE % KEYS == 0:  # all on one page
            page = tl.load(pages + row * pages_row + first // PAGE).to(tl.int64)
            slot = page * PAGE + first % PAGE + tl.arange(0, KEYS)
        else:
            page = tl.load(pages + row * pages_row + key // PAGE, mask=key < end, other=0).to(tl.int64)
            slot = page * PAGE + key % PAGE
        place = slot[:, None] * slot_size + kv_head * dim + column[None, :]
        there = (key < end)[:, None] & (column < dim)[None, :]
        keys = tl.load(k_cache + place, mask=there, other=0)  # [KEYS, DIM]
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # base 2
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        faded = tl.exp2(highest - new_highest)
        values = tl.load(v_cache + place, mask=there, other=0)
        out = out * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * faded + tl.sum(weights, axis=1)
        highest = new_highest
    part = (row * kv_heads * GROUP + head) * SPLITS + split
    some = tl.where(total > 0, total, 1)
    tl.store(partial + part[:, None] * dim + column[None, :], out / some[:, None], mask=inside)
    tl.store(logsumexp + part, highest + tl.log2(some), mask=member < GROUP)  # -inf for a part without keys


@triton.jit
def _add_parts(
    partial, logsumexp, out, dim, splits, SPLITS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    weight = tl.load(logsumexp + row * splits + split, mask=split < splits, other=float("-inf"))
    highest = tl.max(weight, axis=0)
    weight = tl.where(highest > float("-inf"), tl.exp2(weight - highest), 0)
    inside = (split < splits)[:, None] & (column < dim)[None, :]
    parts = tl.load(partial + (row * splits + split)[:, None] * dim + column[None, :], mask=inside, other=0)
    total = tl.sum(weight, axis=0)
    value = tl.sum(parts * weight[:, None], axis=0) / tl.where(total > 0, total, 1)
    tl.store(out + row * dim + column, value, mask=column < dim)


@triton.jit
def _extend(
    q, k_cache, v_cache, pages, lengths, starts, tiles, out, scale,
    q_row, q_head, slot_size, pages_row, q_heads, dim,
    PAGE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One head of a tile of one row's queries, over all keys that they may see."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
    first_token, end_token = tl.load(starts + row), tl.load(starts + row + 1)
    count = end_token - first_token
    if first_query >= count:
        return
    length = tl.load(lengths + row)
    query, column = first_query + tl.arange(0, QUERIES), tl.arange(0, DIM)
    position = length - count + query
    inside = (query < count)[:, None] & (column < dim)[None, :]
    token = (first_token + query).to(tl.int64)[:, None]
    queries = tl.load(q + token * q_row + head * q_head + column[None, :], mask=inside, other=0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, DIM], tl.float32)
    end = tl.minimum(length - count + first_query + QUERIES, length)
    for first in range(0, end, KEYS):
        key = first + tl.arange(0, KEYS)
        page = tl.load(pages + row * pages_row + key // PAGE, mask=key < end, other=0).to(tl.int64)
        place = (page * PAGE + key % PAGE)[:, None] * slot_size + (head // GROUP) * dim + column[None, :]
        there = (key < end)[:, None] & (column < dim)[None, :]
        keys = tl.load(k_cache + place, mask=there, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))  # key 0 is seen by all: never -inf
        weights = tl.exp2(scores - new_highest[:, None])
        faded = tl.exp2(highest - new_highest)
        values = tl.load(v_cache + place, mask=there, other=0)
        sums = sums * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * faded + tl.sum(weights, axis=1)
        highest = new_highest
    place = out + (token * q_heads + head) * dim + column[None, :]
    tl.store(place, sums / total[:, None], mask=inside)
