"""Experts as a few kernels: choose them, group the tokens by them, multiply, add up. Knows no layers.

The reference is `MoELayer.route` and `Experts.forward`. All that depends on the tokens' choices stays on the device, in
tensors of the largest size there can be: the host waits for nothing, and a CUDA graph can hold it all. To group pairs
into tiles of one expert is from vLLM's and SGLang's `moe_align_block_size`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_moe_gemm import grouped_gate_up, grouped_product, one_token
from minisgl.kernel.triton_moe_tiles import choose_tiles
from minisgl.kernel.triton_runs import launches_early

_SLOTS = 64  # of the table of tiles, written at once


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits: the router's, [tokens, experts], contiguous. Returns the weights, float32, and the ids, int32, of each
    token's experts, [tokens, top_k]; of equal ones the first. As `MoELayer.route`, which rounds the weights."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    pdl = launches_early(logits.device)
    _route[(tokens,)](
        logits, weights, expert_ids, experts, top_k, triton.next_power_of_2(top_k), normalise,
        triton.next_power_of_2(experts), pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return weights, expert_ids


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """x: [tokens, hidden]; gate_up: [experts, 2 × size, hidden], gate first; down: [experts, hidden, size]; weights
    and expert_ids: from `route`. Returns [tokens, hidden]. All contiguous. The gate is silu."""
    if len(x) == 1:
        return one_token(x, gate_up, down, weights, expert_ids)
    tokens, top_k = expert_ids.shape
    tiles = choose_tiles(tokens * top_k, len(down), x.dtype, x.device)
    order, table = group(expert_ids, len(down), tiles.rows)
    gated = grouped_gate_up(x, gate_up, order, table, top_k, tiles)  # [pairs, size], in the experts' order
    terms = grouped_product(gated, down, order, table, weights, tiles)  # [pairs, hidden], in the tokens' order
    return _add_up(terms, top_k)


def group(expert_ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs of a token and one of its experts, numbered as expert_ids, [tokens, top_k], has them, sorted by expert, and
    cut into tiles of at most `rows` pairs of one expert.

    Returns order, int32 [pairs], the pairs of expert 0, then of expert 1, in each the first first; and the table,
    int32 [tiles, 3]: the tile's expert, where in `order` it begins, and how many pairs it has. Some have none, since
    the table is as long as it can have to be.
    """
    pairs, device = expert_ids.numel(), expert_ids.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    table = torch.empty((_most_tiles(pairs, experts, rows), 3), dtype=torch.int32, device=device)
    pdl, chunk = launches_early(device), 2048 if pairs <= 2048 else 8192
    _group[(experts,)](
        expert_ids, order, table, pairs, pairs <= len(table), rows, chunk, _SLOTS, pdl,
        num_warps=chunk // 512, launch_pdl=pdl,
    )  # fmt: skip
    return order, table


def _most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Whatever was chosen. An expert begins at tile `pairs before it`, or `pairs before it // rows + expert`: neither
    can overlap, both need one number of it. The first is shorter for few pairs."""
    return min(pairs, pairs // rows + experts)


def _add_up(terms: Tensor, top_k: int) -> Tensor:
    """terms: [tokens × top_k, size]. Returns [tokens, size]."""
    tokens, size = len(terms) // top_k, terms.shape[1]
    out = torch.empty((tokens, size), dtype=terms.dtype, device=terms.device)
    pdl, block = launches_early(terms.device), min(1024, triton.next_power_of_2(size))
    _sum_terms[(tokens, triton.cdiv(size, block))](terms, out, size, top_k, block, pdl, launch_pdl=pdl)
    return out


@triton.jit
def _route(
    logits, weights, expert_ids, experts,
    TOP_K: tl.constexpr, CHOSEN: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    score = tl.load(logits + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    highest = tl.max(score)
    total = tl.sum(tl.exp(score - highest))
    chosen = tl.zeros((CHOSEN,), tl.int32)
    share = tl.zeros((CHOSEN,), tl.float32)
    for number in tl.static_range(TOP_K):
        value, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        score = tl.where(expert == where, float("-inf"), score)
        # Scores that are not numbers could choose what is not there, and would be read there.
        chosen = tl.where(choice == number, tl.minimum(where, experts - 1), chosen)
        share = tl.where(choice == number, tl.exp(value - highest), share)
    if NORMALISE:
        total = tl.sum(share)
    tl.store(weights + row * TOP_K + choice, share / total, mask=choice < TOP_K)
    tl.store(expert_ids + row * TOP_K + choice, chosen, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _group(
    expert_ids, order, table, pairs,
    FEW: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program an expert, each of which counts for itself: it is the cheapest way without a second kernel."""
    expert = tl.program_id(0)
    column = tl.arange(0, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before, own = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, pairs, CHUNK):
        chosen = tl.load(expert_ids + first + column, mask=first + column < pairs, other=2147483647)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    start, count = tl.sum(before), tl.sum(own)
    if count > 0:
        place = start
        for first in range(0, pairs, CHUNK):
            chosen = tl.load(expert_ids + first + column, mask=first + column < pairs, other=2147483647)
            mine = (chosen == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine, 0) - 1, first + column, mask=mine != 0)
            place += tl.sum(mine)
    end = start + count
    tile = start if FEW else start // ROWS + expert
    next_tile = end if FEW else end // ROWS + expert + 1
    for first in range(tile, next_tile, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        done = (slot - tile) * ROWS
        there = slot < next_tile
        tl.store(table + 3 * slot, expert, mask=there)
        tl.store(table + 3 * slot + 1, start + done, mask=there)
        tl.store(table + 3 * slot + 2, tl.minimum(tl.maximum(count - done, 0), ROWS), mask=there)


@triton.jit
def _sum_terms(terms, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = terms + (row * TOP_K + choice) * size + column
        total += tl.load(place, mask=column < size, other=0).to(tl.float32)
    tl.store(out + row * size + column, total, mask=column < size)
