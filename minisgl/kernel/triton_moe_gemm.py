"""Products of tokens with the weights of their own experts: one kernel for all experts. Knows no routing.

Each program takes one tile of rows, all of one expert, and some of the expert's columns (a grouped GEMM). A lone token
has no tiles: its products are GEMVs, bound by the reading of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_moe_tiles import Product, Tiles
from minisgl.kernel.triton_runs import launches_early


def grouped_gate_up(x: Tensor, gate_up: Tensor, order: Tensor, table: Tensor, top_k: int, tiles: Tiles) -> Tensor:
    """silu(x gateᵀ) × x upᵀ. x: [tokens, hidden]; gate_up: [experts, 2 × size, hidden]; order and table: from `group`.
    Returns [pairs, size], as `order` has the pairs."""
    out = torch.empty((len(order), gate_up.shape[1] // 2), dtype=x.dtype, device=x.device)
    _launch(x, gate_up, out, order, table, None, top_k, tiles.rows, tiles.gate_up)
    return out


def grouped_product(x: Tensor, weight: Tensor, order: Tensor, table: Tensor, factors: Tensor, tiles: Tiles) -> Tensor:
    """factor × x Wᵀ. x: [pairs, inputs], as `order` has the pairs; weight: [experts, outputs, inputs]; factors: float32
    [tokens, top_k], as the pairs are numbered. Returns [pairs, outputs], as they are numbered."""
    out = torch.empty((len(order), weight.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, order, table, factors, 1, tiles.rows, tiles.down)
    return out


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, order: Tensor, table: Tensor, factors: Tensor | None, top_k: int,
    rows: int, tile: Product,
) -> None:  # fmt: skip
    outputs, inputs = out.shape[1], x.shape[1]
    pdl = launches_early(x.device)
    _grouped[(len(table) * triton.cdiv(outputs, tile.columns),)](
        x, weight, out, order, table, order if factors is None else factors, len(table), outputs, inputs, top_k,
        tile.group, factors is None, rows, tile.columns, tile.inputs, inputs % tile.inputs == 0, pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def one_token(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """As `run_experts`, for x: [1, hidden]. Nothing is grouped, and the terms are added where they are made."""
    top_k, (_, hidden, size) = expert_ids.shape[1], down.shape
    gated = torch.empty((top_k, size), dtype=x.dtype, device=x.device)
    out, pdl = torch.empty_like(x), launches_early(x.device)
    each = 4
    _gate_up_gemv[(triton.cdiv(size, each), top_k)](
        x, gate_up, gated, expert_ids, size, hidden, each, min(1024, triton.next_power_of_2(hidden)), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    each = 2
    _down_gemv[(triton.cdiv(hidden, each),)](
        gated, down, out, weights, expert_ids, hidden, size, top_k, each, min(1024, triton.next_power_of_2(size)), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tiles", "group"])
def _grouped(
    x, weight, out, order, table, factors, tiles, outputs, inputs, top_k, group,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A group of tiles takes the same columns one after another: those of one expert find its weights in the L2 cache.
    parts = tl.cdiv(outputs, COLUMNS)
    first_tile = tl.program_id(0) // (group * parts) * group
    number = tl.program_id(0) % (group * parts)
    grouped = tl.minimum(tiles - first_tile, group)
    tile, part = first_tile + number % grouped, number // grouped
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, count = tl.load(table + 3 * tile), tl.load(table + 3 * tile + 1), tl.load(table + 3 * tile + 2)
    if count > 0:
        row = tl.arange(0, ROWS)
        there = row < count
        place = (first + tl.where(there, row, 0)).to(tl.int64)
        pair = tl.load(order + place)
        source = (pair // top_k).to(tl.int64) if GATED else place
        column, k = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INPUTS)
        # Past the end of rows and columns the last ones are computed again, and not stored.
        weight_row = tl.minimum(column, outputs - 1) + expert.to(tl.int64) * (outputs * (2 if GATED else 1))
        x_place = x + source[:, None] * inputs + k[None, :]
        weight_place = weight + weight_row[None, :] * inputs + k[:, None]
        total, up = _products(
            x_place, weight_place, outputs.to(tl.int64) * inputs, inputs, GATED, ROWS, COLUMNS, INPUTS, EVEN
        )
        if GATED:
            total = total / (1 + tl.exp(-total)) * up
            target = place
        else:
            total *= tl.load(factors + pair)[:, None]
            target = pair.to(tl.int64)
        tl.store(
            out + target[:, None] * outputs + column[None, :], total,
            mask=there[:, None] & (column < outputs)[None, :],
        )  # fmt: skip


@triton.jit
def _products(
    x_place, weight_place, up_offset, inputs,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x Wᵀ, [ROWS, COLUMNS], and with the rows of W that lie up_offset further if GATED."""
    k = tl.arange(0, INPUTS)
    total, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, inputs, INPUTS):
        if EVEN:
            values, weights = tl.load(x_place + done), tl.load(weight_place + done)
            if GATED:
                up_weights = tl.load(weight_place + up_offset + done)
        else:
            inside = done + k < inputs
            values = tl.load(x_place + done, mask=inside[None, :], other=0)
            weights = tl.load(weight_place + done, mask=inside[:, None], other=0)
            if GATED:
                up_weights = tl.load(weight_place + up_offset + done, mask=inside[:, None], other=0)
        total = tl.dot(values, weights, total, input_precision="ieee")
        if GATED:
            up = tl.dot(values, up_weights, up, input_precision="ieee")
    return total, up


@triton.jit
def _gate_up_gemv(
    x, weight, out, expert_ids, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    choice = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.minimum(output, outputs - 1).to(tl.int64) + tl.load(expert_ids + choice).to(tl.int64) * 2 * outputs
    gate_place = weight + row[:, None] * inputs + column[None, :]
    up_place = gate_place + outputs.to(tl.int64) * inputs
    gate, up = tl.zeros((OUTPUTS, INPUTS), tl.float32), tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, inputs, INPUTS):
        inside = first + column < inputs
        values = tl.load(x + first + column, mask=inside, other=0).to(tl.float32)[None, :]
        gate += tl.load(gate_place + first, mask=inside[None, :], other=0).to(tl.float32) * values
        up += tl.load(up_place + first, mask=inside[None, :], other=0).to(tl.float32) * values
    opened = tl.sum(gate, axis=1)
    opened = opened / (1 + tl.exp(-opened)) * tl.sum(up, axis=1)
    tl.store(out + choice * outputs + output, opened, mask=output < outputs)


@triton.jit
def _down_gemv(
    x, weight, out, factors, expert_ids, outputs, inputs,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, inputs, INPUTS):
        inside = first + column < inputs
        for choice in tl.static_range(TOP_K):  # unrolled: the reads of all experts are under way at once
            row = tl.minimum(output, outputs - 1).to(tl.int64) + tl.load(expert_ids + choice).to(tl.int64) * outputs
            values = tl.load(x + choice * inputs + first + column, mask=inside, other=0).to(tl.float32)
            place = weight + row[:, None] * inputs + first + column[None, :]
            products = tl.load(place, mask=inside[None, :], other=0).to(tl.float32) * values[None, :]
            total += products * tl.load(factors + choice)
    tl.store(out + output, tl.sum(total, axis=1), mask=output < outputs)
