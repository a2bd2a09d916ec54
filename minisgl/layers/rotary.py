"""Rotary position embeddings (Su et al., 2021): one table of cos and sin for a whole model. Knows no attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.learn import exercise

if TYPE_CHECKING:
    from minisgl.models.rope_config import RopeConfig


class Rotation(NamedTuple):
    """The turn of each token of a forward pass, the same in every layer. Both are [tokens, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor  # -sin for the first half of a head, sin for the second

    @exercise("1.2")
    def apply(self, x: Tensor) -> Tensor:
        """Turn every head of x, [tokens, heads, head_dim].

        A pair (a, b) becomes (a cos - b sin, b cos + a sin): x × cos, plus x with its halves exchanged × (-sin, sin).
        """
        exchanged = x.roll(x.shape[-1] // 2, dims=-1)  # [tokens, heads, head_dim]
        return torch.addcmul(x * self.cos, exchanged, self.signed_sin)


class RotaryEmbedding(nn.Module):
    """Position p turns the pair (x[i], x[i + head_dim / 2]) by the angle p × frequency[i].

    table: [max_seq_len, head_dim], cos then sin. Not in the checkpoint: computed here, even under a meta device.
    """

    table: Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_seq_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies(rope, head_dim))  # [max_seq_len, head_dim / 2]
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor  # [max_seq_len, head_dim]
        self.register_buffer("table", table.to(device, dtype), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """positions: int64 [tokens]. Call it once a forward pass, not once a layer."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)  # each [tokens, 1, head_dim / 2]
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2] on the CPU, after the scaling asked for."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are stretched by the factor, fast ones kept, those between interpolated (Llama 3.1)."""
    turns = rope.original_max_position / (2 * math.pi / plain)  # within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)  # 0: stretched, 1: as trained
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """The same by pair number: kept up to the pair that makes beta_fast turns, stretched from beta_slow on
    (Peng et al., 2023, section 3.2)."""
    low = _pair_of_turns(rope.beta_fast, rope, head_dim)
    high = _pair_of_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept


def _pair_of_turns(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The number of the pair (a fraction) that makes so many turns within the original context."""
    wavelength = rope.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
