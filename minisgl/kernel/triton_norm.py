"""RMSNorm, add and RMSNorm, and the silu gate as one Triton kernel each. Knows no layers.

The references are the layers' own `forward`s. All arithmetic is float32; what the references round is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `RMSNorm.forward`. x: [..., size], of which the rows may lie apart but not their elements."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])  # [rows, size]
    _launch_norm(rows, None, weight, out, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `RMSNormFused.forward`. x and residual: [tokens, size], contiguous; or x in parts, [parts, tokens, size], of
    which the sum is meant."""
    if residual is None:
        return rms_norm(x, weight, eps), x
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch_norm(x, residual, weight, out, total, eps)
    return out, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `SiluAndMul.forward`. gate_up: [tokens, 2 × size], contiguous."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    pdl, block = launches_early(gate_up.device), 1024 if size <= 4096 else 2048
    _silu_and_mul[(tokens, triton.cdiv(size, block))](gate_up, out, size, block, pdl, num_warps=8, launch_pdl=pdl)
    return out


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor, eps: float) -> None:
    tokens, size = x.shape[-2:]
    parts, part_stride = (len(x), x.stride(0)) if x.dim() == 3 else (1, 0)
    adds, block, pdl = residual is not None, triton.next_power_of_2(size), launches_early(x.device)
    _norm[(tokens,)](
        x, residual if adds else x, weight, out, total, x.stride(-2), part_stride, eps, size, parts, adds, block, pdl,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _norm(
    x, residual, weight, out, total, x_stride, part_stride, eps, size,
    PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * part_stride + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * size + column, mask=inside, other=0).to(tl.float32)
        value = value.to(out.dtype.element_ty).to(tl.float32)  # the sum is kept, so it is what is normalised
        tl.store(total + row * size + column, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, normed * factor, mask=inside)


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, gate * up, mask=inside)
