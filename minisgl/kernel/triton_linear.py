"""The product of one row with a weight: a GEMV. Knows no layers.

One row makes a product all reading of weights. cuBLAS takes 13 µs for Qwen3-0.6B's 2048 x 1024 projection on an H200,
of which reading is 1: few of its blocks have work. This takes 2.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early

MOST_NORMED = 2048  # inputs that `norm_gemv` takes: for more, norming again costs more than the launch it saves


def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ. x: [1, inputs]; weight: [outputs, inputs], contiguous. Returns [1, outputs]. Sums are float32."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    pdl = launches_early(x.device)
    _gemv[(triton.cdiv(outputs, 2),)](x, weight, out, outputs, inputs, 2, 1024, pdl, num_warps=4, launch_pdl=pdl)
    return out


def norm_gemv(
    x: Tensor, residual: Tensor, factor: Tensor, eps: float, weight: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, then `gemv` of the norm, then `silu_and_mul` of that if asked for. x, residual: [1, inputs], with
    MOST_NORMED inputs at most; factor: [inputs], the weight of the norm. Returns ([1, outputs] or half, x + residual).

    Every program norms the whole row again: that is less than a launch and a trip through memory.
    """
    outputs, inputs = weight.shape
    outputs //= 1 + silu
    out, total = torch.empty((1, outputs), dtype=x.dtype, device=x.device), torch.empty_like(x)
    pdl, each = launches_early(x.device), 4 if silu else 8
    _norm_gemv[(triton.cdiv(outputs, each),)](
        x, residual, factor, eps, weight, out, total, outputs, inputs,
        silu, each, triton.next_power_of_2(inputs), pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out, total


@triton.jit
def _norm_gemv(
    x, residual, factor, eps, weight, out, total, outputs, inputs,
    SILU: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    inside = column < inputs
    there = (output < outputs)[:, None] & inside[None, :]
    place = weight + output.to(tl.int64)[:, None] * inputs + column[None, :]
    kind = out.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    weights = tl.load(place, mask=there, other=0)
    if SILU:
        up_weights = tl.load(place + outputs.to(tl.int64) * inputs, mask=there, other=0)
    factors = tl.load(factor + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.load(x + column, mask=inside, other=0).to(tl.float32)
    row += tl.load(residual + column, mask=inside, other=0).to(tl.float32)
    row = row.to(kind).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(total + column, row, mask=inside)
    scale = tl.rsqrt(tl.sum(row * row) / inputs + eps)
    row = ((row * scale).to(kind).to(tl.float32) * factors).to(kind).to(tl.float32)
    result = tl.sum(weights.to(tl.float32) * row[None, :], axis=1)
    if SILU:
        gate = result.to(kind).to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = gate * tl.sum(up_weights.to(tl.float32) * row[None, :], axis=1).to(kind).to(tl.float32)
    tl.store(out + output, result, mask=output < outputs)


@triton.jit
def _gemv(x, weight, out, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    row = weight + output.to(tl.int64)[:, None] * inputs
    if PDL:
        gdc_launch_dependents()
    # Weights do not depend on the kernel before: the first of them are on their way while it still runs.
    values = tl.load(row + column[None, :], mask=(output < outputs)[:, None] & (column < inputs)[None, :], other=0)
    if PDL:
        gdc_wait()
    total = values.to(tl.float32) * tl.load(x + column, mask=column < inputs, other=0).to(tl.float32)[None, :]
    for first in range(INPUTS, inputs, INPUTS):
        inside = first + column < inputs
        there = (output < outputs)[:, None] & inside[None, :]
        values = tl.load(row + first + column[None, :], mask=there, other=0)
        total += values.to(tl.float32) * tl.load(x + first + column, mask=inside, other=0).to(tl.float32)[None, :]
    tl.store(out + output, tl.sum(total, axis=1), mask=output < outputs)
