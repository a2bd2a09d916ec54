"""The product every linear layer makes, whole or in halves, and the order of weights in memory that suits the device.
Knows no layer."""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN chooses its blocks for a number of rows. From 1 to 512 rows those for 16 were the best in float32 and as good
# as any in bfloat16; never were they slower than plain weights.
_PACKED_FOR_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b. x: [rows, inputs]; weight: [outputs, inputs], plain or from `pack_linear`. Returns [rows, outputs]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """[2, rows, outputs], of which the sum is x Wᵀ: of the first half of the inputs and of the second. x: contiguous;
    weight: plain."""
    rows, inputs = x.shape
    half_inputs = x.view(rows, 2, inputs // 2).transpose(0, 1)
    return torch.bmm(half_inputs, weight.view(len(weight), 2, inputs // 2).permute(1, 2, 0))


def pack_linear(weight: Tensor) -> Tensor:
    """The same weight in oneDNN's blocked order, where that is known to help; else the tensor that was given.

    Decoding is nearly all reading of weights, and one core of a Zen 5 reads bfloat16 at 8 GB/s row after row, at 15 in
    blocks. The result is opaque (no views, no indexing); shape, dtype and `to_dense()` remain.
    """
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return weight
    if not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
    return weight
