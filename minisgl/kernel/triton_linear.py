"""The product of one row with a weight: a GEMV. Knows no layers.

One row makes a product all reading of weights. cuBLAS takes 13 µs for Qwen3-0.6B's 2048 x 1024 projection on an H200,
of which reading is 1: few of its blocks have work. This takes 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early


def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ. x: [1, inputs]; weight: [outputs, inputs], contiguous. Returns [1, outputs]. Sums are float32."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    pdl = launches_early(x.device)
    _gemv[(triton.cdiv(outputs, 2),)](x, weight, out, outputs, inputs, 2, 1024, pdl, num_warps=4, launch_pdl=pdl)
    return out


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
