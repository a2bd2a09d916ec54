"""The product of one row with a weight: a GEMV. Knows no layers.

One row makes a product all reading of weights. cuBLAS then takes 12.5 µs for a 2048 x 1024 projection on an H200, of
which the reading is 1: too few of its blocks have work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gemv(x: Tensor, weight: Tensor, outputs_each: int = 8, inputs_each: int = 512, warps: int = 4) -> Tensor:
    """x Wᵀ. x: [1, inputs]; weight: [outputs, inputs], contiguous. Returns [1, outputs]. Sums are float32."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(outputs, outputs_each),)
    _gemv[grid](x, weight, out, outputs, inputs, outputs_each, inputs_each, num_warps=warps)
    return out


@triton.jit
def _gemv(x, weight, out, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    row = weight + output.to(tl.int64)[:, None] * inputs
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        inside = first + column < inputs
        values = tl.load(x + first + column, mask=inside, other=0).to(tl.float32)
        there = (output < outputs)[:, None] & inside[None, :]
        total += tl.load(row + first + column[None, :], mask=there, other=0).to(tl.float32) * values[None, :]
    tl.store(out + output, tl.sum(total, axis=1), mask=output < outputs)
