"""Root mean square normalisation (Zhang and Sennrich, 2019), alone and after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.learn import exercise


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    @exercise("1.1")
    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) × weight over the last dimension, [..., size]. The sum of squares needs float32, whatever
        x is; the quotient is rounded to x's dtype before it meets the weight, as transformers does."""
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)  # [..., 1]
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight  # [..., size]


class RMSNormFused(RMSNorm):
    """The norm of x + residual. One kernel can do both because the residual is handed from layer to layer."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x: [tokens, size], what the last block computed. Returns (norm of the sum, the sum): the sum is the
        next residual. Without a residual (the first layer) x is the sum."""
        residual = x if residual is None else x + residual  # [tokens, size]
        return super().forward(residual), residual
